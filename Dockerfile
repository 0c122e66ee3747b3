# An image for GPU nodes: this project with its pinned requirements, Transformer Engine, and vLLM in an environment of its own.
#
#   docker build -t megatron-tlt:0.1.0 .                               # compiles Transformer Engine: half an hour, an estimate
#   docker build -t megatron-tlt:0.1.0 --build-arg WITH_VLLM=0 .
#   CONTAINER=$PWD/megatron-tlt.sqsh sbatch -N 4 slurm/train.sbatch CONFIG # pyxis (docs/guides/gpu_cluster.md)
#
# Never built or run by this project's tests, which have no GPU: `make gpu-check` inside it comes first.
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE}
ARG WITH_VLLM=1

# libibverbs: without it NCCL takes TCP between nodes, and says so at INFO only.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential git make ninja-build python3 python3-dev python3-venv \
        ibverbs-providers libibverbs1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/megatron-tlt
RUN python3 -m venv .venv
# The base has no cuDNN: Transformer Engine is built and loaded with the one that torch brings, since two versions in one
# process fail. Its extension for PyTorch finds cudnn.h by CPATH only.
ENV PATH=/opt/megatron-tlt/.venv/bin:${PATH} PIP_NO_CACHE_DIR=1 \
    CUDNN_HOME=/opt/megatron-tlt/.venv/lib/python3.12/site-packages/nvidia/cudnn \
    CPATH=/opt/megatron-tlt/.venv/lib/python3.12/site-packages/nvidia/cudnn/include

# Requirements first: a change of the source keeps these layers.
COPY requirements.txt requirements-gpu.txt ./
RUN pip install -r requirements.txt ninja pybind11 wheel
RUN NVTE_FRAMEWORK=pytorch MAX_JOBS=8 pip install --no-build-isolation -r requirements-gpu.txt
RUN if [ "$WITH_VLLM" = 1 ]; then \
        python3 -m venv .venv/vllm && .venv/vllm/bin/pip install vllm==0.32.0; \
    fi

COPY . .
RUN pip install --no-deps --no-build-isolation -e . && megatron-tlt --help > /dev/null
