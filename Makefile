# dspark-serve: `make help` lists what there is.
PORT ?= 8000
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where pip finds the CPU build of PyTorch, if not already in its own configuration: the address of PyTorch's CPU
# wheel index, as PyTorch's "Get Started" page names it for Linux, pip and CPU.
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_INSTALL := $(PIP) install --quiet --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Fails where pip would take PyTorch's CUDA build, several GB; nothing is listed where it is installed already.
define LOOK_FOR_CPU_TORCH
import json, platform, sys
urls = [row["download_info"]["url"] for row in json.load(sys.stdin)["install"]]
here = (sys.platform, platform.machine())
sys.exit(here == ("linux", "x86_64") and any("cpu" not in url.rsplit("/", 1)[-1] for url in urls))
endef
export LOOK_FOR_CPU_TORCH
define CUDA_TORCH
pip would install PyTorch's CUDA build here. Run make again with TORCH_INDEX= set to the address of PyTorch's CPU wheel
index, which its Get Started page shows for Linux, pip and CPU (after 'make clean' if $(VENV) has the CUDA build).
endef
export CUDA_TORCH

.DEFAULT_GOAL := help
.PHONY: help setup setup-validate setup-test serve test test-slow lint bench-overhead requirements clean

include make/releases.mk make/gpu.mk make/deploy.mk make/chart.mk make/images.mk make/robustness.mk

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## Create .venv with the CPU engine and dspark-serve in it
setup-validate: $(VENV)/.ready-validate ## The same, with what `dspark-serve validate` and `bench` need
setup-test: $(VENV)/.ready-test ## The same, with what the tests need

$(VENV)/.ready: requirements.lock pyproject.toml patches/cpu/distribution/pyproject.toml
	@if test ! -x $(BIN)/python; then $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dspark-serve needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 2; }; \
	  $(PYTHON) -m venv $(VENV); fi
	@$(PIP_INSTALL) --dry-run --report $(VENV)/torch.json $$(grep '^torch==' requirements.lock)
	@$(BIN)/python -c "$$LOOK_FOR_CPU_TORCH" < $(VENV)/torch.json || { echo "$$CUDA_TORCH" >&2; exit 2; }
	@echo "Installing vLLM's CPU engine and dspark-serve into $(VENV) (about two minutes the first time) ..."
	@$(PIP_INSTALL) -r requirements.lock
	@$(PIP_INSTALL) --no-build-isolation ./patches/cpu/distribution
	@$(PIP_INSTALL) --no-build-isolation --editable .
	@$(BIN)/python -c 'import torch, sys; sys.exit(torch.version.cuda is not None)' || { echo "$$CUDA_TORCH" >&2; exit 2; }
	@touch $@

# The versions that the tests have.
$(VENV)/.ready-validate: $(VENV)/.ready requirements-test.lock
	@$(PIP) install --quiet --constraint requirements.lock --constraint requirements-test.lock \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --no-build-isolation --editable '.[validate]'
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready requirements-test.lock
	@$(PIP_INSTALL) -r requirements-test.lock
	@touch $@

serve: setup ## Serve the bundled tiny pair on the CPU (PORT=8000)
	@$(BIN)/dspark-serve up tiny-cpu --port $(PORT)

test: setup-test lint ## Check style and types, and run every test
	@$(BIN)/python -m pytest -n auto tests --ignore tests/e2e
	@$(BIN)/python -m pytest -n 2 tests/e2e

test-slow: releases ## What takes minutes: pairs of chart switches and of patches, two nodes, engines or ranks, a thousand batches or switches, a validation
	@$(BIN)/python -m pytest -m slow tests

lint: setup-test ## ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench-overhead: setup-test ## Compare dspark-serve with plain vllm serve, alternating
	@$(BIN)/python -m tests.bench.overhead

requirements: ## Pin what a fresh environment resolves to
	@tests/resolve_requirements.sh $(PYTHON)

clean: ## Remove the environment
	rm -rf $(VENV)
