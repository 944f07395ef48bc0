# `make serve` and `make test` do everything from a fresh clone; `make help` lists the rest.
SHELL := /bin/sh
VENV ?= .venv
PYTHON ?=
CONFIG ?=
ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.sam3-ray

.DEFAULT_GOAL := install
.PHONY: help install install-into serve test test-full device check format evaluate images \
	requirements browser clean FORCE

# The stamp holds the checkout's path; a moved checkout is installed again.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
$(STAMP): FORCE
endif

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## make .venv with the pinned packages and this one (PYTHON=..., VENV=...)

$(STAMP): requirements.txt pyproject.toml scripts/install.sh
	@scripts/install.sh "$(VENV)" "$(PYTHON)"

install-into: ## install into an environment that has its own torch and ttnn, and keep those (ENV=...)
	@test -x "$(ENV)/bin/python" || { echo "usage: make install-into ENV=/path/to/environment" >&2; exit 2; }
	@"$(ENV)/bin/python" scripts/install_into.py $(ARGS)

serve: install ## start the service (CONFIG=serve_config.yaml, ARGS="--port 9000")
	@$(BIN)/sam3-ray serve $(CONFIG) $(ARGS)

test: install check ## check, then the tests
	@$(BIN)/python -m pytest $(ARGS)

test-full: test ## test, then the full-size model and the long tests
	@$(BIN)/python -m pytest -m full $(ARGS)

device: install ## everything for a machine with a chip, into one report (ARGS=--emulated tries it without)
	@$(BIN)/python perf/device.py $(ARGS)

check: install ## ruff and mypy
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: install ## let ruff format and sort imports
	@$(BIN)/ruff check --fix --exit-zero
	@$(BIN)/ruff format

evaluate: install ## accuracy of the demo checkpoint on the 200 pictures
	@$(BIN)/python scripts/evaluate_demo_checkpoint.py $(ARGS)

images: install ## draw docs/images again
	@$(BIN)/python scripts/draw_readme_picture.py

requirements: install ## compile requirements.txt from pyproject.toml (ARGS=--upgrade)
	@$(BIN)/uv pip compile --quiet --all-extras --python-version 3.12 --python-platform x86_64-manylinux_2_34 \
		--annotation-style line --custom-compile-command "make requirements" \
		--output-file requirements.txt pyproject.toml $(ARGS)

browser: ## Chromium, for the tests of the page
	@scripts/install_browser.sh

clean: ## remove .venv and caches
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
