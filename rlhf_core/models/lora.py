"""Adds and merges low-rank adapters: LoRA (Hu et al. 2021) and QLoRA (Dettmers et al. 2023), with peft's
layers and file format.

The transformers model is changed in place; its linear layers compute `W x + (alpha / rank) B A x`, W frozen.
There is no dropout, which would make the loss depend on the split of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from rlhf_core.config import Lora
from rlhf_core.hub.model_files import ADAPTER_CONFIG
from rlhf_core.hub.snapshots import cached, pinned_base
from rlhf_core.models.weights.shards import Shards
from rlhf_core.models.weights.unbiased_rounding import Survival, round_unbiased

ADAPTER = "default"  # peft's name of the one adapter
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def add_lora(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Freezes `model` and adds adapters to its linear layers, except the outputs of Mamba layers, routers and
    grouped products. A scalar head is trained in full. A is random, from `seed`, and B is zero.

    Raises ValueError if the model does not have any layer that `lora.targets` names.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import cast_adapter_dtype

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        exclude_modules=_not_plain(model) or None,
        task_type="SEQ_CLS" if has_head(model) else "CAUSAL_LM",
    )
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, model, ADAPTER)
        except ValueError as error:
            raise ValueError(
                f"lora.targets={lora.targets!r} fits no layer of {type(model).__name__}: {error}"
            ) from error
    # adapters of a bf16 model are fp32
    cast_adapter_dtype(model, adapter_name=ADAPTER, autocast_adapter_dtype=True)
    for layer in lora_layers(model).values():
        if type(layer.base_layer) is nn.Linear or hasattr(layer.base_layer, "quant_state"):
            vars(layer)["forward"] = partial(_forward, layer)
    if has_head(model):
        model.score.requires_grad_(True)


def _forward(layer: Any, hidden: Tensor) -> Tensor:
    """Computes (..., K) -> (..., N) in the dtype of the base layer's product, which is the dtype of `hidden`,
    or fp32 for a head with `fp32_head`. peft's layers copy both to fp32."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    product = layer.base_layer(flat)
    if not layer.disable_adapters:
        a = layer.lora_A[ADAPTER].weight
        b = layer.lora_B[ADAPTER].weight * layer.scaling[ADAPTER]
        flat = flat.to(product.dtype)
        product = product.addmm_(F.linear(flat, a.to(product.dtype)), b.to(product.dtype).t())
    return product.view(*hidden.shape[:-1], product.shape[-1])


def _not_plain(model: PreTrainedModel) -> list[str]:
    """Returns the names of layers to which no low-rank product can be added: the outputs of Mamba layers
    (with parameters A and D), whose weights a kernel reads itself, and linear layers that return experts or
    one product per group."""
    outputs = [
        f"{name}.out_proj"
        for name, part in model.named_modules()
        if hasattr(part, "A_log") and hasattr(part, "D")
    ]
    return outputs + [
        name
        for name, part in model.named_modules()
        if type(part).__name__.endswith(("Router", "GroupedLinear"))
    ]


def has_head(model: PreTrainedModel) -> bool:
    return hasattr(model, "score")


def lora_layers(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the layers with an adapter, by name."""
    if not hasattr(model, "peft_config"):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def require_linear(model: PreTrainedModel) -> None:
    """Raises ValueError when an adapter does not belong to a linear layer, for example with experts that are
    stored as one tensor."""
    others = [name for name, layer in lora_layers(model).items() if not adapts(layer, "weight")]
    if others:
        raise ValueError(
            "engine.adapters: alone sends adapters of linear layers, and these are of other weights:"
            f" {', '.join(others[:3])}: name linear layers in lora.targets, or leave engine.adapters out"
        )


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Makes the model compute with only its frozen weights while the context is open."""
    layers = lora_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapts(layer: Any, parameter: str) -> bool:
    """Returns whether a layer of `lora_layers` changes the parameter of this name: a linear layer's weight,
    or the one tensor that it adapts."""
    return bool(getattr(layer, "parameter_name", "weight") == parameter)


def merged_weight(
    parameter: Tensor, adapters: Sequence[Any], name: str, survival: Survival | None = None
) -> Tensor:
    """Returns `W + (alpha / rank) B A` with all adapters of W, added in fp32 and rounded without bias to the
    dtype of W. `name`: the name of W in the model. `survival` measures how much of the update survives
    rounding."""
    weight = dequantised(parameter)
    if not adapters:
        return weight
    with torch.no_grad():
        before = weight.float()
        update = sum(layer.get_delta_weight(ADAPTER).float() for layer in adapters)
        merged = round_unbiased(before + update, weight.dtype, name)
        if survival is not None:
            survival.add(update, merged.float() - before)
        return merged


def dequantised(parameter: Tensor) -> Tensor:
    """Returns a 4-bit weight in its compute dtype, and any other weight unchanged."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, state)


def base_of(path: str) -> str | None:
    """Returns the base of the adapter in folder `path`: a folder, or a Hub id if the adapter does not name a
    revision. Returns None without an adapter. Raises ValueError if the adapter does not name a base."""
    if not (Path(path) / ADAPTER_CONFIG).is_file():
        return None
    from peft import PeftConfig

    base = PeftConfig.from_pretrained(path).base_model_name_or_path
    if not base:
        raise ValueError(f"{path}/{ADAPTER_CONFIG} names no base model: set base_model_name_or_path there")
    pinned = pinned_base(Path(path))
    return str(cached(pinned)) if pinned else str(base)


def first_base(path: str) -> str:
    """Returns the model on which the adapters at `path` are based; `path` itself if it is not an adapter."""
    base = base_of(path)
    return path if base is None else first_base(base)


def merges_in_parts(path: str) -> bool:
    """Returns whether the adapter in folder `path` consists only of low-rank matrices, perhaps with a head
    for scores. Other adapters copy whole weights."""
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(path)
    whole = {
        *(getattr(config, "modules_to_save", None) or []),
        *(getattr(config, "trainable_token_indices", None) or []),
    }
    return (
        str(config.peft_type).endswith("LORA")
        and whole <= {"score"}
        and not getattr(config, "use_dora", False)
    )


def merge_adapter(model: PreTrainedModel, path: str, shards: Shards | None = None) -> PreTrainedModel:
    """Returns `model` with the adapter in folder `path` merged into its weights, all trainable again. An
    adapter of a language model also fits a model with a head for scores. `shards`: merge layer by layer."""
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(path)
    if has_head(model) and config.task_type == "CAUSAL_LM":
        config.task_type = None  # peft's class for it would require the model to generate
    adapted = PeftModel.from_pretrained(model, path, config=config)
    if not merges_in_parts(path):
        return adapted.merge_and_unload().requires_grad_(True)
    for name, layer in lora_layers(model).items():
        with nullcontext() if shards is None else shards.gathered(list(layer.parameters()), changed=True):
            _merge_layer(name, layer)
    return adapted.unload().requires_grad_(True)


def _merge_layer(name: str, layer: Any) -> None:
    """Merges an adapter into its layer, plain low-rank matrices with unbiased rounding."""
    weight = getattr(layer.get_base_layer(), "weight", None)
    if (
        not adapts(layer, "weight")
        or weight is None
        or ADAPTER not in layer.lora_A
        or layer.lora_bias[ADAPTER]
    ):
        layer.merge()
        return
    with torch.no_grad():
        weight.copy_(merged_weight(weight, [layer], f"{name}.weight"))
