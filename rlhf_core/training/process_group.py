"""Joins the ranks of a group in PyTorch's default process group: NCCL on GPUs, gloo otherwise."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from rlhf_core.cluster.rank_environment import PATIENCE, STORE, open_store


def backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def join_ranks() -> None:
    """Joins the process group once; RANK and WORLD_SIZE must be set. Does nothing if no store address is set,
    as under torchrun, where the caller joins by other means."""
    address = os.environ.get(STORE)
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    if address and not dist.is_initialized():
        dist.init_process_group(
            backend(),
            store=open_store(address, rank, size, PATIENCE),
            rank=rank,
            world_size=size,
            timeout=PATIENCE,
        )
