"""Runs one engine over several nodes: vLLM's pipeline parallelism, with a process of ours for each of its
stages.

The first stage's process has the engine, which schedules. The others have only vLLM's worker processes, which
wait for its steps. All of these processes find each other in a store of ours, which is a file on one machine
and listens on the cluster's network on several: vLLM's own listens on all interfaces. Their sockets ask
nobody for a password, like those of NCCL and gloo.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from rlhf_core.cluster import LOOPBACK
from rlhf_core.cluster.rank_environment import serve_store
from rlhf_core.system.orphan_watcher import end_with_parent

# environment variable of vLLM's worker processes: where those of all stages find each other
STORE = "ALIGNFLOW_STAGES"
SCHEME = "alignflow"  # of a store that listens, for torch.distributed


class PipelineStage(NamedTuple):
    """Names a pipeline stage of an engine: its number of `stages`, and the store of all of them
    (`rank_environment.store_address`)."""

    number: int = 0
    stages: int = 1
    store: str = ""

    def options(self) -> dict[str, Any]:
        """Returns vLLM's options for it. Each stage is a node to vLLM, also where several are on one host."""
        if self.stages == 1:
            return {}
        where = {
            "nnodes": self.stages,
            "node_rank": self.number,
            "master_addr": urlsplit(self.store).hostname or LOOPBACK,
        }
        return {"pipeline_parallel_size": self.stages, "distributed_executor_backend": "mp"} | where

    def open(self) -> Any:
        """Lets the worker processes that this process will start find those of the other stages; keep what it
        returns."""
        if self.stages == 1:
            return None
        # a forked one would not import `join_stages`
        os.environ |= {STORE: self.store, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        return None if self.number else serve_store(self.store)


WHOLE = PipelineStage()  # an engine that is not cut


class Followers:
    """Runs vLLM's worker processes of a pipeline stage that is not the first one. Returns when those of all
    stages have loaded."""

    def __init__(self, library: Any, options: Mapping[str, Any]):
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        # As in `LLM`: sizes of batches depend on the context.
        config = library.EngineArgs(**options).create_engine_config(
            usage_context=UsageContext.LLM_CLASS, headless=True
        )
        self._executor = MultiprocExecutor(config, monitor_workers=False)

    def wait(self) -> None:
        """Returns when one of the processes has ended, which ends the others."""
        self._executor.start_worker_monitor(inline=True)


def join_stages() -> None:
    """In a worker process of vLLM that belongs to a stage: makes it find the others in the store, and end
    with the process that started it. Call it before vLLM connects the processes."""
    address = os.environ.get(STORE)
    if not address or multiprocessing.parent_process() is None:
        return
    import torch.distributed as dist
    from vllm.distributed import parallel_state

    end_with_parent(signal.SIGKILL)
    listens = not address.startswith("file:")
    if listens:
        dist.register_rendezvous_handler(SCHEME, _joined)  # type: ignore[attr-defined]
        address = address.replace("tcp:", f"{SCHEME}:")
    parallel_state.get_distributed_init_method = lambda *_: address


def _joined(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Any, int, int]]:
    import torch.distributed as dist

    place = urlsplit(url)
    asked = dict(parse_qsl(place.query))
    rank = int(asked["rank"])
    size = int(asked["world_size"])
    yield dist.TCPStore(str(place.hostname), int(place.port or 0), size, False, timeout), rank, size  # type: ignore[attr-defined]
