# Everything runs in .venv, made on first use by scripts/setup_env.sh with pip and constraints.txt.
PY := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help env env-parity env-aot env-docs docs quickstart quickstart-base test gpu-test parity aot llama-cpp lint types clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

env:  ## set up .venv
	@sh scripts/setup_env.sh .venv

env-parity: env
	@sh scripts/setup_env.sh .venv-parity

env-aot: env
	@sh scripts/setup_env.sh .venv-aot

env-docs: env
	@sh scripts/setup_env.sh .venv-docs

docs: env-docs  ## build the documentation into build/site
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --quiet

quickstart: env  ## fine-tune the packaged model on the packaged data, on two CPU cores, in 50 to 90 s
	@$(PY) -m jaxtune.train quickstart
	@echo && echo 'what an 8B model would need on a GPU that is not here:'
	@$(PY) -m jaxtune.train qlora-8b --plan plan.device='RTX 4090'

quickstart-base: env  ## pretrain the packaged model anew (needs a GPU; two minutes on an H200)
	sh scripts/quickstart/make_base.sh runs/quickstart-base/base
	rm -rf jaxtune/quickstart/base && cp -r runs/quickstart-base/base jaxtune/quickstart/base

test: env  ## tests on CPU (no torch, no GPU)
	$(PY) -m pytest tests -q -n 2 --dist worksteal -p tests.remembered -p tests.cases --ignore=tests/parity --ignore=tests/gpu --ignore=tests/golden --ignore=tests/llama_cpp $(PYTEST_ARGS)

GPU_PY ?= python3
gpu-test:  ## on a Hopper GPU: every op's tests over the kernels themselves, and the tiny models against transformers
	JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH=. \
	  $(GPU_PY) -m pytest -q -m gpu tests/pallas tests/train/test_adam8_kernel.py tests/models/test_families.py $(PYTEST_ARGS)

golden: env  ## what the engine computes and chooses, against the record (tests/golden)
	$(PY) -m pytest tests/golden -q -n 2 --dist worksteal -p tests.remembered -p tests.cases $(PYTEST_ARGS)

parity: env-parity  ## checks against torch, transformers, peft, trl and bitsandbytes (3 GB environment)
	.venv-parity/bin/python -m pytest tests/parity -q -n 2 --dist worksteal -p tests.remembered -p tests.cases $(PYTEST_ARGS)

aot: env-aot  ## compile the GPU programs without a GPU
	.venv-aot/bin/python -m pytest tests/gpu/aot -q -n 2 --dist worksteal -p tests.remembered -p tests.cases $(PYTEST_ARGS)

llama-cpp:  ## greedy text of exported GGUF files in llama.cpp itself (built from source once, about 20 minutes)
	@sh scripts/setup_env.sh .venv-llama-cpp
	.venv-llama-cpp/bin/python -m pytest tests/llama_cpp -q $(PYTEST_ARGS)

lint: env  ## ruff
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

types: env  ## pyright
	@$(PY) -m pyright

clean:  ## remove environments, caches and builds
	rm -rf .venv .venv-parity .venv-aot .venv-docs .venv-llama-cpp build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
