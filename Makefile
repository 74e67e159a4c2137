# Two commands on a fresh machine: `make demo` and `make test`. All targets re-use a .venv that is there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

export FLWR_TELEMETRY_ENABLED := 0
# Workers and child processes of the tests compile nothing twice.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-draw test-all test-full check

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt ".[dev]"
	touch $@

demo: setup
	$(BIN)/python -m server local experiments/digits.toml

# What matters every day; a part of the rest, another one each day; all but the whole tables; these too.
test: setup
	$(BIN)/python -m pytest

test-draw: setup
	$(BIN)/python -m pytest --suite=draw

test-all: setup
	$(BIN)/python -m pytest --suite=all

test-full: setup
	$(BIN)/python -m pytest --suite=full

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
