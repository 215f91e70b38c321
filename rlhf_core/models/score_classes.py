"""Adds a transformers class with a scalar head for model families that have no such class (such as Granite,
GLM-4 MoE, Nemotron-H and LFM2)."""

from __future__ import annotations

from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForSequenceClassification


def add_score_class(config: PretrainedConfig) -> None:
    """Registers a class for `AutoModelForSequenceClassification` if transformers has no such class for the
    family of `config`. The class consists of the family's backbone, under the name that its checkpoints use,
    and a linear layer `score`. Skips families that transformers does not know."""
    kind = type(config)
    if kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or kind not in MODEL_MAPPING:
        return
    backbone = MODEL_MAPPING[kind]
    family = next(base for base in backbone.__mro__ if base.__name__.endswith("PreTrainedModel"))
    name = f"{backbone.__name__.removesuffix('Model')}ForSequenceClassification"
    own = {
        "__module__": __name__,
        "config_class": kind,
        "base_model_prefix": family.base_model_prefix or backbone.base_model_prefix,
    }
    made = type(name, (GenericForSequenceClassification, family), own)
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(kind, None)
    renamed = None if whole is None else get_checkpoint_conversion_mapping(whole.__name__)
    if renamed is not None:  # names in checkpoints other than those of the class
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    # without exist_ok nothing is registered for a family of transformers
    AutoModelForSequenceClassification.register(kind, made, exist_ok=True)
    # transformers before 5.19 skips its own families anyway
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING._extra_content[kind] = made
