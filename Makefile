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
.PHONY: help venv demo test matrix lint families-page check-upstream upstream-tests gpu-check gpu-ship docker-steps settings-page bench soak chaos bench-agents bench-block-keys bench-gemma3 bench-cold-requests bench-image-questions bench-random-mm bench-computer-use bench-image-service bench-kv-restart bench-sealing bench-features bench-feature-costs bench-feature-steps bench-identity bench-load bench-memory bench-observe bench-processor bench-start-cost bench-upstream-connectors bench-warm-turn bench-table clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-22s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

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
	test $$v1 = 0 && test $$v2 = 0

$(STAMP_033): pyproject.toml scripts/make_venv scripts/make_venv_033.py scripts/cpu_operators.py | $(STAMP)
	@rm -rf "$(@D)"
	@$(BIN)/python scripts/make_venv_033.py "$(PYTHON)" "$(@D)"
	@touch $@

matrix: $(STAMP) $(STAMP_033)  ## all tests on vLLM 0.32 and 0.33, runners V1 and V2: writes docs/matrix.md (hours); ARGS for a part
	@$(BIN)/python -m scripts.matrix $(ARGS)

lint: $(STAMP)  ## ruff check, ruff format --check, mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

check-upstream: $(STAMP)  ## compare every replaced vLLM symbol with the versions it was written for
	@$(BIN)/python -m mmcache_tools.check_upstream $(ARGS)
	@$(BIN)/python -m pytest -q tests/patches -k wheel

upstream-tests: $(STAMP)  ## vLLM's own tests with and without the plugin; VLLM_SRC=/path/to/its/sources (about 20 minutes)
	@$(BIN)/python -m pip install --quiet --editable '.[cpu,dev,upstream]'
	@$(BIN)/python scripts/upstream_tests.py "$(VLLM_SRC)" $(ARGS)

gpu-check:  ## each room on an NVIDIA GPU: exactness, then benchmarks; VLLM_PYTHON=/path/to/python, with vLLM in it
	@"$(VLLM_PYTHON)" -m scripts.gpu_check.run $(ARGS)

gpu-ship: $(STAMP)  ## the same on a machine without a network, in pieces: ARGS='pack --facts facts.json'; ARGS=--help
	@$(BIN)/python -m scripts.gpu_check.ship $(ARGS)

.PHONY: first-minutes
first-minutes:  ## do in a clean directory what docs/first_minutes.md walks through, timed (about 5 minutes)
	@$(PYTHON) scripts/first_minutes.py $(ARGS)

docker-steps: $(STAMP)  ## do in a clean directory what docker/cpu.Dockerfile says, down to a healthy server (about 4 minutes)
	@$(BIN)/python scripts/docker_steps.py $(ARGS)

settings-page: $(STAMP)  ## write docs/settings.md from the settings model
	@$(BIN)/python scripts/settings_page.py

families-page: $(STAMP)  ## write docs/families.md by a walk through vLLM's registry (half a minute)
	@$(BIN)/python scripts/families_page.py

bench: $(STAMP)  ## all benchmarks in a short form: table, plot, JSON in .artifacts/bench (under 15 minutes)
	@$(BIN)/python -m benchmarks.bench $(ARGS)

soak: $(STAMP)  ## larger random tests on all families, 5 minutes of load, memory over 2,000 images, a million fuzzed inputs and planted entries (over an hour)
	@$(BIN)/python -m scripts.soak $(ARGS)

chaos: $(STAMP)  ## a server whose stores are damaged and taken away, and which is killed 20 times (15 to 20 minutes)
	@$(BIN)/python -m benchmarks.run chaos $(ARGS)

bench-agents: $(STAMP)  ## agents and pipelines: tokens reused, runs of the vision tower, time (about 8 minutes)
	@$(BIN)/python -m benchmarks.run agents $(ARGS)

bench-block-keys: $(STAMP)  ## time the block keys
	@$(BIN)/python -m benchmarks.run block_keys $(ARGS)

