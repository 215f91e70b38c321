"""Exports a model's weights in checkpoint form: adapters merged, 4-bit weights dequantised, experts under
their own names.

During training, LoRA weights are separate from frozen layers, the experts of a layer are one tensor, and
ZeRO-3 shards weights. Sharded weights are gathered in groups of complete layers, so that only one group is in
memory at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlhf_core.models.checkpoint.weight_files import meta
from rlhf_core.models.lora import ADAPTER, adapts, lora_layers, merged_weight
from rlhf_core.models.weights.trained_encoder import TrainedEncoder
from rlhf_core.models.weights.unbiased_rounding import Survival
from rlhf_core.models.weights.whole_weights import whole_shape, whole_size
from rlhf_core.system import progress

# approximate size of a group of gathered weights; groups contain complete layers, since an export may merge a
# layer's weights
GROUP_BYTES = 1 << 27
Gathered = Callable[[Sequence[nn.Parameter]], AbstractContextManager[object]]


class Unit(NamedTuple):
    """One weight of the checkpoint: its name in the model, the parameters to gather for it, and the function
    that computes it."""

    name: str
    parameters: list[nn.Parameter]
    value: Callable[[], Tensor]


def checkpoint_weights(
    model: PreTrainedModel,
    gathered: Gathered,
    survival: Survival | None = None,
    encoder: TrainedEncoder | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields all weights of a model and of its trained image encoder, gathered, under the names used in a
    transformers checkpoint. This is a collective operation on every rank. `gathered(parameters)` is a context
    that gathers sharded parameters. A weight is valid only until the next one is requested. `survival`
    measures how much of the adapters survives rounding.
    """
    for group in _groups(_units(model, survival)):
        with gathered([parameter for unit in group for parameter in unit.parameters]):
            state = {unit.name: unit.value() for unit in group}
            yield from (state if is_quantised(model) else revert_weight_conversion(model, state)).items()
        progress.made()
    for group in _groups(_encoder_units(encoder)):
        with gathered([parameter for unit in group for parameter in unit.parameters]):
            yield from ((unit.name, unit.value()) for unit in group)
        progress.made()


def planned_weights(model: PreTrainedModel, encoder: TrainedEncoder | None = None) -> dict[str, Tensor]:
    """Returns the weights that `checkpoint_weights` will yield, as tensors without memory (see `meta`). This
    is not a collective operation."""
    state = {}
    for unit in _units(model):
        if unit.parameters:
            whole = unit.parameters[0]
            # set for a 4-bit weight, which is exported with another shape and dtype
            quantised = getattr(whole, "quant_state", None)
            known = (
                (quantised.shape, quantised.dtype)
                if quantised is not None
                else (whole_shape(whole), whole.dtype)
            )
        else:
            known = ((buffer := unit.value()).shape, buffer.dtype)
        state[unit.name] = meta(*known)
    state = state if is_quantised(model) else revert_weight_conversion(model, state)
    state |= {} if encoder is None else encoder.stored
    # not as views of each other
    return {name: meta(whole_shape(weight), weight.dtype) for name, weight in state.items()}


def trained_weights(model: PreTrainedModel, gathered: Gathered) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights trained by LoRA, under the names used in peft's adapter files. This is a collective
    operation on every rank."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    with gathered([parameter for _, parameter in trained]):
        for name, parameter in trained:
            yield f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}", parameter.detach()


def scaled_adapters(model: PreTrainedModel, gathered: Gathered) -> Iterator[tuple[str, Tensor]]:
    """Yields the adapters of linear layers, in the dtype of the model's weights and under the names of
    `trained_weights`, with B multiplied by `alpha / rank`. This is a collective operation on every rank."""
    scales = {
        f"base_model.model.{name}": layer.scaling[ADAPTER] for name, layer in lora_layers(model).items()
    }
    for name, weight in trained_weights(model, gathered):
        owner, is_b, _ = name.partition(".lora_B.")
        yield name, (weight * scales[owner] if is_b else weight).to(model.dtype)


def is_quantised(model: PreTrainedModel) -> bool:
    return getattr(model, "hf_quantizer", None) is not None


def _units(model: PreTrainedModel, survival: Survival | None = None) -> Iterator[Unit]:
    layers = lora_layers(model)
    for name, parameter in model.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            continue
        owner, _, leaf = name.rpartition(".")
        adapters = []
        while owner.endswith(".base_layer"):  # adapters of an expert tensor are nested
            owner = owner.removesuffix(".base_layer")
            adapters += [layers[owner]] if adapts(layers[owner], leaf) else []
        owner = owner.replace(".base_layer.", ".")  # part of an adapted layer
        beside = [matrix[ADAPTER].weight for layer in adapters for matrix in (layer.lora_A, layer.lora_B)]
        whole = f"{owner}.{leaf}" if owner else leaf
        yield Unit(whole, [parameter, *beside], partial(merged_weight, parameter, adapters, whole, survival))
    kept = model.state_dict().keys()
    buffers = (
        (name.replace(".base_layer.", "."), buffer) for name, buffer in model.named_buffers() if name in kept
    )
    yield from (Unit(name, [], partial(Tensor.detach, buffer)) for name, buffer in buffers)


def _encoder_units(encoder: TrainedEncoder | None) -> Iterator[Unit]:
    if encoder is not None:
        for name, weight in encoder.stored.items():
            yield Unit(name, [weight], partial(Tensor.detach, weight))


def _groups(units: Iterator[Unit]) -> Iterator[list[Unit]]:
    """Yields consecutive groups of about GROUP_BYTES, each ending at the end of a layer. The groups are the
    same on every rank."""
    group: list[Unit] = []
    size = 0
    layer = ""
    for unit in units:
        found = re.match(r"(.*?\.\d+)\.", unit.name)
        before = layer
        layer = found[1] if found else ""
        if size >= GROUP_BYTES and not (layer and layer == before):
            yield group
            group = []
            size = 0
        group.append(unit)
        size += sum(whole_size(p) * p.element_size() for p in unit.parameters)
    if group:
        yield group
