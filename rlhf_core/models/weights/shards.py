"""Shards a model's weights over its ranks as they are read (ZeRO-3), so that no rank ever holds the whole
model.

transformers builds a model without weights, then puts them in place one by one. Each large weight is then
passed to `Shards.cut`, which keeps this rank's part. transformers' own loading for ZeRO-3 is not used: it
merges the experts of all layers on every rank, and reports neither missing weights nor weights of the wrong
shape.

`one_by_one` patches a private name of transformers, for the releases in MADE_FOR. With other releases, files
stay mapped into memory and the results are the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import transformers
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import modeling_utils

from rlhf_core.models.weights.weight_reader import Buffers, WeightFile
from rlhf_core.system import progress
from rlhf_core.system.machine import give_back_freed_memory

MADE_FOR = ("5.17.", "5.18.", "5.19.")
# elements: DeepSpeed keeps smaller weights whole on each rank, so a new head is initialised as usual
SMALL = 100_000
# environment variable: makes transformers read each weight when it is put in place, instead of all in advance
SYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"


class Shards(Protocol):
    """The ranks over which a model is sharded. Every method is a collective operation, and must be called on
    all ranks for the same weights in the same order. `reads`: whether the other ranks get their parts from
    data read by this rank."""

    reads: bool

    def cut(self, weight: nn.Parameter) -> None:
        """Replaces a weight with this rank's part of it."""

    def gathered(
        self, weights: Sequence[nn.Parameter], changed: bool = False
    ) -> AbstractContextManager[object]:
        """Gathers whole weights while the context is open. `changed`: whether to keep rank 0's changes to
        them."""


def gathered(
    shards: Shards | None, weights: Sequence[nn.Parameter], changed: bool = False
) -> AbstractContextManager[object]:
    """Works like `Shards.gathered`, but does nothing if the model is not sharded."""
    return nullcontext() if shards is None else shards.gathered(weights, changed)


@contextmanager
def as_they_come(shards: Shards | None) -> Iterator[None]:
    """While the context is open, counts each weight that transformers has read as progress, and shards large
    weights."""

    def placed(_module: nn.Module, _name: str, weight: nn.Parameter) -> None:
        progress.made()
        # Weights that are not in the checkpoint are initialised first; tied weights arrive a second time.
        if (
            shards
            and getattr(weight, "_is_hf_initialized", False)
            and not weight.is_meta
            and weight.numel() >= SMALL
        ):
            shards.cut(weight)

    with (
        one_by_one(shards.reads) if shards else nullcontext(),
        register_module_parameter_registration_hook(placed),
    ):
        yield


def require_data(model: nn.Module, shards: Shards | None) -> None:
    """Raises RuntimeError if, on a rank that does not read, a weight still has no data because it was not
    sharded."""
    if shards is not None and not shards.reads:
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if weight.is_floating_point() and not weight.is_meta and bool(weight.isnan().any()):
                raise RuntimeError(
                    f"{name} was not cut over the ranks, so this rank has no data of it, or the checkpoint"
                    " holds nan"
                )


@contextmanager
def one_by_one(reads: bool = True) -> Iterator[None]:
    """Makes transformers read one weight at a time into separately allocated memory while the context is
    open, because pages of a mapped file stay with the process. Without `reads`, large weights are not read
    (`WeightFile`). From then on, freed memory is returned to the system."""
    give_back_freed_memory()
    opened: Callable[..., Any] | None = getattr(modeling_utils, "safe_open", None)
    before = os.environ.get(SYNCHRONOUS)
    os.environ[SYNCHRONOUS] = "1"
    if opened is not None and transformers.__version__.startswith(MADE_FOR):
        buffers = Buffers()
        modeling_utils.safe_open = lambda file, **options: WeightFile(
            opened(file, **options | {"backend": "pread"}), file, reads, buffers
        )
    try:
        yield
    finally:
        if before is None:
            del os.environ[SYNCHRONOUS]
        else:
            os.environ[SYNCHRONOUS] = before
        if opened is not None:
            modeling_utils.safe_open = opened
