# The two commands: `make demo` (train, be killed, carry on) and `make test`. Both make the environment they need.
VENV ?= .venv
BIN := $(VENV)/bin
# The tests wait for a third of their time (for nodes, notices, back-off): more workers than two cores.
WORKERS ?= 4

.PHONY: demo test lint soak bench clean

demo: $(VENV)/.ready-examples
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

soak: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m soak

bench: $(VENV)/.ready-dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV)

# PYTHON=... chooses another interpreter than python3.11.
$(VENV)/.ready-%: pyproject.toml constraints.txt scripts/environment
	PYTHON="$(PYTHON)" scripts/environment $(VENV) $*
	@touch $@
