"""Writes down a run of nights as plain values, for the verdicts, the table and the results file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf_core.recipe.loops.loop_record import Record, read
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.publication.champion_record import champions_of
from tests.nights.books import LOOP, faults_of
from tests.nights.faults import named
from tests.nights.life import Life, Night
from tests.nights.sampler import Model
from tests.nights.verdicts import gain

ALARM = re.compile(r"gate failed \(\w+\): stage (\S+): (.+?, and the gate requires .+?)\. ")


def recorded(life: Life, nights: Sequence[Night], held_out: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Returns the whole run: its nights, the rounds with their true gains, the champions, and the faults of
    its books."""
    record = read(life.folder, LOOP)
    reigns = champions_of(life.folder).reigns
    promoted = [reign.model for reign in reigns]
    best = base = _right(life.base, tuple(held_out))
    rounds = []
    champions = []
    held = [("base", base)]
    for number, (digests, refused) in enumerate(_rounds(record), start=1):
        name = next(
            (name for name in digests if name.startswith(f"{LOOP}.round")), f"{LOOP}.round{number}.dpo"
        )
        folder = life.folder.parent / "stages" / f"{name}-{digests.get(name)}"
        if RunDir(folder).result() is None:
            continue
        right = _right(folder / "checkpoint", tuple(held_out))
        found = gain(right, best)
        is_champion = name in promoted
        about = dict(
            round=number, right=fmean(right), gain=found._asdict(), better=found.better, worse=found.worse
        )
        rounds.append({**about, "promoted": is_champion, "refused": refused})
        if is_champion:
            worse = [other for other, shares in held if gain(right, shares).worse]
            champions.append({"model": name, "right": fmean(right), "worse_than": ", ".join(worse)})
            held.append((name, right))
            best = right
    told = [_night(night, nights[i + 1 : i + 2], nights[:i]) for i, night in enumerate(nights)]
    return {
        "seed": life.faults.seed,
        "base": fmean(base),
        "nights": told,
        "rounds": rounds,
        "champions": champions,
        "books": faults_of(life, nights),
    }


@cache
def _right(folder: Path, questions: tuple[tuple[str, str], ...]) -> list[float]:
    """The probabilities of the right answers; the model in a folder that is named by a digest does not
    change."""
    return Model(folder).right(questions)


def _rounds(record: Record) -> list[tuple[dict[str, str], str]]:
    """The digests of each round's stages and why it was refused, with the round in progress."""
    begun = [(record.begun.stages, "")] if record.begun else []
    return [(done.stages, done.refused) for done in record.rounds] + begun


def _night(night: Night, following: Sequence[Night], before: Sequence[Night]) -> dict[str, Any]:
    """A night, the gates that failed in it beside those on its candidate, and where each of its faults is
    named."""
    gates = [f"{stage}: {what}" for text in night.outputs for stage, what in ALARM.findall(text)]
    alarms = [gate for gate in dict.fromkeys(gates) if not gate.startswith("evaluation: ")]
    if not night.states[-1].startswith("COMPLETED") and not any(
        gate.startswith("evaluation: ") for gate in gates
    ):
        alarms.append(night.states[-1].splitlines()[0][:200])
    pages = [[other.pages for other in nights] for nights in ((night, *following), before)]
    where = {kind: named(kind, night.round, *pages) for kind in night.faults}
    states = [state.splitlines()[0][:300] for state in night.states]
    return {
        "number": night.number,
        "faults": list(night.faults),
        "named": where,
        "champion": night.champion,
        "champion_after": night.champion_after,
        "round": night.round,
        "rows": night.new,
        "gates": list(dict.fromkeys(gates)),
        "alarms": alarms,
        "states": states,
        "seconds": round(night.seconds, 1),
    }


def copy_texts(source: Path, to: Path) -> None:
    """Copies what a person may want to read of a run: records, reports, logs, results; no weights."""
    for file in source.rglob("*"):
        if (
            file.suffix in (".json", ".html", ".txt", ".log", ".md", ".yaml")
            and file.is_file()
            and not file.is_symlink()
        ):
            place = to / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read_bytes())
