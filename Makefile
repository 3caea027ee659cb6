# `make demo` and `make test` set the machine up by themselves; see README.md.
SHELL := /bin/bash
PY := .venv/bin/python
FAST := tests/unit tests/contract tests/integration tests/system
# The directories that exist: a checkout in the making still tests what is there.
DIRS = $(wildcard $(FAST))

.PHONY: setup test test-all demo chaos lint lock clean help

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: ## apt packages that are missing, .venv from requirements.lock, the guest binary
	@bash .ci/setup

test: setup ## all tests but the slow ones
	$(PY) -m pytest $(DIRS) -m "not slow" $(ARGS)

test-all: ## the slow ones too: a Debian guest under QEMU, Docker, other Python versions
	@bash .ci/setup --guest
	$(PY) -m pytest $(DIRS) $(wildcard tests/guest) $(ARGS)

demo: setup ## the main job: a burst of 64 sandboxes replays a recorded agent trajectory
	$(PY) -m examples.demo $(ARGS)

chaos: setup ## kills everything at random under load and checks what is left: SEED= (0 = by chance), SECONDS= (default 300)
	$(PY) -m tests.chaos --seed $(or $(SEED),0) --seconds $(or $(SECONDS),300) $(ARGS)

lint: setup ## ruff, mypy and the import contracts (they are tests as well)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports

lock: setup ## write requirements.lock anew from pyproject.toml
	.venv/bin/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --generate-hashes \
		--no-header --no-annotate --no-emit-index-url --quiet $(ARGS) -o requirements.lock

clean: ## remove what was built here (.venv, caches, the guest binary)
	rm -rf --one-file-system .venv .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist dsec/backends/guest/bin
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
