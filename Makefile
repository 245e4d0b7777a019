# All set-up happens in .venv; see scripts/setup_env.py. Another interpreter: make PYTHON=python3.12 demo
PYTHON ?= python3
BIN := .venv/bin
# So that the redis-server of a wheel is found where the machine has none of its own.
export PATH := $(PATH):$(CURDIR)/$(BIN)
# What is not written would be compiled again by each of some hundred processes of a test run.
unexport PYTHONDONTWRITEBYTECODE

# What depends on vLLM's release: what is gone around and made up there, the proofs' numbers, KV isolation, and its OpenAI server; of
# decode proofs one engine.
MATRIX ?= 0.28 0.30 0.32
MATRIX_TESTS := tests/unit/workers/vllm/release tests/unit/workers/vllm/start/test_random_weights.py \
	tests/integration/engines/test_vllm_engine.py tests/integration/engines/test_kv_isolation.py \
	tests/integration/engines/test_provable.py \
	tests/integration/chat/test_chat.py::TestOpenAiClient

# Two processes more than small machines have cores: most tests wait much of the time. Each needs up to 4 GiB of memory.
PYTEST := pytest -n 4 --dist loadgroup --no-loadscope-reorder -m
# Unit tests do not wait: no process more than there are cores.
UNIT := pytest -n logical --maxprocesses 4 --dist loadgroup --no-loadscope-reorder -m
# Those of the benchmarks and scripts lie beside them.
TOOLS := bench/tests scripts/tests

# Requests of `make fuzz`, made from the API's own description.
CASES ?= 10000
# Of `make faults` and `make soak`; `make failover` and `make hostile` last 10 minutes unless told.
MINUTES ?= 20
ENGINE ?= synthetic
# Of `make mutants`: how many are drawn.
MUTANTS ?= 300
# Of `make failover`.
KILLS ?= 10
FORGET ?= 0
# Of `make models`: which families and variants (default: all that this machine can run), how many engines at a time.
FAMILIES ?=
VARIANTS ?=
JOBS ?=

.PHONY: help setup setup-gpu demo test unit integration docker slow mutants fuzz faults failover soak hostile patience test-matrix models coverage docs docs-serve docs-tables lock manifest audit lint format clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: ## make .venv ready: the engine already in it, else the CPU engine
	@$(PYTHON) scripts/setup_env.py

setup-gpu: ## make .venv ready with CUDA vLLM: pip install -e '.[gpu,dev]'
	@$(PYTHON) scripts/setup_env.py gpu

demo: setup ## start the whole stack with a tiny model, generate and validate proofs, stop
	@$(BIN)/proofline demo

test: lint ## linters, types, then unit and integration tests
	@$(BIN)/python -m $(PYTEST) "not slow" tests $(TOOLS)

unit: setup ## unit tests only: no Redis, no engine
	@$(BIN)/python -m $(UNIT) "not slow" tests/unit $(TOOLS)

integration: setup ## integration tests only: real Redis, real processes, real vLLM
	@$(BIN)/python -m $(PYTEST) "not slow" tests/integration

