"""Configures low-rank adapters. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from rlhf_core.config.engines import EngineConfig
from rlhf_core.records import Config, Positive, Rate

# ranks that vLLM has kernels for; an adapter uses the next larger rank
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class Lora(Config):
    """Low-rank adapters in place of full fine-tuning (LoRA, Hu et al. 2021); on 4-bit weights: QLoRA
    (Dettmers et al. 2023)."""

    rank: Positive = Field(16, description="rank of the adapters")
    alpha: Rate = Field(32.0, description="scale of the adapters, which are multiplied by alpha / rank")
    targets: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description=(
            "layers with adapters: all linear layers except the head, or a list of names (q_proj, v_proj,"
            " ...)"
        ),
        min_length=1,
    )
    quantize: Literal["none", "nf4"] = Field(
        "none",
        description=(
            "nf4: keep frozen weights in 4 bits (QLoRA); needs a GPU, bitsandbytes, and ZeRO stage 0 to 2"
        ),
    )
    export: Literal["merged", "adapter"] = Field(
        "merged",
        description=(
            "what the checkpoint holds. merged: a whole model, with the adapter in its folder `adapter`;"
            " adapter: only the adapter, which names the model it belongs to"
        ),
    )


def adapter_mistakes(engine: EngineConfig, lora: Lora | None, dtype: str) -> Iterator[str]:
    """Yields a sentence for each mistake with `engine.adapters: alone`. On GPUs, vLLM's adapter kernels
    accept only 16-bit types."""
    if engine.adapters == "merged":
        return
    if lora is None:
        yield "engine.adapters: alone sends adapters, but there are none: set lora, or leave it out"
    elif lora.quantize != "none":
        yield (
            f"engine.adapters: alone sends no weights, but lora.quantize={lora.quantize} rounds weights that"
            " engines would not round: leave one of them out"
        )
    elif lora.rank > (most := ADAPTER_RANKS[-1]):
        yield (
            f"engine.adapters: alone supports adapters up to rank {most}, but lora.rank is {lora.rank}: lower"
            " the rank, or leave engine.adapters out"
        )
    if engine.pipeline_parallel_size > 1:
        yield "engine.adapters: alone does not work with pipeline_parallel_size: leave one of them out"
    if engine.gpus and dtype == "float32":
        yield (
            f"engine.adapters: alone needs dtype bfloat16 on GPUs, but dtype is {dtype}: set it to bfloat16,"
            " or leave engine.adapters out"
        )
