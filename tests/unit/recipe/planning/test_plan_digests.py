"""Digests of a plan: what decides a result changes them, and nothing else does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhf_core.cluster.rank_environment import LESS_MEMORY
from rlhf_core.config import PPO
from rlhf_core.config.rewarding.verifiers import (
    CodeReward,
    MathReward,
    ReasoningGymReward,
    VerifierReward,
)
from rlhf_core.recipe import digest
from rlhf_core.recipe.digest import deciding
from rlhf_core.system.files import ABSENT, Digests
from tests.support.tiny_plan import Planned, changed


def test_digests_change_with_what_decides_the_result_and_with_nothing_else(
    planned: Planned, tmp_path: Path
) -> None:
    p = planned()
    everything = {node.name for node in p.nodes}
    below_ppo = everything - {"sft", "reward_model"}
    assert changed(p, planned()) == set()
    assert changed(p, planned("ppo.gamma=0.9")) == below_ppo
    assert changed(p, planned("seed=1")) == everything
    for free in (
        "ppo.logging_steps=7",
        "ppo.save_steps=2",
        "ppo.keep_checkpoints=3",
        "ppo.timeout=9",
        "artifacts=elsewhere",
        "name=other",
    ):
        assert changed(p, planned(free)) == set(), free
    for free in (
        "ppo.zero_stage=3",
        "sft.zero_stage=0",
        "sft.ranks.num_ranks_per_node=2",
        "ppo.actor_ranks.num_ranks_per_node=2",
    ):
        assert changed(p, planned(free)) == set(), free
    assert changed(p, planned("ppo.max_staleness=0")) == set() != changed(p, planned("ppo.max_staleness=1"))
    judged = planned("evaluation.judges=[{kind: openai, model: m}]")
    for free in (
        "requests_per_minute: 9",
        "input_price: 1.5",
        "output_price: 2",
        "verdict_cache: verdicts",
        "concurrency: 2",
    ):
        assert changed(judged, planned(f"evaluation.judges=[{{kind: openai, model: m, {free}}}]")) == set(), (
            free
        )
    assert changed(judged, planned("evaluation.judges=[{kind: openai, model: m, interval_width: 0.1}]")) == {
        "evaluation",
        "publication",
    }
    (tmp_path / "moved.jsonl").write_bytes((tmp_path / "pairs.jsonl").read_bytes())
    assert changed(p, planned("reward_model.data={sources: moved.jsonl}")) == set()
    (tmp_path / "q.jsonl").write_text("other\n")
    assert changed(p, planned()) == {"evaluation", "publication"}
    (tmp_path / "base" / "config.json").write_text('{"a": 1}')
    assert changed(p, planned()) == everything


def test_what_decides_speed_and_memory_alone_makes_nothing_anew(planned: Planned) -> None:
    """So a stage that ran out of memory goes on where it was when its user follows the advice, which names
    these fields."""
    p = planned()
    passes = {"micro_train_tokens": 4096, "micro_train_batch_size": 1, "gradient_checkpointing": True}
    ppo = passes | dict(
        micro_rollout_tokens=4096, micro_rollout_batch_size=2, ref_reward_offload=True, adam_offload=True
    )
    for field in (
        "micro_train_tokens",
        "micro_train_batch_size",
        "gradient_checkpointing",
        "adam_offload",
        "ref_reward_offload",
    ):
        assert field in LESS_MEMORY and field in ppo
    cards = [f"ppo.{role}_ranks.gpus=0.2" for role in ("actor", "critic", "reference", "reward")] + [
        "ppo.engine.gpus=0.2"
    ]
    on_gpus = planned(*cards)
    for stage in ("sft", "reward_model", "loop"):
        for field, value in passes.items():
            assert changed(p, planned(f"{stage}.{field}={value}")) == set(), (stage, field)
    for field, value in ppo.items():
        assert changed(on_gpus, planned(*cards, f"ppo.{field}={value}")) == set(), field
    for field, value in dict(
        gpu_memory_utilization=0.3, num_engines=2, kv_cache_gib=0.5, cpus=0.5, sleep=True
    ).items():
        assert changed(on_gpus, planned(*cards, f"ppo.engine.{field}={value}")) == set(), field
    for free in (
        "loop.engine.num_engines=2",
        "loop.micro_rollout_batch_size=1",
        "ppo.stream_batch_size=64",
        "ppo.actor_ranks.cpus=2",
    ):
        assert changed(p, planned(free)) == set(), free
    assert "ppo" in changed(p, planned("ppo.rollout_batch_size=256"))
    assert "sft" in changed(p, planned("sft.train_batch_size=64"))


def test_marked_fields_are_in_no_digest(tmp_path: Path) -> None:
    config = PPO.model_validate(
        {"prompts": {"sources": "p.jsonl"}, "micro_train_batch_size": 2, "engine": {"num_engines": 3}}
    )
    found = deciding(config, Digests(tmp_path))
    assert (
        not {"micro_train_batch_size", "micro_train_tokens", "actor_ranks", "gates", "timeout", "zero_stage"}
        & found.keys()
    )
    assert not {"num_engines", "gpu_memory_utilization"} & found["engine"].keys() and "gamma" in found


def test_fields_in_the_digest_if_set_are_in_it_with_another_value_than_their_default(tmp_path: Path) -> None:
    given = {"prompts": {"sources": "p.jsonl"}}
    default = deciding(PPO.model_validate(given), Digests(tmp_path))
    assert deciding(PPO.model_validate(given | {"schedule": "cosine"}), Digests(tmp_path)) == default
    other = {"schedule": "wsd", "warmup_steps": 0, "optimizer": "muon"}
    assert deciding(PPO.model_validate(given | other), Digests(tmp_path)) == default | other
    argued = {"prompts": {"sources": "p.jsonl", "template_args": {"effort": "low"}}}
    prompts = deciding(PPO.model_validate(argued), Digests(tmp_path))["prompts"]
    assert prompts == default["prompts"] | {"template_args": {"effort": "low"}}


def test_a_digest_covers_the_code_of_a_reward_function(planned: Planned, tmp_path: Path) -> None:
    rewards = "ppo.reward=[reward_model, {function: 'a.py:f', timeout: 9}]"
    (tmp_path / "a.py").write_text("def f(responses): return [0]\n")
    p = planned(rewards)
    (tmp_path / "b.py").write_text((tmp_path / "a.py").read_text())
    assert changed(p, planned(rewards.replace("9", "60"))) == set()
    assert "ppo" in changed(p, planned(rewards.replace("a.py:f", "a.py:g")))
    (tmp_path / "a.py").write_text("def f(responses): return [1]\n")
    assert "ppo" in changed(p, planned(rewards)) and "sft" not in changed(p, planned(rewards))


@pytest.mark.parametrize("kind", [MathReward, CodeReward, ReasoningGymReward])
def test_a_digest_covers_the_version_of_a_verifier(
    planned: Planned, monkeypatch: pytest.MonkeyPatch, kind: type[VerifierReward]
) -> None:
    reward = f"ppo.reward=[reward_model, {kind.shipped}]"
    p = planned(reward)
    assert changed(p, planned(reward)) == set()
    monkeypatch.setattr(kind, "version", kind.version + 1)
    assert "ppo" in changed(p, planned(reward)) and "sft" not in changed(p, planned(reward))


def test_a_digest_covers_generated_questions_and_the_release_that_generates_them(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "installed_release", lambda: "0.1.25")
    prompts = "ppo.prompts={sources: {reasoning_gym: {tasks: {gcd: {weight: 2}, lcm: {}}, seed: 1}}}"
    p = planned(prompts)
    assert changed(p, planned(prompts)) == set()
    for old, new in (("weight: 2", "weight: 3"), ("seed: 1", "seed: 2"), ("lcm", "leg_counting")):
        assert "ppo" in changed(p, planned(prompts.replace(old, new))), new
    both = planned("ppo.reward=[reward_model, reasoning_gym]")
    monkeypatch.setattr(digest, "installed_release", lambda: "0.1.26")
    assert "ppo" in changed(p, planned(prompts)) and "sft" not in changed(p, planned(prompts))
    assert "ppo" in changed(both, planned("ppo.reward=[reward_model, reasoning_gym]"))


def test_a_digest_covers_the_agreement_that_a_judge_needs(planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text("{}\n")
    agreement = f"agreement: {{data: {tmp_path}/held.jsonl, min: 0.6}}"
    reward = f"ppo.reward=[reward_model, {{judge: {{model: m}}, rubric: r, {agreement}}}]"
    assert "ppo" in changed(planned(reward), planned(reward.replace("0.6", "0.8")))


def test_one_plain_reward_model_counts_by_its_name(planned: Planned) -> None:
    p = planned("loop.reward=reward_model")
    assert changed(p, planned("loop.reward=[{model: reward_model}]", "loop.max_failed_rewards=0.3")) == set()
    for told in ("weight: 0.5", "normalize: running", "name: judge"):
        assert "loop.round1.preferences" in changed(
            p, planned(f"loop.reward=[{{model: reward_model, {told}}}]")
        ), told


def test_digests_are_remembered_and_a_change_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("one")
    os.utime(file, (1, 1))
    first = Digests(tmp_path)
    before = first.of(file)
    first.save()
    monkeypatch.setattr("rlhf_core.system.files.file_digest", lambda path: "read")
    assert Digests(tmp_path).of(file) == before
    file.write_text("two")
    assert Digests(tmp_path).of(file) == "read"
    assert Digests(tmp_path).of(tmp_path / "none") == ABSENT
    (tmp_path / ".digests.json").write_text("[broken")
    assert Digests(tmp_path).of(file) == "read"
