"""Artifacts with the records of runs, for the dashboard's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.finished_run import finished, view

STARTED = 1.79e9


class Artifacts:
    """An artifacts folder with one finished run, `demo/first`, of all kinds of stages."""

    def __init__(self, path: Path):
        self.path = path
        self.views = finished(path, lines=20)
        self.record("first", "done", STARTED + 600)

    def record(
        self, identity: str, state: str = "", ended: float | None = None, status: str = "done", **more: Any
    ) -> Path:
        """Writes the record of a run of these stages. `more`: other fields."""
        stages = [
            dict(
                name=v.name, kind=v.kind, parents=v.parents, run_dir=f"stages/{v.run_dir.name}", status=status
            )
            for v in self.views
        ]
        told = (
            dict(recipe="demo", state=state, host="box", pid=7, started=STARTED, ended=ended, stages=stages)
            | more
        )
        file = self.path / "demo" / "runs" / f"{identity}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(told))
        return file

    def stage(self, name: str) -> Path:
        return view(self.path, name).run_dir


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    return Artifacts(tmp_path / "artifacts")
