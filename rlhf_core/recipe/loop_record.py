"""Finds the next round of a loop from `loop.json` and the run directories on disk. Torch-free, without
Prefect.

`<artifacts>/<recipe>/loop.json` holds the finished rounds with the digests of their stages, and the round in
progress. Finished rounds keep these digests in every later plan, so an edited recipe applies to later rounds
and repeats none. Rounds trained by another command (`alignflow run` with more `rounds`) are found by their
run directories. `loop.lock` lets only one process work on a loop; the system frees it when that process dies.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field, ValidationError

from rlhf_core.config import KINDS, Evaluation, Recipe
from rlhf_core.config.gates import Verdict
from rlhf_core.config.kinds import has_metric
from rlhf_core.hub.revisions import Pins
from rlhf_core.recipe.gate_checks import gates_of, holding
from rlhf_core.recipe.inboxes import ends_of, pinned_ends, rows_awaited
from rlhf_core.recipe.plan import Plan, plan
from rlhf_core.recipe.sentences import unknown
from rlhf_core.records import Frozen
from rlhf_core.runs.run_dir import RESULT, RunDir
from rlhf_core.system.files import locked, write_text

FILE = "loop.json"
LOCK = "loop.lock"
ROLLED_BACK = "rolled back"  # how the reason for leaving out a used round begins


class Round(Frozen):
    """A finished round.

    `stages`: the digest of each of its stages. `begun`: start of the attempt that finished it (None: another
    command trained it). `win_rate`: against the baseline; None when no evaluation judged it. `before`: the
    previous round's win rate in the same evaluation. `taken`: the newest row of each inbox (by its id) that
    the round trained on. `refused`: why its model is not used, or ''.
    """

    stages: dict[str, str]
    begun: datetime | None
    ended: datetime
    win_rate: float | None = None
    before: float | None = None
    taken: dict[str, int] = Field({})
    refused: str = ""


class RoundInProgress(Frozen):
    """The round in progress: the digests of its stages, the start of its last attempt, and the newest row
    that it takes from each inbox."""

    stages: dict[str, str]
    at: datetime
    taken: dict[str, int] = Field({})


class Record(Frozen):
    """The content of `loop.json`."""

    loop: str
    rounds: tuple[Round, ...] = ()
    begun: RoundInProgress | None = None

    @property
    def refused(self) -> frozenset[str]:
        """The names of refused rounds."""
        return frozenset(
            f"{self.loop}.round{number}" for number, done in enumerate(self.rounds, start=1) if done.refused
        )

    @property
    def used(self) -> list[Round]:
        """The finished rounds whose models are used, in order."""
        return [done for done in self.rounds if not done.refused]


@dataclass(frozen=True)
class LoopState:
    """The state of a loop: its record, the number of the next round, and the plan up to that round. `failed`:
    the gates that stop it. `waits`: a sentence on what the next round waits for, or ''."""

    record: Record
    number: int
    plan: Plan
    failed: tuple[Verdict, ...]
    waits: str = ""

    @property
    def held(self) -> tuple[Verdict, ...]:
        """The failed gates of the round in progress: on its stages and on their dependents."""
        ours = {node.name for node in self.plan.stages_of(f"{self.record.loop}.round{self.number}")}
        for node in self.plan.nodes:  # parents first
            if ours.intersection(node.parents):
                ours.add(node.name)
        return tuple(verdict for verdict in self.failed if verdict.stage in ours)

    @property
    def turned_down(self) -> bool:
        """Whether a person refused the round in progress, or did not approve it in time."""
        return self.record.begun is not None and any(verdict.gate.approve for verdict in self.held)

    @property
    def waiting(self) -> tuple[Verdict, ...]:
        """The gates that wait for a person's approval."""
        return _waiting(self.plan)

    @property
    def renewed(self) -> bool:
        """Whether a gate failed in the round in progress and its inboxes have rows for another round."""
        taken = self.record.begun.taken if self.record.begun else {}
        title = f"{self.record.loop}.round{self.number}"
        return bool(self.held and taken) and not rows_awaited(
            self.plan.recipe, self.record.loop, self.number + 1, {title: taken}
        )

    def done(self) -> tuple[str, ...]:
        """Returns the names of the next round's finished stages."""
        return tuple(
            node.name for node in self.plan.stages_of(f"{self.record.loop}.round{self.number}") if node.done
        )

    def why_not(
        self, max_rounds: int | None = None, min_gain: float | None = None, due: datetime | None = None
    ) -> str:
        """Returns a sentence on why the next round should not begin; '' when it should.

        It should not begin after `max_rounds` rounds, if the last round raised the win rate by `min_gain` or
        less, or if the last round began after `due`, this run's scheduled time, and so replaces this run.
        """
        rounds = self.record.rounds
        used = self.record.used
        if max_rounds is not None and len(rounds) >= max_rounds:
            refused = f" ({len(rounds) - len(used)} of them refused)" if len(used) < len(rounds) else ""
            return (
                f"{len(rounds)} rounds are done{refused}, and --max-rounds (parameter max_rounds of the flow)"
                f" is {max_rounds}"
            )
        if min_gain is not None and len(used) > 1:
            last = used[-1].win_rate
            before = used[-2].win_rate if used[-1].before is None else used[-1].before
            if before is not None and last is not None and last - before <= min_gain:
                change = f"from {before:.3f} to {last:.3f} in round {rounds.index(used[-1]) + 1}"
                return f"the win rate went {change}: it does not rise by more than {min_gain:g}"
        if due is not None and rounds and rounds[-1].begun is not None and rounds[-1].begun > due:
            return (
                f"round {len(rounds)} was begun and finished after {due:%Y-%m-%d %H:%M:%S} UTC, when this run"
                " was due"
            )
        return self.waits


