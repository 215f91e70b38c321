"""What `alignflow serve` prints of its server's auth string: the string on a terminal, the file's path to a
log."""

from __future__ import annotations

import os
import pty
from pathlib import Path

import pytest
from rich.console import Console

from flows.cli.app import main
from flows.cli.loop_commands import show_auth
from tests.support.programs import captured

API = "http://127.0.0.1:4200/api"
AUTH = "alignflow:" + "x" * 43


def printed(file: Path, terminal: bool) -> str:
    end, other = pty.openpty() if terminal else os.pipe()
    with os.fdopen(end, "rb", 0) as seen, os.fdopen(other, "w") as out:
        show_auth(Console(file=out, soft_wrap=True), API, AUTH, file)
        text = b""
        while text.count(b"\n") < 2:  # a terminal may hand out one line at a time
            text += seen.read(10_000)
        return text.decode()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_the_auth_string_and_a_log_the_file_that_holds_it(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):  # rich takes them for a terminal's
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "a folder" / "auth-string"
    file.parent.mkdir()
    file.write_text(f"{AUTH}\n")
    asked, shell = printed(file, terminal).splitlines()
    assert asked == f"its pages ask once for the auth string: {AUTH if terminal else f'what is in {file}'}"
    assert AUTH not in shell
    command = shell.removeprefix("from another shell: ")
    told = captured(["sh", "-c", f'{command}; echo "$PREFECT_API_URL $PREFECT_API_AUTH_STRING"'])
    assert told.stdout == f"{API} {AUTH}\n"


def test_serve_says_what_it_does_before_it_imports_prefect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    told = capsys.readouterr()
    assert told.out.startswith("importing Prefect and reading the recipes\n")
    assert "give the recipes to serve" in told.err
