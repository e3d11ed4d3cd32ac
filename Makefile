# Two commands do everything on a machine with python3.11, make and g++: `make demo` and `make test`.
# Each makes .venv when it is missing, with the versions of constraints.txt.
#
# `make test-torch TORCH=2.15.0` runs the tests on another torch, in an environment of its own. With
# PYTHON=python3.14 on another interpreter, with TESTS="tests/lowering ..." a part of them.
# `make test-internals TORCH=2.15.0` runs those that another torch can break, which CI does.
# `make install TORCH=2.15.0` makes that environment and no more.

PYTHON ?= python3.11
ifdef TORCH
VENV := .venv-torch-$(TORCH)-$(notdir $(PYTHON))
PINS := $(VENV)/pins.txt
else
$(if $(filter test-torch,$(MAKECMDGOALS)),$(error make test-torch needs a version: TORCH=2.15.0))
VENV := .venv
PINS := constraints.txt
endif
BIN := $(VENV)/bin
# pip would compile 14,000 files of Python, which takes 80 seconds of CPU time; 2,000 of them are imported.
# Compiled Python is kept even where the environment forbids it: without it each process that imports
# torch compiles them, 10 seconds of CPU time.
unexport PYTHONDONTWRITEBYTECODE
# As a variable the pins take the place of a constraint in pip's own configuration, which could not be
# met together with another torch; as an option they would add to it.
PIP := PIP_CONSTRAINT=$(PINS) $(BIN)/pip install --quiet --no-compile
# mypy cannot follow [tool.setuptools.package-dir], so `lint` gives it the installed layout as links.
TYPED := build/typed

# What another torch can break: capture, rewrite, patches, the graphs that AOTAutograd hands to passes and
# how it partitions them, the code that Inductor writes (test_kernel_counts.py counts it with and without
# each pass), ways to compile; the numbers of its ops; and through its NVRTC machine code and PTX. The
# other tests stand on these, on graphs built by hand, or on no torch but its public functions. From
# prologue fusion and launch counts it has the tests that see what Inductor hands over. The longest
# files come first.
INTERNALS := $(addprefix tests/,q2compile/compiler/test_kernel_counts.py end_to_end/test_ways_to_compile.py) \
    $(addprefix tests/lowering/test_,launches.py lowering.py \
    $(addprefix fused_launches.py::test_,the_bits_are_those_of_two_kernels what_is_not_fused_and_why \
    reads_with_other_masks_are_left rounding_in_between two_operands_of_one_read_are_one_kernel) \
    launch_counts.py::test_bytes_of_a_linear ptx_of_inductor.py fp8_kernels.py gathered.py state.py) \
    $(addprefix tests/q2compile/,capture rewrite torch_internals failures \
    $(addprefix compiler/test_,cache_key.py caches.py nothing_taken.py short_sums.py) \
    $(addprefix passes/test_,fuse_rotations.py gather_scattered.py joint_passes.py \
    passes.py quantize_shards.py recompute_mask.py saved_weights.py tabulate.py)) \
    $(addprefix tests/runtime_kernels/,cuda/test_dbias_static.py cuda/test_ptx_training.py \
    cuda/test_cuda_static.py::test_spills_and_instructions_are_those_recorded \
    $(addprefix numerics/test_,edge_values.py formats.py fp8.py mxfp4.py nonfinite.py nvfp4.py philox.py \
    rotation.py))

# What a change most likely breaks: recipes, numerics, schemas, capture, rewrite, passes, the goldens of
# graphs and launches, the rules of the house. No file of it compiles many graphs, and what Inductor
# compiles is left out: its first C++ code takes half a minute.
QUICK := $(addprefix tests/,test_house.py test_names.py q2compile/test_config.py \
    q2compile/cost_model/test_predictions.py q2compile/rewrite \
    q2compile/recipes/test_policy.py q2compile/recipes/test_recipes.py \
    q2compile/passes/test_passes.py q2compile/capture/test_spellings.py \
    q2compile/linear/test_dense.py q2compile/report/test_dump_report.py \
    lowering/test_launch_counts.py q2compile/passes/test_group_launches.py \
    runtime_kernels/numerics runtime_kernels/ops end_to_end/test_guide_pages.py \
    runtime_kernels/cuda/test_calls.py \
    runtime_kernels/cuda/test_rounded_emulated.py)

