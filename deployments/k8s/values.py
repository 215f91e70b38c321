"""Defines the values of a cluster's manifests."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
NAME = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Images(Record):
    orchestration: str = Field(
        "alignflow-orchestration:0.1.0",
        pattern=r"^\S+:\S+$",
        description="server and worker of Prefect; no torch",
    )
    trainer: str = Field(
        "alignflow-trainer:0.1.0", pattern=r"^\S+:\S+$", description="everything that trains or samples"
    )


class Rdma(Record):
    resource: str = Field(
        "rdma/hca", description="name of the resource that the cluster's device plugin offers"
    )
    count: int = Field(0, ge=0, description="devices of one node; 0: none are requested")


class Storage(Record):
    size_gib: Positive = Field(2048, description="size of the shared volume")
    storage_class: str | None = Field(
        None, description="a class with ReadWriteMany; default: the cluster's own"
    )


class SecretKey(Record):
    secret: str = Field(description="name of a Secret in the namespace", pattern=NAME)
    key: str = Field(description="its key")


class Values(Record):
    namespace: str = Field("alignflow", pattern=NAME)
    images: Images = Images()
    nodes: Positive = Field(1, description="nodes with GPUs; the first one is Ray's head and works as well")
    gpus_per_node: Positive = 8
    cpus_per_node: Positive = 64
    memory_gib: Positive = Field(512, description="memory of one node's pod, shared memory included")
    shm_gib: Positive = Field(
        64, description="/dev/shm of one node, in memory: Ray's object store and NCCL live there"
    )
    rdma: Rdma = Rdma()
    storage: Storage = Storage()
    recipe: str = Field(
        "/artifacts/recipes/recipe.yaml",
        description="recipe on the shared volume, which is mounted at /artifacts",
    )
    operator_namespace: str = Field(
        "kuberay-system", pattern=NAME, description="where KubeRay's operator runs; it may reach Ray's heads"
    )
    secrets: dict[str, SecretKey] = Field(
        {}, description="environment variables whose values come from Secrets, by reference"
    )
    env: dict[str, str] = Field({}, description="other environment variables of the trainer")

    @model_validator(mode="after")
    def _check_shared_memory(self) -> Values:
        if self.shm_gib >= self.memory_gib:
            raise ValueError(
                f"shm_gib={self.shm_gib} is part of the pod's memory: make it less than"
                f" memory_gib={self.memory_gib}"
            )
        return self
