"""One moment of a run, drawn for terminals of several sizes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flows.cli.terminal.frame import BAR, RunMoment, StageLine, counts, duration, frame

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
    StageLine("kto", "failed", text="exit code 1; the log says why"),
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
    assert rows[6] == "✗ kto                               exit code 1; the log says why"


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
