"""Training passes that fit into the memory of a GPU: how many tokens they have, and how many layers are computed again. Torch-free."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from rlhf_core.config import DPO, PPO, RewardModel, Trainable


class Pass(NamedTuple):
    """Tokens of a training pass on one rank, and the share of the layers whose activations are computed again in its backward half."""

    tokens: int
    recomputed: float

    def __str__(self) -> str:
        layers = {0.0: "nothing", 1.0: "all layers"}.get(self.recomputed, f"{self.recomputed:.0%} of the layers")
        return f"{self.tokens:,} tokens a pass, {layers} recomputed"


def longest(config: PPO | Trainable) -> int:
    """Tokens of the longest document, or pair of them: less is in no pass."""
    if isinstance(config, PPO):
        return config.prompt_max_len + config.generate_max_len
    return config.max_len * (2 if isinstance(config, DPO | RewardModel) else 1)


def recipe_pass(config: PPO | Trainable, ranks: int) -> Pass:
    """The passes of a recipe on each of `ranks`, of documents of full length; none is longer than an optimiser step."""
    tokens = config.micro_train_tokens or config.micro_train_batch_size * longest(config)
    return Pass(max(longest(config), min(tokens, _most(config, ranks))), config.gradient_checkpointing)


def as_laid(config: PPO, ranks: int) -> tuple[Pass, int]:
    """The passes of an optimiser step on each of `ranks` as whole documents of full length fill them, and how many."""
    configured, documents = recipe_pass(config, ranks), max(1, config.train_batch_size // ranks)
    passes = math.ceil(documents / (configured.tokens // longest(config)))
    return configured._replace(tokens=documents * longest(config) // passes), passes


def alternatives(config: PPO | Trainable) -> list[Pass]:
    """The recipe's passes first, then others: longer and shorter ones, with fewer and with more layers recomputed."""
    ranks, least = min(_ranks(config)), longest(config)
    configured, most = recipe_pass(config, ranks), _most(config, ranks)
    doubled = [longer for n in range(1, 12) if (longer := configured.tokens << n) <= most]
    halved = [shorter for n in range(1, 12) if (shorter := configured.tokens >> n) >= least]
    lengths = dict.fromkeys([configured.tokens, *doubled, *halved, least])
    return [Pass(tokens, share) for share in dict.fromkeys((configured.recomputed, 0.0, 0.5, 1.0)) for tokens in lengths]


def fields_of(what: Pass, config: PPO | Trainable) -> dict[str, Any]:
    """How a recipe says them: by documents where this one counts those, and they divide its optimiser step, else by tokens."""
    documents, rest = divmod(what.tokens, longest(config))
    counted = config.micro_train_tokens is None and not rest
    divides = counted and all(config.train_batch_size % (documents * ranks) == 0 for ranks in _ranks(config))
    length = {"micro_train_batch_size": documents} if divides else {"micro_train_tokens": what.tokens}
    return length | {"gradient_checkpointing": what.recomputed}


def _ranks(config: PPO | Trainable) -> list[int]:
    if isinstance(config, PPO):
        return [ranks.world_size for name, ranks in config.groups.items() if name in ("actor", "critic")]
    return [config.ranks.world_size]


def _most(config: PPO | Trainable, ranks: int) -> int:
    """Tokens of an optimiser step on one rank."""
    return max(1, config.train_batch_size // ranks) * longest(config)
