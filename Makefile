# Two commands for a newcomer: `make train` and `make test`. Both set up .venv on their first run.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
FAST := not (gpu or ray or peers or browser or slow)
SLOW := slow and not (gpu or ray or peers or browser)

.PHONY: help train test test-slow lint
help:
	@echo "make train      set up, then train the main recipe on this machine's CPU"
	@echo "make test       set up, then run the tests that take minutes at most"
	@echo "make test-slow  the tests that take longer"
	@echo "make lint       style and types"

train: $(INSTALLED)
	$(BIN)/sinkflex train recipes/telecom_cpu.toml

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "$(FAST)"

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m "$(SLOW)"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Torch comes with its own dependencies (on Linux with a GPU these are CUDA libraries), all else exactly as locked.
$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "$$($(PYTHON) --version) found, 3.11 or newer needed. Type for instance: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@echo "Setting up .venv: this takes a few minutes, once."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint requirements.lock torch
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --no-build-isolation --editable .
	@touch $@
