"""Pairs of answers to label, an open labels file, and `alignflow label` as a process that can be killed."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.labelling.assignment import Assignment, Rules
from evaluation.labelling.label_records import ComparedPair, HumanLabel
from evaluation.labelling.label_store import LabelFile
from rlhf_core.system.pages.secret_file import kept_secret
from rlhf_core.system.processes import ROOT

SECRET = "a secret of the tests"


def pairs(count: int) -> list[ComparedPair]:
    return [
        ComparedPair(
            uid=f"q{n}",
            prompt=({"role": "user", "content": f"Question {n}?"},),
            answer_a=f"first {n}",
            answer_b=f"other {n}",
            model_a="secret-baseline",
            model_b="secret-candidate",
            source="secret-source",
        )
        for n in range(count)
    ]


def assignment(path: Path, count: int = 10, clock: Any = lambda: 0.0, **rules: Any) -> Assignment:
    """Opens a labels file without its lock: one process, one file."""
    return Assignment(pairs(count), LabelFile(path), Rules(**{"repeat": 0.0, **rules}), SECRET, clock)


def row(**changes: Any) -> HumanLabel:
    own = {
        "id": "1",
        "verdict": "A>B",
        "shown_first": "a",
        "annotator": "Ann",
        "at": "2026-01-01T00:00:00.000+00:00",
        "seconds": 2.5,
    }
    return HumanLabel(**{**pairs(1)[0].model_dump(), **own, **changes})


def rated(ratings: Sequence[Sequence[int | None]], names: Sequence[str]) -> list[HumanLabel]:
    """Labels of (winner 0, 1, 2) ratings: a list for each annotator, with an entry for each pair."""
    verdicts = ("A>B", "A=B", "B>A")
    return [
        row(id=f"{name}{n}", uid=f"q{n}", annotator=name, verdict=verdicts[rating])
        for name, given in zip(names, ratings, strict=True)
        for n, rating in enumerate(given)
        if rating is not None
    ]


class Served:
    """`alignflow label` in a process of its own. `address`: with the token."""

    def __init__(self, folder: Path, *options: str, port: int = 0):
        command = [sys.executable, "-m", "flows.cli", "label", *options, "--port", str(port)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        atexit.register(self.process.kill)  # also after a test that failed
        assert self.process.stdout is not None
        told = ""
        for line in self.process.stdout:
            told += line
            found = re.search(r"one annotator: +(http://127\.0\.0\.1:(\d+))/", line)
            if found:
                self.root = found[1]
                self.port = int(found[2])
                self.token = kept_secret(folder / ".alignflow" / "label-token")
                return
        raise AssertionError(f"it ended with code {self.process.wait(30)}: {told}")

    def page(self, annotator: str) -> str:
        return f"{self.root}/label?annotator={annotator}&token={self.token}"

    def end(self, number: int = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return file
