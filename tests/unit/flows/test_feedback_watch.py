"""New feedback starts rounds: who watches an inbox, when, and what is sent."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

import flows.triggers.events as events
from flows.cli.app import main
from flows.triggers.inbox_watch import LONGEST_PAUSE, InboxWatch
from rlhf_core.cluster.rank_environment import free_port
from rlhf_core.config import Recipe
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.parse import feedback_of
from rlhf_core.recipe.loops.loop_record import FILE, LOCK, Record, Round, RoundInProgress, folder_of
from rlhf_core.system.files import locked, write_text
from tasks.served import SERVED_ENV

DAY = datetime(2026, 5, 1, tzinfo=UTC)


class Bench:
    """A recipe's loop, its inbox, and a clock."""

    def __init__(self, folder: Path, **loop: Any):
        self.inbox = Inbox(folder / "chat.inbox")
        self.now = 0.0
        source = {"feedback": {"sources": str(self.inbox.folder)}, "min_new_rows": 3}
        stages: dict[str, Any] = {
            "loop": {"stage": "iterative_feedback", "method": "dpo", "rounds": 1, **source, **loop}
        }
        self.recipe = Recipe(
            name="night", base_model="org/base", artifacts=str(folder / "artifacts"), stages=stages
        )
        self.watch = self.watching()
        self._said = 0

    def watching(self) -> InboxWatch:
        """As of a new process."""
        return InboxWatch(self.recipe, lambda: self.now)

    def say(self, count: int) -> None:
        self.inbox.add(
            [
                feedback_of({"prompt": f"q{self._said + n}", "chosen": "good", "rejected": "bad"})
                for n in range(count)
            ]
        )
        self._said += count

    def record(self, *taken: int, begun: int | None = None, refused: str = "") -> None:
        """Writes `loop.json` with rounds, and a round in progress, that go up to these rows."""
        place = self.inbox.id
        rounds = tuple(
            Round(stages={}, begun=DAY, ended=DAY, taken={place: end}, refused=refused) for end in taken
        )
        now = RoundInProgress(stages={}, at=DAY, taken={place: begun}) if begun is not None else None
        folder_of(self.recipe).mkdir(parents=True, exist_ok=True)
        write_text(
            folder_of(self.recipe) / FILE, Record(loop="loop", rounds=rounds, begun=now).model_dump_json()
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_enough_new_rows_start_one_run(bench: Bench) -> None:
    assert not bench.watch.due(), "there is no inbox"
    bench.say(2)
    assert not bench.watch.due()
    bench.say(1)
    assert bench.watch.due()
    bench.watch.started()
    bench.say(2)
    assert not bench.watch.due(), "the run has not begun a round yet"
    bench.record(begun=4)
    bench.say(1)
    assert not bench.watch.due(), "the round goes up to row 4, and two rows came after it"
    bench.record(4)
    bench.say(1)
    assert bench.watch.due(), "three rows after the round"


def test_rows_that_came_while_nothing_watched_are_found(bench: Bench) -> None:
    bench.say(4)
    bench.record(4)
    assert not bench.watching().due()
    bench.say(3)
    assert bench.watching().due()


def test_an_unfinished_round_is_due_once_for_a_new_process_and_again_after_a_crash(bench: Bench) -> None:
    bench.say(3)
    bench.record(begun=3)
    assert bench.watch.due()
    bench.watch.started()
    assert not bench.watch.due(), "it failed: the same rows fail again"
    bench.watch.again()
    assert bench.watch.due()


def test_rows_that_a_continued_round_did_not_have_are_due_after_it(bench: Bench) -> None:
    bench.say(3)
    bench.record(begun=3)
    bench.say(3)
    assert bench.watch.due(), "a new process continues the round"
    bench.watch.started()
    assert not bench.watch.due()
    bench.record(3)
    assert bench.watch.due(), "rows 4 to 6 were there at the start, and no round has them"


def test_a_refused_round_keeps_its_rows(bench: Bench) -> None:
    bench.say(3)
    bench.record(3, refused="accuracy 0.1 is below 0.5")
    assert not bench.watch.due()


def test_rows_of_another_kind_do_not_count(bench: Bench) -> None:
    bench.inbox.add([feedback_of({"prompt": f"t{n}", "response": "x", "thumb": "up"}) for n in range(9)])
    assert not bench.watch.due(), "thumbs are no pairs"


def test_nothing_is_due_while_a_run_works_on_the_loop(bench: Bench) -> None:
    bench.say(3)
    folder_of(bench.recipe).mkdir(parents=True)
    with locked(folder_of(bench.recipe) / LOCK) as ours:
        assert ours and not bench.watch.due()
    assert bench.watch.due()


def test_starts_that_finish_no_round_become_rare(bench: Bench) -> None:
    starts = []
    for _ in range(1000):
        bench.now += 50
        bench.say(3) if bench.now % 100 == 0 else None
        if bench.watch.due():
            starts.append(bench.now)
            bench.watch.started()
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert gaps[0] == 100 and gaps == sorted(gaps) and gaps[-1] >= LONGEST_PAUSE and len(starts) < 24, gaps
    bench.record(int(bench.inbox.end()))
    bench.now += LONGEST_PAUSE
    bench.say(3)
    assert bench.watch.due()
    bench.watch.started()
    bench.say(3)
    assert bench.watch.due(), "a round was finished, so there is no pause"


def test_a_record_that_cannot_be_read_is_told(bench: Bench) -> None:
    bench.say(1)
    bench.record()
    (folder_of(bench.recipe) / FILE).write_text("{")
    with pytest.raises(ValueError, match=r"loop\.json cannot be read"):
        bench.watch.due()


def test_recipes_without_such_a_loop_are_refused(tmp_path: Path) -> None:
    loop = {"stage": "iterative_dpo", "reward": "org/reward", "prompts": {"sources": "p.jsonl"}, "rounds": 1}
    with pytest.raises(ValueError, match="its loop loop does not use feedback"):
        InboxWatch(Recipe(name="x", base_model="org/base", stages={"loop": loop}))


ROW = '{"prompt": "hello", "response": "hi", "thumb": "up"}\n'


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Imports a row. Returns what the command printed."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(ROW)

    def command() -> str:
        assert main(["feedback", "import", "rows.jsonl", "--inbox", "chat.inbox"]) == 0
        return capsys.readouterr().out

    return command


def test_a_server_that_does_not_answer_is_one_warning(imported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    api = f"http://127.0.0.1:{free_port('127.0.0.1')}/api"
    monkeypatch.setenv("PREFECT_API_URL", api)
    with temporary_settings({PREFECT_API_URL: api}):  # Prefect has read the environment already
        told = imported()
    assert "1 new" in told
    assert (
        told.count("warning: Prefect's server (PREFECT_API_URL) did not accept the event about the new rows")
        == 1
    )
    assert Inbox(Path("chat.inbox")).count(("thumb",)) == 1
    assert "warning" not in imported(), "nothing is new, so there is nothing to tell"


@pytest.mark.parametrize("served", [False, True], ids=["without-a-server", "under-serve"])
def test_nothing_is_told_without_a_server_of_ones_own(
    imported: Any, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    if served:
        monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
        monkeypatch.setenv(SERVED_ENV, "served.json")
    monkeypatch.setattr(events, "tell", lambda inboxes: pytest.fail("told"))
    assert "1 new" in imported()


def test_the_endpoint_tells_when_a_round_can_begin_and_repeats_what_was_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = Inbox(tmp_path / "chat.inbox")
    told = list[list[Path]]()
    taken = [False, False, True]
    loop = {
        "stage": "iterative_feedback",
        "method": "kto",
        "feedback": {"sources": str(inbox.folder)},
        "rounds": 1,
        "min_new_rows": 2,
    }
    watch = InboxWatch(
        Recipe(name="n", base_model="org/base", artifacts=str(tmp_path), stages={"loop": loop})
    )
    monkeypatch.setattr(events, "tell", lambda inboxes: told.append(inboxes) or taken.pop(0))
    teller = events.Teller([watch])
    teller.look()
    inbox.add([feedback_of({"prompt": "p", "response": "r", "thumb": "up"})])
    teller.look()
    assert told == []
    inbox.add([feedback_of({"prompt": "q", "response": "r", "thumb": "up"})])
    for _ in range(9):
        teller.look()
    assert told == [[inbox.folder]] * 3
