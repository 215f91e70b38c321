"""What the commands of feedback print and record about files and URLs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from flows.cli.app import main
from flows.cli.operate import feedback_commands as feedback
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.system.machine import Unreachable

ROW = {"prompt": "q", "response": "a", "thumb": "up"}
URL = "memory://rows.jsonl?X-Amz-Signature=hidden&sig=hidden"


@pytest.fixture
def at_a_url() -> Iterator[None]:
    files = fsspec.filesystem("memory")
    files.pipe(URL, "\n".join([json.dumps(ROW), "{"]).encode())
    yield
    files.rm_file(URL)


def test_a_signature_of_a_url_is_neither_shown_nor_recorded(
    at_a_url: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    box = tmp_path / "chat.inbox"
    assert main(["feedback", "import", URL, "--inbox", str(box)]) == 1
    told = capsys.readouterr()
    assert told.out.startswith("opening the inbox: reading its rows\nreading memory://rows.jsonl\n")
    assert "memory://rows.jsonl: 2 rows: 1 new" in told.out
    assert "memory://rows.jsonl, line 2: is not JSON" in told.out
    assert "hidden" not in told.out + told.err
    assert [stored.row.source for stored in Inbox(box).rows(("thumb",))] == ["rows.jsonl"]


def test_a_url_that_cannot_be_read_is_told_without_its_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "nothing://ann:password@example.org/rows.jsonl?sig=hidden"
    assert main(["feedback", "import", url, "--inbox", str(tmp_path / "chat.inbox")]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "nothing://***@example.org/rows.jsonl: cannot be read" in told
    assert "password" not in told
    assert "hidden" not in told


def test_an_inbox_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["feedback", "status", str(tmp_path / "typo.inbox")]) == 2
    assert "does not exist: correct the path" in capsys.readouterr().err


def test_a_service_that_is_down_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app(*given: object, **options: object) -> None:
        raise Unreachable("the Hub cannot be reached: try again")

    monkeypatch.setattr("flows.cli.app.app", app)
    assert main(["plan", "recipe.yaml"]) == 3
    assert capsys.readouterr().err.strip() == "the Hub cannot be reached: try again"


@pytest.mark.parametrize("name", ["x[bold].inbox", "x[red].inbox"])
def test_names_are_no_markup(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        feedback.console, "width", 400
    )  # no cell is folded, however long the folder's path is
    (tmp_path / "r.jsonl").write_text(json.dumps(ROW))
    assert main(["feedback", "import", "r.jsonl", "--inbox", name]) == 0
    assert main(["feedback", "status", name]) == 0
    assert name in capsys.readouterr().out
