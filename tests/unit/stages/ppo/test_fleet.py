"""Who trains when: side by side on GPUs of their own, one after the other on GPUs that they share. And what a
probe lets pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core.data.documents import Document, Prompt
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.reward_contract import RewardsFailed
from rlhf_core.stages.ppo import fleet
from rlhf_core.stages.ppo.fleet import Fleet
from rlhf_core.stages.ppo.iteration import episode_metrics
from rlhf_core.stages.ppo.measured.probe import EngineDiffers, WeightsDiffer
from rlhf_core.stages.ppo.measured.roofline import Ceilings, ModelShape, RooflineInputs
from rlhf_core.stages.ppo.rewards.reward_sources import without_failed
from rlhf_core.stages.ppo.roles.trained import Steps, Trained, Update
from rlhf_core.stages.ppo.rollout_records import Experience, Own, Rollout
from rlhf_core.stages.ppo.sampling.rollout_group import RolloutGroup
from tests.support.fleet_config import fleet_config, no_sources


class Work:
    def __init__(self, said: list[str], name: str, what: str):
        self.said = said
        self.name = name
        self.what = what
        said.append(f"{name} begins to {what}")

    def wait(self, timeout: float) -> list[Steps]:
        self.said.append(f"{self.name} is through")
        scored = [(1, np.ones(2)), (0, np.zeros(2))] if self.name == "actor" else []
        return [
            Steps([{f"{self.name}/loss": 1.0}], scored[:1]),
            Steps([{f"{self.name}/loss": 1.0}], scored[1:]),
        ]


class Role:
    world_size = 1

    def __init__(self, said: list[str], name: str):
        self.said = said
        self.name = name

    def call(self, phase: str, method: Callable[..., Any], *arguments: Any) -> Work:
        return Work(self.said, self.name, method.__name__)


@pytest.mark.parametrize("in_turn", [False, True])
def test_actor_and_critic_train_side_by_side_or_in_turn(
    in_turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(fleet, "put_on_nodes", lambda batch: batch)
    monkeypatch.setattr(fleet, "wait_all", lambda works, timeout: said.append("all have released"))
    actor, critic, reference = (Role(said, name) for name in ("actor", "critic", "reference"))
    made: Any = Fleet(fleet_config(colocate_all=in_turn), actor, critic, reference, no_sources(None), None)  # type: ignore[arg-type]
    found = made.train([], {"actor": [None], "critic": [None]})
    assert found.metrics == [{"critic/loss": 1.0, "actor/loss": 1.0}] and [
        (i, len(a), a[0]) for i, a in found.logprobs
    ] == [
        (0, 2, 0),
        (1, 2, 1),
    ], "log-probs of all ranks, in order"
    released = [f"{name} begins to release" for name in ("actor", "critic", "reference")]
    if in_turn:
        assert [line for line in said if "release" not in line] == [
            "critic begins to train", "critic is through", "actor begins to train", "actor is through",
        ]  # fmt: skip
        for before in ("critic begins to train", "actor begins to train"):
            place = said.index(before)
            assert said[place - 1] == "all have released" and sorted(said[place - 4 : place - 1]) == released
    else:
        assert said == [
            "critic begins to train",
            "actor begins to train",
            "critic is through",
            "actor is through",
        ]


def probed(expected: np.ndarray, found: np.ndarray, experts: bool, noise: float = 0.1) -> Any:
    """A fleet whose trainer and engine give these log-probs of one document; rounding moves the trainer's by
    `noise`."""

    class Probed(Role):
        def call(self, phase: str, method: Callable[..., Any], *arguments: Any) -> Any:
            said = (
                [([(0, expected)], [(0, expected + noise)])] if self.name == "actor" else [[found.tolist()]]
            )
            return SimpleNamespace(wait=lambda timeout: said)

    actor = Probed([], "actor")
    sampler = Probed([], "sampler")
    machine = RooflineInputs({"actor": ModelShape(1, 1, 1, experts)}, {}, 1, Ceilings(1.0, 1.0))
    config = fleet_config(dtype="bfloat16")
    engines = RolloutGroup(config, sampler, actor)  # type: ignore[arg-type]
    return Fleet(config, actor, None, actor, no_sources(None), engines, machine=machine)  # type: ignore[arg-type]


def test_what_the_nodes_have_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks score; the critic's learner gets no log-probs, the actor's no values; both get what would
    have been sent."""
    documents = [Document([5, i, *[1] * i], [False, *[True] * (1 + i)]) for i in range(3)]
    sent = list[Any]()
    got = dict[str, list[Experience]]()

    class Learner(Trained):
        def __init__(self, name: str) -> None:
            self.name = name

        def update(self, items: list[Experience], update: Update, read: list[Any]) -> dict[str, float]:
            got[self.name] = items
            return {f"{self.name}/loss": 1.0}

    class Models(Role):
        def call(self, phase: str, method: Callable[..., Any], *arguments: Any) -> Any:
            if phase == "train":
                return SimpleNamespace(wait=lambda timeout: [method(Learner(self.name), *arguments)])
            kind = 10 * (len(self.name) + (phase == "score"))
            ranks = [
                [(i, np.full(len(d), kind + i, np.float32)) for i, d in enumerate(documents) if i % 2 == rank]
                for rank in (1, 0)
            ]
            return SimpleNamespace(refs=[(pairs, 1.0) for pairs in ranks], wait=lambda timeout: ranks)

    def put(batch: Any) -> Any:
        sent.append(batch)
        return batch

    monkeypatch.setattr(fleet, "put_on_nodes", put)
    actor, critic, reference = (Models([], name) for name in ("actor", "critic", "reference"))
    rollouts = [
        Rollout(Prompt((), [5], {}, False), d, np.full(len(d), -i, np.float32), True)
        for i, d in enumerate(documents)
    ]
    rewards = Rewards({"score": np.zeros(3)}, {})
    step = [Update([2, 0], 0.1, 0.0)]

    def trained(sampler_is: str, by_reference: bool) -> dict[str, list[dict[str, Any]]]:
        made: Any = Fleet(
            fleet_config(
                sampler_is=sampler_is,
                scores_actor=sampler_is != "in_ratio",
                weighs_tokens=sampler_is == "truncate",
            ),
            actor,
            critic,
            reference,
            no_sources(None),
            None,
        )  # type: ignore[arg-type]
        scores = made.start_score(rollouts, rewards, 0)()
        read = zip(rollouts, scores.logprobs, scores.ref_logprobs, scores.values, strict=True)
        whole = [
            Experience(r.document, old, r.sampler_logprobs, ref, v, -1.5, v + 1) for r, old, ref, v in read
        ]
        sent.clear()
        made.train(whole, {"actor": step, "critic": step}, stored=scores.stored if by_reference else ())
        return {name: [vars(one) for one in items] for name, items in got.items()}

    plain = trained("truncate", False)
    in_ratio = trained("in_ratio", True)
    assert [one["old_logprobs"].tolist() for one in in_ratio["actor"]] == [
        rollouts[i].sampler_logprobs.tolist() for i in step[0].indices
    ]
    weighed = trained("truncate", True)
    unweighed = trained("off", True)
    assert [
        (len(one.document), one.old_logprobs is None, one.sampler_logprobs is None) for one in sent[0]
    ] == [(0, True, False)] * 3
    for found in (weighed, unweighed):
        for name, fields in (
            ("actor", ("sampler_logprobs", "old_logprobs", "ref_logprobs")),
            ("critic", ("values", "returns")),
        ):
            for one, expected in zip(found[name], plain[name], strict=True):
                assert one["document"] == expected["document"] and one["advantages"] == -1.5
                assert all(np.array_equal(one[field], expected[field]) for field in fields)
        assert all(one["values"] is None for one in found["actor"])
        assert all(one["old_logprobs"] is None for one in found["critic"])


