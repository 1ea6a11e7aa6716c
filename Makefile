# Everything a contributor runs. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Where the environment forbids bytecode, every process of a test would compile Skiff's source again, and every worker all tests.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
VENV := .venv
LATEST := .venv-latest
EXTRAS := operator,runtime,bench,fast,tracing,dev
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLUSTER := $(PYTHON) tests/cluster/cluster.py
PYTEST := $(BIN)/pytest
PYTEST_ARGS ?=
TEST_WORKERS ?= 4
# pytest-xdist would start files with many tests first, and so those with one long test last: files keep their order.
ON_CPU := not e2e and not gpu and not browser and not matrix and not soak and not checkpoint and not clients
IN_PARALLEL := -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
GPU_PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# GPU_ALONE and TP_ALONE need GPUs to themselves. Processes divide the cases of GPU_KERNELS, one file of which has a thousand,
# and the files of GPU_SERVICES, whose fixtures are engines and services.
GPU_ALONE := $(addprefix tests/gpu/test_,start.py engine.py soak.py)
GPU_KERNELS := tests/runtime/kernels $(addprefix tests/gpu/test_,quantized_weights.py moe.py fp8.py) tests/runtime/models/test_fp8_checkpoints.py
TP_ALONE := $(addprefix tests/gpu/test_,rank_faults.py rank_start_faults.py)
TP_SUITES := $(addprefix tests/gpu/test_,tensor_parallel.py all_reduce.py sharded_sampling.py request_parameters.py soak.py) \
	tests/runtime/engine/test_parity_transformers.py tests/runtime/engine/test_lora.py tests/runtime/serve/test_lora.py \
	tests/runtime/offline/test_llm_endings.py tests/runtime/offline/test_embeddings.py
GPU_SERVICES := $(filter-out $(GPU_ALONE) $(GPU_KERNELS) $(TP_ALONE),$(sort $(wildcard tests/gpu/test_*.py))) \
	$(addprefix tests/runtime/models/test_,weight_loader.py gguf_checkpoint.py) tests/runtime/checkpoint \
	$(addprefix tests/runtime/engine/test_,$(addsuffix .py,sampler logits_processors grammar_masks greedy logits_indices logprobs pooling \
	nan_logits batch_invariance engine lora)) \
	$(addprefix tests/runtime/serve/test_,sampling_parameters.py structured_outputs.py abort_and_flush.py lora.py)
GPU_WORKERS ?= 8
# FlashInfer compiles a kernel at its first use, which takes minutes where other processes compile, too.
GPU_PYTEST := SKIFF_TEST_DEVICE=cuda $(PYTEST) --timeout 900
TRAFFIC_REQUESTS ?= 100000
TRAFFIC_RATE ?= 40
TRAFFIC_REPORTS ?= dist/traffic
GPU_SHAPES ?= qwen3-0.6b llama-3.1-8b qwen3-14b
GPU_BENCH := --load-format dummy --max-model-len 4096 --max-num-batched-tokens 16384 --max-running-requests 256

.PHONY: help setup check format chart-readme test test-integration test-latest browser test-browser screenshots matrix checkpoint test-clients soak gpu-test tp-test gpu-bench e2e e2e-keda test-endpoint-picker traffic traffic-router cluster cluster-down kubeconfig images demo demo-down bench bench-operator bench-operator-pods clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make the virtual environment .venv from the pinned constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(f"make: $(PYTHON) is Python {v[0]}.{v[1]}; Skiff needs 3.11 or later: make PYTHON=python3.12 setup" if v < (3, 11) else 0)'
	@echo "setup: installing Python packages into $(VENV) (torch alone is 2.5 GB to download)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@
	@echo "setup: done"

check: setup ## Format, lint, types, layers, tidiness
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) -q tests/tidy

format: setup ## Let ruff format and mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

chart-readme: ## Write charts/skiff/README.md from the comments of values.yaml
	"$$($(CLUSTER) helm-docs-path)" --chart-search-root charts --sort-values-order file