LOOPS = " or ".join(name for name, kind in KINDS.items() if kind.is_loop)


def loop_of(recipe: Recipe, name: str | None = None) -> str:
    """Returns the name of a recipe's loop stage. Raises ValueError if there is none of that name, none at
    all, or several and no name."""
    loops = [stage for stage, config in recipe.stages.items() if KINDS[config.stage].is_loop]
    if name is not None and name not in loops:
        raise ValueError(
            f"recipe {recipe.name}: {unknown(name, loops, 'loop')}; name a stage of kind {LOOPS}"
        )
    if name is None and len(loops) != 1:
        what = (
            f"{len(loops)} loops ({', '.join(loops)}): say which one with `stage`"
            if loops
            else f"no stage of kind {LOOPS}"
        )
        raise ValueError(f"recipe {recipe.name} has {what}")
    return name or loops[0]


def check_judged(recipe: Recipe, loop: str) -> None:
    """Raises ValueError if no evaluation judges rounds of the loop, as `min_gain` needs."""
    judged = [
        model for config in recipe.stages.values() if type(config) is Evaluation for model in config.models
    ]
    if not any(model == loop or model.startswith(f"{loop}.round") for model in judged):
        raise ValueError(
            f"recipe {recipe.name}: --min-gain (parameter min_gain of the flow) needs an evaluation that"
            f" judges {loop}: add one, or leave it out"
        )


def with_rounds(recipe: Recipe, loop: str, rounds: int) -> Recipe:
    """Returns the recipe with another number of rounds. Rounds in both recipes keep their digests."""
    return recipe.model_copy(
        update={"stages": recipe.stages | {loop: recipe.stages[loop].model_copy(update={"rounds": rounds})}}
    )


def folder_of(recipe: Recipe) -> Path:
    """Returns the recipe's folder, `<artifacts>/<recipe>`."""
    return Path(recipe.artifacts).absolute() / recipe.name


def read(folder: Path, loop: str) -> Record:
    """Returns the record of a loop; an empty one when there is no file. Raises ValueError if it is damaged or
    belongs to another loop."""
    try:
        text = (folder / FILE).read_text()
    except FileNotFoundError:
        return Record(loop=loop)
    try:
        record = Record.model_validate_json(text)
    except ValidationError:
        raise ValueError(
            f"{folder / FILE} cannot be read: restore it, or remove it to find the rounds by their"
            " directories"
        ) from None
    if record.loop != loop:
        raise ValueError(
            f"{folder / FILE} is of the loop {record.loop}, not of {loop}: rename the stage back, or give the"
            " recipe a new name"
        )
    return record


def loop_state(recipe: Recipe, loop: str) -> LoopState:
    """Reads the state of a loop from its record and the run directories.

    Raises ValueError if a finished round's run directory is missing or incomplete, and like `read` and
    `plan`.
    """
    folder = folder_of(recipe)
    record = read(folder, loop)
    kept = {name: digest for done in record.used for name, digest in done.stages.items()}
    _check_there(recipe, loop, kept)
    begun = record.begun.stages if record.begun else {}
    number = len(record.rounds) + 1
    taken = {f"{loop}.round{i}": done.taken for i, done in enumerate(record.rounds, start=1) if done.taken}
    taken |= {f"{loop}.round{number}": record.begun.taken} if record.begun and record.begun.taken else {}
    if begun and all(RunDir(_run_dir(recipe, name, digest)).result() for name, digest in begun.items()):
        held = _failed(plan(with_rounds(recipe, loop, number), kept | begun, taken, record.refused))
        # Keep the digests of a round that is trained but not yet evaluated or published. A round that failed
        # a gate may be trained again.
        kept |= {} if held else begun
    taken |= _rows_of_done(recipe, record, number, kept, taken)
    planned = plan(with_rounds(recipe, loop, number), kept, taken, record.refused)
    while planned[f"{loop}.round{number}"].done:
        taken |= _rows_of_done(recipe, record, number + 1, kept, taken)
        following = plan(with_rounds(recipe, loop, number + 1), kept, taken, record.refused)
        moved_on = following[f"{loop}.round{number + 1}"].done
        if not moved_on and not (
            all(node.done for node in planned.nodes) and not _failed(planned) and not _waiting(planned)
        ):
            break
        kept |= stages_of_round(planned, loop, number)
        record = record.model_copy(
            update={"rounds": (*record.rounds, _adopted(planned, loop, number)), "begun": None}
        )
        number = number + 1
        planned = following
    waits = rows_awaited(recipe, loop, number, taken) if _is_fresh(planned, loop, number) else ""
    return LoopState(record, number, planned, _failed(planned), waits)


