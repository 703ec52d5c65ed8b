# Needs nothing but Python 3.11+ and make:  make demo,  make test
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: venv demo test lint fmt clean

venv: $(STAMP)

# Made anew only when what it installs changes. pip 25.1 is the first to know --group.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[torch,calibrate,low-bit]' --group dev
	touch $@

demo: venv
	$(VENV)/bin/python -m examples.demo

# Ranks, agents and solvers start by the dozen: what they import is compiled once, whatever the shell is set to.
test: venv
	PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -n auto --maxprocesses 8 --dist loadgroup --no-loadscope-reorder

lint: venv
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

fmt: venv
	$(VENV)/bin/ruff format
	$(VENV)/bin/ruff check --fix

clean:
	rm -rf $(VENV) demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
