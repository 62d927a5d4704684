# kagent: two commands do everything.
#   make evolve   create .venv, install, evolve a softmax kernel (BUDGET=6: a short one)
#   make install  create .venv, install, nothing else
#   make test     create .venv, install, run the tests (make test-fast: those of short files)
#   make docs     build the docs as a site in site/; a dead link is an error
# On a machine whose python3 already has torch and triton (a GPU box), add TORCH=host to use those.

PYTHON ?= python3
TORCH  ?= pinned
TASK   ?= softmax
BUDGET ?= 50
WORKERS ?= 3
BIN    := .venv/bin

.PHONY: evolve install test test-fast check check-style check-types check-imports format docs clean

# kagent exits with 3 where the final race found TIE or SLOWER: no failure of make.
evolve: .venv/ready
	$(BIN)/kagent evolve $(TASK) --budget $(BUDGET) --no-memory || [ $$? -eq 3 ]

install: .venv/ready

# Three workers share the files (many tests wait); tests that need the machine to themselves have it (tests/worker_lock.py).
test: .venv/ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# For the inner loop: without the files that tests/durations.json says take long.
test-fast: .venv/ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --fast

# Of use by themselves, and side by side: make -j 2 check.
check: check-style check-types check-imports

check-style: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

check-types: .venv/ready
	$(BIN)/mypy

check-imports: .venv/ready
	$(BIN)/lint-imports --no-logo

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv/docs
	$(BIN)/mkdocs build

clean:
	rm -rf .venv site

# Rebuilt only when what it was made from changes, so a second `make` installs nothing.
.venv/ready: pyproject.toml constraints.txt setup.sh
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" sh setup.sh
	@touch $@

.venv/docs: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@
