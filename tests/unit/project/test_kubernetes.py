"""The Kubernetes manifests render for two sizes and fit their schemas; the node script waits as long as it
says; images are as claimed."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from jsonpatch import JsonPatch

from tests.support.programs import captured

ROOT = Path(__file__).parents[3]
K8S = ROOT / "deployments" / "k8s"
DOCKER = ROOT / "deployments" / "docker"
NODE = K8S / "ray-node.sh"
CRDS = ROOT.parent / "shared" / "data" / "kuberay"
VERSION = "1.37"
SIZES = [(1, 8), (4, 8)]
# What Prefect's worker demands of a job manifest before it takes a flow run (prefect-kubernetes 0.8).
DEMANDED = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"labels": {}},
    "spec": {
        "template": {
            "spec": dict(
                parallelism=1, completions=1, restartPolicy="Never", containers=[{"name": "prefect-job"}]
            )
        }
    },
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(K8S / "render.py"), *arguments]
    return captured(command, timeout=100)


def rendered(out: Path, *arguments: str) -> list[dict[str, Any]]:
    done = run("--out", str(out), *arguments)
    assert done.returncode == 0, done.stderr
    return [
        document for path in sorted(out.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())
    ]


def one(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = (d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name)
    return found


@pytest.mark.parametrize(("nodes", "gpus"), SIZES)
def test_core_objects_fit_their_schemas(tmp_path: Path, nodes: int, gpus: int) -> None:
    documents = rendered(tmp_path, "--nodes", str(nodes), "--gpus-per-node", str(gpus))
    core = [document for document in documents if not document["apiVersion"].startswith("ray.io/")]
    for document in core:
        kubernetes_validate.validate(document, VERSION, strict=True)
    kinds = {document["kind"] for document in core}
    assert {
        "Namespace",
        "PersistentVolumeClaim",
        "Job",
        "Service",
        "Deployment",
        "Role",
        "ConfigMap",
    } <= kinds
    assert not kinds & {"Secret", "ClusterRole"}
    broken = {**one(core, "Namespace", "alignflow"), "speck": 1}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSION, strict=True)


@functools.cache
def schema(kind: str) -> dict[str, Any]:
    """The CRD's schema of v1, with unknown fields refused as the API server's strict mode does."""
    path = CRDS / f"ray.io_{kind.lower()}s.yaml"
    if not path.is_file():
        pytest.skip(f"{path.name}, KubeRay's resource definition, is not here")
    versions = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"][
        "versions"
    ]
    found = next(version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1")

    def close(node: Any) -> Any:
        if isinstance(node, list):
            return [close(value) for value in node]
        if not isinstance(node, dict):
            return node
        closed = {key: close(value) for key, value in node.items()}
        if (
            isinstance(node.get("properties"), dict)
            and "additionalProperties" not in node
            and not node.get("x-kubernetes-preserve-unknown-fields")
        ):
            closed["additionalProperties"] = False
        if node.get("x-kubernetes-int-or-string"):
            closed = {"type": ["integer", "string"]}
        return closed

    spec: dict[str, Any] = close(found["properties"]["spec"])
    return spec


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "gpus"), SIZES)
@pytest.mark.parametrize(("kind", "name"), [("RayCluster", "alignflow"), ("RayJob", "alignflow-run")])
def test_ray_objects_fit_kuberays_schemas(
    tmp_path: Path, kind: str, name: str, nodes: int, gpus: int
) -> None:
    document = one(rendered(tmp_path, "--nodes", str(nodes), "--gpus-per-node", str(gpus)), kind, name)
    jsonschema.validate(document["spec"], schema(kind))
    with pytest.raises(jsonschema.ValidationError, match="speck"):
        jsonschema.validate({**document["spec"], "speck": 1}, schema(kind))


@pytest.mark.parametrize(("nodes", "gpus"), SIZES)
def test_a_node_gets_its_gpus_memory_and_volumes(tmp_path: Path, nodes: int, gpus: int) -> None:
    documents = rendered(tmp_path, "--nodes", str(nodes), "--gpus-per-node", str(gpus))
    cluster = one(documents, "RayCluster", "alignflow")["spec"]
    assert one(documents, "RayJob", "alignflow-run")["spec"]["rayClusterSpec"] == cluster
    workers = cluster.get("workerGroupSpecs", [])
    assert 1 + sum(group["replicas"] for group in workers) == nodes
    job = one(documents, "Job", "alignflow-run-nodes")["spec"]
    assert (job["completions"], job["parallelism"]) == (nodes, nodes)
    pods = [
        cluster["headGroupSpec"]["template"]["spec"],
        *(group["template"]["spec"] for group in workers),
        job["template"]["spec"],
    ]
    for pod in pods:
        (container,) = pod["containers"]
        limits = container["resources"]["limits"]
        assert limits == container["resources"]["requests"] and limits["nvidia.com/gpu"] == gpus
        assert not [key for key in limits if "rdma" in key]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
        assert {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]} == {
            "artifacts": "/artifacts",
            "shm": "/dev/shm",
        }
        assert (
            volumes["artifacts"]["persistentVolumeClaim"]["claimName"]
            == one(documents, "PersistentVolumeClaim", "alignflow-artifacts")["metadata"]["name"]
        )
        assert not {"livenessProbe", "readinessProbe"} & container.keys()  # KubeRay's business
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        tokens = [variable for variable in container["env"] if variable["name"] == "HF_TOKEN"]
        assert tokens == [
            {
                "name": "HF_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": "alignflow-hub", "key": "token", "optional": True}},
            }
        ]


def test_rdma_and_other_values(tmp_path: Path) -> None:
    values = {
        "namespace": "team-a",
        "rdma": {"resource": "rdma/ib", "count": 2},
        "storage": {"storage_class": "nfs"},
        "env": {"NCCL_IB_HCA": "mlx5"},
    }
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    documents = rendered(tmp_path / "out", "--values", str(tmp_path / "values.yaml"), "--nodes", "2")
    assert {d["metadata"].get("namespace", d["metadata"]["name"]) for d in documents} == {"team-a"}
    (container,) = one(documents, "RayCluster", "alignflow")["spec"]["headGroupSpec"]["template"]["spec"][
        "containers"
    ]
    assert container["resources"]["limits"]["rdma/ib"] == 2
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert {"name": "NCCL_IB_HCA", "value": "mlx5"} in container["env"]
    assert one(documents, "PersistentVolumeClaim", "alignflow-artifacts")["spec"]["storageClassName"] == "nfs"


def test_prefects_pool_makes_a_job_that_kubernetes_and_prefect_take(tmp_path: Path) -> None:
    documents = rendered(tmp_path)
    template = json.loads(one(documents, "ConfigMap", "work-pool")["data"]["work-pool.json"])
    names = template["variables"]["properties"]
    defaults = {name: about.get("default") for name, about in names.items()}
    defaults |= {"name": "a-run", "labels": {"a": "b"}}

    def fill(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: fill(value) for key, value in node.items()}
        if isinstance(node, list):
            return [fill(value) for value in node]
        if isinstance(node, str) and (whole := re.fullmatch(r"{{ (\w+) }}", node)):
            return defaults[whole[1]]
        return re.sub(r"{{ (\w+) }}", lambda m: str(defaults[m[1]]), node) if isinstance(node, str) else node

    job = fill(template["job_configuration"]["job_manifest"])
    patch = JsonPatch.from_diff(job, DEMANDED)
    assert [
        operation
        for operation in patch
        if operation["op"] in ("add", "replace") and operation["path"] != "/metadata/labels"
    ] == []
    # Prefect demands them in a place where Kubernetes ignores them
    for key in ("parallelism", "completions"):
        job["spec"]["template"]["spec"].pop(key)
    kubernetes_validate.validate(job, VERSION, strict=True)
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == "alignflow-trainer:0.1.0"
    assert not names.keys() & {"command", "env", "image", "namespace", "working_dir"}
    assert not template["variables"]["additionalProperties"]
    assert not template["job_configuration"].keys() & {"command", "env"}, "a run could change them"


@pytest.mark.parametrize(
    ("arguments", "values", "sentence"),
    [
        (["--nodes", "0"], "{}", "nodes: Input should be greater than 0"),
        ([], "{nods: 2}", "nods: Extra inputs are not permitted"),
        ([], "{shm_gib: 600}", "shm_gib=600 is part of the pod's memory"),
        ([], "{images: {trainer: noversion}}", "images.trainer"),
        ([], "{a: [", "give a YAML file with values"),
    ],
)
def test_wrong_values_are_sentences(tmp_path: Path, arguments: list[str], values: str, sentence: str) -> None:
    (tmp_path / "values.yaml").write_text(values)
    done = run("--values", str(tmp_path / "values.yaml"), "--out", str(tmp_path / "out"), *arguments)
    assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


Nodes = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def node(tmp_path: Path) -> Nodes:
    """Runs the node script with stand-ins for `ray` and `python` that log their calls; `answers` says which
    look finds what."""
    (tmp_path / "bin").mkdir()
    looks = 'looks=$(grep -c "^$1" "$LOG")'
    ray = (
        f'#!/bin/bash\necho "$@" >>"$LOG"\n{looks}\nif [ "$1" = health-check ]; then [[ " $HEALTHY " == *"'
        ' $looks "* ]]; fi\n'
    )
    python = (
        '#!/bin/bash\necho count >>"$LOG"\nlooks=$(grep -c "^count" "$LOG")\nset -- $COUNTS\necho'
        ' "${!looks:-${!#}}"\n'
    )
    for name, text in (("ray", ray), ("python", python)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def start(*command: str, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "LOG": str(tmp_path / "log"),
            "RAY_HEAD_HOST": "head",
            "RAY_AUTH_TOKEN": "secret",
            "JOIN_ATTEMPTS": "3",
            "JOIN_PAUSE": "0",
            "HEALTHY": "",
            "COUNTS": "1",
            **settings,
        }
        (tmp_path / "log").write_text("")
        return captured([str(NODE), *command], env=environment, timeout=100)

    return start


def test_policies_let_nodes_reach_nodes_and_nobody_else(tmp_path: Path) -> None:
    documents = rendered(tmp_path, "--nodes", "4")
    assert one(documents, "NetworkPolicy", "nobody")["spec"] == {
        "podSelector": {},
        "policyTypes": ["Ingress"],
    }
    chosen = one(documents, "NetworkPolicy", "nodes")["spec"]["podSelector"]["matchLabels"]
    cluster = one(documents, "RayCluster", "alignflow")["spec"]
    assert cluster["authOptions"] == {"mode": "token"}
    job = one(documents, "Job", "alignflow-run-nodes")["spec"]["template"]
    for pod in (cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"], job):
        assert chosen.items() <= pod["metadata"]["labels"].items()
    token = [
        variable for variable in job["spec"]["containers"][0]["env"] if variable["name"] == "RAY_AUTH_TOKEN"
    ]
    assert token[0]["valueFrom"]["secretKeyRef"]["name"] == "alignflow-ray"


def instructions(path: Path) -> list[tuple[str, str]]:
    joined = re.sub(
        r"\\\n\s*",
        " ",
        "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")),
    )
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in joined.splitlines() if line.strip()]


@pytest.mark.parametrize("name", ["orchestration", "trainer"])
def test_dockerfiles(name: str) -> None:
    lines = instructions(DOCKER / f"{name}.Dockerfile")
    known = {"FROM", "RUN", "COPY", "ENV", "ARG", "USER", "WORKDIR", "CMD", "ENTRYPOINT"}
    assert {word for word, _ in lines} <= known
    bases = [rest for word, rest in lines if word == "FROM"]
    assert bases and all(re.fullmatch(r"[\w./-]+:\d[\w.-]*\d[\w.-]*", base) for base in bases), (
        "a base image is pinned by a full version"
    )
    kept = [
        line[1:].rstrip("/")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for word, rest in lines:
        if word == "COPY":
            *sources, _ = [part for part in rest.split() if not part.startswith("--")]
            for source in sources:
                assert (ROOT / source).exists(), source
                assert any(source == entry or source.startswith(entry + "/") for entry in kept), (
                    f"{source} is not sent to the builder"
                )
        if word == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists" in rest
        if word == "RUN" and "pip install" in rest:
            for tool, options in re.findall(r"(uv )?pip install (.*?)(?= && |$)", rest):
                assert ("--no-cache --compile-bytecode" if tool else "--no-cache-dir") in options
                assert tool or options.endswith("requirements/uv.txt"), "pip installs uv, and uv the rest"
                # all but alignflow has hashes
                assert "--no-deps" in options and ("--require-hashes" in options or options.endswith(" ."))
        if word in ("ENV", "ARG"):
            assert not re.search(r"TOKEN|PASSWORD|SECRET|API_KEY", rest)
    users = [rest for word, rest in lines if word == "USER"]
    assert users and users[-1] == "1000:1000"
    text = (DOCKER / f"{name}.Dockerfile").read_text()
    assert set(re.findall(r"requirements/(\w+)\.txt", text)) == {{"trainer": "gpu"}.get(name, name), "uv"}
