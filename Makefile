SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo serve test test-all check format native-test clean

setup:
	@scripts/setup.sh

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyrefly check
	@$(BIN)/lint-imports
	@git ls-files '*.cc' '*.h' | xargs -r $(BIN)/clang-format --dry-run --Werror

format:
	@$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format -q .
	@git ls-files '*.cc' '*.h' | xargs -r $(BIN)/clang-format -i
