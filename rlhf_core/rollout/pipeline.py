"""Runs one engine over several nodes: vLLM's pipeline parallelism, with a process of ours for each of its stages.

The first stage's process has the engine, which schedules. The others have only vLLM's worker processes, which wait for its steps. vLLM's
sockets between stages ask nobody for a password, like those of NCCL and gloo: nodes of one cluster share a private network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Stage(NamedTuple):
    """Names a pipeline stage of an engine: its number of `stages`, and the address at which vLLM's processes of all find each other."""

    number: int = 0
    stages: int = 1
    host: str = ""
    port: int = 0

    def options(self) -> dict[str, Any]:
        """Returns vLLM's options for it. Each stage is a node to vLLM, also where several are on one host."""
        if self.stages == 1:
            return {}
        where = {"nnodes": self.stages, "node_rank": self.number, "master_addr": self.host, "master_port": self.port}
        return {"pipeline_parallel_size": self.stages, "distributed_executor_backend": "mp"} | where


WHOLE = Stage()  # an engine that is not cut


class Followers:
    """Runs vLLM's worker processes of a pipeline stage that is not the first one. Returns when those of all stages have loaded."""

    def __init__(self, library: Any, options: Mapping[str, Any]):
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        self._executor = MultiprocExecutor(library.EngineArgs(**options).create_engine_config(headless=True), monitor_workers=False)

    def wait(self) -> None:
        """Returns when one of the processes has ended, which ends the others."""
        self._executor.start_worker_monitor(inline=True)
