"""Builds the parts that manifests share: the pod of a training node, the Ray cluster of such pods, and
Prefect's job template."""

from __future__ import annotations

from typing import Any

from values import SecretKey, Values

NODE = {"alignflow/part": "node"}  # label of training pods; 60-network.yaml refers to it


def pod(v: Values, name: str, command: list[str] | None = None) -> dict[str, Any]:
    """Returns a pod with all GPUs of a node, the shared volume at /artifacts, and /dev/shm in memory (for
    Ray's object store and NCCL)."""
    size: dict[str, Any] = {
        "cpu": v.cpus_per_node,
        "memory": f"{v.memory_gib}Gi",
        "nvidia.com/gpu": v.gpus_per_node,
    }
    if v.rdma.count:
        size[v.rdma.resource] = v.rdma.count
    capabilities = {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if v.rdma.count else {})}  # RDMA pins memory
    container: dict[str, Any] = {
        "name": name,
        "image": v.images.trainer,
        "workingDir": "/artifacts",
        **({"command": command} if command else {}),
        "env": environment(v),
        "resources": {"limits": size, "requests": dict(size)},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": capabilities},
        "volumeMounts": [
            {"name": "artifacts", "mountPath": "/artifacts"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    return {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000},
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "artifacts", "persistentVolumeClaim": {"claimName": "alignflow-artifacts"}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{v.shm_gib}Gi"}},
        ],
    }


def environment(v: Values) -> list[dict[str, Any]]:
    """Returns the environment variables of a trainer. Secrets are optional references, so that a pod starts
    without them."""
    plain = {"HF_HOME": "/artifacts/hub", "RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", **v.env}
    secret = {
        name: {"secretKeyRef": {"name": source.secret, "key": source.key, "optional": True}}
        for name, source in v.secrets.items()
    }
    return [{"name": name, "value": value} for name, value in plain.items()] + [
        {"name": name, "valueFrom": source} for name, source in secret.items()
    ]


def ray_cluster(v: Values) -> dict[str, Any]:
    """Returns a Ray cluster: a head that also trains, and a worker for each further node."""
    gpus = {"num-gpus": str(v.gpus_per_node)}
    labels = {"labels": NODE}
    head = {"metadata": labels, "spec": pod(v, "ray-head")}
    spec: dict[str, Any] = {
        "authOptions": {"mode": "token"},  # KubeRay creates the token and passes it to the pods
        "headGroupSpec": {"rayStartParams": {"dashboard-host": "0.0.0.0", **gpus}, "template": head},
    }
    if v.nodes > 1:
        count = {"replicas": v.nodes - 1, "minReplicas": v.nodes - 1, "maxReplicas": v.nodes - 1}
        spec["workerGroupSpecs"] = [
            {
                "groupName": "gpu",
                **count,
                "rayStartParams": gpus,
                "template": {"metadata": labels, "spec": pod(v, "ray-worker")},
            }
        ]
    return spec


def numbered_pod(v: Values, service: str, job: str, command: list[str]) -> dict[str, Any]:
    """Returns a pod of an Indexed Job for ray-node.sh, with the number of nodes, the host of node 0 and
    Ray's token in its environment."""
    ray = {"RAY_NODES": str(v.nodes), "RAY_HEAD_HOST": f"{job}-0.{service}"}
    token = {"RAY_AUTH_TOKEN": SecretKey(secret="alignflow-ray", key="token")}
    return pod(v.model_copy(update={"env": v.env | ray, "secrets": v.secrets | token}), "node", command)


def work_pool(v: Values) -> dict[str, Any]:
    """Returns the base job template for Prefect's Kubernetes pool. A flow run is a Job on one node, whose
    size a deployment can change.

    Image, command, environment and namespace are fixed, so that a run cannot choose its code.
    """
    spec = pod(v, "prefect-job")
    (container,) = spec["containers"]
    # The flow resumes by running again, not by restarting its pod. Prefect requires the two counts here.
    spec |= {"restartPolicy": "Never", "parallelism": 1, "completions": 1}
    resources = dict(container["resources"]["limits"]) | {
        "cpu": "{{ cpus }}",
        "memory": "{{ memory }}",
        "nvidia.com/gpu": "{{ gpus }}",
    }
    container["resources"] = {"limits": resources, "requests": dict(resources)}
    labels = {"labels": "{{ labels }}"}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**labels, "namespace": v.namespace, "generateName": "{{ name }}-"},
        "spec": {
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": "{{ finished_job_ttl }}",
            "template": {"metadata": labels, "spec": spec},
        },
    }
    fields = ("labels", "name", "job_watch_timeout_seconds", "pod_watch_timeout_seconds", "stream_output")
    return {
        "job_configuration": {
            **{field: f"{{{{ {field} }}}}" for field in fields},
            "namespace": v.namespace,
            "job_manifest": job,
        },
        "variables": {"type": "object", "properties": _variables(v), "additionalProperties": False},
    }


def _variables(v: Values) -> dict[str, Any]:
    def text(title: str, default: str | None = None) -> dict[str, Any]:
        return {"title": title, "type": "string"} | ({} if default is None else {"default": default})

    def number(title: str, default: int) -> dict[str, Any]:
        return {"title": title, "type": "integer", "default": default}

    mapping = {"type": "object", "additionalProperties": {"type": "string"}}
    return {
        "name": text("Name"),
        "labels": {"title": "Labels", **mapping},
        "gpus": number("GPUs", v.gpus_per_node),
        "cpus": number("CPUs", v.cpus_per_node),
        "memory": text("Memory", f"{v.memory_gib}Gi"),
        "finished_job_ttl": number("Seconds a finished job is kept", 3600),
        "job_watch_timeout_seconds": number("Seconds to wait for an event of the job", 3600),
        "pod_watch_timeout_seconds": number("Seconds to wait for the pod, with the pull of its image", 1800),
        "stream_output": {"title": "Stream output", "type": "boolean", "default": True},
    }
