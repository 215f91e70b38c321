"""Configures which weights are trained, and how the optimiser treats them. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rlhf_core.records import Config, InDigestIfSet, Rate, check

Decayed = Literal["matrices", "hidden", "all"]
ImageEncoder = Literal["frozen", "projector", "trained"]


class Freeze(Config):
    """Weights that are not trained."""

    embeddings: bool = Field(
        False, description="freeze the token embeddings, and the head if it is the same matrix"
    )
    layers: int = Field(0, ge=0, description="freeze the first N layers")
    names: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        description=(
            "freeze weights by their names in the model's code: one or more patterns, in which * matches any"
            " text, such as *.mlp.gate.weight"
        ),
    )

    @field_validator("names", mode="before")
    @classmethod
    def _a_text_is_a_pattern(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @check
    def _check_something_is_frozen(self) -> Iterator[str]:
        if not self.embeddings and not self.layers and not self.names:
            yield "freeze names nothing to freeze: set embeddings, layers or names, or leave freeze out"


EMA = "ema"  # name of the export


class OptimiserFields(Config):
    """Optimiser fields that training stages and PPO share, without the optimiser's constants."""

    optimizer: Annotated[Literal["adamw", "muon"], InDigestIfSet] = Field(
        "adamw",
        description=(
            "muon: train the matrices of the model's layers with Muon (Jordan et al. 2024), and all other"
            " weights with AdamW. Muon's updates are scaled to AdamW's size (Liu et al. 2025), so"
            " learning_rate and weight_decay keep their meaning. Needs plain torch, each model on one rank"
        ),
    )
    decay: Annotated[Decayed, InDigestIfSet] = Field(
        "matrices",
        description=(
            "weights that weight_decay applies to. matrices: all except vectors (norms, biases); hidden:"
            " matrices except embeddings and heads; all: all weights"
        ),
    )
    ema: Annotated[float | None, InDigestIfSet] = Field(
        None,
        gt=0,
        lt=1,
        description=(
            "also export a moving average of the trained weights (in ppo: the actor's), which other stages"
            " refer to as STAGE.ema; each optimiser step keeps this share of the average (0.99: an average"
            " over about 100 steps)"
        ),
    )
    freeze: Annotated[Freeze | None, InDigestIfSet] = Field(
        None,
        description="weights that are not trained (in ppo: of actor and critic); default: all are trained",
    )
    image_encoder: Annotated[ImageEncoder, InDigestIfSet] = Field(
        "frozen",
        description=(
            "data with images: what is trained of the encoder that reads them (in ppo: of the actor's)."
            " projector: the part between it and the language model; trained: all of it. To train the"
            " projector alone, freeze the language model: freeze: {names: '*'}"
        ),
    )
    image_encoder_learning_rate: Annotated[Rate | None, InDigestIfSet] = Field(
        None,
        description=(
            "with image_encoder: peak learning rate of what is trained of the encoder, on the same schedule;"
            " default: that of the language model (in ppo: of the actor)"
        ),
    )
