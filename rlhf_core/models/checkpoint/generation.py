"""Derives the generation config of an export from the generation config of its initial model."""

from __future__ import annotations

import copy
import re

from transformers import GenerationConfig, PreTrainedTokenizerBase

from rlhf_core.data.chat import Renderer


def with_stop_tokens(generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Returns the generation config with the chat template's end-of-turn token added to the stop tokens. A
    base model's generation config names a different token, so the trained chat model would never stop."""
    try:
        ends = Renderer(tokenizer, "chat").stop_token_ids
    except ValueError:  # no chat template
        return generation
    named = generation.eos_token_id
    there = [named] if isinstance(named, int) else list(named or ())
    missing = [token for token in ends if token not in there]
    if not missing:
        return generation
    changed = copy.deepcopy(generation)
    changed.eos_token_id = [*there, *missing] if len(there) + len(missing) > 1 else missing[0]
    return changed


def used_values(generation: GenerationConfig) -> GenerationConfig:
    """Returns the generation config without its `ignored_values`. transformers generates the same text with
    this config, and can write it."""
    used = copy.deepcopy(generation)
    for name in ignored_values(generation):
        setattr(used, name, None)
    return used


def ignored_values(generation: GenerationConfig) -> list[str]:
    """Returns the names of values with which transformers will not write a generation config, because
    `generate` ignores them.

    These are sampling values without `do_sample`, beam values with a single beam, and a negative padding
    token.
    """
    try:
        generation.validate(strict=True)
    except ValueError as error:  # the message has one line per value
        return re.findall(r"^- `(\w+)`:", str(error), re.MULTILINE)
    return []