test: setup ## Unit tests on CPU: kernels in the interpreter, tiny models against transformers, planning, parsing
	$(PYTEST) -m "$(ON_CPU) and not integration" $(IN_PARALLEL) $(PYTEST_ARGS)

test-integration: setup ## Integration tests on CPU: whole services, ranks, operators on a real kube-apiserver, helm
	$(CLUSTER) tools
	$(PYTEST) -m "$(ON_CPU) and integration" $(IN_PARALLEL) $(PYTEST_ARGS)

test-latest: ## Both on the newest versions that pyproject.toml allows, without constraints.txt
	@echo "test-latest: installing Python packages into $(LATEST) (torch alone is 2.5 GB to download)"
	@test -x $(LATEST)/bin/python || $(PYTHON) -m venv $(LATEST)
	@$(LATEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager --editable '.[$(EXTRAS)]'
	$(CLUSTER) tools
	$(LATEST)/bin/pytest -m "$(ON_CPU)" $(IN_PARALLEL) $(PYTEST_ARGS)

browser: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[browser]'
	@test -n "$${SKIFF_TEST_CHROMIUM:-}" || command -v chromium > /dev/null || { apt-get -qq update && apt-get -qq install --no-install-recommends chromium fonts-dejavu-core; }

test-browser: browser ## The home page in headless Chromium, from Debian's packages or $$SKIFF_TEST_CHROMIUM
	$(PYTEST) -m browser tests/browser $(PYTEST_ARGS)

screenshots: browser ## Take the screenshots of docs/guide
	PYTHONPATH=tests/support $(BIN)/python tests/browser/take_screenshots.py

matrix: setup ## Full products: engine against transformers with all settings, kernels with all shapes, and other long cases
	$(PYTEST) -m matrix -n $(TEST_WORKERS) $(PYTEST_ARGS)

checkpoint: setup ## A published checkpoint, SmolLM2-135M-Instruct: 200 greedy answers against transformers, and all tests of its service
	$(PYTEST) -m checkpoint $(PYTEST_ARGS)

test-clients: setup ## 25 clients from PyPI and npm against skiff serve, each installed by itself into ~/.cache/skiff-clients
	$(PYTEST) -v -m clients tests/clients $(PYTEST_ARGS)

soak: setup ## Faults, 100,000 requests, hostile bodies, alone against crowded: the full runs, an hour or more
	$(PYTEST) -s -m soak $(PYTEST_ARGS)

gpu-test: setup ## On a GPU: kernels against float64, engine and services against transformers, 20,000 requests
	$(GPU_PIP) --editable '.[gpu]'
	$(GPU_PYTEST) -m "not soak" $(GPU_ALONE) $(PYTEST_ARGS)
	$(GPU_PYTEST) -m "not soak" -n $(GPU_WORKERS) $(GPU_KERNELS) $(PYTEST_ARGS)
	$(GPU_PYTEST) -m "not soak" -n $(GPU_WORKERS) --dist loadfile --no-loadscope-reorder $(GPU_SERVICES) $(PYTEST_ARGS)

tp-test: setup ## On two GPUs or more: several ranks against one and transformers, faults of ranks, 20,000 requests
	$(GPU_PIP) --editable '.[gpu]'
	$(GPU_PYTEST) -m "not soak and not matrix" $(TP_ALONE) $(PYTEST_ARGS)
	$(GPU_PYTEST) -m "not soak and not matrix" -n $(GPU_WORKERS) $(TP_SUITES) $(PYTEST_ARGS)

gpu-bench: setup ## Offline throughput on a GPU, by the shapes of known models with random weights: no download
	$(GPU_PIP) --editable '.[gpu]'
	$(BIN)/skiff prebuild --model-config shape://qwen3-14b
	for model in $(GPU_SHAPES); do $(BIN)/skiff bench offline --model shape://$$model $(GPU_BENCH); done
	for cache in auto fp8_e4m3; do $(BIN)/skiff bench offline --model shape://qwen3-14b --quantization fp8 --kv-cache-dtype $$cache $(GPU_BENCH); done
	for order in fcfs lpm; do $(BIN)/skiff bench offline --model shape://llama-3.1-8b --dataset-name generated-shared-prefix --schedule-policy $$order $(GPU_BENCH); done

e2e: setup ## Everything on a real Kubernetes cluster, which is left up
	$(CLUSTER) up
	$(CLUSTER) images operator runtime client
	$(PYTEST) -m "e2e and not traffic and not picker and not keda" --timeout 1200 tests/e2e $(PYTEST_ARGS)

e2e-keda: setup ## The autoscaling engine KEDA with KEDA itself, built from its Go module in 10 minutes or more
	$(CLUSTER) tools
	$(PYTEST) -m keda --timeout 900 tests/e2e/test_keda.py $(PYTEST_ARGS)

test-endpoint-picker: setup ## The Gateway API's endpoint picker, built from its Go module in a few minutes, in front of two servers
	$(CLUSTER) tools
	$(PYTEST) -m picker tests/e2e/test_endpoint_picker.py $(PYTEST_ARGS)

traffic: setup ## 100,000 requests through a Service while its pods, operator and API server change; 45 minutes, then a table
	$(CLUSTER) up
	$(CLUSTER) images operator runtime client
	SKIFF_TEST_TRAFFIC_REQUESTS=$(TRAFFIC_REQUESTS) SKIFF_TEST_TRAFFIC_RATE=$(TRAFFIC_RATE) SKIFF_TEST_TRAFFIC_REPORTS=$(TRAFFIC_REPORTS) \
		$(PYTEST) -s --timeout 1800 tests/e2e/test_traffic.py $(PYTEST_ARGS)

traffic-router: setup ## The same through the router: rollouts, scaling by load, from zero pods and back; an hour
	$(CLUSTER) up
	$(CLUSTER) images operator runtime client
	SKIFF_TEST_TRAFFIC_REQUESTS=$(TRAFFIC_REQUESTS) SKIFF_TEST_TRAFFIC_RATE=$(TRAFFIC_RATE) SKIFF_TEST_TRAFFIC_REPORTS=$(TRAFFIC_REPORTS) \
		$(PYTEST) -s --timeout 3600 tests/e2e/test_router_traffic.py $(PYTEST_ARGS)

cluster: ## Bring up a Kubernetes to test on: $$KUBECONFIG, kind, or one node built from Go modules
	$(CLUSTER) up

cluster-down: ## Take it down; the machine is as it was
	$(CLUSTER) down

kubeconfig: ## Print the path of its kubeconfig
	@$(CLUSTER) kubeconfig

images: setup ## Build both container images and load them into the cluster, if one is up
	$(CLUSTER) images

demo: setup ## From nothing to an answer streamed by a pod
	@$(BIN)/python tests/cluster/demo.py up

demo-down: ## Take the demo and its cluster down; what was built for it stays in ~/.cache/skiff-cluster
	@$(PYTHON) tests/cluster/demo.py down

bench: setup ## Front-process overhead and radix tree, on CPU
	$(BIN)/python -m skiff_runtime.bench.offline.radix_cache
	$(BIN)/skiff bench overhead

bench-operator: setup ## The operator at 1, 100 and 1,000 InferenceServices
	$(BIN)/python tests/operator/bench/bench_operator.py

bench-operator-pods: setup ## The operator at 1,000 and 5,000 InferenceServices whose pods are Ready, on nodes faked by kwok: half an hour
	$(BIN)/python tests/operator/bench/bench_ready_pods.py

clean: ## Remove the virtual environments, the caches of the clone, and the test cluster with all that was built for it
	$(CLUSTER) down --purge
	rm -rf $(VENV) $(LATEST) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
	find operator runtime tests -name __pycache__ -type d -prune -exec rm -rf {} +
