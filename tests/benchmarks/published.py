"""What `alignflow plan` says of the sizes whose seconds others have published, and of 70B on eight nodes: a
table.

    python -m tests.benchmarks.published [--write]      # to docs/reference/forecast.md

The published figures are OpenRLHF's of its own program (Hu et al. 2024 and its README: seconds for 1,024
prompts and one PPO epoch, prompts and answers of at most 1,024 tokens, on A800s of 80 GB). Nothing is fitted
to them. Here all answers have full length, and the shapes are those of Llama 2 and Code Llama; the network
between those nodes is not published, 100 GB/s is assumed.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from rlhf_core.config import PPO
from rlhf_core.forecast.hardware import GIB, GPUS, Gpu, on_nodes
from rlhf_core.forecast.placements import Placement, choose, details, placements
from rlhf_core.hub.model_config import Size, size_of_config
from tests.benchmarks.calibrate import PAGE, placed_in

LLAMA = {"model_type": "llama", "vocab_size": 32000}
SHAPES: dict[str, dict[str, Any]] = {
    "7B": dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=11008),
    "13B": dict(hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, intermediate_size=13824),
    "34B": {
        **dict(hidden_size=8192, num_hidden_layers=48, num_attention_heads=64, intermediate_size=22016),
        "num_key_value_heads": 8,
    },
    "70B": {
        **dict(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, intermediate_size=28672),
        "num_key_value_heads": 8,
    },
}
ROLES = ("actor_ranks", "critic_ranks", "reference_ranks", "reward_ranks")


class Case(NamedTuple):
    """A size on a number of GPUs, nodes and GB/s between them; the published seconds, where there are
    some."""

    model: str
    gpus: int
    kind: str
    nodes: int
    network: float
    published: float | None


CASES = [
    Case("7B", 16, "a800", 2, 100, 471.11),
    Case("13B", 32, "a800", 4, 100, 608.93),
    Case("34B", 32, "a800", 4, 100, 1526.4),
    Case("70B", 32, "a800", 4, 100, 4488.53),
    Case("70B", 64, "h100", 8, 50, None),
]


def recipe() -> PPO:
    """The stage: four models of one size, 1,024 prompts, 1,024 + 1,024 tokens, one epoch."""
    return PPO.model_validate(
        {
            **{
                "prompts": {"sources": "p.jsonl"},
                "reward": "rm",
                "dtype": "bfloat16",
                **{role: {} for role in ROLES},
            },
            **dict(rollout_batch_size=1024, train_batch_size=128, prompt_max_len=1024, generate_max_len=1024),
            **{
                "micro_train_batch_size": 1,
                "micro_train_tokens": 8192,
                "micro_rollout_tokens": 16384,
                "gradient_checkpointing": True,
            },
        }
    )


class Simulated(NamedTuple):
    """A case with the placements that `alignflow plan` tries, and the one that it chooses."""

    config: PPO
    sizes: dict[str, Size]
    gpu: Gpu
    found: list[Placement]
    chosen: Placement | None


def simulate(case: Case) -> Simulated:
    gpu = on_nodes(GPUS[case.kind], case.gpus, case.nodes, case.network * 1e9)
    config = recipe()
    sizes = dict.fromkeys(config.groups, size_of_config(LLAMA | SHAPES[case.model]))
    found = placements(config, case.gpus, sizes, gpu)
    return Simulated(config, sizes, gpu, found, choose(found, gpu))


def cell(case: Case) -> str:
    """The chosen placement in words: seconds and their range, by phase, the fullest GPU and the host."""
    config, sizes, gpu, found, chosen = simulate(case)
    if chosen is None:
        return f"does not fit: {min(placement.peak for placement in found) / GIB:.0f} GiB at least"
    (fast, typical, slow), memory = details(config, chosen, sizes, gpu)
    phases = ", ".join(
        f"{name} {seconds:.0f}" for name, seconds in typical.items() if name in ("generate", "score", "train")
    )
    peak = max(memory, key=lambda phase: memory[phase].gpu)
    host = max(each.host for each in memory.values()) / GIB
    spent = f"{sum(typical.values()):.0f} s ({sum(fast.values()):.0f} to {sum(slow.values()):.0f}): {phases}"
    return f"{spent}; {memory[peak].gpu / GIB:.0f} GiB ({peak}), host {host:,.0f} GiB; {chosen.name}"


def by_phase_table(case: Case) -> str:
    """Each phase of the placement that is chosen."""
    config, sizes, gpu, _, chosen = simulate(case)
    assert chosen is not None, "it fits"
    seconds, memory = details(config, chosen, sizes, gpu)
    rows = ["| phase | s | GPU | host of a node |", "|---|---|---|---|"]
    for phase in dict.fromkeys([*memory, *seconds.typical]):
        spent = (
            f"{seconds.typical[phase]:.1f} ({seconds.fast[phase]:.1f} to {seconds.slow[phase]:.1f})"
            if phase in seconds.typical
            else ""
        )
        held = [f"{size / GIB:,.0f}" for size in memory[phase]] if phase in memory else ["", ""]
        rows.append(f"| {phase} | {spent} | {' | '.join(held)} |")
    return "\n".join(rows)


def table() -> str:
    rows = ["| models | GPUs | published, s | `plan` |", "|---|---|---|---|"]
    for case in CASES:
        where = f"{case.gpus} {case.kind.upper()}, {case.nodes} nodes, {case.network:g} GB/s"
        published = "" if case.published is None else f"{case.published:,}"
        rows.append(f"| 4 x {case.model} | {where} | {published} | {cell(case)} |")
    return "\n".join(rows)


def tables() -> dict[str, str]:
    return {"published": table(), "phases": by_phase_table(CASES[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    for name, found in tables().items():
        if write:
            PAGE.write_text(placed_in(PAGE.read_text(), name, "tests.benchmarks.published", found))
        print(f"{found}\n")


if __name__ == "__main__":
    main()
