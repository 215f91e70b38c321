"""`alignflow run` on a terminal, with Prefect: lines of stages side by side, the log in its file, the end;
and the same into a pipe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import micro
from tests.support.screen import Terminal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
COMMAND = [sys.executable, "-P", "-m", "flows.cli", "run", "recipe.yaml"]


def test_a_run_on_a_terminal_and_in_a_pipe(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    environment = {
        name: value
        for name, value in micro.build(folder, micro.BRANCHES).items()
        if name not in ("CI", "NO_COLOR")
    }
    (folder / "slow.json").write_text(json.dumps({"one": "middle", "once": 10}))
    seen: list[str] = []
    shown = Terminal(COMMAND, folder, environment | {"TERM": "xterm-256color"}, width=100, height=30)
    assert shown.run(lambda now: seen.append(now.screen.text()), seconds=300) == 0, seen[-1]

    assert any("starting Prefect's server" in text and "· evaluation" in text for text in seen)
    assert any(
        "▶ one" in text and "· evaluation  waits for one" in text and "INFO" not in text for text in seen
    )
    end = shown.screen.text()
    assert "▶" not in end and "The final model (two) is not clearly better or worse than SFT" in end
    assert end.replace("\n", "").endswith(f"report: {folder / 'artifacts' / 'micro' / 'report.html'}")
    assert shown.screen.cursor and shown.restored
    (log,) = (folder / "artifacts" / "micro" / "runs").glob("*.log")
    assert f"log: {log.relative_to(folder)}" in end and log.with_suffix(".json").is_file()
    kept = log.read_text()
    assert "| INFO    | Task run 'one' - middle" in kept and "\x1b" not in kept and "notify_state" not in kept

    piped = subprocess.run(
        COMMAND,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert piped.returncode == 0, piped.stdout
    assert "Task run 'one' - one is already done: one-" in piped.stdout
    assert "\x1b" not in piped.stdout
    assert "notify_state" not in piped.stdout
    assert "log: " not in piped.stdout and piped.stdout.count("report.html") == 1
