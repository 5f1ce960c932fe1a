# SPDX-License-Identifier: Apache-2.0
# Every target makes .venv when it is missing or older than pyproject.toml. Choose the interpreter with
# `make PYTHON=python3.12 ...`; pip's own configuration says where packages come from.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STAMP_033 := $(VENV)-0.33/.installed
ARGS ?=
# Of `make test`: two processes, each with an engine or a server of its own (tests/conftest.py).
WORKERS ?= --numprocesses 2 --dist loadgroup --no-loadscope-reorder
# The interpreter that has vLLM for CUDA: that of an active environment, if none is named here or as PYTHON.
VLLM_PYTHON ?= $(if $(filter file,$(origin PYTHON)),python3,$(PYTHON))

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-fast test-033 coverage matrix lint families-page check-upstream upstream-tests gpu-check gpu-ship docker-steps settings-page bench soak chaos bench-gemma3 bench-features bench-table clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-26s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@awk -F ' = ' '/^\[/ { on = $$0 == "[what]" } on && NF > 1 { gsub("_", "-", $$1); gsub("\"", "", $$2); \
		printf "make bench-%-20s %s\n", $$1, $$2 }' benchmarks/catalogue.toml

$(STAMP): pyproject.toml scripts/make_venv
	@scripts/make_venv "$(PYTHON)" "$(VENV)"
	@touch $@

venv: $(STAMP)  ## make .venv with vLLM for CPU and the development tools (about 2 minutes, once)

demo: $(STAMP)  ## the same conversation with and without the plugin, side by side (about 3 minutes)
	@$(BIN)/mmcache demo $(ARGS)

test: $(STAMP)  ## the tests on model runner V1, then on V2 those of engines; ARGS="-k block_keys" for some
	@scripts/find_chromium
	@scripts/find_programs
	@TEST_PARTS=1 $(BIN)/python -m pytest $(WORKERS) $(ARGS); v1=$$?; \
	TEST_ENGINE=v2-async $(BIN)/python -m pytest $(WORKERS) $(ARGS); v2=$$?; \
	TEST_ENGINE=v2 $(BIN)/python -m pytest $(WORKERS) $(ARGS); sync=$$?; \
	test $$v1 = 0 && test $$v2 = 0 && test $$sync = 0

test-fast: $(STAMP)  ## the tests that start no process or engine and are not marked slow (about a minute on two cores)
	@$(BIN)/python -m pytest -m fast --ignore tests/engine --numprocesses 0 $(ARGS)

# Of what touches vLLM, and needs no engine: making the environment takes longer than they do.
TESTS_033 := $(addprefix tests/unit/,audit components hooking lifecycle metrics models reference_attention trial)
test-033: $(STAMP) $(STAMP_033)  ## the fast tests of what touches vLLM on 0.33's Python, without engines
	@$(VENV)-0.33/bin/python -m pytest -m fast --numprocesses 2 $(or $(ARGS),$(TESTS_033))

