# `make demo` shows it, `make check` is for every change, `make test` proves it, `make integrations` with other people's
# loops; each sets up .venv itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH := $(VENV)/.bench

.PHONY: demo check test lint types unit fast images integrations bench nemo frameworks clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python examples/demo.py

check: lint types fast

test: lint types unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# Tests start hundreds of processes: without the compiled modules each of them compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

# Whole files go to a worker, for their fixtures, in the order of tests/conftest.py: the short ones last. Half of their
# time is waiting, so there are more workers than processors.
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

unit: $(READY) images
	$(PYTEST) $(addprefix --ignore=,$(INTEGRATIONS))

# Other people's loops and loaders: transformers, Lightning, Accelerate, torchdata.
INTEGRATIONS := tests/integrations tests/distributed/test_loader_matrix.py

integrations: $(READY)
	$(PYTEST) $(INTEGRATIONS)

fast: WORKERS = 4
fast: $(READY)
	$(PYTEST) -m 'not slow' tests/unit tests/behaviour tests/architecture

# The power cuts under real file systems need these two of Debian. Without them, or without root, they are skipped.
images:
	@if [ "$$(id -u)" = 0 ] && ! { command -v mkfs.xfs && command -v mkfs.btrfs; } >/dev/null 2>&1; then \
		DEBIAN_FRONTEND=noninteractive timeout 180 sh -c \
			'apt-get update -qq && apt-get install -y -qq xfsprogs btrfs-progs' >/dev/null 2>&1 || \
		echo 'xfsprogs and btrfs-progs could not be installed: the power cuts under XFS and btrfs are skipped'; fi

$(BENCH): $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,bench]'
	touch $(BENCH)

bench: $(BENCH)
	$(BIN)/python benchmarks/run.py

# nemo-toolkit brings 1.7 GB: it has an environment of its own. Where it does not install, its tests are skipped.
NEMO := .nemo-venv

$(NEMO)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(NEMO)
	$(NEMO)/bin/python -m pip install --quiet --upgrade pip
	$(NEMO)/bin/python -m pip install --quiet -c constraints.txt -e '.[nemo]' 'pytest>=8.3'
	$(NEMO)/bin/python -m pip install --quiet -c constraints.txt 'nemo-toolkit[core]>=3.0,<4' || \
		echo 'nemo-toolkit could not be installed: its tests are skipped'
	touch $(NEMO)/.ready

nemo: $(NEMO)/.ready
	$(NEMO)/bin/python -m pytest tests/compat/test_nemo_toolkit.py

# The frameworks that are large or want versions of their own. One that does not install is skipped, with the reason.
FRAMEWORKS := .frameworks-venv
FRAMEWORK_PACKAGES := wandb mlflow-skinny 'ray[train]>=2.50,<2.61' 'torchtitan>=0.3,<0.4' 'megatron-core>=0.16,<0.17' 'deepspeed>=0.19,<0.20'

$(FRAMEWORKS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --upgrade pip
	$(FRAMEWORKS)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	for package in $(FRAMEWORK_PACKAGES); do \
		$(FRAMEWORKS)/bin/python -m pip install --quiet -c constraints.txt "$$package" || \
		echo "$$package could not be installed: its tests are skipped"; done
	touch $(FRAMEWORKS)/.ready

FRAMEWORK_TESTS := $(addprefix tests/integrations/test_,observers.py ray.py \
	torchtitan.py torchtitan_containers.py megatron_core.py megatron_sharded.py deepspeed.py)

frameworks: $(FRAMEWORKS)/.ready
	$(FRAMEWORKS)/bin/python -m pytest -n 2 --dist loadfile $(FRAMEWORK_TESTS)
	$(FRAMEWORKS)/bin/python -m pytest tests/docs/test_documentation.py -k 'every_block_runs and integrations'

clean:
	rm -rf $(VENV) $(NEMO) $(FRAMEWORKS) demo-out .pytest_cache .mypy_cache .ruff_cache
