"""Lives the loop for some days and nights: people ask the champion and send feedback; at night a round is
trained, judged and published."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rlhf_core.recipe.loops.loop_record import read
from rlhf_core.runs.approval_record import asked_in
from rlhf_core.runs.run_dir import LOCK, LOG
from rlhf_core.stages.publication.champion_record import champions_of
from rlhf_core.system.files import is_locked
from tests.nights import town
from tests.nights.disk import fill
from tests.nights.faults import Fault, Faults, Kind
from tests.nights.pages import Endpoint, pages_of
from tests.nights.processes import Here
from tests.nights.sampler import Model
from tests.support.hub_server import Hub

QUESTIONS_A_DAY = 240
PEOPLE = 40
LABELS_A_DAY = 20
DOWN = range(10**9)


@dataclass
class Night:
    """What happened in a day and its night. `faults`: those that had an effect, or in the last night still
    wait for one. `sent`: rows of feedback, `new`: those that the endpoint counted as new; `again`: rows sent
    a second time, `duplicate`: those that it counted as known. `round`: number of the round that was worked
    on last. `states` and `outputs`: how the flow's runs ended, and what they printed. `pages`: texts by their
    places."""

    number: int
    faults: tuple[Kind, ...]
    champion: str
    sent: int = 0
    new: int = 0
    again: int = 0
    duplicate: int = 0
    round: int = 0
    champion_after: str = ""
    states: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    seconds: float = 0.0
    pages: dict[str, str] = field(default_factory=dict)


@dataclass
class Life:
    """A town with its recipe and its doubles. `base`: the model that the loop starts from; `taken`: prompts
    that nobody may ask."""

    here: Here
    faults: Faults
    base: Path
    hub: Hub
    feedback: Endpoint
    dashboard: Endpoint
    taken: set[str]
    likes_length: bool = False
    waiting: dict[Kind, Fault] = field(default_factory=dict)  # faults that have had no effect yet

    @property
    def folder(self) -> Path:
        """The folder of the recipe's report."""
        return self.here.folder / "artifacts" / "town"

    def champion(self) -> tuple[str, Path]:
        """The name and folder of the model in use."""
        now = champions_of(self.folder).now
        return (now.run, (self.folder / "champion").resolve()) if now else ("base", self.base)

    def live(self, number: int) -> Night:
        """A day and its night."""
        planted = self.waiting | self.faults.of(number)
        begin = time.monotonic()
        name, model = self.champion()
        night = Night(number, tuple(planted), name)
        self.day(night, planted, model)
        with self.broken(planted):
            self.night(night, planted)
            self.waiting = {kind: fault for kind, fault in planted.items() if not self.met(kind, night)}
        if number < self.faults.nights:
            night.faults = tuple(kind for kind in planted if kind not in self.waiting)
        record = read(self.folder, "nights")
        night.round = len(record.rounds) + (record.begun is not None)
        night.champion_after = self.champion()[0]
        night.pages = pages_of(self.dashboard, self.folder / "report.html")
        night.seconds = time.monotonic() - begin
        return night

    def day(self, night: Night, planted: dict[Kind, Fault], model: Path) -> None:
        """People ask the champion and say what they like; annotators label some pairs for the judge's
        calibration."""
        seed = self.faults.seed
        number = night.number
        asked = town.day(seed, number, QUESTIONS_A_DAY, PEOPLE, self.faults.drifted(number), self.taken)
        answers = Model(model).answers([one.prompt for one in asked], town.ANSWERS, seed * 1000 + number)
        hostile = planted["poisoned"].share if "poisoned" in planted else 0.0
        rows = list(town.feedback(asked, answers, night.champion, f"{seed}/feedback{number}", hostile))
        told = self.feedback.post("/feedback/town?source=town", rows)
        again = rows[: len(rows) // 10]  # a client that got no answer sends a part once more
        twice = self.feedback.post("/feedback/town?source=town", again)
        night.sent = len(rows)
        night.new = told["new"]
        night.again = len(again)
        night.duplicate = twice["duplicate"]
        with (self.here.folder / "labels.jsonl").open("a") as file:
            town.write_lines(file, town.labels(seed, number, LABELS_A_DAY, self.taken))

    def night(self, night: Night, planted: dict[Kind, Fault]) -> None:
        """A run of the loop; when it asks for an approval, the answer, and the run that goes on."""
        log = self.here.folder / f"night{night.number:02d}.log"
        killed = planted.get("killed")
        kill_when = (lambda: self.works_on(killed.stage)) if killed else None
        state = self.run(night, log, kill_when)
        if "waits for a person" not in state:
            return
        if "silent_approver" in planted:
            _, question = asked_in(self.folder)[-1]
            time.sleep(max(0.0, (question.until - datetime.now(UTC)).total_seconds()) + 1)
            return
        said = self.here.alignflow("approve", "artifacts/town", "--by", "mayor")
        assert said.returncode == 0, said.stdout + said.stderr
        self.run(night, log.with_name(f"{log.stem}-approved.log"), kill_when)

    def met(self, kind: Kind, night: Night) -> bool:
        """Whether a fault had an effect on the night's runs."""
        match kind:
            case "killed":
                return any("exit code -9" in state for state in night.states)
            case "hub_outage":
                return bool(self.hub.requests)
            case "silent_approver":
                return any("waits for a person" in state for state in night.states)
            case _:
                return True

    def run(self, night: Night, log: Path, kill_when: Callable[[], bool] | None = None) -> str:
        """A run of the loop; returns its state."""
        ended = self.here.loop(log, kill_when)
        night.states.append(ended.state or f"exit code {ended.code}")
        night.outputs.append(ended.output)
        return ended.state

    def works_on(self, stage: str) -> bool:
        """Whether a process works on a stage, of the loop on its newest round, and has written the first
        lines of its log."""
        found = (self.here.folder / "artifacts" / "stages").glob(
            f"{stage}.round*" if stage == "nights" else f"{stage}-*"
        )
        return any((place / LOG).exists() and is_locked(place / LOCK) for place in found)

    @contextmanager
    def broken(self, planted: dict[Kind, Fault]) -> Iterator[None]:
        """What goes wrong outside of the night's processes, until the block ends."""
        with ExitStack() as stack:
            if "length_judge" in planted:
                self.likes_length = True
                stack.callback(setattr, self, "likes_length", False)
            if "hub_outage" in planted:
                self.hub.requests.clear()
                self.hub.fault = (DOWN, "refuse")
                stack.callback(self.hub.heal)
            if "full_disk" in planted:
                ballast = self.here.folder / "ballast"
                stack.callback(ballast.unlink)
                fill(ballast, planted["full_disk"].free_mib)
            yield
