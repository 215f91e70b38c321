"""The launches of a script as the stages of a recipe, chained where one reads what another wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rlhf_core.migrate.draft import Draft, Note, draft_of
from rlhf_core.migrate.groups import fit, read_async, read_groups, read_ranks
from rlhf_core.migrate.inputs import Chain, plain, read_data, read_models
from rlhf_core.migrate.launches import Launch
from rlhf_core.migrate.sampling import preferences, task_of
from rlhf_core.migrate.settings import (
    put_defaults,
    read_adapters,
    read_ppo,
    read_precision,
    read_preference,
    read_schedule,
    read_token_limits,
)
from rlhf_core.migrate.values import whole


class Stages(NamedTuple):
    """What a recipe holds besides its name: `base_model`, `stages` and, when the script sets it, `seed`."""

    raw: dict[str, Any]
    notes: list[Note]


def stages_of(launches: Sequence[Launch], gpus: int) -> Stages:
    """The stages of a script, in its order. `gpus`: GPUs of one machine, for launchers that take all there are."""
    chain, notes, seeds = Chain(), list[Note](), list[int]()
    stages: dict[str, dict[str, Any]] = {}
    scorings = [draft for launch in launches if task_of(draft := draft_of(launch, "", "preferences")) == "rm"]
    for launch in launches:
        if launch.kind == "batch_inference":
            draft = draft_of(launch, _name("preferences", stages), "preferences")
            if task_of(draft) == "rm":
                continue
            notes += _read_sampling(draft, scorings, chain)
        else:
            draft = draft_of(launch, _name(launch.kind, stages))
            _read_training(draft, launch, chain, gpus)
        _read_seed(draft, seeds)
        draft.drop_rest()
        notes += draft.notes
        stages[draft.name] = draft.fields if draft.name == draft.kind else {"stage": draft.kind, **draft.fields}
    for scoring in scorings:
        scoring.note("dropped", "--eval_task rm", "it scores answers that no command of the script samples")
        notes += scoring.notes
    return Stages({"base_model": chain.base, **({"seed": seeds[0]} if seeds else {}), "stages": stages}, notes)


def _name(kind: str, stages: dict[str, Any]) -> str:
    same = sum(name == kind or name.startswith(f"{kind}-") for name in stages)
    return kind if not same else f"{kind}-{same + 1}"


def _read_training(draft: Draft, launch: Launch, chain: Chain, gpus: int) -> None:
    """The order matters: rewards ask for the estimator, groups for the rewards, adapters for zero_stage; sizes must fit the ranks."""
    output = draft.take("save_path")
    read_precision(draft)
    read_schedule(draft)
    read_token_limits(draft)
    if draft.kind == "ppo":
        draft.read_fields(("advantage_estimator", "freezing_actor_steps", "kl_estimator"))
        read_ppo(draft)
    else:
        read_preference(draft)
    read_models(draft, chain)
    read_data(draft, chain)
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
        chain.models[plain(output.words[0])] = draft.name
        told = f"the model lies in the run directory of stage {draft.name}; a `publication` stage copies it"
        draft.note("approximated", output.shown, told)


def _read_sampling(draft: Draft, scorings: list[Draft], chain: Chain) -> list[Note]:
    """Reads a sampling command; takes the scoring command that belongs to it from `scorings`. Returns what is to say of that one."""
    written = draft.left.get("output_path")
    place = plain(written.words[0]) if written and written.words else ""
    mine = next((s for s in scorings if (d := s.left.get("dataset")) and d.words and plain(d.words[0]) == place), None)
    preferences(draft, mine, chain)
    draft.read_fields()
    if mine is None:
        return []
    scorings.remove(mine)
    mine.name = draft.name
    mine.drop_rest()
    return mine.notes


def _read_seed(draft: Draft, seeds: list[int]) -> None:
    if seed := draft.take("seed"):
        try:
            seeds.append(max(0, whole(seed.words)))
            same = seeds[-1] == seeds[0]
            told = "seed of the recipe" if same else f"a recipe has one seed: {seeds[0]}"
            draft.note("translated" if same else "approximated", seed.shown, told)
        except ValueError as error:
            draft.note("dropped", seed.shown, str(error))
