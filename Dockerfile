# FastSparse with PyG and DGL, in two stages: the first compiles, the second has neither compiler nor sources.
#
#   docker build -t fastsparse .                                          # CPU
#   docker build -t fastsparse --build-arg BASE=nvidia/cuda:12.9.1-devel-ubuntu24.04 \
#       --build-arg CUDA_ARCHS="80;90" .                                  # CUDA: name the GPUs' architectures
#   docker run --rm fastsparse                                            # the doctor; --gpus all for CUDA
#
# TORCH_INDEX may name PyTorch's package index of CPU builds, which are smaller than those with CUDA.
ARG BASE=ubuntu:24.04
ARG RUNTIME=ubuntu:24.04

FROM ${BASE} AS build
ARG CUDA_ARCHS=none
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/build && /opt/build/bin/pip install --no-cache-dir "setuptools>=77" "pybind11>=2.13"
WORKDIR /src
ENV FASTSPARSE_CUDA_ARCHS=${CUDA_ARCHS}
# What takes minutes is compiled from the kernels alone, so an edit of the README or of a plugin keeps this layer.
COPY pyproject.toml setup.py LICENSE ./
COPY kernels kernels
RUN touch README.md && /opt/build/bin/python setup.py --quiet build_ext
COPY README.md ./
COPY fastsparse_pyg fastsparse_pyg
COPY fastsparse_dgl fastsparse_dgl
COPY fastsparse_run fastsparse_run
RUN /opt/build/bin/pip wheel . --no-deps --no-build-isolation --wheel-dir /wheels

FROM ${RUNTIME}
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
RUN /opt/venv/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} "${TORCH}"
RUN --mount=from=build,source=/wheels,target=/wheels \
    /opt/venv/bin/pip install --no-cache-dir "$(echo /wheels/*.whl)[pyg,dgl]"
RUN useradd --create-home --uid 1001 user
# By number: Kubernetes cannot tell that a name is not root.
USER 1001
ENV PATH=/opt/venv/bin:$PATH
CMD ["fastsparse", "doctor"]