bench-gemma3: $(STAMP)  ## Gemma 3, stock and plugin: exactness, splits under load, prefill time
	@$(BIN)/python -m benchmarks.run gemma3_attention $(ARGS)

bench-cold-requests: $(STAMP)  ## what the first request about images costs, stock and plugin (about 20 minutes)
	@$(BIN)/python -m benchmarks.run cold_requests $(ARGS)

bench-image-questions: $(STAMP)  ## the second question about an image: cached tokens (about 8 minutes)
	@$(BIN)/python -m benchmarks.run image_questions $(ARGS)

bench-random-mm: $(STAMP)  ## vLLM's own client with random-mm, the same seed twice, stock and plugin (about 4 minutes)
	@$(BIN)/python -m benchmarks.run random_mm $(ARGS)

bench-computer-use: $(STAMP)  ## replay: 38 steps at a computer, windows of 1, 3 and 5 screenshots, stock and plugin (over 20 minutes)
	@$(BIN)/python -m benchmarks.run computer_use $(ARGS)

bench-image-service: $(STAMP)  ## replay: requests of one to nine images of many users, stock and plugin
	@$(BIN)/python -m benchmarks.run image_service $(ARGS)

bench-kv-restart: $(STAMP)  ## conversations go on after a restart, KV in vLLM's ExampleConnector, stock and plugin
	@$(BIN)/python -m benchmarks.run kv_restart $(ARGS)

bench-sealing: $(STAMP)  ## what encryption at rest costs
	@$(BIN)/python -m benchmarks.run sealing $(ARGS)

bench-features: $(STAMP)  ## images in rotation and after a restart, stock and plugin
	@$(BIN)/python -m benchmarks.run gallery $(ARGS)
	@$(BIN)/python -m benchmarks.run restart $(ARGS)

bench-feature-costs: $(STAMP)  ## which tier of features is faster than the tower: measures this machine (5 minutes)
	@$(BIN)/python -m benchmarks.run feature_costs $(ARGS)

bench-feature-steps: $(STAMP)  ## what the feature store takes in a step, and what its loads do to others' decoding (about 8 minutes)
	@$(BIN)/python -m benchmarks.run feature_steps $(ARGS)

bench-identity: $(STAMP)  ## identity work per image, and conversations that name images by uuid alone
	@$(BIN)/python -m benchmarks.run identity $(ARGS)

bench-load: $(STAMP)  ## 16 conversations with screenshots for 5 minutes, stock and plugin; ARGS="--seconds 30" for a look
	@$(BIN)/python -m benchmarks.run load $(ARGS)

bench-memory: $(STAMP)  ## memory of each process while 2,000 distinct images are asked about, stock and plugin (about 5 minutes)
	@$(BIN)/python -m benchmarks.run memory $(ARGS)

bench-observe: $(STAMP)  ## what recording costs a warm turn
	@$(BIN)/python -m benchmarks.run observe $(ARGS)

bench-processor: $(STAMP)  ## what an image costs before the model sees it, stock and plugin; goes on where it was cut off (about 90 minutes)
	@$(BIN)/python -m benchmarks.run processor $(ARGS)

bench-start-cost: $(STAMP)  ## CPU time of the plugin at start in each process, stock and plugin (about 6 minutes)
	@$(BIN)/python -m benchmarks.run start_cost $(ARGS)

bench-upstream-connectors: $(STAMP)  ## the feature store beside vLLM's own encoder-cache connectors (about 6 minutes)
	@$(BIN)/python -m benchmarks.run upstream_connectors $(ARGS)

bench-warm-turn: $(STAMP)  ## a warm turn about 20 images, stock and plugin (about 10 minutes)
	@$(BIN)/python -m benchmarks.run warm_turn $(ARGS)

bench-table: $(STAMP)  ## write the tables of the README and the pages, and the plot, from the committed results
	@$(BIN)/python -m benchmarks.summary --write

clean:  ## remove .venv, built models, logs and tool caches
	rm -rf $(VENV) $(VENV)-0.33 .artifacts .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
