"""The live view of a run: its lines at any size, where there is none, and the terminal of the tests."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from flows.cli.terminal import live
from flows.cli.terminal.frame import BAR, RunMoment, StageLine, counts, duration, frame
from tests.support.live_run import ROOT, allow
from tests.support.record_terminal import page, record
from tests.support.screen import Screen, Terminal

LINES = (
    StageLine("sft", "skipped", 89.0, text="eval/loss 0.4316"),
    StageLine("reward_model", "done", 41.0, text="eval/accuracy 0.93"),
    StageLine(
        "ppo",
        "running",
        62.0,
        (15, 30),
        36.0,
        "reward/mean 2.276  kl/mean 0.04677  response/length 4.949  phase/generate 0.2906",
    ),
    StageLine(
        "iterative_dpo.round1.preferences", "running", 3.0, text="importing the libraries of Preferences"
    ),
    StageLine("iterative_dpo.round1.dpo", "waiting", text="waits for iterative_dpo.round1.preferences"),
    StageLine("kto", "failed", text="exit code 1; see the log for the reason"),
)


def drawn(moment: RunMoment, width: int, height: int = 24, ascii_only: bool = False) -> list[str]:
    console = Console(record=True, width=width, height=height, file=io.StringIO())
    console.print(frame(moment, width, height, ascii_only), end="")
    return console.export_text().split("\n")


def test_a_wide_terminal() -> None:
    rows = drawn(RunMoment("tiny-cpu", 192.0, "", LINES), 120)
    assert rows[0] == "tiny-cpu   3 min 12 s   2 of 6 stages done"
    assert rows[1] == "✓ sft                               done before  eval/loss 0.4316"
    assert rows[2] == "✓ reward_model                      41 s  eval/accuracy 0.93"
    bar = "━" * (BAR // 2) + "─" * (BAR // 2)
    assert rows[3].startswith(
        f"▶ ppo                               {bar} 15/30  2.4 s each  36 s left  reward/mean 2.276  kl/"
    )
    assert rows[4] == "▶ iterative_dpo.round1.preferences  3 s  importing the libraries of Preferences"
    assert rows[5] == "· iterative_dpo.round1.dpo          waits for iterative_dpo.round1.preferences"
    assert rows[6] == "✗ kto                               exit code 1; see the log for the reason"


@pytest.mark.parametrize("width", [20, 40, 80])
def test_each_stage_has_one_row_on_a_narrow_terminal(width: int) -> None:
    rows = drawn(RunMoment("tiny-cpu", 192.0, "starting Prefect's server", LINES), width)
    assert len(rows) == 1 + len(LINES) and max(map(len, rows)) < width
    assert [row[0] for row in rows[1:]] == ["✓", "✓", "▶", "▶", "·", "✗"]


def test_the_end_of_a_long_name_stays() -> None:
    rows = drawn(RunMoment("tiny-cpu", 1.0, "", LINES), 80)
    assert rows[4].startswith("▶ …ve_dpo.round1.preferences  3 s  ")
    assert rows[5].startswith("· iterative_dpo.round1.dpo")
    assert "━" in rows[3] and "━" not in drawn(RunMoment("tiny-cpu", 1.0, "", LINES), 60)[3]


def test_of_many_stages_those_that_run_or_failed_are_shown() -> None:
    many = (
        [StageLine(f"done{i}", "done", 1.0) for i in range(14)]
        + [StageLine("early", "failed")]
        + [StageLine(f"later{i}", "waiting") for i in range(13)]
    )
    lines = [*many, StageLine("last", "running", 1.0), StageLine("very last", "running", 1.0)]
    rows = drawn(RunMoment("big", 1.0, "", lines), 80, height=9)
    assert len(rows) == 8 - 1
    assert [row[2:].split()[0] for row in rows[1:6]] == ["early", "later0", "later1", "last", "very"]
    assert rows[6] == "  and 14 done, 11 waiting"
    assert len(drawn(RunMoment("big", 1.0, "", lines), 80, height=40)) == 31


def test_steps_without_a_pace_and_steps_that_are_over() -> None:
    begun = StageLine("dpo", "running", 7.0, (0, 14), None, "loading the model")
    over = StageLine("dpo", "running", 9.0, (14, 14), 0.0, "loss 0.6")
    assert drawn(RunMoment("r", 1.0, "", [begun]), 80)[1].endswith("─ 0/14  7 s  loading the model")
    assert drawn(RunMoment("r", 1.0, "", [over]), 80)[1].endswith("━ 14/14  9 s  loss 0.6")


def test_a_terminal_that_knows_ascii_alone() -> None:
    rows = drawn(RunMoment("tiny-cpu", 1.0, "", LINES), 80, ascii_only=True)
    assert all(row.isascii() for row in rows) and rows[4].startswith("> ..")


def test_without_colours_nothing_but_text_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    console.print(frame(RunMoment("r", 1.0, "", LINES), 80, 24))
    assert "\x1b[3" not in out.getvalue() and "\x1b[9" not in out.getvalue()


def test_words() -> None:
    assert [duration(seconds) for seconds in (4.9, 65, 7500)] == ["4 s", "1 min 05 s", "2 h 05 min"]
    assert counts(LINES) == "1 done, 1 skipped, 1 failed, 2 running, 1 waiting"


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
