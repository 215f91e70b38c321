"""Configures what all training stages share (`Trainable`), and what stages that train a policy share
(`TrainedPolicy`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf_core.config.data import Rows, Text
from rlhf_core.config.process_groups import Groups
from rlhf_core.config.training.optimised import Optimised
from rlhf_core.records import Config, InDigestIfSet, NotInDigest, Positive, Ranks, Rate, check


class TrainedPolicy(Config):
    """Fields that all stages that train a policy share: the router loss, and the precision of the head."""

    router_aux_coef: float = Field(
        0.0,
        ge=0,
        description=(
            "mixture-of-experts models: coefficient of the load-balancing loss, which is computed per"
            " document"
        ),
    )
    fp32_head: Annotated[bool, InDigestIfSet] = Field(
        False,
        description=(
            "with a 16-bit dtype: compute the head's logits in fp32 (MiniMax-M1, arXiv:2506.13585) in the"
            " policy, its reference and, in ppo, the engines, whose log-probs are then closer to the"
            " trainer's"
        ),
    )

    @check
    def _check_head(self) -> Iterator[str]:
        assert isinstance(self, Optimised), "stages that train a policy train"
        if self.fp32_head and self.dtype == "float32":
            yield (
                "fp32_head computes the logits of 16-bit weights in fp32, but dtype is float32: set dtype to"
                " bfloat16, or leave fp32_head out"
            )


class Trainable(Optimised):
    """Fields that all training stages share."""

    rows: ClassVar[Rows | None] = None  # what the rows of `data` and `eval_data` hold

    max_len: Positive = Field(
        512, description="maximum sequence length in tokens; longer sequences are cut and counted"
    )
    learning_rate: Rate = Field(1e-5, description="peak learning rate")
    skip_nonfinite_steps: int = Field(
        0,
        ge=0,
        description=(
            "maximum number of optimiser steps to skip because their loss or gradient norm is not finite, for"
            " data with a few broken rows. A skipped step leaves weights and optimiser unchanged, and"
            " nonfinite_steps.jsonl names its rows. 0: the first such step ends the run"
        ),
    )
    eval_steps: Annotated[int, NotInDigest] = Field(
        0, ge=0, description="number of steps between two evaluations on eval_data; 0: only at the end"
    )
    ranks: Annotated[Ranks, NotInDigest] = Field(Ranks(), description="processes of this stage")
    adam_offload: Annotated[bool, NotInDigest] = Field(
        False,
        description=(
            "keep the optimiser's state in host memory and run its step on the CPU; saves 12 bytes per"
            " parameter on the GPUs; slower"
        ),
    )
    param_offload: Annotated[bool, NotInDigest] = Field(
        False,
        description=(
            "keep ZeRO-3's weight shards in host memory and move one layer at a time to the GPU; slower"
        ),
    )

    @check
    def _check_passes(self) -> Iterator[str]:
        yield from self.batch_mistakes()
        if not self.ranks.gpus:
            fields = [name for name in ("adam_offload", "param_offload") if getattr(self, name)]
            yield from (
                f"{name} frees a GPU's memory, but ranks have no GPU: set gpus of ranks, or leave it out"
                for name in fields
            )

    @property
    def peak_rate(self) -> float:
        return self.learning_rate

    def offloaded(self, what: Literal["adam", "param"]) -> tuple[str, ...]:
        offload = self.adam_offload if what == "adam" else self.param_offload
        return ("model",) if offload else ()

    @property
    def trained_ranks(self) -> dict[str, Ranks]:
        return {"ranks": self.ranks}

    def steps(self, items: int) -> int:
        """Returns the optimiser steps of all epochs over `items` documents or pairs; the last batch of an
        epoch may be smaller."""
        return -(-items // self.train_batch_size) * self.max_epochs

    @property
    def longest(self) -> int:
        return self.max_len * (2 if self.rows == "preference" else 1)

    @property
    def turns(self) -> Sequence[Groups]:
        return [{"ranks": self.ranks}]

    def lengths(self, start: str) -> Mapping[tuple[str, str], tuple[int, str]]:
        # answers that other stages sampled fit the sampling model's positions
        return {("", start): (self.max_len, "max_len")} if self.texts else {}

    @property
    def texts(self) -> Sequence[Text]:
        found = {field: getattr(self, field, None) for field in ("data", "eval_data")}
        return [
            Text(field, data, self.rows, "max_len", self.max_len)
            for field, data in found.items()
            if data is not None
        ]
