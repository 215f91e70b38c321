"""Sets the environment of a process that is one rank of several."""

from __future__ import annotations

import os
import socket

# What helps a role or a stage whose GPU has no memory left.
LESS_MEMORY = (
    "lower micro_train_tokens or micro_train_batch_size (in PPO also those of rollouts, and vllm.gpu_memory_utilization), or set "
    "gradient_checkpointing (in PPO also adam_offload, ref_reward_offload), and run again: with another value of any of these the stage "
    "goes on from its last checkpoint; `alignflow plan` with this GPU's memory says what fits"
)


def set_rank_environment(rank: int, world_size: int, address: str, port: int, local_rank: int = 0) -> None:
    """Sets the variables that torch.distributed and DeepSpeed read."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def free_port(host: str = "") -> int:
    """Returns a TCP port of an address of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
