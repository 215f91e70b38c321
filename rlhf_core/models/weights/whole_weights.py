"""Reads the shape and size of whole weights, of which a rank may hold only a part. This is the only place
outside `rlhf_core/training/zero` that knows the attributes that ZeRO-3 adds to weights (`ds_*`)."""

from __future__ import annotations

import torch
from torch import Tensor


def is_cut(weight: Tensor) -> bool:
    """Returns whether this weight is split over the ranks, so that it must be gathered before it is used."""
    return hasattr(weight, "ds_id")


def whole_shape(weight: Tensor) -> torch.Size:
    """Returns the shape of the whole weight."""
    shape: torch.Size = getattr(weight, "ds_shape", weight.shape)
    return shape


def whole_size(weight: Tensor) -> int:
    """Returns the number of elements of the whole weight."""
    return int(getattr(weight, "ds_numel", weight.numel()))
