# Two commands on a fresh machine: `make demo` and `make test`. All targets re-use a .venv that is there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

export FLWR_TELEMETRY_ENABLED := 0

.PHONY: setup demo test check

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt ".[dev]"
	touch $@

demo: setup
	$(BIN)/python -m server local experiments/digits.toml

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
