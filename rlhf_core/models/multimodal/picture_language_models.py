"""Causal language models of families for which transformers has them only inside the multimodal model."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, Qwen3VLTextConfig, Qwen3VLTextModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLPreTrainedModel


class Qwen3VLTextForCausalLM(Qwen3VLPreTrainedModel, GenerationMixin):
    """The language model of Qwen3-VL with its head. Text has the same position on all three axes of the
    rotary embedding (M-RoPE; Qwen2-VL, section 2.1)."""

    config: Qwen3VLTextConfig
    config_class = Qwen3VLTextConfig
    input_modalities = ("text",)
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^model\.visual\."]
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Qwen3VLTextConfig):
        super().__init__(config)
        self.model = Qwen3VLTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, **options: Any) -> CausalLMOutputWithPast:
        """Returns the logits (B, T, V) of all positions."""
        kept = options.pop("logits_to_keep", 0)
        options.pop("labels", None)
        found = self.model(input_ids=input_ids, **options)
        hidden = found.last_hidden_state[:, -kept:] if kept else found.last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden), past_key_values=found.past_key_values)


PICTURE_LANGUAGE_MODELS = {Qwen3VLTextConfig: Qwen3VLTextForCausalLM}


@cache
def register_picture_language_models() -> None:
    """Registers these classes with `AutoModelForCausalLM` by their configs."""
    for config, model in PICTURE_LANGUAGE_MODELS.items():
        # without exist_ok, transformers skips its own configs
        AutoModelForCausalLM.register(config, model, exist_ok=True)
