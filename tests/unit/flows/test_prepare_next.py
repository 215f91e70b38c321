"""Which stage's process is started ahead while another stage works."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flows import running


def node(name: str, kind: str, done: bool = False) -> Any:
    return SimpleNamespace(name=name, kind=kind, done=done)


NODES = (node("a", "sft"), node("b", "dpo", done=True), node("c", "evaluation"), node("d", "ppo"))


@pytest.mark.parametrize(
    ("begun", "started"),
    [({"a"}, [("evaluation", "evaluation")]), ({"a", "c"}, [("rlhf_core", "ppo")]), ({"a", "c", "d"}, [])],
)
def test_the_next_stage_that_is_not_done(
    begun: set[str], started: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    monkeypatch.setattr(running.prepared, "plan", lambda module, kind: calls.append((module, kind)))
    running.prepare_next(NODES, begun)
    assert calls == started
