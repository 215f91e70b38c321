"""What a language model does with the outputs of its vocabulary head before they are logits."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from rlhf_core.models.token_logprobs import replaced_forward

LOUD = 100.0  # hidden states so large that a cap on the logits shows


@torch.no_grad()
def logit_scale(model: PreTrainedModel) -> float:
    """The constant that the model multiplies its head's outputs with (Granite's and Cohere's is not 1), seen on noise for hidden states.

    Raises ValueError when its logits are no multiple of them, as where they are capped (Gemma 2): our log-probs would not be the model's.
    """
    head, backbone = model.get_output_embeddings(), model.base_model
    noise = torch.randn(1, 1, head.weight.shape[-1], generator=torch.Generator().manual_seed(0))
    hidden = (LOUD * noise).to(head.weight.device, head.weight.dtype)
    with replaced_forward(backbone, lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=hidden)):
        logits = model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=hidden.device), use_cache=False).logits.float()
    plain = head(hidden).float()
    scale = float((logits * plain).sum() / (plain * plain).sum())
    if not (logits - scale * plain).abs().max() <= 0.02 * logits.abs().max():  # bf16 carries three digits
        raise ValueError(
            f"a {model.config.model_type} model does more with its logits than to scale them (final_logit_softcapping, for example), "
            "which training here would leave out: start from another family"
        )
    return 1.0 if abs(scale - 1) < 0.01 else scale
