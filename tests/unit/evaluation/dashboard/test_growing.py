"""Files that grow, are cut, replaced, damaged or no files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from evaluation.dashboard import growing
from evaluation.dashboard.growing import MAX_METRICS, MAX_POINTS, Attempt, Attempts, Curves


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def curves(file: Path) -> Curves:
    return Curves(file)


def add(file: Path, *steps: int, **metrics: float) -> None:
    with file.open("a") as out:
        out.writelines(
            json.dumps({"step": step, "time": 1.7e9 + step, "loss": 1 / step, **metrics}) + "\n"
            for step in steps
        )


def steps(curves: Curves, name: str = "loss") -> list[float]:
    curves.update()
    return [step for step, _ in curves.series[name].points()] if name in curves.series else []


def test_only_what_is_new_is_read(file: Path, curves: Curves, monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps(curves) == [], "there is no file yet"
    add(file, 1, 2)
    assert steps(curves) == [1, 2]
    taken: list[bytes] = []
    take = Curves.take
    monkeypatch.setattr(Curves, "take", lambda self, line: (taken.append(line), take(self, line))[1])
    add(file, 3)
    assert steps(curves) == [1, 2, 3] and len(taken) == 1
    assert (curves.step, curves.time, curves.pace) == (3, 1.7e9 + 3, 1.0)
    assert steps(curves) == [1, 2, 3] and len(taken) == 1


def test_a_half_written_line_counts_when_it_is_whole(file: Path, curves: Curves) -> None:
    add(file, 1)
    with file.open("a") as out:
        out.write('{"step": 2, "lo')
        out.flush()
        assert steps(curves) == [1]
        out.write('ss": 0.5}\n')
    assert steps(curves) == [1, 2]


def resumed(file: Path) -> None:
    kept = file.read_text().splitlines(keepends=True)[:2]
    part = file.with_name("part")
    part.write_text("".join(kept))
    os.replace(part, file)


def written_over(file: Path) -> None:
    """In place and longer, as no writer of ours does."""
    file.write_text(
        "".join(json.dumps({"step": step, "loss": 9.0, "padding": "x" * 50}) + "\n" for step in (1, 2))
    )


def cut(file: Path) -> None:
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))


@pytest.mark.parametrize("change", [resumed, written_over, cut])
def test_a_file_that_was_replaced_or_cut_is_read_again(
    file: Path, curves: Curves, change: Callable[[Path], None]
) -> None:
    add(file, 1, 2, 3, 4, 5)
    assert steps(curves) == [1, 2, 3, 4, 5]
    change(file)
    again = Curves(file)
    assert steps(curves) == steps(again) != [1, 2, 3, 4, 5]
    add(file, 6, 7)
    assert steps(curves)[-2:] == [6, 7]
    file.unlink()
    assert steps(curves) == []


def test_damaged_lines_are_left_out(file: Path, curves: Curves) -> None:
    add(file, 1)
    lines = [
        "{",
        "[1]",
        "null",
        '{"step": "2"}',
        '{"loss": 1}',
        '{"step": true}',
        '{"step": NaN}',
        "[" * 100_000,
        '{"step": 1' + "0" * 400 + "}",
        "\x00",
    ]
    with file.open("ab") as out:
        out.write("\n".join(lines).encode() + b"\n\xff\xfe\n")
        out.write(
            b'{"step": 2, "loss": "low", "nested": {}, "big": 1'
            + b"0" * 400
            + b', "flag": true, "time": "noon"}\n'
        )
    add(file, 3)
    assert steps(curves) == [1, 3] and set(curves.series) == {"loss"}


def test_values_that_are_not_finite_are_counted(file: Path, curves: Curves) -> None:
    add(file, 1)
    add(file, 2, loss=math.nan)
    add(file, 3, loss=math.inf)
    add(file, 4)
    assert steps(curves) == [1, 4] and curves.series["loss"].not_finite == 2
    assert curves.look().last == {"loss": 0.25} and curves.look().not_finite == {"loss": 2}
    assert curves.look() is curves.look(), "nothing is made again while nothing was added"


def test_a_long_run_takes_bounded_memory_and_keeps_its_mean(file: Path, curves: Curves) -> None:
    add(file, *range(1, 50_001))
    points = curves.series["loss"].points() if steps(curves) else []
    assert MAX_POINTS / 2 - 1 <= len(points) <= MAX_POINTS and points[-1][0] == 50_000
    assert points == sorted(points), "steps rise"
    group = curves.series["loss"]._group
    assert points[3][1] == pytest.approx(
        sum(1 / step for step in range(3 * group + 1, 4 * group + 1)) / group
    )
    many = {f"m{n}": 1.0 for n in range(2 * MAX_METRICS)}
    add(file, 50_001, **many)
    assert steps(curves) and len(curves.series) == MAX_METRICS


def test_a_line_without_end_does_not_fill_the_memory(
    file: Path, curves: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing, "CHUNK", 1000)
    monkeypatch.setattr(growing, "MAX_LINE", 5000)
    add(file, 1)
    with file.open("a") as out:
        out.write('{"step": 2, "text": "' + "x" * 20_000)
        out.flush()
        curves.update()
        assert len(curves._rest) <= 6000
        out.write('"}\n')
    add(file, 3)
    assert steps(curves) == [1, 3]


def test_what_is_no_file_is_empty(file: Path, curves: Curves, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    add(secret, 1)
    file.symlink_to(secret)
    assert steps(curves) == [], "a link is not followed"
    file.unlink()
    os.mkfifo(file)
    assert steps(curves) == [], "a pipe without a writer does not block"
    file.unlink()
    file.mkdir()
    assert steps(curves) == []


def test_starts_and_ends_of_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "log.txt"
    log = Attempts(file)
    first = "--- 2026-11-26 13:47:10 sft\nstep 1/20  loss 1\nnoise step 9/9\nstep 2/20\n"
    end = "+++ 2026-11-26 13:48:10 sft ended after 60.25 s with code -9\n"
    file.write_text(first + end + "--- 2026-11-26 14:00:00 sft\n+++ not a mark\nstep 3/20  loss 0.5\n")
    log.update()
    ended, open_end = log.attempts
    assert (ended.seconds, ended.code) == (60.25, -9) and open_end.started - ended.started == 770
    assert open_end == Attempt(open_end.started) and log.progress == (3, 20)
    monkeypatch.setattr(Attempts, "most", 60)
    last = Attempts(file)
    last.update()
    assert last.attempts == [] and last.progress == (3, 20), "only the end of a long log is read"


@pytest.mark.parametrize(
    "lines, progress",
    [
        (
            (
                "sampling 6 answers to each of 768 prompts\nsampled answers to 512 of 768 prompts, 12,345"
                " tokens\n"
            ),
            (512, 768),
        ),
        ("scored 64 of 128 answers\n", (64, 128)),
        ("sft: 420 answers in 7.2 s (1 of 4 models)\n", (1, 4)),
        ("judge gpt: 840 games, 840 to ask\njudge gpt: 120 of 840 done\n", (120, 840)),
        (
            (
                "each episode leaves out 48 of 6000 prompts, which fill no iteration of 64"
                " (rollout_batch_size)\n"
            ),
            None,
        ),
        ("warning: data: rows that equal another one: 2644 of 40000 rows (for instance a, row 1)\n", None),
        ("step 3/30  reward/mean 1\nreward: 5 of 10 done\n", (3, 30)),
    ],
)
def test_progress_of_stages_without_steps(
    tmp_path: Path, lines: str, progress: tuple[int, int] | None
) -> None:
    file = tmp_path / "log.txt"
    file.write_text("--- 2026-11-26 13:47:10 sft\n" + lines)
    assert Attempts(file).look().progress == progress
