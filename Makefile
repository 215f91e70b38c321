# Every target first makes .venv what it needs (requirements/install.sh; a second time this costs nothing).
.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo check light test test-engines test-all test-long algorithms crash families nights nights-long lint format docs clean

export PYTHON  # the interpreter .venv is made with, for machines where it is not found: make demo PYTHON=/path/to/python3.12

REPORT := artifacts/tiny-cpu/report.html
PYTEST := .venv/bin/python -m pytest -n auto --maxprocesses 4 --durations 25 --durations-min 30
LIGHT := $(addprefix tests/unit/,config evaluation/report evaluation/scores flows hub migrate project recipe runs system tasks)
END_TO_END := tests/engines/test_lifecycle.py

help:
	@echo "make demo        the whole lifecycle on this machine, without a GPU; ends with one page: $(REPORT)"
	@echo "make check       ruff, mypy, import-linter and the tests that start no engine"
	@echo "make test        the other unit tests, flow tests and one short end-to-end run (not those marked gpu)"
	@echo "make test-engines  Ray, DeepSpeed and vLLM on this machine's CPUs"
	@echo "make test-long   the long variants of some of these tests"
	@echo "make test-all    all of these"
	@echo "make algorithms  every algorithm for a short time (half an hour to three quarters); writes the table docs/reference/algorithms-learn.md"
	@echo "make crash       kills every stage at its start, middle and end and runs it again (hours; goes on where it was cut off); writes docs/reference/crash.md"
	@echo "make families    a small model of every family, through training and vLLM, and every class of transformers (most of an hour); writes docs/reference/families.md"
	@echo "make nights      ten nights of a loop with planted faults, and ten without (under an hour); writes docs/reference/nights.md"
	@echo "make nights-long thirty nights of each (75 minutes); their checks are on the same page"
	@echo "make lint        ruff, mypy and import-linter"
	@echo "make format      let ruff format the code"
	@echo "make docs        the pages of docs/ as a site, links checked: site/index.html"
	@echo "make setup       only make .venv"
	@echo "make clean       remove the demo's material and the caches; .venv and artifacts/ stay"

setup:
	@requirements/install.sh

setup-dev:
	@requirements/install.sh dev

demo: setup
	.venv/bin/alignflow demo

check: setup-dev
	$(MAKE) -j 2 --no-print-directory lint light

light: setup-dev
	$(PYTEST) $(LIGHT) -m "not gpu and not long and not slow"

test: setup-dev
	$(PYTEST) -n 3 tests/unit tests/flows $(END_TO_END) --checked "$(LIGHT)" -m "not gpu and not long"

test-engines: setup-dev
	$(PYTEST) tests/engines --deselect $(END_TO_END) -m "not gpu and not long"
	PYTHONPATH=.venv/vision .venv/bin/python -m pytest -m "not gpu and not long" tests/engines/test_vllm_pictures.py

test-all: setup-dev
	$(PYTEST) -m "not gpu"

test-long: setup-dev
	.venv/bin/python -m pytest -m "long and not gpu"

algorithms: setup
	.venv/bin/python tests/algorithms/run_all.py

crash: setup-dev
	.venv/bin/python -m tests.crash.run_all $(if $(ONLY),--only $(ONLY))

families: setup-dev
	.venv/bin/python -m tests.families.run_all

nights: setup-dev
	.venv/bin/python -m tests.nights.run_all

nights-long: setup-dev
	.venv/bin/python -m tests.nights.run_all --faults tests/nights/faults-long.yaml

lint: setup-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache

format: setup-dev
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

docs:
	@requirements/install.sh docs
	.venv/bin/python -m mkdocs build --strict --clean
	@echo "The site: $(CURDIR)/site/index.html"

clean:
	rm -rf demo build site .uv-cache *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find flows tasks rlhf_core evaluation deployments tests -name __pycache__ -type d -prune -exec rm -rf {} +
