# The commands of the project. `make` alone lists them.
#
#   PYTHON=path    the interpreter for a new environment (default: the first of the supported versions that runs)
#   VENV=path      the environment (default: .venv)
#   ARGS="..."     passed on to the demo, to pytest or to the benchmarks
#   WORKERS=n      pytest processes (default: 2)

VENV ?= .venv
MODELS_VENV := .venv-models
AOT_VENV := .venv-aot
PYTHON ?=
ARGS ?=
WORKERS ?= 2

RUN := $(VENV)/bin/python
PYTEST := $(RUN) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)
CORE := $(addprefix tests/,stats signals detect observe step)
REFERENCE := docs/metrics.md
PIN_FLAGS := --quiet --generate-hashes --no-annotate --no-header --no-emit-index-url --no-emit-find-links \
             --python-platform x86_64-manylinux_2_28

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-core test-models test-aot lint docs docs-models bench bench-aot pins clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.runtime ## train a small language model with its probes on (ARGS="--nnx --steps 200")
	@$(RUN) examples/demo.py $(ARGS)

test: $(VENV)/.dev ## every test, and the examples in the docstrings
	PROBES_TESTS=quick $(PYTEST) -m "not optimized"
	$(PYTEST) -m optimized || [ $$? = 5 ]

test-core: $(VENV)/.dev ## the tests of what is traced into a step, for the second pair of Python and JAX
	PROBES_TESTS=quick $(PYTEST) -m "not slow and not optimized" $(CORE)
	$(PYTEST) -m "not slow and optimized" $(CORE)

test-models: $(MODELS_VENV)/.models ## models of other packages, unedited (1.1 GB, minutes; not part of make test)
	$(MODELS_VENV)/bin/python -m pytest --disable-warnings tests/models $(ARGS)

test-aot: $(AOT_VENV)/.aot ## programs compiled for TPUs and GPUs that are not here (1.5 GB, minutes)
	$(AOT_VENV)/bin/python -m pytest tests/cost/test_topologies.py $(ARGS)

lint: $(VENV)/.dev ## formatting, ruff, pyright, import rules, the generated reference
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m pyright --pythonpath $(RUN)
	$(RUN) -m pytest tests/contracts/test_import_rules.py
	@$(RUN) -m probes_jax metrics --markdown | diff -u $(REFERENCE) - \
	    || { echo "$(REFERENCE) is not what the registry says: run make docs and commit the result." >&2; exit 1; }

docs: $(VENV)/.runtime ## write the metric reference again from the registry
	@$(RUN) -m probes_jax metrics --markdown > $(VENV)/metrics.md
	@cp $(VENV)/metrics.md $(REFERENCE) && echo "wrote $(REFERENCE)"

docs-models: $(MODELS_VENV)/.models ## write the coverage tables of models of other packages again
	@$(MODELS_VENV)/bin/python -m tests.models.tables > $(MODELS_VENV)/tables.md
	@cp $(MODELS_VENV)/tables.md docs/coverage_models.md && echo "wrote docs/coverage_models.md"

bench: $(VENV)/.dev ## measure what docs/performance.md reports
	$(RUN) -m benchmarks.run $(ARGS)

bench-aot: $(AOT_VENV)/.aot ## the figures of programs compiled for TPUs and GPUs that are not here (most of an hour)
	$(AOT_VENV)/bin/python -m benchmarks.run cost

pins: ## resolve the pinned requirements again (needs uv)
	@for pair in 3.11 3.12; do \
	    name=requirements/py$$(echo $$pair | tr -d .); \
	    dev="--extra dev"; [ $$pair = 3.12 ] || dev="$$dev --extra tensorflow"; \
	    uv pip compile $(PIN_FLAGS) --python-version $$pair pyproject.toml $$name.in -o $$name.txt > /dev/null \
	    && uv pip compile $(PIN_FLAGS) --python-version $$pair pyproject.toml $$name.in $$dev -c $$name.txt \
	        -o $$name-dev.txt > /dev/null || exit 1; \
	done
	@uv pip compile $(PIN_FLAGS) --python-version 3.11 pyproject.toml requirements/py311.in requirements/models.in \
	    --excludes requirements/models-without.in -c requirements/py311-dev.txt -o requirements/models.txt > /dev/null
	@uv pip compile $(subst 2_28,2_31,$(PIN_FLAGS)) --python-version 3.11 pyproject.toml requirements/py311.in requirements/aot.in \
	    -c requirements/py311-dev.txt -o requirements/aot.txt > /dev/null

clean: ## remove the environment and what the tools left (not runs/)
	@for folder in $(VENV) .venv .venv-second $(MODELS_VENV) $(AOT_VENV); do \
	    [ ! -f $$folder/pyvenv.cfg ] || rm -rf $$folder; \
	done
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .jax_cache
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# The stamps: an environment is installed again when its pins or the package's own requirements change.
# The development pins hold the runtime pins too, so one environment serves every command.
$(VENV)/.runtime: requirements/py311.txt requirements/py312.txt pyproject.toml
	@sh requirements/install.sh $(VENV) runtime $(PYTHON)
	@touch $@

$(VENV)/.dev: requirements/py311-dev.txt requirements/py312-dev.txt pyproject.toml
	@sh requirements/install.sh $(VENV) dev $(PYTHON)
	@touch $(VENV)/.runtime $@

$(AOT_VENV)/.aot: requirements/aot.txt pyproject.toml
	@sh requirements/install.sh $(AOT_VENV) aot $(PYTHON)
	@touch $@

$(MODELS_VENV)/.models: requirements/models.txt pyproject.toml
	@sh requirements/install.sh $(MODELS_VENV) models $(PYTHON)
	@touch $@
