"""Describes the processes of a stage: groups of ranks, engines and servers, and which of them can share
GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field

from rlhf_core.config.engines import EngineConfig, only_in_ppo, without_pipeline
from rlhf_core.records import Config, Positive, Ranks, check


class OnEngine(Config):
    """A model that the stage starts an engine for, in addition to the engines that answer its prompts."""

    max_model_len: Positive | None = Field(
        None,
        description=(
            "maximum length of prompt and answer together, in tokens; default: the model's own maximum"
        ),
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="dtype of the model; auto: the dtype of the checkpoint"
    )
    engine: EngineConfig = Field(EngineConfig(), description="the model's engine")


class Served(OnEngine):
    """A model on a vLLM server that the stage starts and stops."""

    @check
    def _check_server(self) -> Iterator[str]:
        if not self.engine.abilities.serves:
            yield f"a server needs vLLM, but engine.kind is {self.engine.kind}: leave kind out"
        if self.engine.num_engines > 1 or self.engine.sleep:
            yield (
                "a server is one engine that never sleeps: leave num_engines and sleep out"
                " (tensor_parallel_size splits a model)"
            )
        yield from only_in_ppo(self.engine)
        yield from without_pipeline(self.engine)


Wanted = Ranks | EngineConfig
Groups = Mapping[str, Wanted]


def processes(wanted: Wanted) -> int:
    """Returns the number of processes of a group."""
    return wanted.world_size if isinstance(wanted, Ranks) else wanted.num_engines * wanted.processes


def check_together(groups: Groups) -> None:
    """Raises ValueError unless groups that share GPUs have the same number of processes, and all or none of
    them use GPUs."""
    counts = {name: processes(wanted) for name, wanted in groups.items()}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ValueError(
            f"groups that share GPUs need the same number of processes, but have: {found}. Set num_nodes x"
            " num_ranks_per_node to the same (and engine.num_engines x tensor_parallel_size x"
            " pipeline_parallel_size)"
        )
    if len({bool(wanted.gpus) for wanted in groups.values()}) > 1:
        without = ", ".join(name for name, wanted in groups.items() if not wanted.gpus)
        raise ValueError(f"groups that share GPUs must all use GPUs: set gpus of {without}")
