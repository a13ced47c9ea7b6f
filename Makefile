# Everything a newcomer needs. The first target to run makes the environment; later ones reuse it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EPOCHS ?= 3
# Two workers, or one where there is but one GPU; `make demo WORKERS=4` takes another number.
WORKERS ?= $(shell $(BIN)/python -c 'import torch; print(min(2, torch.cuda.device_count() or 2))')
DEMO := runs/demo

STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs bench adversary evidence clean

help:
	@echo "make demo    train ResNet-18 on two workers, with the reason for every choice, and write a report"
	@echo "make test    run the tests"
	@echo "make lint    check style, types, floor plan and sizes"
	@echo "make docs    check that the documentation's programs run and its links lead somewhere"
	@echo "make bench   run the experiments in benchmarks/ on this machine"
	@echo "make adversary  run generated programs in every mode beside plain PyTorch (PROGRAMS=200 SEED=0)"
	@echo "make evidence   the long runs of docs/verification.md (JOBS=64 on a large host)"

demo: $(STAMP)
	@rm -rf $(DEMO)  # a run directory is never written over
	$(BIN)/ridgeline train resnet18 --workers $(WORKERS) --epochs $(EPOCHS) -o $(DEMO)
	@echo "Open the report in a browser: $(CURDIR)/$(DEMO)/report.html"

# What compares times, or wants the cores for itself, runs alone; the rest in JOBS processes. Tests on GPUs come
# first, in GPU_JOBS processes: where a dozen hold graphs and streams, a driver makes no context for another. Where
# there is no GPU the rest skips them.
# Files are begun in the order of tests/conftest.py, long ones first, and only those with such marks read for them.
# Bytecode is kept whatever the caller does elsewhere: each of hundreds of processes would compile what it imports.
# JOBS is one more than two cores: some tests wait, for limits and for each other's processes.
JOBS ?= 3
GPU_JOBS ?= 4
test: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP)
	@status=0; alone=alone; \
	marked() { grep -rlE "mark\.($$1)" tests --include="test_*.py"; }; \
	if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(BIN)/python -m pytest -q -m "gpu and not quiet" -n $(GPU_JOBS) --dist loadfile $$(marked gpu) || status=1; \
	  $(BIN)/python -m pytest -q -m quiet $$(marked quiet) || status=1; \
	  alone="gpu or alone"; fi; \
	$(BIN)/python -m pytest -q -m alone $$(marked alone) || status=1; \
	$(BIN)/python -m pytest -q -m "not ($$alone)" -n $(JOBS) \
	  --dist loadfile --no-loadscope-reorder || status=1; \
	exit $$status

lint: $(STAMP)
	.ci/run lint

docs: $(STAMP)
	$(BIN)/python -m pytest -q tests/meta/test_docs.py

bench: $(STAMP)
	@set -e; for program in benchmarks/*.py; do echo "== $$program"; $(BIN)/python "$$program"; done

# Failures found are written to runs/adversary, each as a script of its own.
PROGRAMS ?= 200
SEED ?= 0
adversary: $(STAMP)
	$(BIN)/python tests/adversary/run.py --programs $(PROGRAMS) --seed $(SEED) --jobs $(JOBS) --once --confirm

# Each says what it found and goes on; outcomes are kept in runs/evidence.
EVIDENCE := runs/evidence
evidence: $(STAMP)
	@mkdir -p $(EVIDENCE); status=0; \
	$(BIN)/python tests/kvstore/kills.py 100 --jobs $(JOBS) --out $(EVIDENCE)/kills.json || status=1; \
	$(BIN)/python tests/kvstore/fuzz_wire.py 1000000 || status=1; \
	$(BIN)/python tests/hybrid/damaged_packages.py 10000 || status=1; \
	$(BIN)/python tests/runtime/failing_tasks.py 1000000 || status=1; \
	$(BIN)/python tests/runtime/interrupted_engines.py 1000 || status=1; \
	$(BIN)/python -m pytest -q -m "not gpu" -n $(JOBS) --dist loadfile --hypothesis-seed=$(SEED) \
	  $$(grep -rl "@given" tests --include="test_*.py") || status=1; \
	$(BIN)/python tests/adversary/run.py --programs 2000 --jobs $(JOBS) --new --confirm \
	  --json $(EVIDENCE)/adversary.json || status=1; \
	exit $$status

clean:
	rm -rf $(VENV) runs build dist

# The stamp is newer than both files for as long as the environment fits them.
$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ]; then \
	  if ! $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'; then \
	    echo "wanted Python 3.11 or 3.12, got $$($(PYTHON) --version 2>&1) as '$(PYTHON)';" \
	      "install one, then e.g. 'make PYTHON=python3.12 $(MAKECMDGOALS)'" >&2; exit 1; fi; \
	  echo "Making the environment in $(VENV) with $$($(PYTHON) --version) ..."; \
	  $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; fi
	@echo "Installing ridgeline and its pinned dependencies (torch is large; once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
