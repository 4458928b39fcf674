# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e
BUILD_SIDE := $(VENV)/.installed-build
ALL := $(VENV)/.installed
# One thread for each of the processes.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
TOGETHER := -n 2 --dist loadfile --no-loadscope-reorder
BUILD_SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.PHONY: setup demo quick test fuzz shelf census check docs gpu-check format schema clean

setup: $(ALL)

$(BUILD_SIDE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[build]'
	touch $@

$(ALL): $(BUILD_SIDE)
	$(INSTALL) '.[dev]'
	touch $@

# Without a GPU: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo
demo: $(BUILD_SIDE)
	$(BIN)/compress demo

# In two processes; which files come first and stay together: tests/conftest.py.
test: setup
	$(PYTEST) $(TOGETHER) tests

# The unit tests alone, without those that take seconds each: what to run while editing.
quick: setup
	$(PYTEST) $(TOGETHER) -m "not slow" tests/compress tests/runtime

# The same generated cases as in `make test`, many more of them: about an hour. FUZZ_SEED=1 makes others.
fuzz: setup
	FUZZ_CASES=$${FUZZ_CASES:-100000} $(PYTEST) -n 2 tests/fuzz

# Small models of what people deploy, through the whole build, and the table of docs/reference/shelf.md: half an hour.
shelf: setup
	SHELF=1 $(PYTEST) tests/shelf

# Every language model of the installed transformers, tiny, and the table of docs/reference/census.md: one or two hours; it
# goes on from where it was stopped.
census: setup
	OMP_NUM_THREADS=1 COMPRESS_TIMING=off $(BIN)/python benchmarks/census.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd benchmarks && MYPYPATH=.. ../$(BIN)/mypy --config-file ../pyproject.toml *.py
	$(BIN)/lint-imports
	$(BUILD_SITE)

# The site, in ./site: pages under docs/, a reference made from the code. A broken link is an error; no network is needed.
docs: setup
	$(BUILD_SITE)

gpu-check: setup
	$(BIN)/python benchmarks/gpu_check.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: setup
	$(BIN)/compress schema --out recipes/schema.json

clean:
	rm -rf $(VENV) bundles site benchmarks/.venvs build dist *.egg-info
