# make demo | test | slow | check | replay | bench: each makes the environment first. Needs Python >= 3.11 and make only.
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1 && echo $$p && break; done)
VENV ?= .venv
SLOW ?= tests
# Most fast tests wait for a process or a clock, so more workers than cores pay off.
WORKERS ?= 4
# Without compiled modules every worker and every process under test would compile them all again.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help env demo replay test slow check wheel clean

help:
	@echo "make demo   a whole study on the embedded DDTree engine (4 to 8 minutes after installation)"
	@echo "make replay the search on 8 B300 against a stand-in for SGLang (2 to 6 minutes; needs cc)"
	@echo "make test   the fast tests        make slow   the slow ones"
	@echo "make check  lint, format, types   make wheel  build dist/*.whl"

env: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "autotune needs Python 3.11, 3.12 or 3.13 (set PYTHON=/path/to/python)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python -m autotune tune +space=local
	$(BIN)/python -m autotune report +space=local

replay: $(READY)
	$(BIN)/python -m tests.replay

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

slow: $(READY)
	$(BIN)/python -m pytest -m 'slow and not gpu' --timeout 1500 $(SLOW)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

wheel: $(READY)
	$(BIN)/python -m pip wheel -q --no-deps -w dist .

clean:
	rm -rf $(VENV) build dist *.egg-info
