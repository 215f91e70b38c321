"""Causal language models of families for which transformers has them only inside the multimodal model.

They are not registered with `AutoModelForCausalLM`, which ignores registered classes for its own configs
before transformers 5.18.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3VLTextConfig,
    Qwen3VLTextModel,
)
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


def has_causal_class(config: PretrainedConfig) -> bool:
    """Returns whether there is a causal language model for the config, here or in transformers."""
    return type(config) in PICTURE_LANGUAGE_MODELS or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def load_causal(path: str, **options: Any) -> PreTrainedModel:
    """Loads a causal language model. `options`: of `from_pretrained`."""
    config = options.get("config")
    if config is None:
        config = AutoConfig.from_pretrained(path, trust_remote_code=options.get("trust_remote_code"))
    own = PICTURE_LANGUAGE_MODELS.get(type(config), AutoModelForCausalLM)
    model: PreTrainedModel = own.from_pretrained(path, **options)
    return model


def causal_from_config(config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """Returns a causal language model with random weights."""
    own = PICTURE_LANGUAGE_MODELS.get(type(config))
    if own is not None:
        return own(config)
    return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