def _rows_of_done(
    recipe: Recipe,
    record: Record,
    number: int,
    kept: Mapping[str, str],
    taken: Mapping[str, Mapping[str, int]],
) -> dict[str, dict[str, int]]:
    """Returns the inbox rows of a round that another command has trained: the rows that it was planned with,
    if its result exists."""
    title = f"{record.loop}.round{number}"
    pinned = pinned_ends(recipe, record.loop, title, Pins(folder_of(recipe))) if title not in taken else {}
    if not pinned:
        return {}
    as_planned = plan(
        with_rounds(recipe, record.loop, number), kept, {**taken, title: pinned}, record.refused
    )
    return {title: pinned} if as_planned[title].done else {}


def _is_fresh(planned: Plan, loop: str, number: int) -> bool:
    """Returns whether no stage of a round has been started."""
    return not any(node.run_dir.exists() for node in planned.stages_of(f"{loop}.round{number}"))


def stages_of_round(planned: Plan, loop: str, number: int) -> dict[str, str]:
    """Returns the digests of a round's stages, and of the finished publications of only that round."""
    ours = {node.name: node.digest for node in planned.stages_of(f"{loop}.round{number}")}
    published = {
        node.name: node.digest
        for node in planned.nodes
        if node.done and _publishes(planned, node.name, loop, number)
    }
    return ours | published


def begin(recipe: Recipe, state: LoopState) -> LoopState:
    """Records in `loop.json` that the next round is in progress, and the last row that it takes from each
    inbox. Returns the loop's state."""
    loop = state.record.loop
    title = f"{loop}.round{state.number}"
    if _is_fresh(state.plan, loop, state.number) and (ends := ends_of(recipe.stages[loop])):
        _write(
            state.plan,
            state.record.model_copy(
                update={"begun": RoundInProgress(stages={}, at=datetime.now(UTC), taken=ends)}
            ),
        )
        state = loop_state(recipe, loop)
    stages = {node.name: node.digest for node in state.plan.stages_of(title)}
    begun = RoundInProgress(stages=stages, at=datetime.now(UTC), taken=dict(state.plan.taken.get(title, {})))
    _write(state.plan, state.record.model_copy(update={"begun": begun}))
    return state


def refuse(recipe: Recipe, state: LoopState, why: str) -> LoopState:
    """Records in `loop.json` that the round in progress is refused. The next one starts from the model before
    it, with other rows and prompts. Returns the loop's state."""
    assert state.record.begun is not None
    begun = state.record.begun
    now = datetime.now(UTC)
    left = Round(stages=begun.stages, begun=begun.at, ended=now, taken=begun.taken, refused=why)
    _write(
        state.plan, state.record.model_copy(update={"rounds": (*state.record.rounds, left), "begun": None})
    )
    return loop_state(recipe, state.record.loop)


def follow(recipe: Recipe, state: LoopState, champion: str, earlier: Mapping[str, str]) -> LoopState:
    """Makes the loop continue from the champion: records in `loop.json` that later rounds that were champions
    are left out, and that the champion's round is used again. Rounds trained from one that is left out are
    left out too. A round in progress is left out too if any of its stages is done, and otherwise begins anew.

    `champion`: the stage that made the champion's model. `earlier`: the stages of previous champions, with
    the reason for the rollback, or ''. Returns the loop's state.
    """
    record = state.record
    rounds = list(record.rounds)
    ours = next((number for number, done in enumerate(rounds) if champion in done.stages), None)
    if ours is None:
        return state
    left_out = rounds[ours].refused.startswith(ROLLED_BACK)  # so later rounds were trained without it
    rounds[ours] = rounds[ours].model_copy(update={"refused": ""}) if left_out else rounds[ours]
    for number, done in enumerate(rounds[ours + 1 :], start=ours + 1):
        model = next((name for name in done.stages if name in earlier), None)
        if not done.refused and (model or left_out):
            why = (
                earlier[model] if model else "it was trained from another model"
            ) or f"{champion} was promoted"
            rounds[number] = done.model_copy(update={"refused": f"{ROLLED_BACK}: {why}"})
            left_out = True
    if rounds == list(record.rounds):
        return state
    begun = record.begun
    if begun and any(
        RunDir(_run_dir(recipe, name, digest)).result() for name, digest in begun.stages.items()
    ):
        why = f"{ROLLED_BACK}: it was trained from another model"
        rounds.append(
            Round(
                stages=begun.stages, begun=begun.at, ended=datetime.now(UTC), taken=begun.taken, refused=why
            )
        )
    _write(state.plan, record.model_copy(update={"rounds": tuple(rounds), "begun": None}))
    return loop_state(recipe, record.loop)


