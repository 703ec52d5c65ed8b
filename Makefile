# Needs nothing but Python 3.11+ and make:  make demo,  make test
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: venv demo test lint fmt build docs clean

venv: $(STAMP)

# Updated only when pyproject.toml or constraints.txt changes.
# pip 25.3 is the first with --build-constraint, which pins the build backend too.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade 'pip>=25.3'
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt --build-constraint constraints.txt \
	  -e '.[torch,calibrate,low-bit,postgresql]' --group dev
	touch $@

demo: venv
	$(VENV)/bin/python -m examples.demo

# Tests start dozens of processes: compile what they import once, whatever the shell is set to.
test: venv
	PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -n auto --maxprocesses 8 --dist loadgroup --no-loadscope-reorder

lint: venv
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

fmt: venv
	$(VENV)/bin/ruff format
	$(VENV)/bin/ruff check --fix

# The reference, the pictures, and what the commands on the pages print; tests compare them.
docs: venv
	$(VENV)/bin/python -m docs.generate
	$(VENV)/bin/python -m docs.outputs

# The source distribution, and the wheel built from it, in dist/.
build: venv
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(VENV)/bin/python -m build

clean:
	rm -rf $(VENV) dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
