"""Translates the launches of a script to recipe stages, which are linked where one stage reads another
stage's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rlhf_core.migrate.draft import Draft, Note, draft_of
from rlhf_core.migrate.flag_values import off_or_number
from rlhf_core.migrate.groups import fit, read_async, read_groups, read_ranks
from rlhf_core.migrate.launches import Launch
from rlhf_core.migrate.script_inputs import Chain, plain, read_data, read_models
from rlhf_core.migrate.settings import (
    put_defaults,
    read_adapters,
    read_ppo,
    read_precision,
    read_schedule,
    read_token_limits,
)
from rlhf_core.migrate.trl.trl_stages import read_trl, reason_of


class Stages(NamedTuple):
    """A recipe's contents apart from its name (`base_model`, `stages` and, if the script sets it, `seed`),
    and the notes about all flags."""

    raw: dict[str, Any]
    notes: list[Note]


def stages_of(launches: Sequence[Launch], gpus: int) -> Stages:
    """Returns the stages into which launches are translated, in order. `gpus`: number of GPUs of one machine,
    for launchers that use all of them.

    Raises ValueError when a command has no model, data or reward.
    """
    chain = Chain()
    notes = list[Note]()
    seeds = list[int]()
    stages: dict[str, dict[str, Any]] = {}
    for launch in launches:
        draft = draft_of(launch, _name(launch.kind, stages))
        if launch.tool == "trl":
            read_trl(draft, launch, chain, gpus)
        else:
            _read_training(draft, launch, chain, gpus)
        _read_seed(draft, seeds)
        draft.drop_rest(reason_of if launch.tool == "trl" else None)
        notes += draft.notes
        stages[draft.name] = (
            draft.fields if draft.name == draft.kind else {"stage": draft.kind, **draft.fields}
        )
    return Stages(
        {"base_model": chain.base, **({"seed": seeds[0]} if seeds else {}), "stages": stages}, notes
    )


def _name(kind: str, stages: dict[str, Any]) -> str:
    same = sum(name == kind or name.startswith(f"{kind}-") for name in stages)
    return kind if not same else f"{kind}-{same + 1}"


def _read_training(draft: Draft, launch: Launch, chain: Chain, gpus: int) -> None:
    """Reads a training command. The order matters: rewards depend on the estimator, groups on the rewards,
    adapters on zero_stage, and sizes on the ranks."""
    output = draft.take("save_path")
    read_precision(draft)
    read_schedule(draft)
    read_token_limits(draft)
    if draft.kind == "ppo":
        draft.read_fields(("advantage_estimator", "freezing_actor_steps", "kl_estimator"))
        read_ppo(draft)
    elif flag := draft.take("ipo"):
        draft.translate(flag, "loss", "ipo")
    read_models(draft, chain)
    read_data(draft)
    if draft.kind == "ppo":
        read_groups(draft)
    else:
        read_ranks(draft, launch.gpus, gpus)
    draft.read_fields()
    if draft.kind == "ppo":
        read_async(draft)
    put_defaults(draft)
    read_adapters(draft)
    fit(draft)
    if output and output.words:
        chain.models[plain(output.first)] = draft.name
        text = f"the model is in the run directory of stage {draft.name}; a `publication` stage copies it"
        draft.note("approximated", output, text)


def _read_seed(draft: Draft, seeds: list[int]) -> None:
    value = draft.read(seed := draft.take("seed"), off_or_number)
    if value is not None:
        seeds.append(value)
        same = value == seeds[0]
        text = "seed of the recipe" if same else f"a recipe has one seed: {seeds[0]}"
        draft.note("translated" if same else "approximated", seed, text)
