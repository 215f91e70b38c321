"""Configures what training stages share with each other and with PPO."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field

from rlhf_core.config.gates import Gated
from rlhf_core.config.sweep import Value, sweep_mistakes, variants
from rlhf_core.config.training.lora_fields import Lora
from rlhf_core.config.training.optimiser_fields import EMA, OptimiserFields
from rlhf_core.config.training.pass_size import FULL_PASS, ROWS, PassSize, pass_size
from rlhf_core.config.training.schedule_fields import ScheduleFields
from rlhf_core.config.training.sharding import TORCH, Sharding
from rlhf_core.config.training.zero_fields import QUANTISED_FROZEN, ZERO, ZeroFields
from rlhf_core.config.training.zero_sharding import ZERO_1, ZERO_2, ZERO_3
from rlhf_core.records import (
    InDigestIfSet,
    Momentum,
    NotInDigest,
    Positive,
    Ranks,
    Rate,
    Share,
    check,
)

Recomputed = Annotated[
    Share, BeforeValidator(lambda value: float(value) if isinstance(value, bool) else value)
]

HALF = ("bfloat16", "float16")
FEW_STEPS = 10  # fewer optimiser steps than this train hardly anything
# what each value of `zero_stage` shards
SHARDINGS: dict[int, Sharding] = {each.stage: each for each in (TORCH, ZERO_1, ZERO_2, ZERO_3)}


class Optimised(Gated, OptimiserFields, ScheduleFields, ZeroFields):
    """Fields that PPO and all training stages share: optimiser, schedule, checkpoints, precision."""

    train_batch_size: Positive = Field(
        128, description="documents (for preferences: pairs) per optimiser step, all ranks together"
    )
    micro_train_batch_size: Annotated[Positive | None, NotInDigest] = Field(
        None,
        description="rows per training pass on one rank; default: micro_train_tokens sets the size of a pass",
    )
    micro_train_tokens: Annotated[Positive | None, NotInDigest] = Field(
        None,
        description=(
            "tokens per training pass on one rank: documents are packed without padding, and passes are"
            f" equally full; default without micro_train_batch_size: {ROWS} documents (or pairs) of maximum"
            f" length, but at most {FULL_PASS} tokens (times sequence_parallel_size) or one document"
        ),
    )
    max_epochs: Positive = Field(1, description="number of passes over the data; in ppo: over each rollout")
    betas: tuple[Momentum, Momentum] = Field((0.9, 0.95), description="AdamW's betas")
    weight_decay: float = Field(0.0, ge=0, description="weight decay of AdamW and Muon, decoupled")
    max_norm: Rate = Field(1.0, description="gradient norm above which gradients are clipped")
    logging_steps: Annotated[Positive, NotInDigest] = Field(
        1, description="optimiser steps (in ppo: iterations) between two lines of metrics.jsonl"
    )
    save_steps: Annotated[int, NotInDigest] = Field(
        0,
        ge=0,
        description=(
            "optimiser steps (in ppo: iterations) between two resume checkpoints; 0: use save_minutes"
        ),
    )
    save_minutes: Annotated[float, NotInDigest] = Field(
        30.0,
        ge=0,
        description="if save_steps is 0: minutes between two resume checkpoints; 0: no checkpoints",
    )
    keep_checkpoints: Annotated[Positive, NotInDigest] = Field(
        1, description="number of resume checkpoints to keep"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description=(
            "dtype of parameters and activations. float16: finer than bfloat16, but with a smaller range, so"
            " DeepSpeed scales the loss and skips steps whose gradients overflow; in ppo it applies to actor,"
            " reference and engines (Qi et al. 2025), while reward models and critic use bfloat16"
        ),
    )
    float8: Annotated[bool, InDigestIfSet] = Field(
        False,
        description=(
            "multiply large linear layers in FP8, but their weights' gradients in bfloat16: faster on Hopper"
            " and newer GPUs, with rounding errors of 3 to 4 % in each product; in ppo: in all models (for"
            " engines set engine.options)"
        ),
    )
    gradient_checkpointing: Annotated[Recomputed, NotInDigest] = Field(
        0.0,
        description=(
            "share of the layers whose activations are recomputed in the backward pass (above 0: logits too);"
            " true: all"
        ),
    )
    mlp_tokens: Annotated[Positive | None, NotInDigest] = Field(
        None,
        description=(
            "tokens of a pass that a dense feed-forward block computes at a time, and recomputes in the"
            " backward pass; saves memory for long documents; default: all"
        ),
    )
    zero_stage: Annotated[Literal["auto", 0, 1, 2, 3], NotInDigest] = Field(
        "auto",
        description=(
            "0: plain torch on one rank (in ppo: one each for actor and critic); 1-3: DeepSpeed ZeRO; auto: 0"
            " on one rank, on several ranks the lowest stage that fits their GPUs, but 3 with param_offload"
            " or zero_hpz, and in ppo without GPUs"
        ),
    )
    sequence_parallel_size: Annotated[Positive, NotInDigest] = Field(
        1,
        description=(
            "number of ranks that compute each pass together, for long documents: each rank takes a part of"
            " the tokens and, in attention, a part of the heads; must divide the number of ranks and of the"
            " model's attention heads"
        ),
    )
    lora: Lora | None = Field(
        None, description="train low-rank adapters (in ppo: of actor and critic); default: all weights"
    )
    sweep: Annotated[dict[str, tuple[Value, ...]], NotInDigest] = Field(
        {},
        description=(
            "fields with lists of values: the stage runs once for each combination, as STAGE.FIELD=VALUE; not"
            " available in a loop"
        ),
    )

    @property
    def trained_ranks(self) -> dict[str, Ranks]:
        """The ranks of each trained model, by config field or role."""
        raise NotImplementedError

    @property
    def peak_rate(self) -> float:
        """The peak learning rate of the model (in ppo, of the actor)."""
        raise NotImplementedError

    @property
    def encoder_rate(self) -> float:
        """The learning rate of a trained image encoder as a fraction of the model's."""
        own = self.image_encoder_learning_rate
        return 1.0 if own is None else own / self.peak_rate

    def offloaded(self, what: Literal["adam", "param"]) -> tuple[str, ...]:
        """Returns the trained models whose optimiser (adam) or weights (param) are kept in host memory: roles
        for ppo, else `model`."""
        raise NotImplementedError

    def dtype_in(self, role: str) -> str:
        """Returns the dtype of a model. `role`: as in `offloaded`, or a group of ppo."""
        return self.dtype

    def loads(self, place: str) -> bool:
        return True

    @property
    def exports(self) -> Sequence[str]:
        return [EMA] if self.ema is not None else []

    @property
    def variants(self) -> Mapping[str, Self]:
        return variants(self, self.sweep) if self.sweep else {}

    @property
    def sharding(self) -> Sharding | None:
        """What training shards over its ranks; None: `auto`, which is decided when the stage starts."""
        if self.optimizer == "muon":
            return TORCH
        return None if self.zero_stage == "auto" else SHARDINGS[self.zero_stage]

    @property
    def shardings(self) -> list[Sharding]:
        """The possible shardings, the least sharded first: 4-bit weights cannot be sharded, and Muon needs
        whole matrices. Only DeepSpeed trains in float16."""
        if self.optimizer == "muon":
            return [TORCH]
        able = [each for each in SHARDINGS.values() if not (each.weights and self.quantized)]
        return [each for each in able if each is not TORCH] if self.dtype == "float16" else able

    @property
    def needing_shards(self) -> list[str]:
        """The fields that affect only sharded weights."""
        wanted = {"param_offload": self.offloaded("param"), "zero_hpz": self.zero_hpz}
        return [name for name, on in wanted.items() if on]

    @property
    def quantized(self) -> bool:
        return self.lora is not None and self.lora.quantize != "none"

    @property
    def alone(self) -> bool:
        """Whether plain torch can train this stage: each model is on one rank, and no field needs
        DeepSpeed."""
        offloaded = self.offloaded("adam") or self.offloaded("param")
        lacking = offloaded or self.deepspeed or self.dtype == "float16"
        return not lacking and all(ranks.world_size == 1 for ranks in self.trained_ranks.values())

    @property
    def longest(self) -> int:
        """The tokens of the longest document, or pair of documents, which must fit in one pass."""
        raise NotImplementedError

    @property
    def train_pass(self) -> PassSize:
        """The size of a training pass."""
        return pass_size(
            self.micro_train_batch_size, self.micro_train_tokens, self.longest, self.sequence_parallel_size
        )

    def batch_mistakes(self) -> Iterator[str]:
        """Yields a sentence for each model whose ranks would not all run the same number of full passes.
        Passes whose size is in tokens are always spread evenly."""
        micro, tokens = self.train_pass
        if tokens is not None:
            return
        for ranks in self.trained_ranks.values():
            at_once = max(1, ranks.world_size // self.sequence_parallel_size)
            whole = micro * at_once
            if self.train_batch_size % whole:
                share, rest = divmod(self.train_batch_size, at_once)
                fitting = f" (micro_train_batch_size={math.gcd(micro, share)} works)" if not rest else ""
                yield (
                    f"train_batch_size={self.train_batch_size} must be a multiple of micro_train_batch_size x"
                    f" ranks{' / sequence_parallel_size' * (self.sequence_parallel_size > 1)} = {micro} x"
                    f" {at_once} = {whole}{fitting}: every rank must run the same number of full forward"
                    " passes"
                )

    @check
    def _check_sweep(self) -> Iterator[str]:
        if self.sweep:
            yield from sweep_mistakes(self, self.sweep)

    @check
    def _check_float8(self) -> Iterator[str]:
        if self.float8 and self.dtype != "bfloat16":
            yield (
                f"float8 works only with bfloat16, but dtype is {self.dtype}: set dtype to bfloat16, or leave"
                " float8 out"
            )
        if self.float8 and self.lora is not None:
            yield "float8 trains all weights, but lora trains only adapters: leave one of them out"
        if self.float8 and self.freeze is not None:
            yield (
                "float8 computes gradients for all weights, including frozen ones: leave float8 or freeze out"
            )

    @check
    def _check_float16(self) -> Iterator[str]:
        if self.dtype != "float16" or self.sharding is not TORCH:
            return
        field = "optimizer to adamw" if self.optimizer == "muon" else "zero_stage to 1, 2, 3 or auto"
        yield (
            f"dtype=float16 needs DeepSpeed's loss scaling, but this stage uses plain torch: set {field}, or"
            " dtype to bfloat16"
        )

    @check
    def _check_ema(self) -> Iterator[str]:
        if self.ema is not None and self.zero_hpz:
            yield (
                "ema cannot replace the second copies of the weights that zero_hpz keeps: leave one of them"
                " out"
            )

    @check
    def _check_muon(self) -> Iterator[str]:
        if self.optimizer != "muon":
            return
        for name, ranks in self.trained_ranks.items():
            if ranks.world_size > 1:
                yield (
                    f"optimizer=muon trains each model on one rank, but {name} configures {ranks.world_size}:"
                    " set optimizer to adamw, or use one rank"
                )
        zero = {
            "zero_stage": self.zero_stage not in ("auto", 0),
            "zero_hpz": self.zero_hpz,
            "deepspeed": self.deepspeed,
            "adam_offload": self.offloaded("adam"),
            "param_offload": self.offloaded("param"),
        }
        yield from (
            f"optimizer=muon trains with plain torch, not with DeepSpeed: leave out {name}, or set optimizer"
            " to adamw"
            for name, on in zero.items()
            if on
        )
        if self.lora is not None:
            yield (
                "optimizer=muon makes the update of each matrix orthogonal, but lora adapters are only"
                " factors of a matrix: leave one of them out"
            )

    @check
    def _check_freeze(self) -> Iterator[str]:
        if self.freeze is not None and self.lora is not None:
            yield "freeze and lora are alternative ways to train part of the weights: leave one of them out"
        zero = self.deepspeed.get(ZERO)
        if self.freeze is not None and isinstance(zero, dict) and zero.get(QUANTISED_FROZEN):
            yield (
                f"deepspeed.{ZERO}.{QUANTISED_FROZEN} would round the weights that freeze keeps unchanged:"
                " leave one of them out"
            )

    @check
    def _check_image_encoder(self) -> Iterator[str]:
        if self.image_encoder != "frozen" and self.lora is not None:
            yield (
                f"image_encoder: {self.image_encoder} trains weights of the encoder, lora adapters of the"
                " language model alone: leave one of them out"
            )
        if self.image_encoder == "frozen" and self.image_encoder_learning_rate is not None:
            yield (
                "image_encoder_learning_rate is that of an encoder that is trained: set image_encoder to"
                " projector or trained, or leave it out"
            )

    @check
    def _check_sequence(self) -> Iterator[str]:
        for name, ranks in self.trained_ranks.items():
            if ranks.world_size % self.sequence_parallel_size:
                yield (
                    f"sequence_parallel_size={self.sequence_parallel_size} ranks compute each pass together,"
                    f" but {name} configures {ranks.world_size}: set it to a divisor of this number"
                )

    @check
    def _check_zero(self) -> Iterator[str]:
        if self.optimizer == "muon":  # `_check_muon` reports it
            return
        sharding = self.sharding
        plain = sharding is TORCH
        for name, ranks in self.trained_ranks.items():
            if plain and ranks.world_size > 1:
                yield (
                    f"zero_stage=0 trains on one rank, but {name} configures {ranks.world_size}: set"
                    " zero_stage to 1, 2, 3 or auto"
                )
        if self.lora is not None and self.quantized and sharding is not None and sharding.weights:
            yield (
                f"lora.quantize={self.lora.quantize} does not work with zero_stage=3, which would shard the"
                " 4-bit weights: set zero_stage to 2 or less, or quantize to none"
            )
        if self.lora is not None and self.quantized:
            because = f"lora.quantize={self.lora.quantize} keeps whole weights on the GPU"
            yield from (
                f"{because}: leave out {name}, or set quantize to none" for name in self.needing_shards
            )
        if plain and self.offloaded("adam"):
            yield (
                "zero_stage=0 keeps Adam on the GPU, but adam_offload moves it to the host: set zero_stage to"
                " 2, 3 or auto"
            )
        if plain and self.deepspeed:
            yield (
                "zero_stage=0 uses plain torch, which has no DeepSpeed options: leave out deepspeed, or set"
                " zero_stage to 1, 2, 3 or auto"
            )
        if sharding is not None and not sharding.weights:
            yield from (
                f"{name} applies only to sharded weights: set zero_stage to 3 or auto, or leave it out"
                for name in self.needing_shards
            )
        if self.zero_hpz and all(ranks.num_nodes == 1 for ranks in self.trained_ranks.values()):
            yield (
                "zero_hpz keeps a copy of the weights on each node, but only one node is set for"
                f" {' and '.join(self.trained_ranks)}: leave it out"
            )
