"""Training passes that a card has room for: how many tokens they have, and how many layers are computed again. Torch-free."""

from __future__ import annotations

from typing import Any, NamedTuple

from rlhf_core.config import DPO, PPO, RewardModel, Trainable


class Pass(NamedTuple):
    """Tokens of a training pass on one rank, and the share of the layers whose activations are computed again in its backward half."""

    tokens: int
    recomputed: float

    def __str__(self) -> str:
        layers = {0.0: "nothing", 1.0: "all layers"}.get(self.recomputed, f"{self.recomputed:.0%} of the layers")
        return f"{self.tokens:,} tokens a pass, {layers} recomputed"

    @property
    def fields(self) -> dict[str, Any]:
        """What a recipe says to have it."""
        return {"micro_train_tokens": self.tokens, "gradient_checkpointing": self.recomputed}


def as_told(config: PPO | Trainable) -> Pass:
    """The passes of a recipe, whose documents have full length."""
    documents = config.micro_train_batch_size * (2 if isinstance(config, DPO | RewardModel) else 1)  # of a pair
    return Pass(config.micro_train_tokens or documents * longest(config), config.gradient_checkpointing)


def longest(config: PPO | Trainable) -> int:
    """Tokens of the longest document."""
    return config.prompt_max_len + config.generate_max_len if isinstance(config, PPO) else config.max_len


def alternatives(config: PPO | Trainable) -> list[Pass]:
    """The recipe's passes first, then others: halved down to one document (or a pair), with fewer and with more layers recomputed."""
    told = as_told(config)
    least = longest(config) * (2 if isinstance(config, DPO | RewardModel) else 1)
    lengths = [told.tokens] + [half for n in range(1, 12) if (half := told.tokens >> n) >= least]
    return [Pass(tokens, share) for share in dict.fromkeys((told.recomputed, 0.0, 0.5, 1.0)) for tokens in lengths]
