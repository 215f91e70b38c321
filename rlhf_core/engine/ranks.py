"""How a training stage gets its ranks and its engine, and what it leaves behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from rlhf_core import checkpoint
from rlhf_core.cluster.ranks import LESS_MEMORY, free_port, set_rank_environment
from rlhf_core.config import DPO, KTO, SFT, Lora, RewardModel, Trainable
from rlhf_core.data.report import JSON
from rlhf_core.engine.base import AdamW, Engine, TorchEngine, on_cpu
from rlhf_core.forecast.sizes import Size
from rlhf_core.forecast.zero import Chosen, doubt, peak_of_training, size_at, stage_of_training
from rlhf_core.models.memory import recompute
from rlhf_core.models.save import save_adapter, save_model, save_tokenizer
from rlhf_core.models.weights import checkpoint_weights, trained_weights
from rlhf_core.names import TRAINED_FROM
from rlhf_core.stage import Outcome, RunDir, StageRequest

Rank = Callable[[StageRequest, RunDir], Outcome]


def on_ranks(rank: Rank, request: StageRequest, run: RunDir) -> Outcome:
    """Runs `rank` in this process when the stage has one rank, else on a Ray worker group; returns rank 0's outcome.

    The group decides on a ZeRO stage that the recipe leaves open.
    """
    config = request.config
    assert isinstance(config, (SFT, RewardModel, DPO, KTO))
    if config.ranks.world_size == 1:
        set_rank_environment(0, 1, "127.0.0.1", free_port())
        if torch.cuda.is_available():
            _doubt(request, config, torch.cuda.get_device_properties(0).total_memory)
        try:
            return rank(request, run)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"{request.name} ran out of GPU memory: {LESS_MEMORY}. {error}") from None
    from rlhf_core.cluster.group import run_on_group

    return run_on_group(rank, request.name, run, config.ranks, lambda card_bytes: with_zero_stage(request, run, config, card_bytes))


def with_zero_stage(request: StageRequest, run: RunDir, config: Trainable, card_bytes: int) -> StageRequest:
    """The request with a ZeRO stage where the recipe leaves it open: that of the resume state, else by `card_bytes` of a GPU (0: none)."""
    if config.zero_stage == "auto":
        resume = checkpoint.latest(run)
        kept = resume.loop.get("zero_stage") if resume else None
        chosen = Chosen(kept, "as its resume state") if kept else stage_of_training(config, _size(request, config), card_bytes)
        print(chosen, flush=True)
        config = config.model_copy(update={"zero_stage": chosen.stage})
    _doubt(request, config, card_bytes)
    return request.model_copy(update={"config": config})


def _size(request: StageRequest, config: Trainable) -> Size | None:
    return size_at(request.inputs[getattr(config, TRAINED_FROM.get(request.config.stage, "model"))])


def _doubt(request: StageRequest, config: Trainable, card_bytes: int) -> None:
    """Says so where a card will hardly hold the training."""
    if card_bytes and config.dtype == "bfloat16" and (size := _size(request, config)) is not None:
        stage = 0 if config.zero_stage == "auto" else config.zero_stage
        print(doubt(peak_of_training(config, size, stage, card_bytes), card_bytes), end="", flush=True)


def make_engine(module: nn.Module, config: Trainable) -> Engine:
    """The engine of one rank: plain torch for `zero_stage` 0 (and for auto on one rank), DeepSpeed otherwise."""
    assert config.zero_stage != "auto" or config.ranks.world_size == 1, "decided before (with_zero_stage)"
    recompute(module.model, config.gradient_checkpointing)
    module.train()  # transformers loads models for reading, where nothing is recomputed
    adamw = AdamW(config.betas, config.weight_decay, config.max_norm)
    zero_stage = 0 if config.zero_stage == "auto" else config.zero_stage
    if zero_stage == 0:
        return TorchEngine(module, adamw)
    from rlhf_core.engine.zero import ZeroEngine

    return ZeroEngine(module, adamw, zero_stage, config.dtype, config.micro_train_batch_size, timeout=1800)


def finish_training(
    engine: Engine, request: StageRequest, run: RunDir, source: str, lora: Lora | None, metrics: dict[str, float]
) -> Outcome:
    """Writes the trained model to `checkpoint/` on rank 0."""
    if engine.rank == 0:
        shutil.rmtree(run / "checkpoint", ignore_errors=True)
    export(engine, run / "checkpoint", source, lora, request.trust_remote_code)
    return Outcome(metrics, {"checkpoint": "checkpoint", "data_report": JSON})


def export(engine: Engine, folder: Path, source: str, lora: Lora | None, trust_remote_code: bool) -> None:
    """Writes the model, or its adapter if `lora` says so, to `folder` on rank 0; a collective. `source` is what training started from."""
    model = engine.module.model
    alone = lora is not None and lora.export == "adapter"
    state = on_cpu(engine, (trained_weights if alone else checkpoint_weights)(model, engine.gathered))
    if engine.rank != 0:
        return
    if alone:
        save_adapter(model, state, source, folder)
        save_tokenizer(source, folder, trust_remote_code)
    else:
        save_model(model, state, source, folder, trust_remote_code)
