"""`alignflow label` as a process: killed at random moments while two annotators label, who sees its page, and
a second server."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from evaluation.labelling.label_records import HumanLabel
from evaluation.labelling.label_store import read_labels
from tests.support.labelling import Served, write_rows
from tests.support.sockets import beyond_loopback

pytestmark = pytest.mark.slow
COUNT = 300
KILLS = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(
        tmp_path / "rows.jsonl",
        [{"uid": f"q{n}", "prompt": f"{n}?", "answer_a": f"a{n}", "answer_b": f"b{n}"} for n in range(COUNT)],
    )
    return tmp_path


def serve(folder: Path, port: int = 0) -> Served:
    return Served(
        folder, "rows.jsonl", "--out", "labels.jsonl", "--sample", str(COUNT), "--repeat", "0", port=port
    )


class Annotator(threading.Thread):
    """Labels as the page does: sends a verdict again until the server answers. `acknowledged`: tasks that it
    said are saved."""

    def __init__(self, name: str, served: Served):
        super().__init__(daemon=True)
        self.name = name
        self.root = served.root
        self.acknowledged = list[str]()
        self._client = httpx.Client(headers={"authorization": f"Bearer {served.token}"}, timeout=10)
        self.conflicts = 0

    def run(self) -> None:
        shown = self._ask("GET", "/api/next", params={"annotator": self.name}).json()
        while shown["task"] is not None:
            # answer A is much better, on whichever side it is
            choice = 0 if shown["left"].startswith("a") else 4
            answer = self._ask(
                "POST",
                "/api/label",
                json={"annotator": self.name, "task": shown["task"], "choice": choice, "seconds": 1},
            )
            assert answer.status_code in (200, 409), answer.text
            self.conflicts += answer.status_code == 409  # it was saved, but the answer was lost
            self.acknowledged.append(shown["left"][1:])
            shown = answer.json()

    def _ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        while True:
            try:
                return self._client.request(method, f"{self.root}{path}", **more)
            except httpx.TransportError:
                time.sleep(0.02)


def test_kills_lose_no_acknowledged_label_and_repeat_none(folder: Path) -> None:
    served = serve(folder)
    generator = random.Random(1)
    annotators = [Annotator(name, served) for name in ("Ann", "Bob")]
    for annotator in annotators:
        annotator.start()
    for kill in range(1, KILLS + 1):
        enough = kill * COUNT // (KILLS + 1) + generator.randrange(10)
        while len(annotators[0].acknowledged) < enough and annotators[0].is_alive():
            time.sleep(0.001)
        acknowledged = {annotator.name: list(annotator.acknowledged) for annotator in annotators}
        served.end()
        there = read_labels(folder / "labels.jsonl")
        for name, told in acknowledged.items():
            assert {f"q{number}" for number in told} <= uids(there, name)
        served = serve(folder, served.port)
    for annotator in annotators:
        annotator.join(300)
        assert not annotator.is_alive()
    labels = read_labels(folder / "labels.jsonl")
    assert served.end() == -9 and len(labels) == len({label.id for label in labels}) == 2 * COUNT
    assert uids(labels, "Ann") == uids(labels, "Bob") == {f"q{n}" for n in range(COUNT)}
    assert {label.verdict for label in labels} == {"A>>B"}


def uids(labels: list[HumanLabel], annotator: str) -> set[str]:
    return {label.uid for label in labels if label.annotator == annotator}


def test_only_this_machine_with_the_token_and_one_server_for_a_file(folder: Path) -> None:
    served = serve(folder)
    assert beyond_loopback(served.process.pid) == {}
    assert httpx.get(f"{served.root}/").status_code == 401
    assert httpx.get(f"{served.root}/?token={served.token}").status_code == 303
    assert (folder / ".alignflow/label-token").stat().st_mode & 0o077 == 0
    with pytest.raises(
        AssertionError, match=r"it ended with code 3: .*labels.jsonl: .* label` is writing to this file"
    ):
        serve(folder)
    other = ["rows.jsonl", "--out", "other.jsonl"]
    with pytest.raises(AssertionError, match=f"code 3: nothing can be served on 127.0.0.1:{served.port}"):
        Served(folder, *other, port=served.port)
    assert not (folder / "other.jsonl").exists()
    assert served.end(2) == 130, "Ctrl-C"
    assert serve(folder).end(15) in (143, -15)
