"""Finds how a model turns its head's outputs into logits: by a factor and a cap."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from rlhf_core.models.logprobs.token_logprobs import capped, replaced_forward

LARGE = 100.0  # scale of hidden states at which a cap on the logits has an effect


class _LastHiddenState(MoeModelOutputWithPast):
    """Holds a backbone's last hidden state. Returns None for all other attributes that a backbone's output
    may have."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def backbone_of(model: PreTrainedModel) -> nn.Module:
    """Returns the module that computes hidden states from tokens. Llama 4 uses a different name for this
    module than its class declares."""
    return model.base_model if model.base_model is not model else model.model


def logit_cap(model: PreTrainedModel) -> float | None:
    """Returns the cap of the model's logits (Gemma 2 and 4), or None."""
    cap = getattr(model.config, "final_logit_softcapping", None)
    return None if cap is None else float(cap)


@torch.no_grad()
def logit_scale(model: PreTrainedModel) -> float:
    """Measures the factor between the model's logits and its head's outputs, capped by `logit_cap`, on random
    hidden states. It is not 1 for Granite and Cohere.

    Raises ValueError when the logits are not a multiple of the outputs, because log-probs would be wrong.
    """
    head = model.get_output_embeddings()
    backbone = backbone_of(model)
    noise = torch.randn(1, 1, head.weight.shape[-1], generator=torch.Generator().manual_seed(0))
    hidden = (LARGE * noise).to(head.weight.device, head.weight.dtype)
    with replaced_forward(backbone, lambda *_, **__: _LastHiddenState(last_hidden_state=hidden)):
        logits = model(
            input_ids=torch.zeros(1, 1, dtype=torch.int64, device=hidden.device), use_cache=False
        ).logits.float()
    plain = capped(head(hidden).float(), logit_cap(model))
    scale = float((logits * plain).sum() / (plain * plain).sum())
    if not (logits - scale * plain).abs().max() <= 0.02 * logits.abs().max():  # bf16 has three digits
        raise ValueError(
            f"models of type {model.config.model_type} do more with their logits than to scale and cap them, "
            "which is not supported: start from another family"
        )
    return 1.0 if abs(scale - 1) < 0.01 else scale
