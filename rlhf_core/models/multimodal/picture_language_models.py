"""Defines the causal language models of families for which transformers has only the multimodal model.

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
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2VLTextConfig,
    Qwen2VLTextModel,
    Qwen3VLTextConfig,
    Qwen3VLTextModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLPreTrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLPreTrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLPreTrainedModel


class HeadOverThreeAxes:
    """The head over a language model, `text_model`, whose tokens have a position on each of three axes of the
    rotary embedding (M-RoPE; Qwen2-VL, section 2.1). Text has the same position on all of them."""

    input_modalities = ("text",)
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^(model\.)?visual\."]
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    text_model: ClassVar[type[PreTrainedModel]]

    def __init__(self, config: PretrainedConfig):
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self.text_model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]

    def forward(self, input_ids: Tensor | None = None, **options: Any) -> CausalLMOutputWithPast:
        """Returns the logits (B, T, V) of all positions."""
        kept = options.pop("logits_to_keep", 0)
        options.pop("labels", None)
        found = self.model(input_ids=input_ids, **options)
        hidden = found.last_hidden_state[:, -kept:] if kept else found.last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden), past_key_values=found.past_key_values)


class Qwen2VLTextForCausalLM(HeadOverThreeAxes, Qwen2VLPreTrainedModel, GenerationMixin):
    """The language model of Qwen2-VL with its head."""

    config: Qwen2VLTextConfig
    config_class = Qwen2VLTextConfig
    text_model = Qwen2VLTextModel


class Qwen25VLTextForCausalLM(HeadOverThreeAxes, Qwen2_5_VLPreTrainedModel, GenerationMixin):
    """The language model of Qwen2.5-VL with its head."""

    config: Qwen2_5_VLTextConfig
    config_class = Qwen2_5_VLTextConfig
    text_model = Qwen2_5_VLTextModel


class Qwen3VLTextForCausalLM(HeadOverThreeAxes, Qwen3VLPreTrainedModel, GenerationMixin):
    """The language model of Qwen3-VL with its head."""

    config: Qwen3VLTextConfig
    config_class = Qwen3VLTextConfig
    text_model = Qwen3VLTextModel


PICTURE_LANGUAGE_MODELS = {
    Qwen2VLTextConfig: Qwen2VLTextForCausalLM,
    Qwen2_5_VLTextConfig: Qwen25VLTextForCausalLM,
    Qwen3VLTextConfig: Qwen3VLTextForCausalLM,
}


# Language models that read the bounds of documents only from the first of four rows of positions.
BOUNDS_FROM_FOUR = ("qwen2_5_vl_text", "qwen2_vl_text")


def with_bounds(config: PretrainedConfig, positions: Tensor) -> Tensor:
    """Returns the positions to pass to a language model, given the positions of texts, (B, T). These are the
    same positions, or (4, B, T) for a model that can separate packed documents only in this form. Positions
    that have axes stay as they are."""
    if positions.ndim == 3 or config.model_type not in BOUNDS_FROM_FOUR:
        return positions
    return positions[None].expand(4, *positions.shape)


def has_causal_class(config: PretrainedConfig) -> bool:
    """Returns whether this module or transformers has a causal language model for the config."""
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
