"""Computes logits in fp32 with vLLM 0.24, whose `head_dtype` applies only to pooling models."""

from __future__ import annotations

from typing import Any

from rlhf_core.models.logprobs.fp32_head import fp32_product

FP32_HEAD = {"head_dtype": "float32"}  # vLLM's `hf_overrides`


def apply() -> None:
    """Makes models whose config contains FP32_HEAD apply their head in fp32. The head is not quantised."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    made = LogitsProcessor.__init__
    plain = LogitsProcessor._get_logits

    def make(self: Any, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        model = get_current_vllm_config().model_config
        self.in_fp32 = model is not None and getattr(model.hf_config, "head_dtype", None) == "float32"

    def logits_of(self: Any, hidden_states: Any, lm_head: Any, embedding_bias: Any) -> Any:
        if not self.in_fp32:
            return plain(self, hidden_states, lm_head, embedding_bias)
        logits = self._gather_logits(fp32_product(hidden_states, lm_head.weight, embedding_bias))
        return None if logits is None else logits[..., : self.org_vocab_size]

    LogitsProcessor.__init__ = make
    LogitsProcessor._get_logits = logits_of
