"""What commands print: of this machine, of a champion, of labels, of the server's auth string, at Ctrl-C, and of
schedules that never fire."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from evaluation.labelling.label_store import LabelFile
from flows.cli import app, doctor
from flows.cli.app import main
from flows.cli.doctor import _compiled, examine
from flows.cli.loop_commands import show_auth
from flows.serving.schedules import schedule_of
from rlhf_core.data.labels import load_labels
from rlhf_core.stages.publication import champion_record as record
from tests.support.labelling import rated, row
from tests.support.programs import captured


@pytest.mark.parametrize(
    ("told", "compiled", "warned"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_libraries_that_every_process_compiles(
    told: bool, compiled: bool, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = tmp_path / "torch" / "__init__.py"
    (cached := Path(importlib.util.cache_from_source(str(origin)))).parent.mkdir(parents=True)
    if compiled:
        cached.touch()
    monkeypatch.setattr(sys, "dont_write_bytecode", told)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: SimpleNamespace(name=name, origin=str(origin)) if name == "torch" else None,
    )
    found = _compiled()
    assert [finding.level for finding in found] == (["warn"] if warned else [])
    assert not warned or (
        "but torch have no compiled files: each process" in found[0].value
        and f"-j 0 {tmp_path}`" in found[0].value
    )


def test_the_findings_of_this_environment() -> None:
    found = {finding.what: finding for finding in examine()}
    assert found["torch"].level == "ok" and found["CPUs"].level == "ok"
    assert found["vllm: rotary_heads"].value.endswith(
        "Until: A CPU kernel for tensors with a separate dimension for heads."
    )


def test_a_vllm_that_is_not_tested_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: {"vllm": "0.27.0"}.get(package, "1"))
    (finding,) = [finding for finding in examine() if finding.what.startswith("vllm ")]
    assert finding.level == "bad" and "vLLM 0.27.0 is not tested" in finding.value


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


def test_the_agreement_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = LabelFile(tmp_path / "labels.jsonl")
    ann = [n % 3 for n in range(30)]
    for label in rated([ann, [2 if n < 6 else rating for n, rating in enumerate(ann)]], ["Ann", "[red]Bob"]):
        file.append(label)
    file.append(row(id="again", uid="q2", annotator="Ann", verdict="B>A", shown_first="b", repeat_of="Ann2"))
    assert main(["label", "--agreement", str(tmp_path / "labels.jsonl")]) == 0
    told = capsys.readouterr().out
    assert "30 pairs have a verdict, 30 of them by two or more annotators" in told
    line = next(line for line in told.splitlines() if line.startswith("Ann, [red]Bob"))
    assert line.split()[2:5] == ["30", "87", "%"] and " 0.80 (" in line
    line = next(line for line in told.splitlines() if line.startswith("Ann "))
    assert line.split()[:5] == ["Ann", "30", "0", "33", "%"] and "100 %" in line


def test_names_send_nothing_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = LabelFile(tmp_path / "labels.jsonl")
    for label in rated([[0, 2, 1], [0, 2, 0]], ["\x1b]0;title\x07Ann", "\x9b31mBob\u202e"]):
        file.append(label)
    assert main(["label", "--agreement", str(tmp_path / "labels.jsonl")]) == 0
    told = capsys.readouterr().out
    assert "Ann" in told and "Bob" in told and not set(told) & set("\x1b\x07\x9b\u202e")


def test_a_file_that_a_calibration_reads_has_an_agreement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def line(number: int, annotator: str, verdict: str, **changes: Any) -> str:
        prompt = [{"role": "user", "content": "Copy this number: 41"}]
        own = dict(id=f"{annotator}{number}", uid=f"q{number}", prompt=prompt, answer_a="41", answer_b="No.")
        return (
            json.dumps(
                own
                | {"verdict": verdict, "annotator": annotator, "repeat_of": None, "undone": None}
                | changes
            )
            + "\n"
        )

    file = tmp_path / "labels.jsonl"
    lines = [line(n, "ann", "A>B") + line(n, "bo", "A=B" if n < 3 else "A>B") for n in range(20)]
    # the same winner, the other way round
    lines += line(20, "ann", "A>>B"), line(20, "bo", "B>A", answer_a="No.", answer_b="41")
    lines += line(21, "ann", "B>A"), '{"id": "taken", "undone": "ann21"}\n'
    file.write_text("".join(lines) + '{"id": "cut by a cra')
    assert len(load_labels(file)) == 21
    assert main(["label", "--agreement", str(file)]) == 0
    told = capsys.readouterr().out
    assert "21 pairs have a verdict, 21 of them by two or more annotators" in told
    both = next(line for line in told.splitlines() if line.startswith("ann, bo"))
    assert both.split()[2:5] == ["21", "86", "%"]
    alone = next(line for line in told.splitlines() if line.startswith("ann "))
    # no side and no time is known
    assert alone.split()[:5] == ["ann", "21", "0", "0", "%"] and alone.rstrip().endswith("–")
    file.write_text(line(1, "ann", "A>>>B"))
    assert main(["label", "--agreement", str(file)]) != 0
    assert "line 1: verdict is 'A>>>B'" in capsys.readouterr().err


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
    assert (
        asked == f"its pages request the auth string once: {AUTH if terminal else f'the content of {file}'}"
    )
    assert AUTH not in shell
    command = shell.removeprefix("from another shell: ")
    told = captured(["sh", "-c", f'{command}; echo "$PREFECT_API_URL $PREFECT_API_AUTH_STRING"'])
    assert told.stdout == f"{API} {AUTH}\n"


def test_serve_says_what_it_does_before_it_imports_prefect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    told = capsys.readouterr()
    assert told.out.startswith("importing Prefect and reading the recipes\n")
    assert "give the recipes to serve" in told.err


def test_ctrl_c_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def examine() -> list[object]:
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.cli.doctor.examine", examine)
    assert app.main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted; run the same command again to continue\n"


@pytest.mark.parametrize(
    ("cron", "told"), [("0 0 30 2 *", "month 2 has no day 30"), ("5 4 31 4,6 *", "month 4,6 has no day 31")]
)
def test_a_cron_that_never_fires_is_refused(cron: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"never fires: {told}; correct the day or the month"):
        schedule_of(None, cron, "UTC")


@pytest.mark.parametrize("cron", ["0 2 * * *", "0 0 29 2 *", "0 0 31 1,2 *", "@daily"])
def test_a_cron_that_fires_is_taken(cron: str) -> None:
    assert schedule_of(None, cron, "Europe/Berlin").cron == cron


def test_an_interval_needs_no_cron() -> None:
    assert schedule_of(60, "0 0 30 2 *", "UTC").cron is None
