# One word for each thing a developer does. `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
WORKERS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

# One thread for each test process: with WORKERS of them, more would only wait for one another.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false

.PHONY: mutants test-trl test-tasks test-clients architectures help venv demo demo-node quick test test-wide test-processes deep test-oldest test-gpu test-net bench-gpu gpu-proof golden check format soak bench bench-promise site dist house clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/ -/'

venv: $(STAMP)  ## make the environment in .venv and install everything into it

# torch comes first and alone: what it needs is by far the largest part, and it decides the build (CPU or CUDA) of this machine.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headrace needs Python 3.11 or newer, found " + sys.version.split()[0] + "; run: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) torch
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[dev,demo]'
	@touch $@

demo: $(STAMP)  ## fine-tune a real language model, kill it, resume it, ask it (under five minutes); MODEL=made: without a network
	$(BIN)/python demo/demo.py --model $(or $(MODEL),real)

demo-node: $(STAMP)  ## a node and two workers on this machine, one of which is killed: the same model (under two minutes)
	$(BIN)/python demo/node_demo.py

# Everything but what has a target of its own; and of each room what takes few seconds of processors, for the inner loop.
USUAL := not soak and not net and not gpu
QUICK_ONES := record slots families checksum directories faults state lsp_checks lsp_rewrites clip_and_scale split_master muon \
	updater kernels projectors plan_format lane_table bound links ledger forecast program given parking taps caught replay \
	chain bad_checkpoints architecture encoding execute device_lanes merge shelf question planning_config \
	planning_allowances planning_outcome third_code compress_bad_input calls architectures weight_pages jobs compose \
	extents cli_clean cli_report cli_commands train_parts moments rerun update_counts damage_on_the_way node_refusals \
	nothing_is_left kept resumed_plan
QUICK := tests/terms tests/files tests/net tests/machine tests/codec tests/data tests/apps tests/report tests/runs tests/bench tests/demo \
	$(foreach name,$(QUICK_ONES),$(or $(wildcard tests/*/test_$(name).py tests/*/*/test_$(name).py),$(error there is no test_$(name).py)))

quick: $(STAMP)  ## some tests of each room, for the inner loop (a minute; the first time one and a half)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) -m "not wide and not deep and not process and $(USUAL)" $(QUICK)

test: $(STAMP)  ## the usual tests: of each promise one case (seven minutes); LEDGER=1: what each folder takes
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) -m "not wide and not deep and not process and $(USUAL)" --ignore=tests/style $(if $(LEDGER),--time-ledger --durations=12 --durations-min=5)

test-wide: $(STAMP)  ## what `test` has one case of, more widely: further values, models, pairs (a quarter of an hour)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) -m "wide and not deep and not process and $(USUAL)" --durations=12 --durations-min=5

test-processes: $(STAMP)  ## tests whose processes are killed or measured (a quarter of an hour)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) -m "process and not deep and $(USUAL)" --durations=12 --durations-min=5

deep: $(STAMP)  ## what `test` and `test-wide` have a sample of, whole: all architectures, full products (most of an hour); TRL: see test-trl
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) -m "deep and $(USUAL)" --timeout=1200 --durations=12 --durations-min=5
	$(if $(TRL),$(MAKE) test-trl)

architectures: $(STAMP)  ## each causal model of transformers: train, eval, generate, LoRA, int4, beside stock (a quarter of an hour); RENEW=1
	$(TEST_ENV) PYTHONPATH=$(CURDIR) $(BIN)/python tests/architectures/table.py --workers $(WORKERS) $(if $(RENEW),--renew)

test-oldest:  ## the same with the oldest versions that are allowed, in .venv-oldest (gigabytes: torch brings CUDA)
	$(MAKE) test test-wide VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

# GPU_PYTHON names an environment that has torch, transformers, numba, pytest and pytest-xdist: nothing is installed then.
GPU_ENV := $(if $(GPU_PYTHON),,$(STAMP))
GPU_RUN := PYTHONPATH=$(CURDIR) $(or $(GPU_PYTHON),$(BIN)/python)
HAS_GPU = $(GPU_RUN) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'

# What takes the time of copies runs alone; the rest is many small runs, whose time is Python's.
TIMED_GPU_TESTS := tests/gpu/test_cuda_machine.py
GPU_TESTS = failed=0; \
	$(GPU_RUN) -m pytest -m gpu $(TIMED_GPU_TESTS) || failed=1; \
	$(GPU_RUN) -m pytest -m gpu -n 4 tests/gpu tests/update --ignore=$(TIMED_GPU_TESTS) || failed=1; \
	exit $$failed

test-gpu: $(GPU_ENV)  ## tests that need a CUDA device
	@if $(HAS_GPU); then $(GPU_TESTS); else echo "test-gpu: no CUDA device here; nothing was tested"; fi

