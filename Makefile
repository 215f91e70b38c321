# Every target first makes .venv what it needs (requirements/install.sh; a second time this costs nothing).
.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo test test-long algorithms crash lint format clean

export PYTHON  # the interpreter .venv is made with, for machines where it is not found: make demo PYTHON=/path/to/python3.12

RECIPE := deployments/recipes/tiny-cpu.yaml
REPORT := artifacts/tiny-cpu/report.html

help:
	@echo "make demo        the whole lifecycle on this machine, without a GPU; ends with one page: $(REPORT)"
	@echo "make test        unit tests, flow tests and one short end-to-end run (not those marked gpu)"
	@echo "make test-long   the long variants of some of these tests"
	@echo "make algorithms  every algorithm for a short time (half an hour to three quarters); writes the table docs/algorithms-learn.md"
	@echo "make crash       kills every stage at its start, middle and end and runs it again (hours; goes on where it was cut off); writes docs/crash.md"
	@echo "make lint        ruff and mypy"
	@echo "make format      let ruff format the code"
	@echo "make setup       only make .venv"
	@echo "make clean       remove the demo's material and the caches; .venv and artifacts/ stay"

setup:
	@requirements/install.sh

setup-dev:
	@requirements/install.sh dev

demo: setup
	.venv/bin/python deployments/demo/make_material.py --out demo/material
	.venv/bin/alignflow run $(RECIPE)
	@echo "The page: $(CURDIR)/$(REPORT)"

test: setup-dev
	.venv/bin/python -m pytest -m "not gpu and not long" -n auto --maxprocesses 4

test-long: setup-dev
	.venv/bin/python -m pytest -m "long and not gpu"

algorithms: setup
	.venv/bin/python tests/algorithms/run_all.py

crash: setup-dev
	.venv/bin/python -m tests.crash.run_all $(if $(ONLY),--only $(ONLY))

lint: setup-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: setup-dev
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean:
	rm -rf demo build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find flows tasks rlhf_core evaluation deployments tests -name __pycache__ -type d -prune -exec rm -rf {} +