coverage: export COVERAGE_FILE := $(CURDIR)/build/coverage/data
coverage: setup ## all tests once more, slower, and which lines and branches they ran, also in child processes
	@rm -rf build/coverage && mkdir -p build/coverage
	@# Python 3.11 cannot trace two threads that start at the same time: the warning is no fault of a test.
	@$(BIN)/python -m coverage run -m $(PYTEST) "not slow" -W default::pytest.PytestUnraisableExceptionWarning tests $(TOOLS)
	@$(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage report

faults: setup ## the whole stack under work while processes, network, disk and receivers fail (MINUTES=20 SEED=1 ENGINE=vllm)
	@$(BIN)/python -m bench.faults --minutes $(MINUTES) --engine $(ENGINE) $(if $(SEED),--seed $(SEED))

failover: setup ## the same behind real Sentinels, whose primary is killed again and again (KILLS=10 MINUTES=10 FORGET=1)
	@$(BIN)/python -m bench.faults.failover --kills $(KILLS) --minutes $(if $(filter file,$(origin MINUTES)),10,$(MINUTES)) --forget $(FORGET) $(if $(SEED),--seed $(SEED))

soak: setup ## the same without faults: nothing lost, nothing grows
	@$(BIN)/python -m bench.faults --no-faults --minutes $(MINUTES) --engine $(ENGINE) $(if $(SEED),--seed $(SEED))

fuzz: export PROOFLINE_FUZZ := long
fuzz: setup ## what hypothesis and schemathesis try in `make test`, ever new and a hundred times as much (CASES=10000)
	@$(BIN)/python -m pytest -n 2 --timeout 3600 -m fuzz tests/unit
	@$(BIN)/python -m bench.described --cases $(CASES)
	@$(BIN)/python -m bench.described --cases $(CASES) --keys
	@$(BIN)/python -m bench.poison.campaign --cases $(CASES)

hostile: setup ## what honest clients see beside 20 hostile ones of 26 kinds (MINUTES=10)
	@$(BIN)/python -m bench.hostile --minutes $(if $(filter file,$(origin MINUTES)),10,$(MINUTES)) $(if $(SEED),--seed $(SEED))

patience: export PROOFLINE_TIMES := real
patience: setup ## an engine under too much chat and one that stands still, with the times of production: 20 minutes
	@$(BIN)/python -m pytest -s tests/integration/engines/test_hung_engine.py

docker: setup ## all images, compose.yaml, and the swap with MLNode, on a Docker engine, of its own where none answers
	@bash tests/docker/engine.sh $(BIN)/python -m pytest -v -s -n 0 tests/docker

mutants: setup ## which mutations of the product the unit tests do not find (MUTANTS=300 SEED=1): an hour on 2 cores
	@$(PYTHON) -m venv build/mutants && build/mutants/bin/python -m pip install --quiet "cosmic-ray>=8.7,<9"
	@build/mutants/bin/python scripts/mutants.py -n $(MUTANTS) $(if $(SEED),--seed $(SEED))

slow: setup ## what `make test` leaves out: further engines, larger jobs
	@$(BIN)/python -m $(PYTEST) slow tests $(TOOLS)

test-matrix: ## golden tests on several releases of vLLM, each in an environment of its own (MATRIX="0.28 0.30 0.32")
	@for version in $(MATRIX); do \
		PROOFLINE_VLLM=$$version $(PYTHON) scripts/setup_env.py cpu || exit 1; \
		echo "vLLM $$version:"; \
		.venv-vllm-$$version/bin/python -m pytest $(MATRIX_TESTS) || exit 1; \
		.venv-vllm-$$version/bin/python -m pytest -m "not slow" tests/integration/engines/test_decode_vllm.py || exit 1; \
	done

models: setup ## the model matrix: tiny models of every family the network runs (FAMILIES="qwen3 gpt-oss" VARIANTS=float32)
	@$(BIN)/python -m bench.families.matrix $(if $(VARIANTS),--variants $(VARIANTS)) $(if $(JOBS),--jobs $(JOBS)) $(FAMILIES)

docs: setup ## build the documentation site into build/docs/site; a broken link or any other warning is an error
	@$(BIN)/python scripts/build_docs.py

docs-serve: setup ## the same on http://127.0.0.1:8001, following what you write
	@$(BIN)/python scripts/build_docs.py --serve

docs-tables: setup ## write the generated parts of the pages (settings, commands, recipes, promises)
	@$(BIN)/python -m scripts.docs_tables

lock: setup ## write locks/*.txt anew after pyproject.toml changed (UPGRADE=1: with the newest versions); needs the network
	@$(BIN)/python -m pip install --quiet "uv>=0.13,<0.14"
	@$(BIN)/python -m scripts.lock $(if $(UPGRADE),--upgrade)

manifest: setup ## write docker/k8s/proofline.yaml anew after docker/chart changed
	@$(BIN)/python -m scripts.manifest

audit: setup ## known holes in what is installed and locked, secrets in what is checked in; offline
	@$(BIN)/python -m scripts.audit

lint: setup ## ruff, mypy, and vulture, which finds what nothing calls
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy
	@$(BIN)/python -m vulture

format: setup ## let ruff fix and format; the synchronous client from the asynchronous one
	@$(BIN)/python -m ruff check --fix .
	@$(BIN)/python -m ruff format .
	@$(BIN)/python -m scripts.sync_client

clean: ## remove .venv and caches
	rm -rf .venv .venv-vllm-* .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
