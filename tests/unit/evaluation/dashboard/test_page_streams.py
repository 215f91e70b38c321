"""The events of the dashboard's pages: what changed, their number, and their end."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.testclient import TestClient

from evaluation.dashboard import dashboard_app as app
from evaluation.dashboard.artifacts_folder import Folder
from evaluation.dashboard.dashboard_app import changes
from rlhf_core.runs.run_dir import LOG, METRICS
from tests.unit.evaluation.dashboard.conftest import STARTED, Artifacts
from tests.unit.evaluation.dashboard.test_pages import PPO, client

__all__ = ["client"]


class Stream:
    """The events of a page's stream, one look after the other."""

    def __init__(self, artifacts: Path, path: str, known: dict[str, str] | None = None):
        self.events: list[dict[str, str]] = []
        self.open: set[object] = set()
        self.ended = anyio.Event()
        self._made = changes(Folder(artifacts), path, {}, known or {}, self.open, self.ended)

    async def next(self, seconds: float = 60) -> dict[str, Any]:
        event = await asyncio.wait_for(anext(self._made), seconds)  # type: ignore[arg-type]
        return {"event": event["event"], "parts": json.loads(event["data"] or "{}")}

    async def until(self, *names: str) -> dict[str, Any]:
        """The parts of the events until these have come: a file that changes during a look changes one part
        then, another one later."""
        parts: dict[str, Any] = {}
        while not parts.keys() >= set(names):
            parts |= (await self.next())["parts"]
        return parts


def test_a_stream_sends_what_changed_and_nothing_else(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "LOOK_SECONDS", 0.01)
    run_dir = artifacts.stage("ppo")
    for file in run_dir.iterdir():
        # the page shows whole seconds, and the files were made in this one
        os.utime(file, (STARTED, STARTED))

    async def watch() -> None:
        stream = Stream(artifacts.path, PPO)
        first = await stream.next()
        assert {"state", "curves", "log", "lineage"} <= set(first["parts"]), "a page without digests gets all"
        known = {name: part["digest"] for name, part in first["parts"].items()}
        with pytest.raises(TimeoutError):
            await Stream(artifacts.path, PPO, known).next(0.5)
        stream = Stream(artifacts.path, PPO, known)
        waiting = asyncio.create_task(stream.until("state", "curves"))
        await asyncio.sleep(0.3)
        with (run_dir / METRICS).open("a") as file:
            file.write(json.dumps({"step": 21, "reward/mean": 9.0}) + "\n")
        assert set(await waiting) == {"state", "curves"}, "with the time of the last change"
        waiting = asyncio.create_task(stream.until("log"))
        await asyncio.sleep(0.3)
        with (run_dir / LOG).open("a") as file:
            file.write("a new line\n")
        told = await waiting
        assert "a new line" in told["log"]["html"] and "curves" not in told
        assert len(stream.open) == 1
        stream.ended.set()
        with pytest.raises(StopAsyncIteration):
            await stream.next()
        assert not stream.open

    asyncio.run(watch())


def test_a_stream_of_a_stage_that_is_removed_ends(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "LOOK_SECONDS", 0.01)

    async def watch() -> None:
        stream = Stream(artifacts.path, PPO)
        await stream.next()
        artifacts.stage("ppo").rename(artifacts.path / "elsewhere")
        assert (await stream.next())["event"] == "gone"

    asyncio.run(watch())


def test_streams_are_bounded(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_STREAMS", 0)
    assert client.get("/events/").status_code == 503
