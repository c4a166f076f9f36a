SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?=
export VENV PYTHON

# A model folder (config.json, tokenizer.json, *.safetensors); demo and serve fetch the default.
# tiny-deepseek and tiny-qwen3-moe are no folders: small random models, made when asked for.
MODEL ?= models-data/SmolLM2-135M-Instruct
# More options for the script or for pytest, as in: make test ARGS='-k page_pool -x'
ARGS ?=

CXX_FILES = git ls-files '*.cc' '*.h' | xargs -r

.DEFAULT_GOAL := help
.PHONY: help setup model demo serve test test-all gpu-aot native-test check format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\nVariables: MODEL=FOLDER|tiny-deepseek|tiny-qwen3-moe ARGS="..." PYTHON=/path/to/python3.12 VENV=DIR\n'

setup: ## Install what is missing: system packages, .venv, the native build (at once if unchanged)
	@scripts/setup.sh

model: setup
	@if [ '$(MODEL)' = models-data/SmolLM2-135M-Instruct ]; then \
	  $(BIN)/python scripts/fetch_smollm2.py >/dev/null; fi

demo: model ## Ask SmolLM2, prefill and decode apart, and account for the answer (MODEL= another)
	@$(BIN)/python scripts/demo.py --model '$(MODEL)' $(ARGS)

serve: model ## The same deployment, until Ctrl-C (MODEL= another model folder)
	@$(BIN)/python scripts/serve.py --model '$(MODEL)' $(ARGS)

test: model ## All tests but the long matrices
	@$(BIN)/python -m pytest -m 'not slow' $(ARGS)

test-all: model ## All tests
	@$(BIN)/python -m pytest $(ARGS)

gpu-aot: setup ## Compile kernels and steps for GPUs that are not here, in an environment of its own
	@$(BIN)/python scripts/gpu_aot.py $(ARGS)

native-test: setup ## The C++ tests under the address sanitizer
	@scripts/native_test.sh

check: setup ## Lint, format, types, import rules; changes nothing, reports all that is wrong
	@failed=; \
	$(BIN)/ruff check . || failed+=' lint'; \
	$(BIN)/ruff format --check . || failed+=' format'; \
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python || failed+=' types'; \
	$(BIN)/lint-imports --no-logo || failed+=' imports'; \
	$(CXX_FILES) $(BIN)/clang-format --dry-run --Werror || failed+=' clang-format'; \
	[ -z "$$failed" ] || { echo "check failed:$$failed" >&2; exit 1; }

format: setup ## Put every file into the form that check wants
	@$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format -q .
	@$(CXX_FILES) $(BIN)/clang-format -i

clean: ## Remove the environment, builds and caches; fetched models stay
	@rm -rf $(VENV) build dist .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
