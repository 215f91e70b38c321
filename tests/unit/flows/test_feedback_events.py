"""Telling a Prefect server of new feedback never stops an import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

import flows.triggers.events as events
from flows.cli.app import main
from flows.triggers.inbox_watch import InboxWatch
from rlhf_core.cluster.rank_environment import free_port
from rlhf_core.config import Recipe
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.parse import feedback_of
from tasks.served import SERVED_ENV

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
        told.count("warning: Prefect's server (PREFECT_API_URL) did not take the event of the new rows") == 1
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
