# `make demo` shows it, `make check` is for every change, `make test` proves it, `make deep` repeats and enumerates at
# length. Each sets up .venv itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH := $(VENV)/.bench

.PHONY: demo check test lint types unit fast deep integrations bench nemo frameworks pins clean

# $(call install,PYTHON,CONSTRAINTS,WHAT): pip names the package that fails. All versions are those of CONSTRAINTS.
define install
( for try in 1 2 3; do \
	$(1) -m pip install --quiet --disable-pip-version-check -c $(2) $(3) && break; \
	test $$try != 3 || exit 1; echo "pip failed; trying again"; sleep 10; done )
endef
# What builds the package itself, pinned like all else, so without an environment of its own for that.
BUILD := hatchling editables

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(call install,$(BIN)/python,constraints.txt,$(BUILD))
	$(call install,$(BIN)/python,constraints.txt,--no-build-isolation -e '.[dev]')
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
WORKERS ?= 4
# What fails is run once more, alone.
PYTEST = $(BIN)/python -m tests.second_look -n $(WORKERS) --dist loadfile --no-loadscope-reorder

unit: $(READY)
	$(PYTEST) $(addprefix --ignore=,$(INTEGRATIONS)) -k 'not (every_block_runs and integrations)'

# Other people's loops and loaders: transformers, Lightning, Accelerate, torchdata.
INTEGRATIONS := tests/integrations tests/distributed/test_loader_matrix.py

integrations: $(READY)
	$(PYTEST) $(INTEGRATIONS)
	$(BIN)/python -m tests.second_look tests/docs/test_documentation.py -k 'every_block_runs and integrations'

fast: $(READY)
	$(PYTEST) -m 'not slow' tests/unit tests/behaviour tests/architecture

# Long series of crash points, all matrices, new seeds, the files in another order each time: before a release. What
# fails is not run again.
deep: $(READY)
	HOLDFAST_DEEP=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

$(BENCH): $(READY) constraints/bench.txt
	$(call install,$(BIN)/python,constraints/bench.txt,--no-build-isolation -e '.[dev,bench]')
	touch $(BENCH)

bench: $(BENCH)
	$(BIN)/python benchmarks/run.py

# nemo-toolkit brings 1.7 GB: it has an environment of its own. Where it does not install, its tests are skipped.
NEMO := .nemo-venv
NEMO_PACKAGES := pytest 'nemo-toolkit[core]>=3.0,<4'

$(NEMO)/.ready: pyproject.toml constraints/nemo.txt
	$(PYTHON) -m venv $(NEMO)
	$(call install,$(NEMO)/bin/python,constraints/nemo.txt,$(BUILD))
	$(call install,$(NEMO)/bin/python,constraints/nemo.txt,--no-build-isolation -e '.[nemo]' pytest)
	$(call install,$(NEMO)/bin/python,constraints/nemo.txt,$(NEMO_PACKAGES)) || \
		echo 'nemo-toolkit could not be installed: its tests are skipped'
	touch $(NEMO)/.ready

nemo: $(NEMO)/.ready
	$(NEMO)/bin/python -m pytest tests/compat/test_nemo_toolkit.py

# The frameworks that are large or want versions of their own. Their environment lies outside of the clone, one for each
# list of versions, without the package itself. One that does not install is skipped, with the reason.
FRAMEWORK_PACKAGES := wandb mlflow-skinny 'ray[train]>=2.50,<2.61' 'torchtitan>=0.3,<0.4' 'megatron-core>=0.16,<0.17' 'deepspeed>=0.19,<0.20'
FRAMEWORKS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/holdfast/frameworks-$(firstword $(shell sha256sum constraints/frameworks.txt))

$(FRAMEWORKS)/.ready: constraints/frameworks.txt
	rm -rf $(FRAMEWORKS)
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(call install,$(FRAMEWORKS)/bin/python,constraints/frameworks.txt,$(BUILD))
	$(call install,$(FRAMEWORKS)/bin/python,constraints/frameworks.txt,--no-build-isolation -e '.[dev]')
	missing=; for package in $(FRAMEWORK_PACKAGES); do \
		$(call install,$(FRAMEWORKS)/bin/python,constraints/frameworks.txt,"$$package") || \
		{ echo "$$package could not be installed: its tests are skipped"; missing=1; }; done; \
		$(FRAMEWORKS)/bin/python -m pip uninstall --quiet --yes holdfast; test -n "$$missing" || touch $@

FRAMEWORK_TESTS := $(addprefix tests/integrations/test_,observers.py ray.py \
	torchtitan.py torchtitan_containers.py megatron_core.py megatron_sharded.py deepspeed.py)

frameworks: export PYTHONPATH := $(CURDIR)/src
frameworks: $(FRAMEWORKS)/.ready
	$(FRAMEWORKS)/bin/python -m tests.second_look -n 2 --dist loadfile $(FRAMEWORK_TESTS)
	$(FRAMEWORKS)/bin/python -m tests.second_look tests/docs/test_documentation.py -k 'every_block_runs and integrations'

# The newest versions that the ranges of pyproject.toml allow, with the pinned torch, become the pinned ones.
COMMA := ,
TORCH := $(shell grep '^torch==' constraints.txt)
# $(call pin,FILE,PACKAGES)
define pin
	rm -rf .pins && $(PYTHON) -m venv .pins && echo '$(TORCH)' >.pins/torch.txt
	$(call install,.pins/bin/python,.pins/torch.txt,$(BUILD) $(2))
	{ echo '# All versions of this environment. Made by `make pins`.'; .pins/bin/python -m pip freeze --exclude-editable \
		| sed -e '/^#/d' -e 's/+cpu$$//'; } >$(1) && rm -rf .pins
endef

pins:
	$(call pin,constraints.txt,-e '.[dev]')
	$(call pin,constraints/bench.txt,-e '.[dev$(COMMA)bench]')
	$(call pin,constraints/frameworks.txt,-e '.[dev]' $(FRAMEWORK_PACKAGES))
	$(call pin,constraints/nemo.txt,-e '.[nemo]' $(NEMO_PACKAGES))

clean:
	rm -rf $(VENV) $(NEMO) $(FRAMEWORKS) .pins demo-out .pytest_cache .mypy_cache .ruff_cache
