"""Defines where plain torch and DeepSpeed ZeRO differ: the sharding of weights as a model is loaded, the
engine that trains it, and the wrapper for sharded models that are not trained.

Everything else uses `backend_of(config)`. `config/training/sharding.py` describes what a backend shards and
how much memory it takes. A new backend, such as FSDP2, needs one more class here and one more record there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import nn

from rlhf_core.config import Optimised
from rlhf_core.config.training.sharding import TORCH
from rlhf_core.models.policy import Policy, Scorer
from rlhf_core.models.weights.shards import Shards
from rlhf_core.training.engine import AdamW, Engine, TorchEngine


class FrozenModel(Protocol):
    """One rank of a sharded model that is not trained. Each pass is a collective operation."""

    module: nn.Module

    def __call__(self, *inputs: Any) -> Any: ...

    def release(self) -> None:
        """Frees weights that were fetched ahead."""


class TrainingBackend(Protocol):
    """A way to train a model on the ranks of a stage."""

    def shards(self, config: Optimised, role: str) -> Shards | None:
        """Returns the object that shards a trained model as it is loaded, or None to load it unsharded.
        `role`: as in `Optimised.offloaded`."""

    def frozen_shards(self, dtype: str) -> Shards | None:
        """Like `shards`, but for a model that is not trained."""

    def frozen(self, module: nn.Module, dtype: str) -> FrozenModel:
        """Wraps a model that was loaded with `frozen_shards`."""

    def engine(self, module: Policy | Scorer, adamw: AdamW, config: Optimised, role: str) -> Engine:
        """Returns the engine of this rank. This is a collective operation."""


class TorchBackend:
    """Plain torch: a single rank holds everything."""

    def shards(self, config: Optimised, role: str) -> None:
        return None

    def frozen_shards(self, dtype: str) -> None:
        return None

    def frozen(self, module: nn.Module, dtype: str) -> FrozenModel:
        raise AssertionError("plain torch has no model that is cut")

    def engine(self, module: Policy | Scorer, adamw: AdamW, config: Optimised, role: str) -> Engine:
        return TorchEngine(module, adamw)


def backend_of(config: Optimised) -> TrainingBackend:
    """Returns the backend of a stage: plain torch on a single rank with `zero_stage: auto`, which must
    otherwise be resolved."""
    opened: dict[str, Callable[[], TrainingBackend]] = {"torch": TorchBackend, "zero": zero_backend}
    return opened[(config.sharding or TORCH).backend]()


def zero_backend() -> TrainingBackend:
    """Returns DeepSpeed ZeRO."""
    from rlhf_core.training.zero.zero_backend import ZeroBackend

    return ZeroBackend()


def import_zero() -> None:
    """Imports DeepSpeed ahead of its first use, because the import takes seconds."""
    from rlhf_core.training.zero.zero_engine import library

    library()


def unknown_zero_options(options: Mapping[str, Any]) -> list[str]:
    """Returns messages about options in the recipe's `deepspeed` field that the installed DeepSpeed does not
    know; empty if DeepSpeed is not installed."""
    from rlhf_core.training.zero.zero_engine import unknown

    return unknown(options)
