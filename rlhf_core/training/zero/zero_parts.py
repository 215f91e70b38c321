"""Finds, in a DeepSpeed engine, this rank's parts of each trained weight and of its optimiser state.

Reads undocumented attributes of DeepSpeed's optimisers, as DeepSpeed's own universal checkpoints do;
tests/engines/test_zero_ranks.py checks whether the installed release still has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf_core.training.moving_average import KIND as AVERAGE
from rlhf_core.training.state_files import KINDS, WeightPart


class Fragment(NamedTuple):
    """Locates part of a weight, starting at its element `start`: `length` elements of one of the optimiser's
    flat fp32 tensors, starting at `offset`."""

    name: str
    start: int
    flat: Tensor
    offset: int
    length: int


def zero_parts(
    optimizer: Any, module: nn.Module, stage: int, rank: int, averages: Sequence[Tensor] = ()
) -> Iterator[WeightPart]:
    """Yields this rank's parts, whose tensors are views. The optimiser must have a state. `averages`: the
    moving averages of its `flat_weights`, if there are any."""
    state = optimizer.optimizer.state
    average_of = dict(zip(flat_weights(optimizer, stage), averages, strict=False))
    for name, start, flat, offset, length in _fragments(optimizer, module, stage, rank):
        sources = {"weight": flat} | {kind: state[flat][kind] for kind in KINDS[1:]}
        if averages:
            sources[AVERAGE] = average_of[flat]
        yield WeightPart(
            name, start, {kind: source.detach().narrow(0, offset, length) for kind, source in sources.items()}
        )


def make_state(optimizer: Any, stage: int, steps: float) -> None:
    """Gives the optimiser a zero state with `steps` steps counted, in the form that its first step would
    create."""
    for flat in flat_weights(optimizer, stage):
        fused = optimizer.optimizer.defaults["fused"]
        step = torch.tensor(steps, dtype=torch.float32, device=flat.device if fused else "cpu")
        optimizer.optimizer.state[flat] = {"step": step} | {
            kind: torch.zeros_like(flat) for kind in KINDS[1:]
        }


def steps_of(optimizer: Any) -> float:
    """Returns the number of steps that the optimiser has taken."""
    return float(next(iter(optimizer.optimizer.state.values()))["step"])


def to_weights(optimizer: Any, stage: int) -> None:
    """Rounds the optimiser's fp32 weights into the module's weights. This is a collective operation."""
    if stage < 3:
        optimizer.update_lp_params()
        return
    optimizer.empty_partition_cache()
    for weights, flat in zip(
        optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True
    ):
        weights.data.copy_(flat.data)
    whole = optimizer.persistent_parameters
    if whole:  # small weights, which stay whole
        whole[0].partition(whole)
        whole[0].all_gather(whole)


def drop_gradients(optimizer: Any, stage: int) -> None:
    """Drops the gradients of a step that the optimiser rejected. With Adam on the host, ZeRO-1 and 2 would
    otherwise add the next step's gradients to them."""
    if stage < 3:
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None


def flat_weights(optimizer: Any, stage: int) -> list[Tensor]:
    """Returns the flat fp32 tensors that hold the weights this rank optimises."""
    if stage == 3:
        return list(optimizer.fp32_partitioned_groups_flat)
    return [group["params"][0] for group in optimizer.optimizer.param_groups]


def _fragments(optimizer: Any, module: nn.Module, stage: int, rank: int) -> Iterator[Fragment]:
    names = {id(weight): name for name, weight in module.named_parameters()}
    flats = flat_weights(optimizer, stage)
    if stage == 3:
        for group, flat in zip(optimizer.fp16_groups, flats, strict=True):
            offset = 0
            for weight in group:
                share = weight.ds_tensor.numel()  # includes padding, so equal on all ranks
                yield Fragment(
                    names[id(weight)],
                    rank * share,
                    flat,
                    offset,
                    max(0, min(share, weight.ds_numel - rank * share)),
                )
                offset += share
        return
    for name, weight in module.named_parameters():
        here: Any = getattr(weight, "_hp_mapping", None) if weight.requires_grad else None
        if here is not None:  # this rank holds part of the weight
            place = here.hp_fragment_address
            yield Fragment(
                name, here.lp_fragment_address.start, flats[here.param_group_index], place.start, place.numel
            )
