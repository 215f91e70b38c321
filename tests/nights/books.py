"""Checks that nothing was lost and nothing done twice: feedback, rounds, commits on the Hub, champions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.take import VIEWS
from rlhf_core.recipe.loops.loop_record import Record, read
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.publication.champion_record import BRANCH, champions_of
from tests.nights.life import Life, Night

LOOP = "nights"
REPOSITORY = "town/model"


def faults_of(life: Life, nights: Sequence[Night]) -> list[str]:
    """Returns a sentence for each thing that is missing or was done twice; empty when all is well."""
    record = read(life.folder, LOOP)
    return [*_feedback(life, nights), *_rounds(life, record), *_published(life, record)]


def _feedback(life: Life, nights: Sequence[Night]) -> Iterator[str]:
    """Each row that was sent is in the inbox once."""
    kinds = Inbox(life.here.folder / "town.inbox").kinds()
    stored = sum(kinds.values())
    for night in nights:
        if night.duplicate != night.again:
            yield (
                f"day {night.number}: {night.again} rows were sent twice, and {night.duplicate} of them"
                " counted as known"
            )
    if stored != sum(night.new for night in nights):
        yield f"the inbox has {stored} rows, and its endpoint accepted {sum(night.new for night in nights)}"


def _rounds(life: Life, record: Record) -> Iterator[str]:
    """Each row that a round can use was in one round, a used one or a refused one; each round was made
    once."""
    inbox = Inbox(life.here.folder / "town.inbox")
    ends = [done.taken[inbox.id] for done in (*record.rounds, *([record.begun] if record.begun else []))]
    for before, after in pairwise([0, *ends]):
        if after <= before:
            yield f"a round ends with row {after}, and the one before it with {before}"
    trained: Counter[int] = Counter()
    for digests in [done.stages for done in record.rounds] + ([record.begun.stages] if record.begun else []):
        for name, digest in digests.items():
            if name.startswith(f"{LOOP}.round"):
                trained.update(_rows_of(life.folder.parent / "stages" / f"{name}-{digest}"))
    usable = {stored.seq for stored in inbox.rows(VIEWS["preference"], 0, ends[-1] if ends else 0)}
    lost = usable - set(trained)
    if lost:
        yield f"{len(lost)} rows were in no round, the first is {min(lost)}"
    twice = [seq for seq, count in trained.items() if count > 1]
    if twice:
        yield f"{len(twice)} rows were in two rounds, the first is {min(twice)}"
    strange = set(trained) - usable
    if strange:
        yield f"{len(strange)} rows were trained on before their round took them, the first is {min(strange)}"
    made = Counter(
        folder.name.rpartition("-")[0]
        for folder in (life.folder.parent / "stages").glob(f"{LOOP}.round*")
        if RunDir(folder).result()
    )
    several = [name for name, count in made.items() if count > 1]
    if several:
        yield f"these rounds were trained twice: {', '.join(several)}"


def _rows_of(run_dir: Path) -> set[int]:
    """The numbers of the rows of feedback that a stage was given."""
    request = RunDir(run_dir).request()
    if request is None:
        return set()
    lines = Path(request.config.data.sources[0].path).read_text().splitlines()  # type: ignore[union-attr]
    return {json.loads(line)["feedback"] for line in lines}


def _published(life: Life, record: Record) -> Iterator[str]:
    """Each round that is used was published in one commit with one tag, and was the champion once, in
    order."""
    champions = champions_of(life.folder)
    repository = life.hub.repositories.get(REPOSITORY)
    reigns = [reign.model for reign in champions.reigns]
    used = [
        f"{LOOP}.round{number}.dpo" for number, done in enumerate(record.rounds, start=1) if not done.refused
    ]
    if champions.moving is not None:
        yield f"a move of the champion to {champions.moving.model} is not completed"
    if reigns != used:
        yield (
            f"the champions were {', '.join(reigns) or 'none'}, and the rounds that are used are"
            f" {', '.join(used) or 'none'}"
        )
    if repository is None:
        if used:
            yield f"{REPOSITORY} is not on the Hub"
        return
    commits = [reign.commit for reign in champions.reigns]
    history = repository.history()[:-1]  # without the one that made the repository
    if len(history) != len(commits) or len(set(commits)) != len(commits):
        yield f"the Hub has {len(history)} commits for {len(commits)} champions"
    if sorted(repository.tags.values()) != sorted(filter(None, commits)):
        yield f"the Hub has {len(repository.tags)} tags for {len(commits)} champions"
    if repository.branches.get(BRANCH) != (commits[-1] if commits else None):
        yield f"the branch {BRANCH} on the Hub is not at the champion's commit"