coverage: $(STAMP)  ## branches of the package that the tests without an engine run; ARGS=tests for all tests, or some
	@mkdir -p .artifacts/coverage
	@$(BIN)/python -m coverage erase
	@$(BIN)/python -m coverage run -m pytest $(WORKERS) $(or $(ARGS),-m "not engine"); tested=$$?; \
	$(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage report && exit $$tested

$(STAMP_033): pyproject.toml scripts/make_venv scripts/make_venv_033.py scripts/cpu_operators.py | $(STAMP)
	@rm -rf "$(@D)"
	@$(BIN)/python scripts/make_venv_033.py "$(PYTHON)" "$(@D)"
	@touch $@

matrix: $(STAMP) $(STAMP_033)  ## all tests on vLLM 0.32 and 0.33, runners V1 and V2: writes docs/matrix.md (hours); ARGS for a part
	@scripts/find_chromium
	@scripts/find_programs
	@$(BIN)/python -m scripts.matrix $(ARGS)

lint: $(STAMP)  ## ruff check, ruff format --check, mypy over package, tools, tests, benchmarks and scripts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

check-upstream: $(STAMP)  ## compare every replaced vLLM symbol with the versions it was written for
	@$(BIN)/python -m mmcache_tools.check_upstream $(ARGS)
	@$(BIN)/python -m pytest -q tests/system/patches -k wheel

upstream-tests: $(STAMP)  ## vLLM's own tests with and without the plugin; VLLM_SRC=/path/to/its/sources (about 20 minutes)
	@$(BIN)/python -m pip install --quiet --editable '.[cpu,dev,upstream]'
	@$(BIN)/python scripts/upstream_tests.py "$(VLLM_SRC)" $(ARGS)

gpu-check:  ## each component on an NVIDIA GPU: exactness, then benchmarks; VLLM_PYTHON=/path/to/python, with vLLM in it
	@"$(VLLM_PYTHON)" -m scripts.gpu_check.run $(ARGS)

gpu-ship: $(STAMP)  ## the same on a machine without a network, in pieces: ARGS='pack --facts facts.json'; ARGS=--help
	@$(BIN)/python -m scripts.gpu_check.ship $(ARGS)

.PHONY: seeded-faults
seeded-faults: $(STAMP)  ## plant faults in a copy, one at a time, and see that the tests notice (about 8 minutes); ARGS=--save
	@$(BIN)/python -m scripts.seeded_faults $(ARGS)

.PHONY: first-minutes
first-minutes:  ## do in a clean directory what docs/first_minutes.md walks through, timed (about 5 minutes)
	@$(PYTHON) scripts/first_minutes.py $(ARGS)

docker-steps: $(STAMP)  ## do in a clean directory what docker/cpu.Dockerfile says, down to a healthy server (about 4 minutes)
	@$(BIN)/python scripts/docker_steps.py $(ARGS)

settings-page: $(STAMP)  ## write docs/settings.md from the settings model
	@$(BIN)/python scripts/settings_page.py

families-page: $(STAMP)  ## write docs/families.md by a walk through vLLM's registry (half a minute)
	@$(BIN)/python scripts/families_page.py

bench: $(STAMP)  ## most benchmarks in a short form: table, plot, JSON in .artifacts/bench (about 20 minutes)
	@$(BIN)/python -m benchmarks.bench $(ARGS)

soak: $(STAMP)  ## larger random tests on all families, 5 minutes of load, memory over 2,000 images, a million fuzzed inputs and planted entries (over an hour)
	@$(BIN)/python -m scripts.soak $(ARGS)

.PHONY: screenshots
screenshots: $(STAMP)  ## docs/images from a real server under load, and each query of docs/grafana.json (about 3 minutes)
	@CI=1 scripts/find_chromium
	@CI=1 scripts/find_programs
	@$(BIN)/python -m scripts.screenshots $(ARGS)

chaos: $(STAMP)  ## a server whose stores are damaged and taken away, and which is killed 20 times (15 to 20 minutes)
	@$(BIN)/python -m benchmarks.run chaos $(ARGS)

# Each benchmark of the catalogue, its name with dashes: bench-warm-turn runs warm_turn.
bench-%: $(STAMP)
	@$(BIN)/python -m benchmarks.run $(subst -,_,$*) $(ARGS)

bench-gemma3: bench-gemma3-attention  ## the name of bench-gemma3-attention in the tables

bench-features: $(STAMP)  ## bench-gallery and bench-restart, one after the other
	@$(BIN)/python -m benchmarks.run gallery $(ARGS)
	@$(BIN)/python -m benchmarks.run restart $(ARGS)

bench-table: $(STAMP)  ## write the tables of the README and the pages, and the plot, from the committed results
	@$(BIN)/python -m benchmarks.summary --write

clean:  ## remove .venv, built models, logs and tool caches
	rm -rf $(VENV) $(VENV)-0.33 .artifacts .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