bench-gpu: $(GPU_ENV)  ## Headrace on a GPU capped to 8, 16 and 24 GiB, beside plain PyTorch (8 minutes); SCRATCH=directory
	@mkdir -p bench-results
	@$(GPU_RUN) bench/gpu.py --scratch $(or $(SCRATCH),bench-results) --output bench-results/gpu

gpu-proof: $(GPU_ENV)  ## kernels beside float64, then runs of real widths, measured over planned (ten minutes); OUTPUT=directory FROM=results.json
	@$(GPU_RUN) bench/gpu_proof.py --output $(or $(OUTPUT),bench-results/gpu-proof) $(if $(FROM),--from $(FROM)) $(if $(SCRATCH),--scratch $(SCRATCH))

test-net: $(STAMP)  ## tests on a network of their own, with cables that are shaped and pulled: as root, skipped elsewhere
	$(TEST_ENV) $(BIN)/python -m pytest -m net tests/namespaces -rs --timeout=600

test-trl: $(STAMP)  ## losses, tables and trainers beside the TRL that is installed in TRL: a folder made by pip install --no-deps --target
	PYTHONPATH=.:$(TRL) $(BIN)/python tests/losses/trl_numbers.py
	$(TEST_ENV) PYTHONPATH=.:$(TRL) $(BIN)/python -m pytest tests/losses tests/integrations

test-tasks:  ## `headrace eval --tasks` beside lm-eval's own model, in .venv-eval (lm-eval brings 400 MB)
	test -d .venv-eval || $(PYTHON) -m venv .venv-eval
	.venv-eval/bin/python -m pip install -q -e '.[eval,trainer]' pytest pytest-timeout pytest-xdist hypothesis torch==$(shell sed -n 's/^torch==//p' constraints.txt)
	$(TEST_ENV) .venv-eval/bin/python -m pytest tests/integrations/test_lm_eval.py

test-clients:  ## other programs as clients of `headrace serve` (lm-eval's local-completions), in .venv-clients
	test -d .venv-clients || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install -q -e '.[eval,serve]' 'lm-eval[api]' httpx hypothesis openai pytest pytest-timeout pytest-xdist torch==$(shell sed -n 's/^torch==//p' constraints.txt)
	$(TEST_ENV) .venv-clients/bin/python -m pytest tests/serve/test_serve_clients.py

mutants: $(STAMP)  ## are 200 kept changes of the code noticed by the tests nearest to them? (two hours; goes on where it was interrupted) ONLY=headrace.store
	$(TEST_ENV) $(BIN)/python tests/mutants/run.py $(if $(ONLY),--only $(ONLY))

golden: $(STAMP)  ## renew the golden plans, and say which field of which changed (minutes); NAMES=train-S
	$(TEST_ENV) $(BIN)/python tests/plan/golden_plans.py $(NAMES)

check: $(STAMP)  ## formatting, lint, types, layers (seconds)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(TEST_ENV) $(BIN)/python -m pytest tests/style

format: $(STAMP)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

soak: $(STAMP)  ## long stress runs, and all properties on fresh examples (an hour)
	$(TEST_ENV) $(BIN)/python -m pytest -m soak --timeout=7200
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) -m "$(USUAL)" --hypothesis-profile=fresh

# DEEPSPEED_PYTHON names an environment that has DeepSpeed (bench/README.md); without it only plain PyTorch is compared.
bench: $(STAMP)  ## what this machine can do, and Headrace beside its peers; SCRATCH=directory on the disk to measure
	@mkdir -p bench-results
	$(BIN)/python bench/limits.py --scratch $(or $(SCRATCH),bench-results) --output bench-results/limits.json
	$(BIN)/python bench/peers.py --scratch $(or $(SCRATCH),bench-results) --output bench-results/peers \
		$(if $(DEEPSPEED_PYTHON),--deepspeed-python $(DEEPSPEED_PYTHON))

bench-promise: $(STAMP)  ## planned against measured, and the distance to the limit, of 17 runs (an hour or more); SCRATCH=directory
	@mkdir -p bench-results
	$(BIN)/python bench/promise.py --scratch $(or $(SCRATCH),bench-results) --output bench-results/promise

site:  ## the pages of docs/ as a site, in site/, from an environment of its own
	test -d .venv-docs || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install -q $(shell grep -E '^(mkdocs|mkdocstrings.*|ruff)==' constraints.txt)
	.venv-docs/bin/mkdocs build --strict
	grep -q 'id="headrace.engine.trainer.Engine.step"' site/reference.html  # members are shown

dist: $(STAMP)  ## sdist and wheel, in dist/
	$(BIN)/python -m hatchling build

house: $(STAMP)  ## the package in figures; RANGE=A..B: what these commits added and removed
	@$(BIN)/python bench/house.py $(if $(RANGE),--range $(RANGE))

clean:  ## remove the environment and what runs left in this tree
	rm -rf dist $(VENV) .venv-oldest .venv-eval .venv-clients .venv-docs site demo-run bench-results .tests-tmp .pytest_cache .mypy_cache .ruff_cache .hypothesis
