# Everything that trains and samples, for NVIDIA GPUs. From the repository's root; flash-attn compiles for half an hour and more:
#   docker build -f deployments/docker/trainer.Dockerfile --build-arg CUDA_ARCHITECTURES=9.0 -t alignflow-trainer:0.1.0 .
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# libnuma is for vLLM, the ibverbs packages for NCCL over RDMA, gcc and python3-dev for DeepSpeed's and Triton's kernels.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        python3.12-venv python3.12-dev gcc g++ libnuma1 libibverbs1 ibverbs-providers librdmacm1t64 tini \
    && rm -rf /var/lib/apt/lists/*

# The base image has a user 1000 of another name.
RUN userdel --remove ubuntu && groupadd --gid 1000 alignflow && useradd --uid 1000 --gid 1000 --create-home alignflow
RUN python3.12 -m venv /opt/venv && chown -R 1000:1000 /opt/venv
# KubeRay may start Ray in a login shell, which sets PATH anew.
RUN echo 'export PATH=/opt/venv/bin:$PATH' > /etc/profile.d/alignflow.sh
ENV PATH=/opt/venv/bin:$PATH VIRTUAL_ENV=/opt/venv

ARG CUDA_ARCHITECTURES=9.0
ARG MAX_JOBS=8
ENV TORCH_CUDA_ARCH_LIST=${CUDA_ARCHITECTURES}
USER 1000:1000
WORKDIR /opt/alignflow
COPY requirements/uv.txt requirements/gpu.txt requirements/
# Without uv: `pip install --no-cache-dir` in place of each `uv pip install --no-cache --compile-bytecode`.
RUN pip install --no-cache-dir --require-hashes --no-deps -r requirements/uv.txt
# Wheels first: building the three sdists needs some of them. flash-attn's build would else download a wheel, without a hash.
RUN sed -E '/^(deepspeed|flash-attn|interegular)==/,/[^\\]$/d' requirements/gpu.txt > /tmp/wheels.txt \
    && uv pip install --no-cache --compile-bytecode --require-hashes --no-deps --only-binary :all: -r /tmp/wheels.txt
RUN FLASH_ATTENTION_FORCE_BUILD=TRUE MAX_JOBS=${MAX_JOBS} \
    uv pip install --no-cache --compile-bytecode --require-hashes --no-deps --no-build-isolation -r requirements/gpu.txt

COPY --chown=1000:1000 pyproject.toml README.md LICENSE ./
COPY --chown=1000:1000 flows flows
COPY --chown=1000:1000 tasks tasks
COPY --chown=1000:1000 evaluation evaluation
COPY --chown=1000:1000 rlhf_core rlhf_core
COPY --chown=1000:1000 deployments/recipes deployments/recipes
COPY --chown=1000:1000 deployments/demo deployments/demo
COPY --chown=1000:1000 deployments/tasks deployments/tasks
RUN uv pip install --no-cache --compile-bytecode --no-deps --no-build-isolation .
COPY --chmod=755 deployments/k8s/ray-node.sh /usr/local/bin/ray-node.sh

ENV PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 DO_NOT_TRACK=1 RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0
WORKDIR /home/alignflow
ENTRYPOINT ["tini", "-g", "--"]
CMD ["alignflow", "doctor"]
