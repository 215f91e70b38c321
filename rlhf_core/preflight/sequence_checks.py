"""Finds sequence lengths that exceed the positions of a stage's models. Also finds models that the ranks of a
stage with `sequence_parallel_size` cannot share. Torch-free.

The stage itself checks Hub ids and properties that are not in config.json, and rejects such models before its
first step (see `models/kernels/attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from rlhf_core.config import KINDS, PPO, Optimised
from rlhf_core.hub.model_config import STATEFUL_LAYERS, text_config
from rlhf_core.hub.positions import require_positions, stored_config
from rlhf_core.recipe.plan import Node


def length_problems(node: Node, start_of: Callable[[str], str | None]) -> list[str]:
    """Returns a sentence for each model that would receive more tokens than it has positions. Considers
    training, answering, scoring for a calibration, and sampling in vLLM.

    `start_of` returns the folder or Hub id of the model that a named model ultimately starts from. Training
    does not change the number of positions.
    """
    asked = node.config.lengths(getattr(node.config, KINDS[node.kind].start, ""))
    stage = node.name.partition(".")[0]
    problems = []  # names the recipe's stage, so it is reported once for all rounds of a loop
    for (field, name), (tokens, what) in asked.items():
        if not name:
            continue  # a kind from another package, which has no start model
        place = start_of(name) or ""
        try:
            require_positions(place, stored_config(place), tokens, what)
        except ValueError as error:
            problems.append(f"stages.{stage}{field}: {error}")
    return problems


def sequence_problems(node: Node, start_of: Callable[[str], str | None]) -> list[str]:
    """Returns a sentence for each model whose layers or number of attention heads prevent the ranks from
    sharing it. `start_of` returns the folder or Hub id of the model from which a named model's training
    began."""
    config = node.config
    problems = dict[str, None]()
    if not isinstance(config, Optimised) or config.sequence_parallel_size == 1:
        return []
    ranks = config.sequence_parallel_size
    where = f"stages.{node.name.partition('.')[0]}.sequence_parallel_size"
    for name in _shared(config, KINDS[node.kind].start):
        place = start_of(name)
        text = text_config(stored_config(place or ""))
        kinds = {*(text.get("layer_types") or ()), *(text.get("layers_block_type") or ())} & STATEFUL_LAYERS
        heads = text.get("num_attention_heads")
        if kinds:
            problems[
                f"{where}: {place} has layers that carry state along a row ({', '.join(sorted(kinds))}):"
                " leave it out"
            ] = None
        elif isinstance(heads, int) and heads % ranks:
            problems[
                f"{where}: {ranks} ranks cannot share the {heads} attention heads of {place} equally: set it"
                " to a divisor"
            ] = None
    return list(problems)


def _shared(config: Optimised, start: str) -> list[str]:
    """Returns the names of the models whose passes are computed by several ranks together."""
    names = [getattr(config, start), getattr(config, "critic", None)]
    if isinstance(config, PPO):
        names += [
            name
            for role, name in config.read_names.items()
            if role in config.groups and config.sharing_of(role) > 1
        ]
        names += [config.reward_models[0].model] if config.has_critic and config.critic is None else []
    else:
        names.append(getattr(config, "reference", None))
    return [name for name in names if isinstance(name, str)]
