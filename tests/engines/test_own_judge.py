"""Judges on engines of their stage: GRPO follows the taste of one, and one judges rounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_core.cluster import temporary_group
from rlhf_core.cluster.pending import RankDied
from rlhf_core.config import PPO, Data, EngineConfig, Preferences, Ranks
from rlhf_core.config.kinds import has_metric
from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.sources import prompts as load_prompts
from rlhf_core.rewards.judge.rating_prompt import rating_prompt
from rlhf_core.rewards.reward_contract import Sample
from rlhf_core.rollout.chat_models import judge_renderer
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import ROLLOUTS, RunDir
from rlhf_core.stages.preferences.preferences_stage import run as preferences
from rlhf_core.stages.preferences.round_judge import round_judge
from tests.support.judge_model import rating_of, save_judge
from tests.support.stage_request import stage_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LIKED = "!#$%&*/=@^_`{|}~BFJKQUVXZjz"
RUBRIC = "Is it written in signs?"
ITERATIONS = 8
SHARE = 0.25
SMALL = {"cpus": SHARE, "kv_cache_gib": 0.5}


def reward_of(answer: str) -> float:
    return (rating_of(answer, LIKED) - 1) / 9


def rewarded(kind: str, **fields: Any) -> dict[str, Any]:
    engine = SMALL if kind == "vllm" else {"cpus": SHARE}
    judge = {"kind": kind, "model": "grm", "max_tokens": 8, "max_model_len": 3000, "engine": engine}
    return {"judge": judge, "rubric": RUBRIC, **fields}


@pytest.fixture(scope="module")
def inputs(material: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The demo's policy, and a judge that counts signs which no request has but for the answer."""
    folder = tmp_path_factory.mktemp("grm") / "grm"
    save_judge(folder, LIKED, 1)
    source = JudgeReward(**rewarded("vllm"))
    policy = Renderer(load_tokenizer(str(material / "base")), "chat")
    data = load_prompts(Data(sources=str(material / "prompts.jsonl"), max_samples=50), policy, 64, 0)
    asked = [rating_prompt(source, Sample(prompt.messages, "x" * 30, {}, True, "")) for prompt in data.items]
    texts = [message["content"] for messages in asked for message in messages]
    assert not any(sign in text for sign in LIKED for text in texts)
    lengths = [len(judge_renderer("grm", str(folder), False).prompt(messages)) for messages in asked]
    save_judge(folder, LIKED, sum(lengths) // len(lengths))
    return {"base": str(material / "base"), "grm": str(folder)}


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs whose chosen answer the judge prefers."""
    rows = [{"prompt": f"Name {n}.", "chosen": f"{n} @@", "rejected": f"{n} aa"} for n in range(6)]
    file = tmp_path_factory.mktemp("labels") / "labels.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def grpo(
    material: Path, inputs: dict[str, str], labels: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PPO, RunDir]:
    root = tmp_path_factory.mktemp("judged")
    config = PPO(
        actor="base",
        advantage_estimator="grpo",
        init_kl_coef=0.0,
        reward=rewarded("vllm", agreement={"data": str(labels), "min": 0.9}),
        prompts=Data(sources=str(material / "prompts.jsonl")),
        rollout_batch_size=8,
        n_samples_per_prompt=8,
        train_batch_size=32,
        micro_train_batch_size=16,
        max_steps=ITERATIONS,
        prompt_max_len=64,
        generate_max_len=16,
        actor_learning_rate=3e-3,
        timeout=200,
        actor_ranks=Ranks(cpus=SHARE),
        engine=EngineConfig(**SMALL),
    )
    run = RunDir(root / "grpo")
    run.prepare(stage_request(config, inputs, name="grpo", seed=7))
    with (root / "log.txt").open("wb") as log:
        command = [sys.executable, "-m", "rlhf_core", str(run.path)]
        code = subprocess.run(
            command, env=dict(os.environ), stdout=log, stderr=log, stdin=subprocess.DEVNULL, timeout=800
        ).returncode
    assert code == 0, (root / "log.txt").read_text()[-5000:]
    return config, run


def test_each_answer_has_the_reward_of_the_judges_taste(grpo: tuple[PPO, RunDir]) -> None:
    config, run = grpo
    rows = [
        json.loads(line)
        for file in sorted((run / ROLLOUTS).glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    assert len(rows) == 8 * ITERATIONS
    given = [row["rewards"]["grm"] for row in rows]
    assert given == pytest.approx([reward_of(row["response"]) for row in rows]) and len(set(given)) > 2
    result = run.result()
    assert result is not None
    assert result.metrics["judge/grm/agreement"] == 1 and result.metrics["judge/grm/pairs"] == 6
    assert result.metrics["work/judge:grm/generate"] > 0 and 0 < result.metrics["wait/judge:grm"] < 1
    assert all(has_metric(config, name) for name in result.metrics)
    for line in read_metrics(run.path):
        assert line["reward/grm/failed"] == 0 < line["reward/grm/requests"] <= 64


def test_the_policy_follows_the_taste(grpo: tuple[PPO, RunDir]) -> None:
    _, run = grpo
    means = [line["reward/mean"] for line in read_metrics(run.path)]
    assert means[-1] > means[0] + 0.2


def round_of(inputs: dict[str, str], material: Path, reward: Any) -> Any:
    config = Preferences(
        policy="base",
        reward=reward,
        prompts={"sources": str(material / "prompts.jsonl"), "max_samples": 6},
        prompt_max_len=64,
        generate_max_len=16,
        engine=EngineConfig(kv_cache_gib=0.5),
    )
    return stage_request(config, inputs, name="round", seed=3)


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.long)])
def test_a_round_is_judged_and_a_resumed_one_starts_no_judge(
    kind: str,
    inputs: dict[str, str],
    labels: Path,
    material: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agreement = {"data": str(labels), "min": 0.9} if kind == "transformers" else None
    request = round_of(inputs, material, rewarded(kind, agreement=agreement))
    run = RunDir(tmp_path / "round")
    run.prepare(request)
    metrics = preferences(request, run).metrics
    pairs = [json.loads(line) for line in (run / "pairs.jsonl").read_text().splitlines()]
    assert metrics["pairs"] == len(pairs) > 0 == metrics["reward/failed"]
    for pair in pairs:
        assert pair["chosen_score"] == pytest.approx(reward_of(pair["chosen"]))
        assert pair["rejected_score"] == pytest.approx(reward_of(pair["rejected"]))
    assert 0 < metrics["reward/grm/requests"] <= 24
    assert metrics.get("judge/grm/agreement") == (1 if agreement else None)
    assert all(has_metric(request.config, name) for name in metrics)

    def start(*_: Any, **__: Any) -> Any:
        raise AssertionError("a judge was started, and all verdicts are known")

    monkeypatch.setattr(temporary_group, "temporary_group", start)
    again = preferences(request, run).metrics
    assert again["reward/grm/requests"] == 0
    assert {**again, **dict.fromkeys(metrics, 0)} == {**metrics, **dict.fromkeys(metrics, 0)}
    assert [json.loads(line) for line in (run / "pairs.jsonl").read_text().splitlines()] == pairs


def test_a_judge_that_disagrees_with_the_labels_stops_the_round(
    inputs: dict[str, str], labels: Path, material: Path, tmp_path: Path
) -> None:
    swapped = tmp_path / "swapped.jsonl"
    rows = [json.loads(line) for line in labels.read_text().splitlines()]
    swapped.write_text(
        "".join(
            json.dumps(row | {"chosen": row["rejected"], "rejected": row["chosen"]}) + "\n" for row in rows
        )
    )
    request = round_of(inputs, material, rewarded("transformers", agreement={"data": str(swapped)}))
    run = RunDir(tmp_path / "round")
    run.prepare(request)
    with pytest.raises(ValueError, match=r"the judge grm agrees with .*swapped.jsonl on 0 of 6 pairs"):
        preferences(request, run)
    assert not (run / "state" / "answers.jsonl").exists(), "before its engines start"


def engines_of_the_cluster() -> list[psutil.Process]:
    """Returns the processes of this process's own Ray cluster that run engines."""
    started = psutil.Process().children(recursive=True)
    return [process for process in started if process.name().startswith("ray::Worker")]


def test_an_engine_that_is_killed_stops_the_round(inputs: dict[str, str], material: Path) -> None:
    request = round_of(inputs, material, rewarded("transformers"))
    (source,) = request.config.reward
    messages = {str(n): [{"role": "user", "content": f"Rate {n}."}] for n in range(4)}
    with round_judge(request.config, request, source) as chat:
        found: dict[str, str] = {}
        chat.each(messages, chat.ask, lambda key, reply: found.update({key: reply.text}))
        assert set(found.values()) == {"[[1]]"}
        (engine,) = engines_of_the_cluster()
        engine.kill()
        with pytest.raises(RankDied, match="a rank of judge:grm died during 'generate'"):
            chat.each(messages, chat.ask, lambda *_: None)
    assert not engines_of_the_cluster()
