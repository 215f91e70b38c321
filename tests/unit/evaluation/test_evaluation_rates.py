"""What an evaluation measures beyond the baseline: parents, lengths, reward models, and a paid judge that
stops early."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from evaluation.judges.offline import Match
from evaluation.scores.reward_accuracy import RewardReports
from rlhf_core.config import OpenAIJudge, RuleJudge
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.judging.chat_client import ChatClient
from rlhf_core.models.reward_scoring import RewardScorer
from rlhf_core.records import Game, Judgment
from tests.support.evaluations import (
    COUNT,
    Setting,
    evaluate,
    make_reward_model,
    make_tokenizer,
)


def test_every_model_also_plays_its_parent(setting: Setting) -> None:
    directory, report, metrics = evaluate(setting, parents={"ppo": "dpo", "dpo": "sft"})
    assert [(rate.model, rate.baseline) for rate in report.win_rates] == [("dpo", "sft"), ("ppo", "sft")]
    (rate,) = report.against_parent  # dpo's parent is the baseline: once is enough
    assert (rate.model, rate.baseline) == ("ppo", "dpo")
    assert rate.win_rate == pytest.approx((4 + 16 / 2) / 20)  # ppo alone is right on 4 questions
    assert metrics["win_rate_vs_parent/ppo"] == rate.win_rate
    assert metrics["win_rate/ppo"] == pytest.approx(0.7)
    judged = [
        Judgment.model_validate_json(line)
        for line in (directory / "report/judgments/rule.jsonl").read_text().splitlines()
    ]
    assert len(judged) == 60
    assert report.judging is not None
    assert report.judging.games == 120
    assert report.judging.questions == COUNT


def test_a_parent_that_is_not_judged_itself_still_answers(setting: Setting) -> None:
    directory, report, _ = evaluate(setting, models=("ppo",), parents={"ppo": "dpo"})
    assert [rate.model for rate in report.win_rates] == ["ppo"] and report.right["dpo"] == pytest.approx(0.7)
    assert (directory / "report/answers/dpo.jsonl").is_file()


def test_rates_come_raw_and_length_controlled(setting: Setting) -> None:
    """Right answers have 3 tokens and wrong ones 7: what length explains, control takes away."""
    _, report, metrics = evaluate(setting)
    for rate in report.win_rates:
        assert rate.length_controlled is not None and rate.lc_low is not None and rate.lc_high is not None
        assert rate.lc_low <= rate.length_controlled <= rate.lc_high
        assert rate.length_controlled < rate.win_rate - 0.05
        assert metrics[f"length_controlled/{rate.model}"] == rate.length_controlled
    effects = {effect.feature: effect for effect in report.style}
    assert set(effects) == {"length", "headers", "lists", "bold"}
    assert effects["length"].effect < 0 == effects["bold"].effect


def test_lengths_can_be_counted_by_one_tokenizer_for_all(setting: Setting) -> None:
    make_tokenizer(setting.folder / "counter")
    with_own, with_one = (evaluate(setting, name, **changes)[1] for name, changes in (
        ("own", {}), ("one", {"style_tokenizer": str(setting.folder / "counter")}),
    ))  # fmt: skip
    assert with_one.mean_tokens == pytest.approx(with_own.mean_tokens)  # the same tokens
    with pytest.raises(Exception, match="nowhere"):
        evaluate(setting, "none", style_tokenizer=str(setting.folder / "nowhere"))


def test_reward_models_are_evaluated_on_held_out_pairs(setting: Setting) -> None:
    for number, name in enumerate(("rm", "rm2")):
        make_reward_model(setting, name, seed=number)
    pairs = setting.folder / "pairs.jsonl"
    rows = [
        dict(prompt=f"Reverse w{n:02d}", chosen=f"w{n:02d}"[::-1], rejected="no idea", subset="ab"[n % 2])
        for n in range(20)
    ]
    pairs.write_text(
        "".join(
            json.dumps(row) + "\n" for row in [*rows, {"prompt": "x", "chosen": "same", "rejected": "same"}]
        )
    )
    wanted = {"models": ["rm", "rm2"], "data": {"sources": str(pairs)}}
    directory, _, metrics = evaluate(setting, reward_evaluation=wanted)
    found = RewardReports.model_validate_json((directory / "report/reward_models.json").read_text())
    assert [report.model for report in found.models] == ["rm", "rm2"] and found.models[0].overall.pairs == 20
    assert {name: part.pairs for name, part in found.models[0].by_subset.items()} == {"a": 10, "b": 10}
    assert found.models[0].longer_chosen == 0.0 and found.models[0].accuracy_longer is None
    assert metrics["reward_accuracy/rm"] == found.models[0].overall.accuracy
    assert "reward_agreement/rm/rm2" in metrics
    # The model itself, asked directly, ranks the pairs as the report says.
    scorer = RewardScorer(setting.inputs["rm"], "float32", 4)
    renderer = Renderer(load_tokenizer(setting.inputs["rm"]), "chat")
    documents = [
        renderer.answer(asked(row["prompt"]), row[side]) for row in rows for side in ("chosen", "rejected")
    ]
    scores = scorer.score(documents)
    assert found.models[0].overall.accuracy == pytest.approx(
        sum(a > b for a, b in zip(scores[::2], scores[1::2], strict=True)) / 20
    )


def asked(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


class Scripted:
    """Stands for `evaluation.judges.factory.LlmJudge`: the longer answer wins; says what it was made with
    and asked."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, name: str, client: ChatClient, cache: Path, identity: str, max_failed: float):
        self.name = name
        self.client = client
        self.made.append({"client": client, "cache": cache, "identity": identity})

    @property
    def tokens(self) -> tuple[int, int]:
        return 1000 * self.client.requests, 100 * self.client.requests

    def judge(self, matches: Sequence[Match]) -> list[Game]:
        self.client.requests += len(matches)
        differences = [len(match.answer_a) - len(match.answer_b) for match in matches]
        return [
            Game(score="A>B" if d > 0 else "B>A" if d < 0 else "A=B", judgment={"answer": "."})
            for d in differences
        ]


def test_a_paid_judge_is_asked_until_the_interval_is_narrow_and_its_cost_is_told(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evaluation.judges.factory.LlmJudge", Scripted)
    monkeypatch.setattr("evaluation.evaluation_stage.require_servers", lambda *_: None)  # nobody is asked
    Scripted.made.clear()
    prices = {
        "input_price": 2.0,
        "output_price": 8.0,
        "requests_per_minute": 600,
        "verdict_cache": str(setting.folder / "verdicts"),
    }
    judge = OpenAIJudge(model="gpt", interval_width=0.5, sequential_questions=10, **prices)
    _, report, metrics = evaluate(setting, judges=(judge, RuleJudge()), models=("ppo",))
    assert report.judging is not None
    assert report.judging.questions == report.win_rates[0].num_questions == 10 < COUNT
    assert report.judging.cost == pytest.approx(20 * (1000 * 2 + 100 * 8) / 1e6) == metrics["judge_cost/gpt"]
    assert metrics["judge_input_tokens/gpt"] == 20_000 and report.judging.requests == 20
    (made,) = Scripted.made
    assert made["client"].pace.gap == 60 / 600 and made["identity"] == "gpt"
    assert made["cache"].parent == setting.folder / "verdicts" and made["cache"].name.startswith("gpt-")
    assert 0 <= report.agreement["rule"] <= 1  # on the questions both judged
