# Every target sets up .venv by itself when it is missing.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test check bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   train on 3 simulated nodes, kill some, show what happened"
	@echo "make test   every test, real processes included"
	@echo "make check  lint, types and the pure tests (under a minute)"
	@echo "make bench  speed, as ratios measured side by side"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("elastic-resume needs Python 3.10 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=python3.11, say." if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m 'not cluster and not slow'

test: $(READY)
	$(BIN)/python -m pytest -q

bench: $(READY)
	$(BIN)/python benchmarks/save_load.py

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis demo-run
