# Every target sets up what it needs. Needs bash and a Python 3.12 or newer; see scripts/find_python.sh.
#
#   make test VENV=/fast/disk/venv         another place for the environment (5 GB)
#   make test PYTHON=/opt/py/bin/python3   another Python to create it with
#   make test USE_PYTHON=$(which python)   an environment of your own, used as it is
#   make test ARGS="-k layout"             more arguments for the program behind the target

VENV ?= .venv
EDITABLE ?= yes
USE_PYTHON ?=
ARGS ?=
FAULTS ?= 200
SEED ?= 1
CASE ?=
export VENV EDITABLE PYTHON
# This checkout, whatever else is installed.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

RUN := "$(or $(USE_PYTHON),$(VENV)/bin/python)"
# Folders without torch, checked strictly; those that exist.
TYPED := $(wildcard $(addprefix megatron_elas/,spec schedule planner simulator control cli config.py prerequisites.py proof.py))

.PHONY: help native demo test test-all check lint types imports format campaign soak bench-communicator bench-consistency bench-recovery bench-detection bench-emulation bench-goodput bench-gradient-sums bench-migration bench-orders bench-planner bench-random-streams bench-rebuild bench-throughput bench-transaction venv clean distclean

help:
	@echo "make demo                train a tiny Llama, lose a worker, watch it go on"
	@echo "make test                quick tests;  make test-all: all of them"
	@echo "make campaign            every phase x kind of fault x role once on two grids (an hour)"
	@echo "make soak                a random campaign: FAULTS=200 SEED=1; one case of it again: SEED=1 CASE=17"
	@echo "make check               style, types, import rules;  make format: mend the style"
	@echo "make bench-communicator  process groups: ours against gloo, and a lost replica against torchft"
	@echo "make bench-consistency   losses through events against the undisturbed run, by level; step time and memory of the levels"
	@echo "make bench-recovery      step time with and without --elastic; a lost worker against a restart; how recovery grows"
	@echo "make bench-transaction   step time with and without backups, bytes on the wire, recoveries with gradients or copies"
	@echo "make bench-rebuild       time of a worker's rebuild when one of its layers moves, against one of everything"
	@echo "make bench-detection     from a killed or stopped worker to its agent's notice"
	@echo "make bench-planner       predicted throughput after losses: our planner against other policies; time of a plan"
	@echo "make bench-orders        orders of a plan against the stock schedule on the same items; the cost of split backward"
	@echo "make bench-goodput       simulated weeks of failures: our policy against others, from 96 devices to a million"
	@echo "make bench-gradient-sums a micro-batch's gradient added in fixed point, against an addition in fp32"
	@echo "make bench-emulation     emulated accelerators: how well operations and steps keep to their times"
	@echo "make bench-throughput    emulated accelerators: throughput of real jobs before and after losses, by policy; the real torchft"
	@echo "make bench-migration     emulated accelerators: how long a migration of 1 to 4 layers holds training up"
	@echo "make clean               remove caches and build files;  make distclean: the environment too"

# The C libraries of this checkout; quick when up to date. Without a compiler, Python code takes their place.
native: venv
	@$(RUN) setup.py --quiet build_ext --inplace

demo: native
	@$(RUN) scripts/demo.py $(ARGS)

test: native
	@$(RUN) -m pytest -q -m "not slow" $(ARGS)

test-all: native
	@$(RUN) -m pytest -q $(ARGS)

campaign: native
	@$(RUN) -m pytest -q tests/fault/test_campaign.py $(ARGS)

soak: native
	@$(RUN) -W ignore -m tests.fault.soak --seed $(SEED) --faults $(FAULTS) $(if $(CASE),--case $(CASE)) $(ARGS)

check: lint types imports

lint: venv
	@$(RUN) -m ruff check --quiet --output-format=concise .
	@$(RUN) -m ruff format --check --quiet --output-format=concise . || { echo "style: 'make format' mends the files above" >&2; exit 1; }
	@PATH="$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$$PATH" shellcheck scripts/*.sh .ci/run

types: venv
	@$(RUN) -m mypy --strict $(TYPED)

imports: venv
	@$(RUN) -c 'from importlinter.cli import lint_imports_command as main; main()' --no-logo --no-cache

format: venv
	@$(RUN) -m ruff check --quiet --fix-only .
	@$(RUN) -m ruff format --quiet .

bench-communicator: native
	@$(RUN) benchmarks/communicator.py $(ARGS)

bench-consistency: native
	@$(RUN) benchmarks/consistency.py $(ARGS)

bench-recovery: native
	@$(RUN) benchmarks/recovery.py $(ARGS)

bench-transaction: native
	@$(RUN) benchmarks/transaction.py $(ARGS)

bench-rebuild: native
	@$(RUN) benchmarks/rebuild.py $(ARGS)

bench-detection: native
	@$(RUN) benchmarks/detection.py $(ARGS)

bench-planner: venv
	@$(RUN) benchmarks/planner.py $(ARGS)

bench-orders: native
	@$(RUN) benchmarks/orders.py $(ARGS)

bench-gradient-sums: native
	@$(RUN) benchmarks/gradient_sums.py $(ARGS)

bench-goodput: venv
	@$(RUN) benchmarks/goodput.py $(ARGS)

bench-emulation: native
	@$(RUN) benchmarks/emulation.py $(ARGS)

bench-random-streams: native
	@$(RUN) benchmarks/random_streams.py $(ARGS)

bench-throughput: native
	@$(RUN) benchmarks/throughput.py $(ARGS)

bench-migration: native
	@$(RUN) benchmarks/migration.py $(ARGS)

venv:
	@$(if $(USE_PYTHON),:,scripts/setup_venv.sh)

clean:
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -path ./.git -prune -o -path "./$(VENV)" -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	@if [ -e "$(VENV)/.elas-owned" ]; then rm -rf "$(VENV)" "$(VENV).lock"; fi
