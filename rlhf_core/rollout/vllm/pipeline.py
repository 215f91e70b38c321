"""Runs one engine over several nodes with vLLM's pipeline parallelism, with one process of this project per
stage.

The first stage's process runs the engine, which does the scheduling. The other processes have only vLLM's
worker processes, which wait for its steps. All these processes find each other through a store of this
project: a file on a single machine, or across machines a store that listens on the cluster's network (vLLM's
own listens on all interfaces). These sockets are unauthenticated, like the sockets of NCCL and gloo.
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

# environment variable for vLLM's worker processes: the store through which those of all stages meet
STORE = "ALIGNFLOW_STAGES"
SCHEME = "alignflow"  # URL scheme of a listening store, for torch.distributed


class PipelineStage(NamedTuple):
    """A pipeline stage of an engine: its number out of `stages`, and the address of the store that the stages
    share (see `rank_environment.store_address`)."""

    number: int = 0
    stages: int = 1
    store: str = ""

    def options(self) -> dict[str, Any]:
        """Returns vLLM's options for this stage. vLLM considers each stage a node, even if several share a
        host."""
        if self.stages == 1:
            return {}
        where = {
            "nnodes": self.stages,
            "node_rank": self.number,
            "master_addr": urlsplit(self.store).hostname or LOOPBACK,
        }
        return {"pipeline_parallel_size": self.stages, "distributed_executor_backend": "mp"} | where

    def open(self) -> Any:
        """Lets the worker processes that this process starts find the worker processes of the other stages.
        In the first stage, this opens the store. The caller must keep the return value alive."""
        if self.stages == 1:
            return None
        # a forked process would not import `join_stages`
        os.environ |= {STORE: self.store, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        return None if self.number else serve_store(self.store)


class Followers:
    """Runs the vLLM worker processes of a pipeline stage after the first. The constructor returns once the
    processes of all stages have loaded."""

    def __init__(self, library: Any, options: Mapping[str, Any]):
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        # As in `LLM`, since batch sizes depend on the context.
        config = library.EngineArgs(**options).create_engine_config(
            usage_context=UsageContext.LLM_CLASS, headless=True
        )
        self._executor = MultiprocExecutor(config, monitor_workers=False)

    def wait(self) -> None:
        """Blocks until one of the processes ends, which makes the others end too."""
        self._executor.start_worker_monitor(inline=True)


def join_stages() -> None:
    """Makes a stage's vLLM worker process find the others through the store, and end together with its parent
    process. Does nothing in other processes. Must be called before vLLM connects the processes."""
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