.PHONY: demo install test quick test-torch test-internals test-integrations lint format docs release clean

demo: $(VENV)/.with-train
	$(BIN)/python examples/train_llama.py --recipes bf16,quartet2 --out runs/demo

install: $(VENV)/.with-train,dev

# A process for each core, and one thread in each: the tests are many small computations. Files go
# to the processes in the order of the folders: by xdist's own, those of few tests come last, and
# among them are the longest.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(TESTS)

quick: TESTS := $(QUICK) -k 'not [inductor]'
quick: test

test-torch: test

test-internals: TESTS := $(INTERNALS)
test-internals: test

# Libraries with models or trainers of their own, the newest that fit constraints.txt, in an environment
# of their own. litgpt asks for an older huggingface_hub than transformers 5 does, and is installed without it.
# torchtune imports names that torchao 0.15 and later lack, and peft refuses versions before 0.16: the last
# command has torchtune an older one.
INTEGRATIONS := .venv-integrations
test-integrations:
	$(MAKE) VENV=$(INTEGRATIONS) '$(INTEGRATIONS)/.with-train,dev,integrations'
	PIP_CONSTRAINT=constraints.txt $(INTEGRATIONS)/bin/pip install --quiet --no-deps litgpt jsonargparse
	OMP_NUM_THREADS=1 $(INTEGRATIONS)/bin/python -m pytest tests/integrations
	$(INTEGRATIONS)/bin/pip install --quiet --no-deps --upgrade --target $(INTEGRATIONS)/torchao-0.14 torchao==0.14.1
	OMP_NUM_THREADS=1 PYTHONPATH=$(INTEGRATIONS)/torchao-0.14 \
	    $(INTEGRATIONS)/bin/python -m pytest tests/integrations -k torchtune

lint: $(VENV)/.with-train,dev
	$(BIN)/ruff check .
	$(BIN)/codespell
	rm -rf $(TYPED) && mkdir -p $(TYPED)/q2compile
	ln -s $(CURDIR)/q2compile/* $(CURDIR)/lowering $(CURDIR)/runtime_kernels $(TYPED)/q2compile/
	MYPYPATH=$(TYPED) $(BIN)/mypy --package q2compile
	MYPYPATH=$(TYPED) $(BIN)/mypy --follow-imports silent examples
	MYPYPATH=$(TYPED) $(BIN)/mypy --follow-imports silent --strict tests/support/typed_user.py
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.with-train,dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The API reference, from docstrings, into build/docs.
docs: $(VENV)/.with-train,dev
	$(BIN)/python -m tests.support.api_reference build/docs

# Sdist and wheel of HEAD into dist/, checked with each Python of tests/support/release.py. One that is
# not installed fails, or with MISSING=skip is named and left out.
MISSING ?= fail
release: $(VENV)/.with-train,dev
	$(BIN)/python -m tests.support.release --missing $(MISSING)

clean:
	rm -rf build dist runs *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# .venv/.with-EXTRAS: q2compile is installed, editable, with these extras of pyproject.toml. The stamp
# is written last, so an interrupted installation is done again. The demo does without the extra dev:
# transformers imports torchao when it finds it, which prints warnings.
$(VENV)/.with-%: pyproject.toml $(PINS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) 'setuptools>=77' wheel
	$(PIP) --no-build-isolation --editable '.[$*]'
	touch $@

# Another torch brings Triton, CUDA's libraries and the setuptools that it needs; all other pins stay,
# on the Python they were made for.
$(VENV)/pins.txt: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	echo torch==$(TORCH) > $@
	! $(BIN)/python --version | grep -q 'Python 3.11' \
	    || sed -E '/^(torch|triton|setuptools)==|^(cuda|nvidia)-/d' constraints.txt >> $@
