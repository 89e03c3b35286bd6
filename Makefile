# Two commands start it all: `make demo` and `make test`. Nothing is needed but Python >= 3.11, make and git.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
ROUNDS ?= 30

.PHONY: demo federation-demo test test-long test-federation setup lint bench clean

demo: .venv/installed
	$(BIN)/fedkper compare --methods fedavg fedkper --rounds $(ROUNDS) --out runs/demo

test: setup
	$(BIN)/python -m pytest -n 3 --dist worksteal

test-long: setup
	$(BIN)/python -m pytest -n 0 -m long

test-federation: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m federation tests/test_federation_network.py

federation-demo: setup
	$(BIN)/python deploy/demo.py

setup: .venv/complete

# The package alone, for the demo; with the extras, for everything else.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(INSTALL) -e .
	touch $@

.venv/complete: .venv/installed
	$(INSTALL) -e '.[test,lint]'
	touch $@

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: setup
	$(BIN)/python bench/round.py
	$(BIN)/python bench/methods.py
	$(BIN)/python bench/scale.py

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
