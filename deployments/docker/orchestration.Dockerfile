# Prefect's server and worker, and the `alignflow` command without any engine: no torch, no CUDA. From the repository's root:
#   docker build -f deployments/docker/orchestration.Dockerfile -t alignflow-orchestration:0.1.0 .
FROM python:3.11.14-slim-bookworm

RUN groupadd --gid 1000 alignflow && useradd --uid 1000 --gid 1000 --create-home alignflow
WORKDIR /opt/alignflow
COPY requirements/uv.txt requirements/orchestration.txt requirements/
# Without uv: `pip install --no-cache-dir` in place of each `uv pip install --system --no-cache --compile-bytecode`.
# Compiled here, since the user below cannot write to these folders.
RUN pip install --no-cache-dir --require-hashes --no-deps -r requirements/uv.txt
RUN uv pip install --system --no-cache --compile-bytecode --require-hashes --no-deps -r requirements/orchestration.txt
COPY pyproject.toml README.md LICENSE ./
COPY flows flows
COPY tasks tasks
COPY evaluation evaluation
COPY rlhf_core rlhf_core
COPY deployments/recipes deployments/recipes
COPY deployments/demo deployments/demo
COPY deployments/tasks deployments/tasks
RUN uv pip install --system --no-cache --compile-bytecode --no-deps --no-build-isolation .

ENV PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 DO_NOT_TRACK=1 PREFECT_SERVER_ANALYTICS_ENABLED=false
USER 1000:1000
WORKDIR /home/alignflow
CMD ["alignflow", "--help"]
