"""The terminal of the tests, and the screens that a recording picks."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.record_terminal import page, record
from tests.support.screen import Screen

CODE = """
import sys, time
rows = ["r   1 s   0 of 2 stages done", "▶ ppo  ━━━ {}/4  2.0 s each  reward/mean 1"]
sys.stdout.write(f"log: r.log\\n{rows[0]}\\n{rows[1].format(1)}")
sys.stdout.flush()
time.sleep(0.3)
sys.stdout.write(f"\\r\\x1b[2K\\x1b[1A\\x1b[2K{rows[0]}\\n{rows[1].format(3)}")
sys.stdout.flush()
time.sleep(3)
sys.stdout.write("\\r\\x1b[2K\\x1b[1A\\x1b[2Kthe end\\n")
"""


def test_a_screen_follows_what_rich_writes() -> None:
    screen = Screen(20, 5)
    screen.feed("\x1b[?25l\x1b[1mone\x1b[0m\r\ntwo\x1b[")
    assert screen.text() == "one\ntwo" and not screen.cursor
    screen.feed("1A\x1b[2K\rONE\r\n\x1b[2Kthree\x1b[?25h")
    assert screen.text() == "ONE\nthree" and screen.cursor
    screen.feed("\x1b[2J\x1b[Hnew " + "x" * 20)
    assert screen.text() == "new " + "x" * 16 + "\nxxxx"


def test_a_recording_has_a_screen_in_ppo_and_the_last_one(tmp_path: Path) -> None:
    screens = record([sys.executable, "-c", CODE], tmp_path)
    assert screens == {
        "In PPO": "log: r.log\nr   1 s   0 of 2 stages done\n▶ ppo  ━━━ 3/4  2.0 s each  reward/mean 1",
        "At the end": "log: r.log\nthe end",
    }
    assert "## In PPO\n\n```text\nlog: r.log\n" in page(screens, "a run")
