"""Runs an object in a process on another node of the stage, alongside its ranks. The process reserves no CPUs
or GPUs and has several threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf_core.cluster.ray_cluster import RayNode, passed_environment
from rlhf_core.cluster.reach import end_when_alone, fetched, head, own_node

OWN = ("RAY_", "CUDA_", "NVIDIA_", "GLOO_", "VLLM_HOST_IP")  # prefixes of node-specific variables
CLOSING_SECONDS = 5.0


class HelperDied(RuntimeError):
    """Raised when a helper's process has ended."""


class ObjectHolder:
    """Holds the object in the process on the other node."""

    def make(
        self, factory: Callable[..., Any], options: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        end_when_alone([head(), own_node()])
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        self._held = factory(**options)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._held, method)(*args)


class Helper:
    """Creates an object on another node with `factory(**options)`, in its own process.

    The new process inherits this process's environment variables, except node-specific variables (`OWN`) and
    variables set by the node. The variables are sent in a call, because Ray logs variables that are passed to
    an actor when it starts. `threads`: maximum number of concurrent calls.
    """

    def __init__(self, node: RayNode, threads: int, factory: Callable[..., Any], **options: Any):
        self.node = node
        where = NodeAffinitySchedulingStrategy(node.identity, soft=False)
        process = ray.remote(ObjectHolder).options(
            num_cpus=0,
            max_concurrency=threads,
            scheduling_strategy=where,
            runtime_env={"env_vars": passed_environment()},
        )
        self._process: Any = process.remote()
        variables = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
        self._made = self._process.make.remote(factory, options, variables)

    def call(self, method: str, *args: Any) -> Any:
        """Returns the result of a method of the object. Raises any error of the method, HelperDied when the
        process has ended, and NodeLost when the node is lost."""
        try:
            fetched(self._made)
            return fetched(self._process.call.remote(method, *args))
        except ray.exceptions.RayActorError:
            raise HelperDied(f"the process on the Ray node {self.node.address} ended") from None
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def close(self, method: str) -> None:
        """Calls one last method, then ends the process."""
        with suppress(ray.exceptions.RayError):
            ray.get(self._process.call.remote(method), timeout=CLOSING_SECONDS)
        ray.kill(self._process)
