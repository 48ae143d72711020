# `make demo` and `make test` need only Python 3.11 or newer: they set up everything else.
#   make PYTHON=python3.12 test     use another Python
#   make VENV=/path/to/venv test    keep the environment elsewhere

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types layering check format clean

help:
	@echo "make demo      set up, then fit a training step into a budget"
	@echo "make test      set up, then run the whole test suite"
	@echo "make check     lint, types, layering and tests"
	@echo "make lint      ruff: rules and formatting       make format    apply both"
	@echo "make types     mypy on src/memfit               make layering  one-way imports"
	@echo "make setup     only create the environment      make clean     remove it and all caches"

setup: $(INSTALLED)

# torch goes first: with its pin, and before anything that would ask for another build of it.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: memfit needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)" >&2; \
	  echo "hint: name another one, e.g. make PYTHON=python3.11 $(or $(MAKECMDGOALS),setup)" >&2; \
	  exit 1; }
	@echo "setting up $(VENV): once, a minute or more, most of it torch"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) --editable '.[hf,test,lint]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

lint: $(INSTALLED)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

format: $(INSTALLED)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

types: $(INSTALLED)
	$(BIN)/python -m mypy

layering: $(INSTALLED)
	$(BIN)/python -m pytest --quiet tests/unit/test_layering.py

check:
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory layering
	@$(MAKE) --no-print-directory test

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
