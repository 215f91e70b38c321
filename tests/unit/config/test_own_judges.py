"""A judge on engines of the stage, in the config: its kind, where it is placed, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.config import PPO, Preferences
from rlhf_core.config.metrics.ppo.sampling_metrics import priced_judges_of
from rlhf_core.config.rewarding.judge_models import EngineJudge, RatingModel
from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.preflight.machine_checks import Needs, needs
from tests.support.text_rows import rows_of_text

ON_GPU = {"gpus": 1.0}


def reward(**judge: Any) -> dict[str, Any]:
    return {"judge": {"kind": "vllm", "model": "grm", **judge}, "rubric": "Short."}


def grpo(*sources: Any, **fields: Any) -> PPO:
    common = {"prompts": {"sources": "p.jsonl"}, "advantage_estimator": "grpo", "n_samples_per_prompt": 8}
    return PPO(**common | {"reward": list(sources), "init_kl_coef": 0.0} | fields)


def test_without_a_kind_a_judge_is_behind_an_endpoint() -> None:
    for judge in ({"model": "m"}, {"model": "m", "kind": "openai"}):
        source = JudgeReward(judge=judge, rubric="Short.")
        assert isinstance(source.judge, RatingModel)
        assert JudgeReward.model_validate(source.model_dump()) == source
        assert [server.chat for server in grpo(source).servers] == [source.judge]
    own = JudgeReward(**reward(engine={"cpus": 0.5}))
    assert isinstance(own.judge, EngineJudge) and own.judge.engine.cpus == 0.5 and own.title == "grm"
    assert JudgeReward.model_validate(own.model_dump()) == own
    config = grpo(own)
    assert not config.servers and not priced_judges_of(config)


def test_the_kind_is_that_of_the_engine() -> None:
    source = JudgeReward(judge={"kind": "transformers", "model": "m"}, rubric="Short.")
    assert isinstance(source.judge, EngineJudge) and source.judge.engine.kind == "transformers"


@pytest.mark.parametrize(
    ("judge", "told"),
    rows_of_text(r"""
    {kind: vllm, model: grm, base_url: "http://localhost:8000/v1"} | kind vllm runs the judge in this stage, but base_url applies only to a judge behind an endpoint: leave one of them out
    {kind: transformers, model: grm, concurrency: 3} | kind transformers runs the judge in this stage, but concurrency applies only to a judge behind
    {model: grm, engine: {gpus: 1}} | engine applies only to a judge on the stage's own engines, but this one is behind an endpoint: set kind to vllm, or leave engine out
    {kind: vllm, model: grm, engine: {kind: transformers}} | the judge's kind is vllm, but engine.kind is transformers: leave engine.kind out
    {kind: vllm, model: grm, max_model_len: 4096} | max_tokens=4096 leaves no room for a request in max_model_len=4096: lower max_tokens
    {kind: vllm, model: grm, engine: {adapters: alone}} | engine.adapters is only for ppo
    """),
)
def test_what_is_for_the_other_kind_is_refused(judge: Any, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        JudgeReward(judge=judge, rubric="Short.")
    assert told in str(caught.value)


def test_a_judge_has_a_group_of_its_own_and_counts_in_what_is_needed() -> None:
    engine = {**ON_GPU, "tensor_parallel_size": 2}
    config = grpo(reward(engine=engine), actor_ranks=ON_GPU, engine=ON_GPU)
    assert list(config.placed) == ["actor", "sampler", "judge:grm"]
    assert needs(config) == Needs(cpus=4, gpus=4, nodes=1)
    assert config.nested_names == [("reward.judge.model", "grm", "policy")]
    assert not config.loads("reward.judge.model") and config.loads("actor")
    two = grpo(reward(), {"function": "a.py:f"}, {**reward(model="b/c"), "name": "other"})
    assert [(judge.place, judge.group) for judge in two.own_judges] == [
        ("reward.0.judge", "judge:grm"),
        ("reward.2.judge", "judge:other"),
    ]


def test_a_judge_shares_gpus_if_its_engine_sleeps() -> None:
    ranks = {**ON_GPU, "num_ranks_per_node": 2}
    common = dict(actor_ranks=ranks, colocate_all=True, engine={**ON_GPU, "num_engines": 2, "sleep": True})
    apart = grpo(reward(engine=ON_GPU), **common)
    assert apart.together == [["actor", "sampler"]] and needs(apart).gpus == 3
    shared = grpo(reward(engine={**ON_GPU, "num_engines": 2, "sleep": True}), **common)
    assert shared.together == [["actor", "sampler", "judge:grm"]] and needs(shared).gpus == 2
    with pytest.raises(
        ValueError, match=r"groups that share GPUs need the same number of processes.*judge:grm 1"
    ):
        grpo(reward(engine={**ON_GPU, "sleep": True}), **common)
    with pytest.raises(
        ValueError, match="dynamic_filtering uses the judge grm while the engines hold the GPUs"
    ):
        grpo(reward(engine={**ON_GPU, "num_engines": 2, "sleep": True}), dynamic_filtering=True, **common)


def test_a_round_judges_after_it_has_sampled() -> None:
    fields: dict[str, Any] = {"policy": "sft", "prompts": {"sources": "p.jsonl"}, "engine": ON_GPU}
    config = Preferences(reward=reward(engine=ON_GPU), **fields)
    assert [list(turn) for turn in config.turns] == [["sampler"], ["judge:grm"]]
    assert needs(config).gpus == 1
    with pytest.raises(ValueError, match="the judge grm has the GPUs to itself while it judges a round"):
        Preferences(reward=reward(engine={**ON_GPU, "sleep": True}), **fields)


def test_lengths_are_those_that_the_judge_must_have() -> None:
    place = (".reward.judge", "grm")
    assert grpo(reward()).lengths("sft")[place] == (4096, "max_tokens")
    limited = grpo(reward(max_model_len=9000)).lengths("sft")
    assert limited[place] == (9000, "max_model_len")
