"""`alignflow champion`: names and reasons are shown as they are."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.cli.app import main
from rlhf_core.stages.publication import champion_record as record


def test_a_reason_is_no_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = dict(model="[red]m", run="[/x]", repo_id=None, commit=None, why="[b]w", by="[/y]", ended=None)
    reign = SimpleNamespace(at=datetime(2026, 1, 1, tzinfo=UTC), **own)
    monkeypatch.setattr(
        record, "champions_of", lambda folder: SimpleNamespace(now=reign, moving=None, reigns=[reign])
    )
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "[z]"
    folder.mkdir()
    assert main(["champion", str(folder)]) == 0
    told = capsys.readouterr().out
    assert all(text in told for text in ("[red]m", "[/x]", "[b]w ([/y])", "champions of [z]"))