def finish(state: LoopState) -> Round:
    """Records in `loop.json` that the round recorded by `begin` is finished, and returns it."""
    planned = state.plan
    record = read(state.plan.folder, state.record.loop)
    assert record.begun is not None
    done = _adopted(planned, record.loop, state.number).model_copy(
        update={"begun": record.begun.at, "ended": datetime.now(UTC)}
    )
    _write(planned, record.model_copy(update={"rounds": (*record.rounds, done), "begun": None}))
    return done


def loop_lock(folder: Path, seconds: float = 1.0) -> AbstractContextManager[bool]:
    """Locks the loop in a recipe's folder until the block ends, and yields whether that succeeded.

    Waits up to `seconds`, because a process that only checks whether the lock is free holds it for an
    instant.
    """
    return locked(folder / LOCK, seconds)


def directories(folder: Path) -> list[str]:
    """Returns the names of the run directories, `<stage>-<digest>`, that the loop in a recipe's folder needs;
    for `alignflow gc`.

    Raises ValueError when `loop.json` cannot be read.
    """
    try:
        record = Record.model_validate_json((folder / FILE).read_text())
    except FileNotFoundError:
        return []
    except ValueError:  # not JSON, or not a loop's record
        raise ValueError(
            f"{folder / FILE} cannot be read: restore it, or remove it if nothing needs the loop"
        ) from None
    stages = [done.stages for done in record.used] + ([record.begun.stages] if record.begun else [])
    return [f"{name}-{digest}" for found in stages for name, digest in found.items()]


def _write(planned: Plan, record: Record) -> None:
    planned.folder.mkdir(parents=True, exist_ok=True)
    write_text(planned.folder / FILE, record.model_dump_json(indent=2) + "\n")


def _run_dir(recipe: Recipe, name: str, digest: str) -> Path:
    return folder_of(recipe).parent / "stages" / f"{name}-{digest}"


def _check_there(recipe: Recipe, loop: str, kept: Mapping[str, str]) -> None:
    gone = [
        _run_dir(recipe, name, digest) for name, digest in kept.items() if name.startswith(f"{loop}.round")
    ]
    gone = [folder for folder in gone if RunDir(folder).result() is None]
    if gone:
        raise ValueError(
            f"{gone[0]} of a finished round is missing or incomplete: restore it, or remove"
            f" {folder_of(recipe) / FILE} to train again what is missing"
        )


def _publishes(planned: Plan, name: str, loop: str, number: int) -> bool:
    title = f"{loop}.round{number}"
    return name.endswith(f".round{number}") and planned[name].config.published_model == title


def _failed(planned: Plan) -> tuple[Verdict, ...]:
    return tuple(verdict for node in planned.nodes for verdict in holding(gates_of(node)))


def _waiting(planned: Plan) -> tuple[Verdict, ...]:
    return tuple(verdict for node in planned.nodes for verdict in gates_of(node) if verdict.waits)


def _adopted(planned: Plan, loop: str, number: int) -> Round:
    title = f"{loop}.round{number}"
    ended = (planned[title].run_dir / RESULT).stat().st_mtime
    used = [
        name
        for name, stage in planned.aliases.items()
        if name.startswith(f"{loop}.round") and stage.startswith(f"{name}.")
    ]
    earlier = used[: used.index(title)]
    metric = f"win_rate/{title}"
    before = f"win_rate/{earlier[-1]}" if earlier else ""
    results = [RunDir(node.run_dir).result() for node in planned.nodes if has_metric(node.config, metric)]
    judged = next((result.metrics for result in results if result and metric in result.metrics), {})
    stages = stages_of_round(planned, loop, number)
    when = datetime.fromtimestamp(ended, UTC)
    taken = dict(planned.taken.get(title, {}))
    return Round(
        stages=stages,
        begun=None,
        ended=when,
        win_rate=judged.get(metric),
        before=judged.get(before),
        taken=taken,
    )
