"""The lines of a run under a real pty: what they show, where the log goes, and how the terminal is left. The
stage is live_run.py's."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from flows.cli.terminal import live
from flows.cli.terminal.frame import RunMoment, StageLine
from tests.support.live_run import ROOT, allow
from tests.support.screen import Terminal

COMMAND = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from flows.cli.terminal.live import live_view
from tests.support import live_run

artifacts = Path(sys.argv[1])
node = SimpleNamespace(name="sft", done=False, parents=())
planned = SimpleNamespace(artifacts=artifacts, folder=artifacts / live_run.RECIPE, recipe=SimpleNamespace(name=live_run.RECIPE))
with live_view(planned, (node,), "one", False) as say:
    say("checking the inputs")
    print("a line of this process")
    os.system("echo a line of a child >&2")
    live_run.run(artifacts, "one")
print("after it")
"""
LOG = "night/runs/one.log"


@pytest.fixture
def terminal(tmp_path: Path) -> Callable[..., Terminal]:
    allow(tmp_path, 3)
    unset = ("CI", "NO_COLOR", "COLUMNS", "LINES")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    environment = kept | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}

    def start() -> Terminal:
        return Terminal([sys.executable, "-c", COMMAND, str(tmp_path)], tmp_path, environment, width=100)

    return start


def test_lines_while_it_runs_and_a_clean_terminal_after(
    terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    seen: list[str] = []

    def see(now: Terminal) -> None:
        text = now.screen.text()
        seen.append(text)
        if "3/8" in text and now.screen.width == 100:
            now.resize(50, 12)
        elif "3/8" in text and text.startswith("night") and max(map(len, text.split("\n"))) < 50:
            allow(tmp_path, 8)

    shown = terminal()
    assert shown.run(see) == 0
    assert shown.screen.text().endswith("after it") and "3/8" not in shown.screen.text()
    assert shown.screen.cursor and shown.restored
    assert any("checking the inputs" in text for text in seen)
    assert any(
        "▶ sft  ━" in text and "3/8" in text and "loss 0.6667" in text and f"log: {LOG}" in text
        for text in seen
    )
    assert any(text.startswith("night") and "▶ sft  3/8" in text for text in seen)
    assert not any("a line of" in text for text in seen)
    assert (tmp_path / LOG).read_text() == "a line of this process\na line of a child\n"


def test_ctrl_c_is_told_and_leaves_a_clean_terminal(
    terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    pressed = False

    def see(now: Terminal) -> None:
        nonlocal pressed
        if "3/8" in now.screen.text() and not pressed:
            pressed = True
            now.press(b"\x03")

    shown = terminal()
    assert shown.run(see) != 0 and pressed
    assert live.INTERRUPTED in shown.written
    assert shown.screen.cursor and shown.restored and "KeyboardInterrupt" in shown.screen.text()
    assert "KeyboardInterrupt" not in (tmp_path / LOG).read_text()


def test_after_ctrl_c_no_stage_is_said_to_start() -> None:
    screen = Console(file=io.StringIO(), width=80, force_terminal=True)
    lines = [StageLine("sft", "running", text="loss 1"), StageLine("ppo", "waiting", text="starts soon")]
    picture = live.Picture(screen, lambda doing: RunMoment("night", 1.0, doing, lines))
    shown = []
    for doing in ("", live.INTERRUPTED):
        picture.say(doing)
        picture._draw()
        shown.append(str(picture._live.renderable))
    assert "starts soon" in shown[0] and "starts soon" not in shown[1] and "loss 1" in shown[1]


@pytest.mark.parametrize("name, value", [("CI", "true"), ("TERM", "dumb")])
def test_where_lines_cannot_move_or_are_all_kept_there_is_no_view(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert live.is_watched(plain=False) and not live.is_watched(plain=True)
    monkeypatch.setenv(name, value)
    assert not live.is_watched(plain=False)


def test_a_pipe_has_no_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert not live.is_watched(plain=False)
