.DEFAULT_GOAL := help
.PHONY: help up test proofs check bench pictures mutants lock wheel

BIN := .venv/bin
# Without its bytecode, each process would take a second or more to compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: ## set up what is missing, then run the gateway and one worker (ARGS="--model ...")
	@scripts/setup worker
	@exec $(BIN)/paceline up $(ARGS)

test: ## set up what is missing, then run the tests (ARGS="tests/socket -k stream")
	@scripts/setup dev
	@PATH="$(CURDIR)/$(BIN):$$PATH" exec scripts/with-blas $(BIN)/pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

proofs: ## run the long searches for counterexamples that `make test` samples
	@$(MAKE) --no-print-directory test ARGS="-m proof $(ARGS)"

check: ## lint, format, types, import contracts, prose and links
	@scripts/setup dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tools.prose
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: ## print the benchmarks
	@scripts/setup dev
	@exec $(BIN)/python -m bench $(ARGS)

pictures: ## check the accessibility of all pages, and take pictures of them into docs/pages
	@scripts/setup dev
	@exec scripts/with-blas $(BIN)/python -m tools.pictures

mutants: ## count changes of the program that no test notices (ARGS="--count 500 --seed 7")
	@scripts/setup dev
	@exec scripts/with-blas $(BIN)/python -m tools.mutants $(ARGS)

lock: ## write locks/ anew from pyproject.toml (needs uv)
	@scripts/lock

wheel: ## build dist/, whose install.sh installs Paceline on a machine without a clone
	@scripts/setup gateway
	@scripts/wheel
