"""What `alignflow dashboard` refuses, and where it prints its token."""

from __future__ import annotations

import os
import pty
import socket
import stat
from pathlib import Path

import pytest
from rich.console import Console

from flows.cli.app import main
from flows.cli.operate.dashboard import show_address
from rlhf_core.system.pages.secret_file import kept_secret


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["absent"], "there is no such folder: give the `artifacts` folder"),
        ([".", "--port", "99999"], "there is no port 99999"),
        ([".", "--allow-host", "a b"], "--allow-host a b: give names or addresses of hosts"),
    ],
)
def test_wrong_input_is_one_sentence(
    options: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["dashboard", *options]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert (
            main(
                [
                    "dashboard",
                    str(tmp_path),
                    "--port",
                    str(other.getsockname()[1]),
                    "--home",
                    str(tmp_path / "home"),
                ]
            )
            == 3
        )
    assert "give another --port or --host" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_the_token_and_a_log_the_file_that_holds_it(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):  # rich takes them for a terminal's
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "a folder" / "dashboard-token"
    token = kept_secret(file)
    # the next start has the same token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and kept_secret(file) == token
    end, other = pty.openpty() if terminal else os.pipe()
    with os.fdopen(end, "rb", 0) as seen, os.fdopen(other, "w") as out:
        show_address(
            Console(file=out, soft_wrap=True), Path("artifacts"), "http://127.0.0.1:8123/", token, file
        )
        text = b""
        while b"\n" not in text:
            text += seen.read(10_000)
    shown = (
        f"http://127.0.0.1:8123/?token={token}"
        if terminal
        else f"http://127.0.0.1:8123/?token=... (the token: what is in {file})"
    )
    assert text.decode().splitlines()[0] == f"artifacts is shown at {shown}"
