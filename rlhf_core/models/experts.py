"""Computes the load-balancing loss of mixtures of experts, and replays the routing of a sampler.

The balance loss is computed per document and averaged over the documents of an optimiser step (the
sequence-wise form of DeepSeek-V3, section 2.1.2), so it is the same for any split into micro-batches, packed
or padded. With replayed routing (R3; Ma et al. 2025, arXiv:2510.11370) the policy routes each token to the
experts that the sampler chose. Otherwise, because engine and trainer round differently, a token near the
decision boundary between two experts may get different experts, and log-probs differ. The policy's router
computes the weights of the chosen experts, with gradient.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# Families whose routers return logits, weights and experts, and whose routing vLLM returns.
REPLAYED = (
    *("deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "mixtral"),
    *("olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"),
)


def balance_loss(router_logits: Sequence[Tensor], documents: Tensor, top_k: int) -> Tensor:
    """Returns the sum over documents of `E * sum_i f_i P_i`, averaged over layers (Fedus et al. 2021, eq. 4
    to 6, on each document alone).

    router_logits: per layer, (B * T, E). documents: (B, T), -1 on pads. f_i: how often expert i was among a
    token's `top_k`, averaged over the document's tokens. P_i: mean probability of expert i. Evenly used
    experts give `top_k` per document.
    """
    inside = documents.flatten() >= 0
    index = documents.flatten()[inside]
    count = int(index.max()) + 1
    lengths = torch.zeros(count, device=index.device).index_add(
        0, index, torch.ones_like(index, dtype=torch.float32)
    )[:, None]
    total = torch.zeros((), device=index.device)
    for logits in router_logits:
        probabilities = torch.softmax(logits[inside].float(), -1)
        chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(top_k, -1).indices, 1.0)
        zeros = torch.zeros(count, probabilities.shape[1], device=index.device)
        used, mean = (zeros.index_add(0, index, x) / lengths for x in (chosen, probabilities))
        total = total + probabilities.shape[1] * (used * mean).sum()
    return total / len(router_logits)


def replayed(config: Mapping[str, Any]) -> bool:
    """Returns whether the routing of a language model with this config.json can be replayed. vLLM stores
    experts by the KV slots of full attention, so the model needs a layer with full attention."""
    windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    return config.get("model_type") in REPLAYED and (
        not windowed or "full_attention" in (config.get("layer_types") or ())
    )


class Replay:
    """Overrides a model's routers with `table`: experts of each token and layer, (tokens, layers, k). An
    entry of -1 keeps the router's choice."""

    def __init__(self, model: nn.Module):
        self.table: Tensor | None = None
        routers = {
            name: part
            for name, part in model.named_modules()
            if type(part).__name__.lower().endswith("topkrouter")
        }
        assert routers, f"{type(model).__name__} has no router"
        for name, router in routers.items():
            router.register_forward_hook(partial(self._choose, _layer(name)))

    def _choose(
        self, layer: int, router: nn.Module, _: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if self.table is None:
            return None
        logits, weights, own = output
        wanted = self.table[:, layer].long()
        chosen = torch.where(wanted >= 0, wanted, own)
        # A router with a bias is DeepSeek-V3's (section 2.1.2): it weights experts with a sigmoid, and the
        # bias affects only the choice.
        sigmoid = hasattr(router, "e_score_correction_bias")
        scores = (torch.sigmoid(logits.float()) if sigmoid else torch.softmax(logits.float(), -1)).gather(
            -1, chosen
        )
        if getattr(router, "norm_topk_prob", True):
            scores = scores / scores.sum(-1, keepdim=True)
        return logits, (scores * getattr(router, "routed_scaling_factor", 1.0)).to(weights.dtype), chosen


def _layer(name: str) -> int:
    found = re.search(r"\blayers\.(\d+)\.", name)
    assert found, f"{name} is in no layer"
    return int(found[1])
