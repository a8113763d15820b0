# The same few verbs for people and for CI. VENV may name an existing virtual environment.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.eagle-batch-installed
# Test processes; a test uses one core, or two for a job of two workers.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder
PYTEST_ARGS ?=

.PHONY: demo test exhaustive oldest lint types bench check constraints clean

demo: $(STAMP)  ## make questions and answers with the demo target on this machine
	$(BIN)/eagle-batch demo fetch
	$(BIN)/eagle-batch submit pipelines/synth.yaml

test: $(STAMP)  ## run the tests, in under ten minutes on two cores
	$(PYTEST) $(PYTEST_ARGS)

exhaustive: $(STAMP)  ## run the long tests: whole comparisons, every crash
	$(PYTEST) -m exhaustive $(PYTEST_ARGS)

# The oldest transformers that is promised, laid over the environment: torch is not installed twice.
.oldest: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --target $@ --upgrade \
		"transformers==5.16.*" "huggingface_hub<2" httpx httpcore h11 anyio
	touch $@

oldest: .oldest  ## decode every family with the oldest transformers that is promised
	PYTHONPATH=.oldest $(BIN)/python -m pytest -q -p no:cacheprovider \
		tests/engine/test_parity.py tests/data/test_chat.py -k "family or chat"

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy --strict
	$(BIN)/mypy

bench: $(STAMP)  ## the demo target with and without its head, and beside other engines, on this machine
	$(BIN)/eagle-batch demo fetch
	$(BIN)/eagle-batch bench pipelines/synth.yaml
	$(BIN)/python -m tests.bench.peers --install

check: lint types test

constraints: $(STAMP)  ## pin the versions that this environment has
	{ echo "# Made by \`make constraints\` with $$($(BIN)/python --version) on a clean environment."; \
	  echo "# To install the same: PIP_CONSTRAINT=constraints.txt make demo"; \
	  $(BIN)/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//'; } > constraints.txt

clean:  ## remove what the other verbs made here
	rm -rf .venv .oldest runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# An old pip knows no dependency groups, so pip itself comes first.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable ".[demo,cpu]" --group dev
	touch $@
