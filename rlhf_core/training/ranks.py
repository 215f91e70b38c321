"""Starts the ranks and engine of a training stage, and exports its model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from rlhf_core.cluster.rank_environment import LESS_MEMORY, set_rank_environment, store_address
from rlhf_core.config import KINDS, Lora, Optimised, Trainable
from rlhf_core.config.training import Float8
from rlhf_core.data.report import JSON
from rlhf_core.forecast.zero_stage import Chosen, doubt, peak_of_training, require_start, size_at, stage_of_training, starts
from rlhf_core.hub.model_config import Size
from rlhf_core.models.document_leak import detect_document_leak
from rlhf_core.models.float8 import multiply_in_float8
from rlhf_core.models.kernels.attention import split_attention
from rlhf_core.models.kernels.feed_forward import split_feed_forward
from rlhf_core.models.kernels.sequence_ranks import sequence_ranks
from rlhf_core.models.load import Policy, Scorer, recompute
from rlhf_core.models.save import save_adapter, save_model, save_tokenizer
from rlhf_core.models.sequence_split import split_sequences
from rlhf_core.models.weights import checkpoint_weights, trained_weights
from rlhf_core.runs import resume_state
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest
from rlhf_core.system import progress
from rlhf_core.training.engine import AdamW, Engine, TorchEngine, on_cpu
from rlhf_core.training.train_loop import layout_of

Rank = Callable[[StageRequest, RunDir], Outcome]


def on_ranks(rank: Rank, request: StageRequest, run: RunDir) -> Outcome:
    """Runs `rank` in this process when the stage has one rank, else on a Ray worker group; returns rank 0's outcome.

    On a group `zero_stage: auto` is resolved after its start. Raises ValueError for a resume state that these ranks cannot read.
    """
    config = request.config
    assert isinstance(config, Trainable)
    resume_state.require_layout(run, layout_of(config))
    if config.ranks.world_size == 1:
        set_rank_environment(0, 1, store_address())
        if torch.cuda.is_available():
            _doubt(request, config, torch.cuda.get_device_properties(0).total_memory)
        try:
            return rank(request, run)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"{request.name} ran out of GPU memory: {LESS_MEMORY}. {error}") from None
    from rlhf_core.cluster.worker_group import run_on_group

    return run_on_group(rank, request.name, run, config.ranks, lambda gpu_bytes: with_zero_stage(request, run, config, gpu_bytes))


def with_zero_stage(request: StageRequest, run: RunDir, config: Trainable, gpu_bytes: int) -> StageRequest:
    """Resolves `zero_stage: auto`: that of the resume state, else by `gpu_bytes`, the memory of a GPU (0: none).
    Raises MachineLacks when such a GPU cannot hold what is loaded onto it."""
    if config.zero_stage == "auto":
        resume = resume_state.latest(run)
        kept = resume.loop["layout"]["zero_stage"] if resume else None
        chosen = Chosen(kept, "as its resume state") if kept else stage_of_training(config, _size(request, config), gpu_bytes)
        print(chosen, flush=True)
        config = config.model_copy(update={"zero_stage": chosen.stage})
    _doubt(request, config, gpu_bytes)
    return request.model_copy(update={"config": config})


def _size(request: StageRequest, config: Trainable) -> Size | None:
    return size_at(request.inputs[getattr(config, KINDS[config.stage].start)])


def _doubt(request: StageRequest, config: Trainable, gpu_bytes: int) -> None:
    """Prints a warning where training may not fit the GPU's memory. Raises MachineLacks where the model does not."""
    if not gpu_bytes or (size := _size(request, config)) is None:
        return
    require_start([request.name], starts(config, {request.name: size})[request.name], gpu_bytes)
    if config.dtype == "bfloat16":
        stage = 0 if config.zero_stage == "auto" else config.zero_stage
        print(doubt(peak_of_training(config, size, stage, gpu_bytes), gpu_bytes), end="", flush=True)


def make_engine(module: Policy | Scorer, config: Optimised, packed: bool = False, offload: bool = False) -> Engine:
    """The engine of one rank: plain torch for `zero_stage` 0 (and for auto on one rank), DeepSpeed otherwise. Tests `packed` rows.

    `offload`: as in `ZeroEngine`. Raises ValueError for a model whose sequences cannot be split as the config says.
    """
    assert config.zero_stage != "auto" or all(ranks.world_size == 1 for ranks in config.trained_ranks.values()), "decided before"
    sharing = config.sequence_parallel_size
    if sharing > 1:
        split_attention(module.model, sharing)
    recompute(module.model, config.gradient_checkpointing)
    if isinstance(config, Float8) and config.float8:
        print(f"{multiply_in_float8(module.model)} linear layers multiply in float8", flush=True)
    if config.mlp_tokens:
        split_feed_forward(module.model, config.mlp_tokens)
    module.train()  # transformers loads models in eval mode, which does not recompute
    adamw = AdamW(config.betas, config.weight_decay, config.max_norm)
    engine: Engine
    if config.zero_stage == "auto" or config.zero_stage == 0:
        engine = TorchEngine(module, adamw)
    else:
        from rlhf_core.training.zero_engine import ZeroEngine

        engine = ZeroEngine(module, adamw, config.zero_stage, config.dtype, config.micro_train_batch_size, offload)
    detect_document_leak(engine, module, engine.device, packed or bool(config.micro_train_tokens), engine.all_reduce)
    if sharing > 1:
        engine.sharing = sharing
        split_sequences(engine, module, sequence_ranks(sharing), engine.device, engine.all_reduce)
    return engine


def finish_training(
    engine: Engine, request: StageRequest, run: RunDir, source: str, lora: Lora | None, metrics: dict[str, float]
) -> Outcome:
    """Writes the trained model to `checkpoint/` on rank 0."""
    if engine.rank == 0:
        shutil.rmtree(run / "checkpoint", ignore_errors=True)
    export(engine, run / "checkpoint", source, lora, request.trust_remote_code)
    return Outcome(metrics, {"checkpoint": "checkpoint", "data_report": JSON})


def export(engine: Engine, folder: Path, source: str, lora: Lora | None, trust_remote_code: bool) -> None:
    """Writes the model, or with `lora.export` its adapter, to `folder` on rank 0; a collective. `source`: the start model of training."""
    model = engine.module.model
    alone = lora is not None and lora.export == "adapter"
    with progress.files(folder):
        state = on_cpu(engine, (trained_weights if alone else checkpoint_weights)(model, engine.gathered))
        if engine.rank != 0:
            return
        if alone:
            save_adapter(model, state, source, folder)
            save_tokenizer(source, folder, trust_remote_code)
        else:
            save_model(model, state, source, folder, trust_remote_code)
