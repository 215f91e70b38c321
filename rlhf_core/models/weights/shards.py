"""Cuts the weights of a model over its ranks while it is read (ZeRO-3), so that no rank ever holds the whole
model.

transformers builds a model without weights, then puts them in place one after the other. Each large one goes
to `Shards.cut` at that moment, which keeps this rank's part. transformers' own loading for ZeRO-3 is not
used: it merges the experts of all layers on every rank, and reports neither missing weights nor weights of
another shape.

`one_by_one` patches a private name of transformers, for the releases in MADE_FOR. With other releases files
stay mapped into memory, and results are the same.
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
# elements: DeepSpeed keeps smaller weights whole on each rank; a new head is therefore initialised as usual
SMALL = 100_000
# environment variable: makes transformers read each weight when it is put in place, not all ahead
SYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"


class Shards(Protocol):
    """The ranks over which a model is cut. Every method is a collective, called for the same weights in the
    same order. `reads`: whether the other ranks get their parts from this rank's data."""

    reads: bool

    def cut(self, weight: nn.Parameter) -> None:
        """Replaces a weight with this rank's part of it."""

    def gathered(
        self, weights: Sequence[nn.Parameter], changed: bool = False
    ) -> AbstractContextManager[object]:
        """Makes weights whole while the context is open. `changed`: keeps rank 0's changes to them."""


def gathered(
    shards: Shards | None, weights: Sequence[nn.Parameter], changed: bool = False
) -> AbstractContextManager[object]:
    """Like `Shards.gathered`, but does nothing for a model that is whole."""
    return nullcontext() if shards is None else shards.gathered(weights, changed)


@contextmanager
def as_they_come(shards: Shards | None) -> Iterator[None]:
    """Counts each weight that transformers has read as progress and cuts large ones, while the context is
    open."""

    def placed(_module: nn.Module, _name: str, weight: nn.Parameter) -> None:
        progress.made()
        # Weights that are not in the checkpoint are initialised first; tied weights come a second time.
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
    cut."""
    if shards is not None and not shards.reads:
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if weight.is_floating_point() and not weight.is_meta and bool(weight.isnan().any()):
                raise RuntimeError(
                    f"{name} was not cut over the ranks, so this rank has no data of it, or the checkpoint"
                    " holds nan"
                )


@contextmanager
def one_by_one(reads: bool = True) -> Iterator[None]:
    """Makes transformers read one weight at a time, into its own memory, while the context is open: pages of
    a mapped file stay with the process. Without `reads` it reads no large weights (`WeightFile`). From then
    on freed memory goes back to the system."""
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
