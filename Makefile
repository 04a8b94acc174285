# Every target works on a fresh clone; the second time nothing is installed again.
PYTHON ?= python3
PY := .venv/bin/python
RUNS ?= $(patsubst %/metrics.jsonl,%,$(wildcard out/*/metrics.jsonl))

.PHONY: help setup train test lowest lint report bench claims

help:
	@echo "make train   train configs/quickstart.toml; ARGS=\"--norm rmsnorm\" passes flags on"
	@echo "make test    the tests; ARGS='-m \"slow or browser\"' runs the long ones"
	@echo "make lowest  tests with the lowest versions that pyproject.toml allows"
	@echo "make report  report.html of the runs in out/, or RUNS=\"out/a out/b\""
	@echo "make bench   the kernels against eager and compiled PyTorch"
	@echo "make claims  every claim about normalization, checked"
	@echo "make lint    ruff"

setup: .venv/run
train: .venv/run
	$(PY) train.py configs/quickstart.toml --run-name auto $(ARGS)
test: .venv/dev
	$(PY) -m pytest -n auto --dist loadfile $(ARGS)
lowest: .venv/dev
	$(PY) tests/lowest.py $(ARGS)
lint: .venv/dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
report: .venv/run
	$(PY) -m tools.report $(RUNS) -o report.html $(ARGS)
bench: .venv/run
	$(PY) -m kernels.bench $(ARGS)
claims: .venv/run
	$(PY) -m tools.claims $(ARGS)

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Python 3.11 or newer is needed; name one with PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv .venv
.venv/run: pyproject.toml | .venv/bin/python
	$(PY) -m pip install --quiet --no-cache-dir --editable ".[report]"
	@touch $@
.venv/dev: pyproject.toml .venv/run | .venv/bin/python
	$(PY) -m pip install --quiet --no-cache-dir --editable ".[dev]"
	@touch $@