@pytest.mark.parametrize("experts", [False, True])
def test_prompts_of_one_token_have_nothing_to_probe(experts: bool) -> None:
    assert probed(np.zeros(1, np.float32), np.zeros(1, np.float32), experts).probe(
        [Document([1], [False])]
    ) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("far", "experts", "stops"), [(0, False, False), (1, False, True), (1, True, False), (5, True, True)]
)
def test_a_model_with_experts_may_differ_at_a_tenth_of_the_probed_tokens(
    far: int, experts: bool, stops: bool
) -> None:
    """Of 40 tokens `far` are 2 nats away, the others 0.1."""
    expected = np.full(41, -3.0, np.float32)
    found = expected + 0.1
    found[0] = expected[0] = 0.0  # the first token, of which nobody speaks
    found[1 : 1 + far] = -5.0
    made = probed(expected, found, experts)
    if stops:
        with pytest.raises(WeightsDiffer, match=r"after a weight sync .* does not hold the actor's weights"):
            made.probe([Document([1], [False])])
        with pytest.raises(
            EngineDiffers,
            match=r"before any weight sync .* computes the model in another way than the trainer",
        ):
            made.probe([Document([1], [False])], synced=False)
    else:
        assert made.probe([Document([1], [False])]) == pytest.approx((0.1, 0.4), abs=1e-5)


def test_the_bound_of_the_probe_follows_from_rounding() -> None:
    expected = np.full(41, -3.0, np.float32)
    found = expected + np.float32(0.1)
    found[0] = expected[0]
    assert probed(expected, found, False, 0.03).probe([Document([1], [False])]).bound == pytest.approx(
        0.12, abs=1e-5
    )
    with pytest.raises(WeightsDiffer, match=r"by up to 0\.1 \(allowed 0\.08\)"):
        probed(expected, found, False, 0.02).probe([Document([1], [False])])


def test_failed_episodes_have_no_reward_whatever_other_sources_say() -> None:
    own = [Own(1.0, None, "", 1, 1, 0.0), Own(math.nan, None, "it raised", 0, 3, 0.0)]
    document = Document([1, 2], [False, True])
    prompt = Prompt(({"role": "user", "content": "a"},), [1], {}, False)
    rollouts = [Rollout(prompt, document, np.zeros(2, np.float32), True, (), told) for told in own]
    rewards = Rewards({"short": np.array([0.5, 0.0])}, {})
    found = without_failed(rewards, rollouts, "it raised", 1)
    assert found.by_source["short"][0] == 0.5 and math.isnan(found.by_source["short"][1])
    with pytest.raises(RewardsFailed, match="an episode failed: it raised"):
        without_failed(rewards, rollouts, "it raised", 0)


def test_episodes_are_counted_by_the_limit_that_ended_them() -> None:
    document = Document([1, 2], [False, True])
    prompt = Prompt(({"role": "user", "content": "a"},), [1], {}, False)
    limits = ("turns", "turns", "time", None, "tokens", None, None, None)
    own = [Own(1.0, None, "", 1, 1, 0.0, ended_by=limit) for limit in limits]
    rollouts = [Rollout(prompt, document, np.zeros(2, np.float32), True, (), told) for told in own]
    found = episode_metrics(rollouts)
    shares = [found[f"environment/ended_by_{limit}"] for limit in ("turns", "tokens", "time")]
    assert shares == [0.25, 0.125, 0.125]
    assert episode_metrics([Rollout(prompt, document, np.zeros(2, np.float32), True)]) == {}
