# Each target is one command on a machine with Python 3.11 or newer, make and git. It installs
# everything into VENV, inside the checkout.

# Compiled modules are kept: else each process of the tests compiles them anew.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
TEST_DIR ?= /dev/shm
DEMO_ARGS ?=
SOAK_MINUTES ?= 30
FUZZ_MINUTES ?= 10
BENCH_ARGS ?=
BENCH_TMPFS ?= /dev/shm
BENCH_DISK ?= build/bench

python := $(VENV)/bin/python
pip := $(python) -m pip --quiet --disable-pip-version-check
empty := build/empty/bin/python
bounds := build/bounds/bin/python

.PHONY: help test stores faults faults-root gpu browser soak fuzz check demo bench bench-quick bench-gpu notebooks docs dist bounds publish clean
.DELETE_ON_ERROR:
# Targets that run in parallel would install into one environment at the same time.
.NOTPARALLEL:

help:
	@echo "make test         runs all tests except slow, store, fault, GPU and browser tests"
	@echo "make stores       runs the tests with object stores, which it starts on this machine"
	@echo "make faults       runs the fault tests and prints the scorecard; faults-root: those that need root"
	@echo "make gpu          runs the tests that need a GPU; bench-gpu: the benchmarks that need one"
	@echo "make browser      builds the pages and runs the tests that need Chromium in PATH"
	@echo "make soak         exposes one run to random faults for SOAK_MINUTES=$(SOAK_MINUTES)"
	@echo "make fuzz         fuzzes all parsers for FUZZ_MINUTES=$(FUZZ_MINUTES)"
	@echo "make check        checks format, lint, types and spelling"
	@echo "make demo         trains a model, interrupts the run and resumes it"
	@echo "make bench        runs the benchmarks, about an hour; bench-quick takes about a minute"
	@echo "make notebooks    runs every notebook"
	@echo "make docs         builds the pages of docs/ into build/site"
	@echo "make dist         builds the wheel and the sdist, and tries both in an empty environment"
	@echo "make bounds       tries the oldest releases of all dependencies that pyproject.toml allows"
	@echo "make publish      does the same and uploads them"
	@echo "make clean        removes everything that these targets made"
	@echo "Settings: PYTHON=$(PYTHON) VENV=$(VENV) PYTEST_ARGS= TEST_DIR=$(TEST_DIR) DEMO_ARGS= BENCH_ARGS= BENCH_TMPFS=$(BENCH_TMPFS) BENCH_DISK=$(BENCH_DISK)"

# In memory nothing waits for the disk; the tests leave a folder there only for those that failed.
# Three at a time, on two cores: each waits a part of its time. All tests of two folders run elsewhere,
# and importing them takes as long as importing the others.
test: $(VENV)/.installed-test
	TMPDIR=$(TEST_DIR) PYTEST_DEBUG_TEMPROOT=$(TEST_DIR) $(python) -m pytest -n 3 --dist worksteal \
	  --ignore=tests/stores --ignore=tests/faults $(PYTEST_ARGS)

# These tests, and those of faults, wait half of the time, for locks and leases.
stores: $(VENV)/.installed-test
	@mkdir -p build
	$(python) -m pytest -m "stores and not slow" -n 3 --dist worksteal \
	  --scorecard=build/stores.md --scorecard-of=stores $(PYTEST_ARGS)

faults: $(VENV)/.installed-test
	@mkdir -p build
	$(python) -m pytest -m "faults and not slow" -n 3 --dist worksteal \
	  --scorecard=build/faults.md $(PYTEST_ARGS)

faults-root: $(VENV)/.installed-test
	@mkdir -p build
	$(python) -m pytest -m faults_root --scorecard=build/faults-root.md --scorecard-of=faults-root \
	  $(PYTEST_ARGS)

# JAX_PLATFORMS names the platforms of jax; the CPU is for what has to be there too.
gpu: $(VENV)/.installed-test $(VENV)/.installed-cuda12
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cuda,cpu} $(python) -m pytest -m gpu tests/test_gpu.py $(PYTEST_ARGS)

browser: $(VENV)/.installed-test docs
	$(python) -m pytest -m browser $(PYTEST_ARGS)

