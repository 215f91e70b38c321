"""Finds training passes that fit into a GPU's memory: how many tokens they have and how many layers are
recomputed. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rlhf_core.config import Optimised


class Pass(NamedTuple):
    """A training pass: its tokens, which `sequence_parallel_size` ranks compute together, and the fraction of
    layers whose activations are recomputed in the backward half."""

    tokens: int
    recomputed: float

    def __str__(self) -> str:
        layers = {0.0: "nothing", 1.0: "all layers"}.get(
            self.recomputed, f"{self.recomputed:.0%} of the layers"
        )
        return f"{self.tokens:,} tokens a pass, {layers} recomputed"


def recipe_pass(config: Optimised, ranks: int) -> Pass:
    """Returns the recipe's passes on each of `ranks`, for documents of full length. No pass is longer than an
    optimiser step."""
    tokens = config.train_pass.most_tokens(config.longest)
    return Pass(max(config.longest, min(tokens, _most(config, ranks))), config.gradient_checkpointing)


def as_laid(config: Optimised, ranks: int) -> tuple[Pass, int]:
    """Returns an optimiser step's passes on each of `ranks`, filled with complete documents of full length.
    The result consists of a pass, with its tokens per rank, and the number of passes."""
    configured = recipe_pass(config, ranks)
    documents = _documents(config, ranks)
    passes = math.ceil(documents / (configured.tokens // config.longest))
    return (
        configured._replace(
            tokens=on_rank(documents * config.longest // passes, config.sequence_parallel_size)
        ),
        passes,
    )


def sums_in_fp32(config: Optimised, ranks: int) -> bool:
    """Returns whether the bf16 gradients of passes are summed in fp32. They are if a step may have several
    passes on one of `ranks` and the recipe's DeepSpeed options do not request sums in bf16."""
    types = config.deepspeed.get("data_types")
    asked = types.get("grad_accum_dtype", "fp32") if isinstance(types, Mapping) else "fp32"
    return several_passes(config, ranks) and asked == "fp32"


def several_passes(config: Optimised, ranks: int) -> bool:
    """Returns whether an optimiser step with documents of full length may have several passes on one of
    `ranks`."""
    documents = config.train_pass.most_documents(config.longest)
    return config.train_batch_size > documents * max(1, ranks // config.sequence_parallel_size)


def on_rank(tokens: int, sharing: int) -> int:
    """Returns the tokens of a pass on each of the ranks that share it."""
    return math.ceil(tokens / sharing)


def alternatives(config: Optimised) -> list[Pass]:
    """Returns the recipe's passes, followed by alternatives: longer and shorter passes, with fewer and with
    more layers recomputed."""
    ranks = min(_ranks(config))
    least = config.longest
    configured = recipe_pass(config, ranks)
    most = _most(config, ranks)
    doubled = [longer for n in range(1, 12) if (longer := configured.tokens << n) <= most]
    halved = [shorter for n in range(1, 12) if (shorter := configured.tokens >> n) >= least]
    lengths = dict.fromkeys([configured.tokens, *doubled, *halved, least])
    return [
        Pass(tokens, share)
        for share in dict.fromkeys((configured.recomputed, 0.0, 0.5, 1.0))
        for tokens in lengths
    ]


def fields_of(what: Pass, config: Optimised) -> dict[str, Any]:
    """Returns the passes as recipe fields: in documents if the recipe counts documents and they divide its
    optimiser step evenly, otherwise in tokens."""
    documents, rest = divmod(what.tokens, config.longest)
    counted = config.train_pass.tokens is None and not rest
    sharing = config.sequence_parallel_size
    divides = counted and all(
        config.train_batch_size % (documents * ranks // sharing) == 0 for ranks in _ranks(config)
    )
    length = {"micro_train_batch_size": documents} if divides else {"micro_train_tokens": what.tokens}
    return length | {"gradient_checkpointing": what.recomputed}


def _ranks(config: Optimised) -> list[int]:
    return [ranks.world_size for ranks in config.trained_ranks.values()]


def _most(config: Optimised, ranks: int) -> int:
    """Returns the tokens of an optimiser step on one rank, or on the ranks that share passes."""
    return _documents(config, ranks) * config.longest


def _documents(config: Optimised, ranks: int) -> int:
    return max(1, config.train_batch_size * config.sequence_parallel_size // ranks)
