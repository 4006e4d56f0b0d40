# Everything runs in .venv, made on first use by scripts/setup_env.sh with pip and constraints.txt.
PY := .venv/bin/python
PARITY_PY := .venv-parity/bin/python
AOT_PY := .venv-aot/bin/python

.DEFAULT_GOAL := help
.PHONY: help env env-parity env-aot env-docs docs quickstart quickstart-base quickstart-picture-base quick test golden parity aot full gpu-test card llama-cpp lint types clean

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

quickstart-picture-base: env  ## pretrain the packaged model of pictures anew, on two CPU cores, in ten minutes
	sh scripts/quickstart/make_picture_base.sh runs/quickstart-picture-base/base
	rm -rf jaxtune/quickstart/pictures/base && cp -r runs/quickstart-picture-base/base jaxtune/quickstart/pictures/base

# The set that CI runs; `CASES=` runs all cases. tests/conftest.py says which cases are marked `full`.
CASES ?= -m "not full"
WORKERS ?= 2
RUN = -m pytest -q -n $(WORKERS) --dist worksteal $(CASES) $(PYTEST_ARGS)

quick: env  ## the fast ones of CI's tests and the rules, to run while working: three minutes on two cores
	$(PY) $(RUN) tests/conversations tests/convert tests/models tests/serve tests/train/data tests/test_rules.py

test: env  ## tests on a CPU (no torch, no GPU)
	$(PY) $(RUN) tests --ignore=tests/parity --ignore=tests/gpu --ignore=tests/golden --ignore=tests/llama_cpp

golden: env  ## what the engine computes and chooses, against the record (tests/golden)
	$(PY) $(RUN) tests/golden

parity: env-parity  ## checks against torch, transformers, peft, trl and bitsandbytes (3 GB environment)
	$(PARITY_PY) $(RUN) tests/parity

aot: env-aot  ## compile the GPU programs without a GPU
	$(AOT_PY) $(RUN) tests/gpu/aot

full: env env-parity env-aot  ## every case of test, golden, parity and aot: hours; writes benchmarks/results/full_tests.json
	$(PY) -m scripts.full_tests

GPU_PY ?= python3
gpu-test:  ## on a Hopper GPU: every op's tests over the kernels themselves, and the tiny models against transformers
	JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH=. \
	  $(GPU_PY) -m pytest -q -m gpu tests/pallas tests/train/test_adam8_kernel.py tests/models/test_families.py $(PYTEST_ARGS)

card:  ## on a GPU, in nine minutes: what people do by default, with forecasts and rates; writes benchmarks/results/card.json
	$(GPU_PY) -m benchmarks.card

llama-cpp:  ## greedy text of exported GGUF files in llama.cpp itself (built from source once, about 20 minutes)
	@sh scripts/setup_env.sh .venv-llama-cpp
	.venv-llama-cpp/bin/python -m pytest tests/llama_cpp -q $(PYTEST_ARGS)

lint: env  ## ruff; lists large classes and functions
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) scripts/sizes.py

types: env  ## pyright
	@$(PY) -m pyright

clean:  ## remove environments, caches and builds
	rm -rf .venv .venv-parity .venv-aot .venv-docs .venv-llama-cpp build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