soak: $(VENV)/.installed-test
	@mkdir -p build
	SOAK_MINUTES=$(SOAK_MINUTES) $(python) -m pytest -m "faults and slow" -o faulthandler_timeout=0 \
	  --scorecard=build/soak.md --scorecard-of=soak $(PYTEST_ARGS)

fuzz: $(VENV)/.installed-fuzz
	$(python) -m tests.faults.fuzz -max_total_time=$$(( 60 * $(FUZZ_MINUTES) )) build/corpus

check: $(VENV)/.installed-dev
	$(python) -m ruff format --check .
	$(python) -m ruff check .
	$(python) -m pyright --pythonpath $(python)
	$(python) -m codespell_lib

demo: $(VENV)/.installed-demo
	@$(python) examples/demo.py $(DEMO_ARGS)

bench: $(VENV)/.installed-bench
	$(python) -m benchmarks --dir $(BENCH_TMPFS) --out benchmarks/results --name tmpfs $(BENCH_ARGS)
	$(python) -m benchmarks large --scale 4 --repeats 3 \
	  --dir $(BENCH_TMPFS) --out benchmarks/results --name tmpfs-large $(BENCH_ARGS)
	$(python) -m benchmarks.chart
	$(python) -m benchmarks large gpt2 small integrity \
	  --dir $(BENCH_DISK) --out benchmarks/results --name disk $(BENCH_ARGS)

bench-quick: $(VENV)/.installed-test
	$(python) -m pytest -m bench $(PYTEST_ARGS)
	$(python) -m benchmarks large gpt2 small second interference imports \
	  --quick --dir $(BENCH_TMPFS) $(BENCH_ARGS)

bench-gpu: $(VENV)/.installed-bench $(VENV)/.installed-cuda12
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cuda,cpu} $(python) -m benchmarks.gpu --dir $(BENCH_TMPFS) $(BENCH_ARGS)

notebooks: $(VENV)/.installed-test
	$(python) -m pytest --nbmake --nbmake-timeout=60 notebooks $(PYTEST_ARGS)

# Open the pages from the disk, or run: python -m http.server -d build/site
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict

# First the wheel without any extra, so that an undeclared dependency is missed; then the sdist.
dist: $(VENV)/.installed-release
	rm -rf dist build/empty
	$(python) -m hatchling build --directory dist
	$(python) -m twine check --strict dist/*
	$(python) -m venv build/empty
	$(empty) -m pip install --quiet --disable-pip-version-check --no-compile dist/*.whl
	$(empty) -I .ci/smoke.py
	$(empty) -m pip uninstall --quiet --yes jaxckpt
	$(empty) -m pip install --quiet --disable-pip-version-check --no-compile "$$(echo dist/*.tar.gz)[cli]"
	$(empty) -I .ci/smoke.py
	rm -rf build/empty

# What these tests read and write depends most on other packages.
bounds:
	rm -rf build/bounds
	$(PYTHON) -m venv build/bounds
	$(bounds) -m pip install --quiet --disable-pip-version-check --no-compile \
	  pytest pytest-xdist hypothesis . $$($(bounds) .ci/bounds.py)
	$(bounds) -m pytest -n 2 --dist worksteal -m "not slow and not stores and not multihost" \
	  tests/format tests/storage
	rm -rf build/bounds

# Needs an account on the index and its token; see docs/releasing.md.
publish: dist
	$(python) -m twine upload dist/*

clean:
	rm -rf .venv .venv-ci-* .pytest_cache .ruff_cache .hypothesis build dist
	find jaxckpt tests benchmarks docs examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# One stamp file per dependency group: it is installed again only when pyproject.toml changes. The pip
# of Python 3.11 to 3.13 is too old to know groups.
$(VENV)/.installed-%: pyproject.toml | $(python)
	@echo "Installing jaxckpt and the group $* into $(VENV)"
	@$(pip) install 'pip>=25.1'
	@$(pip) install --editable . --group $*
	@touch $@

$(VENV)/.installed-cuda12: pyproject.toml | $(python)
	@echo "Installing jaxckpt[cuda12] into $(VENV)"
	@$(pip) install --editable '.[cuda12]'
	@touch $@

$(python):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "jaxckpt needs Python 3.11 or newer. '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)" >&2; \
	  echo "Choose another one, for example: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)
