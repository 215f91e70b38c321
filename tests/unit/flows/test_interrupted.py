"""What a command says when Ctrl-C ends it."""

from __future__ import annotations

import pytest

from flows.cli import app


def test_ctrl_c_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def examine() -> list[object]:
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.cli.doctor.examine", examine)
    assert app.main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted; run the same command again to go on\n"
