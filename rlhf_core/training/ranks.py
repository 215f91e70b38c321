"""Starts the ranks and the engine of a training stage, and exports its model."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rlhf_core.cluster.rank_environment import LESS_MEMORY, set_rank_environment, store_address
from rlhf_core.config import DPO, KINDS, KTO, SFT, Lora, Optimised, Trainable
from rlhf_core.config.metrics.shared_metrics import SURVIVES
from rlhf_core.config.training.optimised import HALF
from rlhf_core.config.training.optimiser_fields import EMA
from rlhf_core.config.training.sharding import TORCH
from rlhf_core.data.data_report import JSON
from rlhf_core.forecast.by_phase import training_by_phase, training_host_doubt
from rlhf_core.forecast.hardware import Gpu
from rlhf_core.forecast.image_data import seen_size
from rlhf_core.forecast.zero_stage import (
    doubt,
    peak_of_training,
    require_start,
    size_at,
    stage_of_state,
    stage_of_training,
    starts,
)
from rlhf_core.hub.model_config import Size
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights, trained_weights
from rlhf_core.models.checkpoint.generation import ignored_values
from rlhf_core.models.checkpoint.save import (
    plan_weights,
    save_adapter,
    save_description,
    save_model,
    save_tokenizer,
)
from rlhf_core.models.document_leak import detect_document_leak
from rlhf_core.models.kernels.attention import split_attention
from rlhf_core.models.kernels.feed_forward import split_feed_forward
from rlhf_core.models.kernels.float8 import use_float8
from rlhf_core.models.kernels.sequence_ranks import sequence_ranks
from rlhf_core.models.load_model import load_policy, recompute, trained_policy
from rlhf_core.models.policy import Policy, Scorer
from rlhf_core.models.sequence_split import split_sequences
from rlhf_core.models.weights.frozen_weights import freeze_weights
from rlhf_core.models.weights.shards import Shards
from rlhf_core.models.weights.trained_encoder import trained_encoder_of
from rlhf_core.models.weights.unbiased_rounding import Survival
from rlhf_core.runs import resume_state
from rlhf_core.runs.run_dir import EXPORTS, STATE, Outcome, RunDir, StageRequest
from rlhf_core.system import progress
from rlhf_core.system.machine import disk_problem, free_memory
from rlhf_core.training.backends import FrozenModel, backend_of
from rlhf_core.training.engine import AdamW, Engine, finite, on_cpu

Rank = Callable[[StageRequest, RunDir], Outcome]
BESIDE = "adapter"  # folder of the adapter inside a merged checkpoint
EXPORT_TRIAL = f"{STATE}/export_trial"  # folder of `try_export`


def tell_load(source: str) -> None:
    """Prints, on rank 0, which model is about to be loaded."""
    if os.environ.get("RANK", "0") == "0":
        print(f"loading the model {source}", flush=True)


def on_ranks(rank: Rank, request: StageRequest, run: RunDir) -> Outcome:
    """Runs `rank` in this process if the stage has one rank, otherwise on a Ray worker group, and returns
    rank 0's outcome.

    With a worker group, `zero_stage: auto` is resolved after the group has started.
    """
    config = request.config
    assert isinstance(config, Trainable)
    if config.ranks.world_size == 1:
        set_rank_environment(0, 1, store_address())
        memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
        if config.alone:
            _doubt(request, config, memory, free_memory())
        else:
            request = with_zero_stage(request, run, config, memory, free_memory())
        try:
            return rank(request, run)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"{request.name} ran out of GPU memory: {LESS_MEMORY}. {error}") from None
    from rlhf_core.cluster.worker_group import run_on_group

    return run_on_group(
        rank,
        request.name,
        run,
        config.ranks,
        lambda gpu_bytes, host_bytes: with_zero_stage(request, run, config, gpu_bytes, host_bytes),
    )


def with_zero_stage(
    request: StageRequest, run: RunDir, config: Trainable, gpu_bytes: int, host_bytes: int
) -> StageRequest:
    """Returns the request with `zero_stage: auto` resolved.

    Takes the ZeRO stage of a resume state written by the same number of ranks, otherwise chooses one by
    `gpu_bytes`, the memory of a GPU (0: no GPU). Prints a warning if `gpu_bytes` or `host_bytes`, the free
    memory of a node, may not suffice. Raises MachineLacks when the GPU cannot hold the models that are loaded
    onto it.
    """
    if config.sharding is None:
        kept = resume_state.kept_zero_stage(run, config)
        chosen = (
            stage_of_training(config, _size(request, config), gpu_bytes)
            if kept is None
            else stage_of_state(config, kept)
        )
        print(chosen, flush=True)
        config = config.model_copy(update={"zero_stage": chosen.stage})
    _doubt(request, config, gpu_bytes, host_bytes)
    return request.model_copy(update={"config": config})


def _size(request: StageRequest, config: Trainable) -> Size | None:
    size = size_at(request.inputs[getattr(config, KINDS[config.stage].start)])
    return None if size is None else seen_size(config, size)


def _doubt(request: StageRequest, config: Trainable, gpu_bytes: int, host_bytes: int) -> None:
    """Prints a warning if training may exceed the GPU's or the host's memory. Raises MachineLacks if the
    model does not fit on the GPU."""
    if not gpu_bytes or (size := _size(request, config)) is None:
        return
    require_start([request.name], starts(config, {request.name: size})[request.name], gpu_bytes)
    if config.dtype in HALF:
        stage = (config.sharding or TORCH).stage
        print(doubt(peak_of_training(config, size, stage, gpu_bytes), gpu_bytes), end="", flush=True)
        print(
            training_host_doubt(training_by_phase(config, size, stage, Gpu(gpu_bytes)), host_bytes),
            end="",
            flush=True,
        )


def shards_of(config: Optimised, role: str = "model") -> Shards | None:
    """Returns the object that shards a model over the ranks as it is loaded, or None to load it unsharded.
    `role`: as in `Optimised.offloaded`."""
    return backend_of(config).shards(config, role)


def policy_to_train(request: StageRequest, config: SFT | DPO | KTO, path: str) -> Policy:
    """Loads the policy that the stage trains: all weights or adapters, whole or sharded. Raises the same
    errors as `trained_policy`."""
    tell_load(path)
    policy = trained_policy(
        path,
        config.dtype,
        request.trust_remote_code,
        config.lora,
        request.seed,
        config.router_aux_coef,
        shards_of(config),
    )
    policy.fp32_head = config.fp32_head
    return policy


def open_frozen(
    path: str, config: DPO | KTO, trust_remote_code: bool, device: torch.device
) -> Policy | FrozenModel:
    """Loads a policy that is not trained: sharded if trained models are, otherwise whole on each rank. This
    is a collective operation if the policy is sharded."""
    cut = config.sharding is not None and config.sharding.weights
    shards = backend_of(config).frozen_shards(config.dtype) if cut else None
    policy = load_policy(path, config.dtype, trust_remote_code, shards=shards)
    policy.fp32_head = config.fp32_head
    if config.float8:
        use_float8(policy.model, required=False)
    return policy.to(device) if shards is None else backend_of(config).frozen(policy, config.dtype)


def make_engine(
    module: Policy | Scorer, config: Optimised, packed: bool = False, role: str = "model"
) -> Engine:
    """Returns the engine of one rank (see `backend_of`). If rows are `packed`, first tests that documents in
    a row do not leak into each other.

    `role`: as in `Optimised.offloaded`. Raises ValueError for a model whose sequences cannot be split as
    configured, or that lacks the weights named in `freeze`.
    """
    assert config.sharding is not None or all(
        ranks.world_size == 1 for ranks in config.trained_ranks.values()
    ), "decided before"
    if config.float8:
        use_float8(module.model, required=role != "critic")
    sharing = config.sequence_parallel_size
    if sharing > 1:
        split_attention(module.model, sharing)
    recompute(module.model, config.gradient_checkpointing)
    if module.image_encoder is not None:
        assert module.tower is not None, "its weights are those of the encoder"
        for part in module.tower.parts:
            recompute(part, config.gradient_checkpointing)
    if config.mlp_tokens:
        split_feed_forward(module.model, config.mlp_tokens)
    module.train()  # transformers loads models in eval mode, which disables recomputation
    if config.freeze is not None:
        freeze_weights(module.model, config.freeze, role, module.image_encoder is not None)
    average = None if role == "critic" else config.ema
    muon = config.optimizer == "muon"
    encoder_rate = 1.0 if role == "critic" else config.encoder_rate
    adamw = AdamW(
        config.betas, config.weight_decay, config.max_norm, config.decay, average, muon, encoder_rate
    )
    engine = backend_of(config).engine(module, adamw, config, role)
    detect_document_leak(
        engine, module, engine.device, packed or config.train_pass.tokens is not None, engine.all_reduce
    )
    if sharing > 1:
        engine.sharing = sharing
        split_sequences(engine, module, sequence_ranks(sharing), engine.device, engine.all_reduce)
    return engine


def try_export(engine: Engine, folder: Path, source: str, lora: Lora | None, trust_remote_code: bool) -> None:
    """Checks before training that the model can be exported: on rank 0, writes everything but the weights to
    `folder`, then removes it. Raises ValueError if the export fails. Prints the generation config values that
    the exported model will lack."""
    if engine.rank != 0:
        return
    model = engine.module.model
    try:
        if _exports_adapter(lora):
            save_adapter(model, {}, source, folder)
            save_tokenizer(source, folder, trust_remote_code)
            return
        save_description(model, source, folder, trust_remote_code)
        plan_weights(model, trained_encoder_of(engine.module))
        _print_ignored(model, source)
    except Exception as error:
        if isinstance(error, OSError) or disk_problem(error):
            raise
        told = " ".join(str(error).split())
        raise ValueError(
            f"a model trained from {source} could not be saved ({type(error).__name__}: {told}): correct the"
            f" files of {source}; nothing was trained"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _print_ignored(model: PreTrainedModel, source: str) -> None:
    if model.can_generate() and (names := ignored_values(model.generation_config)):
        print(
            f"generation_config.json of {source} has values that transformers ignores and refuses to write"
            f" ({', '.join(names)}): that of the checkpoint is without them, and vLLM, which reads them,"
            " samples from it by its own defaults",
            flush=True,
        )


def _exports_adapter(lora: Lora | None) -> bool:
    return lora is not None and lora.export == "adapter"


def finish_training(
    engine: Engine,
    request: StageRequest,
    run: RunDir,
    source: str,
    lora: Lora | None,
    metrics: dict[str, float],
) -> Outcome:
    """Writes the trained model to `checkpoint/` on rank 0, and with `ema` also its moving average to
    `exports/ema/`."""
    if engine.rank == 0:
        shutil.rmtree(run / "checkpoint", ignore_errors=True)
    survives = export(engine, run / "checkpoint", source, lora, request.trust_remote_code)
    if survives is not None:
        metrics = metrics | {SURVIVES: survives}
    outputs = {"checkpoint": "checkpoint", "data_report": JSON}
    assert isinstance(request.config, Trainable)
    if request.config.ema is not None:
        export_average(engine, run / EXPORTS / EMA, source, lora, request.trust_remote_code)
        outputs[EXPORTS] = EXPORTS
    return Outcome(metrics, outputs)


def export_average(
    engine: Engine, folder: Path, source: str, lora: Lora | None, trust_remote_code: bool
) -> None:
    """Writes the model's moving average to `folder` on rank 0, in the same form as `export`. This is a
    collective operation."""
    if engine.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    with engine.averaged():
        export(engine, folder, source, lora, trust_remote_code)


def export(
    engine: Engine, folder: Path, source: str, lora: Lora | None, trust_remote_code: bool
) -> float | None:
    """Writes the model to `folder` on rank 0. This is a collective operation.

    Adapters are merged, and also written separately to the subfolder `adapter`; if `lora.export` says so,
    only the adapter is written. `source`: the initial model of the training. Returns the fraction of the
    update that survives rounding in the merged weights, or None if nothing is merged.
    """
    with progress.files(folder):
        if _exports_adapter(lora):
            _export_adapter(engine, folder, source)
            if engine.rank == 0:
                save_tokenizer(source, folder, trust_remote_code)
            return None
        survival = Survival()
        _export_model(engine, folder, source, trust_remote_code, survival)
        if lora is not None:
            _export_adapter(engine, folder / BESIDE, source)
        return survival.share()


def _export_adapter(engine: Engine, folder: Path, source: str) -> None:
    state = on_cpu(engine, trained_weights(engine.module.model, engine.gathered))
    if engine.rank == 0:
        save_adapter(engine.module.model, state, source, folder)


def _export_model(
    engine: Engine, folder: Path, source: str, trust_remote_code: bool, survival: Survival
) -> None:
    model = engine.module.model
    encoder = trained_encoder_of(engine.module)
    weights = checkpoint_weights(model, engine.gathered, survival, encoder)
    if engine.rank != 0:
        deque(weights, maxlen=0)
        return
    try:
        save_model(model, finite(weights), source, folder, trust_remote_code, encoder)
    except FloatingPointError:  # raised after the last weight
        shutil.rmtree(folder, ignore_errors=True)
        raise
