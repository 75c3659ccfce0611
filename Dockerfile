# FastSparse with PyG and DGL in /opt/fastsparse.
#
#   docker build -t fastsparse .                                          # CPU
#   docker build -t fastsparse --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 \
#       --build-arg CUDA_ARCHS="80;90" .                                  # CUDA: name the GPUs' architectures
#   docker run --rm fastsparse python -m fastsparse_core.doctor           # with --gpus all for CUDA
ARG BASE=ubuntu:24.04
FROM ${BASE}
ARG CUDA_ARCHS=none
ARG TORCH=torch
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY . /opt/fastsparse
WORKDIR /opt/fastsparse
RUN FASTSPARSE_CUDA_ARCHS="${CUDA_ARCHS}" make setup VENV=/opt/venv TORCH="${TORCH}"
ENV PATH=/opt/venv/bin:$PATH
CMD ["python", "-m", "fastsparse_core.doctor"]
