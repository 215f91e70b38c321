"""What a group of processes asks of a cluster."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.config.rounds import Vllm
from rlhf_core.types import Ranks

Wanted = Ranks | Vllm


def processes(wanted: Wanted) -> int:
    return wanted.world_size if isinstance(wanted, Ranks) else wanted.num_engines * wanted.tensor_parallel_size


def check_together(groups: Mapping[str, Wanted]) -> None:
    """Groups on the same cards have one process on each of them. Raises ValueError otherwise."""
    counts = {name: processes(wanted) for name, wanted in groups.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ValueError(
            f"groups that share cards need equally many processes, there are: {told}. Set num_nodes x num_ranks_per_node alike "
            f"(and vllm.num_engines x tensor_parallel_size)"
        )
    if len({bool(wanted.gpus) for wanted in groups.values()}) > 1:
        without = ", ".join(name for name, wanted in groups.items() if not wanted.gpus)
        raise ValueError(f"groups that share cards all need one: set gpus of {without}")
