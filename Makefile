# headway: two commands suffice on a fresh machine, `make demo` and `make test`.
.PHONY: install services demo test tests check shape newest bench faults docs package notes clean help
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
WORKERS ?= $(shell echo $$(($$(nproc) + 3)))  # two have the SLURM clusters, and wait for most of their time
export PYTHONDONTWRITEBYTECODE :=  # else each of a thousand processes would compile what it imports

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## make .venv with headway and all it needs, at the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt scripts/make-venv.sh
	@scripts/make-venv.sh $(PYTHON)
	@touch $@

services:  ## install SLURM and MPI for the cluster tests, where this user may
	@scripts/install-services.sh

demo: install  ## a tour on this machine: train, kill, resume, compare
	@$(BIN)/headway demo

test: install  ## everything that must hold: checks, and all tests beside them
	@$(MAKE) --no-print-directory -j 2 check tests

tests: install services
	$(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder --durations=15

check: install  ## style, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

shape: install  ## what one must open to follow one thing: cycles, coupling, walks, lines
	@$(BIN)/python scripts/shape

bench: install  ## measurements beside peers, printed as ratios
	for each in startup failing control_hub loop data checkpoint plan; do $(BIN)/python benchmarks/$$each.py; done

faults: install services  ## the tests of faults with all their cases (kills, bit flips, power cuts): many minutes
	HEADWAY_FAULTS=full $(BIN)/python -m pytest $$(grep -rlE --include='test_*.py' 'HEADWAY_FAULTS|^import warm' tests)

newest:  ## the tests that the newest torch and Python may break, in an environment with both
	@scripts/make-newest.sh
	.venv-newest/bin/python -m pytest -n $(WORKERS) --no-loadscope-reorder tests/train tests/checkpoint tests/dist tests/data tests/launcher tests/record tests/run tests/plan

docs: install  ## build the documentation into site/, and check its links and examples
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"
	$(BIN)/python -m pytest -q tests/docs

package: install  ## sdist and wheel in dist/, tried in clean environments: core only, and each extra alone
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	$(BIN)/python scripts/check_package.py dist

notes:  ## the release notes of a version, from the changelog: make notes VERSION=0.1.0
	@$(PYTHON) scripts/release_notes.py $(VERSION)

clean:  ## remove what was installed, built and cached here
	rm -rf .venv dist site headway-demo* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
