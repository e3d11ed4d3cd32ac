# Two commands do everything on a machine with python3.11 and gcc: `make demo` and `make test`.
# Each makes .venv when it is missing, with the versions of constraints.txt.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# mypy cannot follow [tool.setuptools.package-dir], so `lint` gives it the installed layout as links.
TYPED := build/typed

.PHONY: demo test lint format clean

demo: $(STAMP)
	$(BIN)/python examples/train_llama.py --recipes bf16,quartet2 --out runs/demo

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/codespell
	rm -rf $(TYPED) && mkdir -p $(TYPED)/q2compile
	ln -s $(CURDIR)/q2compile/* $(CURDIR)/lowering $(CURDIR)/runtime_kernels $(TYPED)/q2compile/
	MYPYPATH=$(TYPED) $(BIN)/mypy --package q2compile
	MYPYPATH=$(TYPED) $(BIN)/mypy examples

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist runs *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# The stamp is written last, so an interrupted installation is done again.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt setuptools wheel
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev,train]'
	touch $@
