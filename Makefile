# Everything that a person or CI runs. `make` alone lists the targets.
SHELL := bash
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -p no:cacheprovider -q
FAST := tests/unit tests/integration $(wildcard tests/notebooks)
ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: help setup setup-all setup-browser demo test test-all test-browser check lab clean distclean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup:  ## make .venv with everything that is needed (about ten minutes the first time, nothing later)
	@test -n "$(PYTHON)" || { echo "rlkit needs Python 3.11 or 3.12, and neither was found. Name one: make setup PYTHON=/path/to/python3.12"; exit 2; }
	@$(PYTHON) scripts/setup_env.py

setup-all:  ## as setup, with SmolLM2 for the slow tests
	@test -n "$(PYTHON)" || { echo "rlkit needs Python 3.11 or 3.12, and neither was found. Name one: make setup-all PYTHON=/path/to/python3.12"; exit 2; }
	@$(PYTHON) scripts/setup_env.py --with smollm2

setup-browser:  ## as setup, with what the browser tests need; installs Debian's chromium when there is none (as root)
	@test -n "$(PYTHON)" || { echo "rlkit needs Python 3.11 or 3.12, and neither was found. Name one: make setup-browser PYTHON=/path/to/python3.12"; exit 2; }
	@$(PYTHON) scripts/setup_env.py --with browser
	@$(PYTHON) scripts/setup_browser.py

demo: setup  ## run the quickstart headless; the last line is its result as JSON (more: make demo ARGS="-p seed=1")
	@$(BIN)/rlkit run notebooks/01_quickstart.ipynb $(ARGS)

test: setup  ## unit, integration and notebook tests that take minutes together
	$(PYTEST) -m "not slow" $(FAST)

test-all: setup-all  ## every test, the slow ones too
	$(PYTEST) $(FAST)

test-browser:  ## the widgets in JupyterLab in headless Chromium (make setup-browser gets one); screenshots go to runs/browser
	@test -n "$(PYTHON)" || { echo "rlkit needs Python 3.11 or 3.12, and neither was found. Name one: make test-browser PYTHON=/path/to/python3.12"; exit 2; }
	@$(PYTHON) scripts/setup_env.py --with browser
	@$(PYTHON) scripts/setup_browser.py --find
	$(PYTEST) tests/browser

check: setup  ## lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lab: setup  ## JupyterLab on 127.0.0.1
	$(BIN)/jupyter lab --ip=127.0.0.1 $(ROOT) notebooks

clean:  ## remove build outputs and caches; keeps .venv and runs/
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean  ## as clean, and .venv too
	rm -rf .venv
