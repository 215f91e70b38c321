"""Who trains when: side by side on cards of their own, one after the other on cards that they share."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.ppo import fleet
from rlhf_core.ppo.fleet import Fleet


class Work:
    def __init__(self, said: list[str], name: str, what: str):
        self.said, self.name, self.what = said, name, what
        said.append(f"{name} begins to {what}")

    def wait(self, timeout: float) -> list[list[dict[str, float]]]:
        self.said.append(f"{self.name} is through")
        return [[{f"{self.name}/loss": 1.0}]]


class Role:
    def __init__(self, said: list[str], name: str):
        self.said, self.name = said, name

    def call(self, phase: str, method: str, *arguments: Any) -> Work:
        return Work(self.said, self.name, method)


@pytest.mark.parametrize("in_turn", [False, True])
def test_actor_and_critic_train_side_by_side_or_in_turn(in_turn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(fleet, "share", lambda batch: batch)
    monkeypatch.setattr(fleet, "wait_all", lambda works, timeout: said.append("all have released"))
    actor, critic, reference, sampler = (Role(said, name) for name in ("actor", "critic", "reference", "sampler"))
    made: Any = Fleet(actor, critic, reference, {}, sampler, None, str, 1.0, "float32", in_turn=in_turn)  # type: ignore[arg-type]
    assert made.train([], {"actor": [None], "critic": [None]}) == [{"critic/loss": 1.0, "actor/loss": 1.0}]
    released = [f"{name} begins to release" for name in ("actor", "critic", "reference")]
    if in_turn:
        assert [line for line in said if "release" not in line] == [
            "critic begins to train", "critic is through", "actor begins to train", "actor is through",
        ]  # fmt: skip
        for before in ("critic begins to train", "actor begins to train"):
            place = said.index(before)
            assert said[place - 1] == "all have released" and sorted(said[place - 4 : place - 1]) == released
    else:
        assert said == ["critic begins to train", "actor begins to train", "critic is through", "actor is through"]
