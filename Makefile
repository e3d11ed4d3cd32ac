# Two commands do everything on a machine with python3.11, make and g++: `make demo` and `make test`.
# Each makes .venv when it is missing, with the versions of constraints.txt.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# mypy cannot follow [tool.setuptools.package-dir], so `lint` gives it the installed layout as links.
TYPED := build/typed

.PHONY: demo test lint format clean

demo: $(VENV)/.with-train
	$(BIN)/python examples/train_llama.py --recipes bf16,quartet2 --out runs/demo

# A process for each core, and one thread in each: the tests are many small computations.
test: $(VENV)/.with-train,dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

lint: $(VENV)/.with-train,dev
	$(BIN)/ruff check .
	$(BIN)/codespell
	rm -rf $(TYPED) && mkdir -p $(TYPED)/q2compile
	ln -s $(CURDIR)/q2compile/* $(CURDIR)/lowering $(CURDIR)/runtime_kernels $(TYPED)/q2compile/
	MYPYPATH=$(TYPED) $(BIN)/mypy --package q2compile
	MYPYPATH=$(TYPED) $(BIN)/mypy --follow-imports silent examples

format: $(VENV)/.with-train,dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist runs *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# .venv/.with-EXTRAS: q2compile is installed, editable, with these extras of pyproject.toml. The stamp
# is written last, so an interrupted installation is done again. The demo does without the extra dev:
# transformers imports torchao when it finds it, which prints warnings.
$(VENV)/.with-%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt setuptools wheel
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[$*]'
	touch $@
