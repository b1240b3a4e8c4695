# The two commands: `make demo` (train, be killed, carry on) and `make test`. Each makes its own environment.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
DEMO := .venv-demo
DEV := .venv-dev

.PHONY: demo test lint soak bench

demo: $(DEMO)/.ready
	$(DEMO)/bin/python examples/demo.py

test: lint
	$(DEV)/bin/python -m pytest -n 2

lint: $(DEV)/.ready
	$(DEV)/bin/ruff check .
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/mypy
	$(DEV)/bin/lint-imports

soak: $(DEV)/.ready
	$(DEV)/bin/python -m pytest -m soak

bench: $(DEV)/.ready
	$(DEV)/bin/python -m benchmarks

# torch first and pinned: the newest build would bring several GB of CUDA packages along.
$(DEMO)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/pip install --quiet --requirement constraints.txt
	$(DEMO)/bin/pip install --quiet --constraint constraints.txt --editable '.[examples]'
	touch $@

$(DEV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DEV)
	$(DEV)/bin/pip install --quiet --requirement constraints.txt
	$(DEV)/bin/pip install --quiet --constraint constraints.txt --editable '.[examples,dev]'
	touch $@
