"""Over-optimisation: known numbers, what is suspicious and what is not, and the stage that measures it with
real models."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from evaluation.answers.kl import log_ratios
from evaluation.report.drawing.evaluation_charts import over_optimisation_chart
from evaluation.scores.over_optimisation import (
    FILE,
    OverOptimisation,
    QuestionValues,
    battle_scores,
    curve,
    metrics,
    suspicion_of,
)
from rlhf_core.config import Evaluation, Source
from rlhf_core.config.kinds import has_metric
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.questions import Question
from rlhf_core.records import Game, Judgment, WinRate
from tests.support.evaluations import Setting, evaluate, make_model, make_reward_model
from tests.support.text_rows import rows_of_text
from tests.support.tiny_plan import Planned

QUESTIONS = 400


def measured(kl: float, proxy: float, won: float, noise: float = 0.0, seed: int = 0) -> QuestionValues:
    """Of a model: the means asked for, exactly without noise; `won` of the battles are 1, the others 0."""
    generator = np.random.default_rng(seed)
    battle = np.zeros(QUESTIONS)
    battle[: round(won * QUESTIONS)] = 1.0
    return QuestionValues(
        *(np.full(QUESTIONS, value) + generator.normal(0, noise, QUESTIONS) for value in (kl, proxy)),
        generator.permutation(battle),
    )


def baseline() -> QuestionValues:
    return QuestionValues(np.zeros(QUESTIONS), np.zeros(QUESTIONS), np.full(QUESTIONS, 0.5))


def rate(model: str, won: float) -> WinRate:
    return WinRate(
        model=model, baseline="sft", judge="gpt", win_rate=won, ci_low=won - 0.05, ci_high=won + 0.05, num_questions=QUESTIONS,
        num_failed=0, swap_consistency=1.0, by_category={},
    )  # fmt: skip


def curve_of(*points: tuple[str, float, float, float], noise: float = 0.0) -> OverOptimisation:
    """(model, KL, proxy, share of battles won)."""
    found = {
        model: measured(kl, proxy, won, noise, seed) for seed, (model, kl, proxy, won) in enumerate(points)
    }
    return curve(
        "rm",
        "sft",
        {"sft": baseline(), **found},
        {model: rate(model, won) for model, _, _, won in points},
        500,
        0,
    )


def test_the_textbook_case_rises_with_the_proxy_and_then_falls_with_the_judge() -> None:
    found = curve_of(
        ("ppo.iteration10", 4, 1.0, 0.6),
        ("ppo.iteration20", 16, 2.0, 0.75),
        ("ppo.iteration30", 36, 3.0, 0.55),
        ("ppo", 64, 4.0, 0.3),
    )
    assert [(p.model, p.kl, p.proxy, p.win_rate) for p in found.points] == [
        ("sft", 0, 0, 0.5),
        ("ppo.iteration10", 4, 1, 0.6),
        ("ppo.iteration20", 16, 2, 0.75),
        ("ppo.iteration30", 36, 3, 0.55),
        ("ppo", 64, 4, 0.3),
    ]
    assert [(p.suspicion, p.since) for p in found.points] == [("none", None)] * 3 + [
        ("sure", "ppo.iteration20")
    ] * 2
    assert {p.chain for p in found.points[1:]} == {"ppo"}
    assert metrics(found)["over_optimised/ppo"] == 1 and metrics(found)["over_optimised/ppo.iteration20"] == 0
    assert (metrics(found)["kl/ppo"], metrics(found)["proxy/ppo"], metrics(found)["kl/sft"]) == (64, 4, 0)


def test_a_model_that_is_worse_than_the_one_it_started_from_is_over_optimised_at_once() -> None:
    assert [(p.suspicion, p.since) for p in curve_of(("ppo", 9, 1.0, 0.3)).points[1:]] == [("sure", "sft")]


@pytest.mark.parametrize(
    ("proxy", "won", "noise", "expected"),
    [
        (2.0, 0.8, 0.0, "none"),  # both rise
        (0.5, 0.4, 0.0, "none"),  # both fall: a bad run, no over-optimisation
        (2.0, 0.5, 0.0, "sure"),
        (2.0, 0.59, 0.0, "possible"),  # 0.6 before: the judge's difference is noise
        (1.2, 0.4, 8.0, "possible"),  # 1.0 before: the proxy's difference is noise
    ],
)
def test_only_what_both_intervals_say_is_sure(proxy: float, won: float, noise: float, expected: str) -> None:
    before = measured(1, 1.0, 0.6, 0.0, seed=1)
    after = measured(2, proxy, won, noise, seed=3)
    assert suspicion_of(before, after, 1000, 0) == expected


def test_a_few_questions_are_not_sure() -> None:
    ones = np.ones(3)
    assert (
        suspicion_of(QuestionValues(ones, ones, ones), QuestionValues(ones, 2 * ones, 0 * ones), 100, 0)
        == "possible"
    )


def test_chains_are_told_apart_and_each_begins_at_the_baseline() -> None:
    found = curve_of(("ppo", 4, 5.0, 0.9), ("loop.round1", 2, 1.0, 0.7), ("loop.round2", 4, 2.0, 0.6))
    assert [(p.chain, p.suspicion, p.since) for p in found.points[1:]] == [
        ("ppo", "none", None),
        ("loop", "none", None),
        ("loop", "sure", "loop.round1"),
    ]


def test_false_alarms_are_rare() -> None:
    """Proxy and judge of two equally good models: both one-sided 2.5 % events at once, by chance."""
    alarms = 0
    for seed in range(200):
        generator = np.random.default_rng(seed)
        draws = [
            QuestionValues(
                generator.normal(size=100), generator.normal(size=100), generator.integers(0, 2, 100) * 1.0
            )
            for _ in range(2)
        ]
        alarms += suspicion_of(draws[0], draws[1], 200, 0) == "sure"
    assert alarms <= 2


def test_battles_without_a_verdict_are_left_out_of_the_comparison() -> None:
    games = (Game(score="B>A", judgment={}), Game(score="A>B", judgment={}))
    lost = (Game(score=None, judgment={}), Game(score=None, judgment={}))
    judged = [
        Judgment(
            uid=f"q{n}", category="x", judge="j", model="ppo", baseline="sft", games=games if n else lost
        )
        for n in range(3)
    ]
    scores = battle_scores(judged, "ppo", "sft", ["q0", "q1", "q2", "q3"])
    assert [None if math.isnan(score) else score for score in scores] == [None, 1.0, 1.0, None]
    nothing = QuestionValues(np.zeros(4), np.zeros(4), np.full(4, np.nan))
    assert suspicion_of(QuestionValues(np.zeros(4), np.zeros(4), scores), nothing, 10, 0) == "none"


def test_the_chart_rings_what_is_suspicious() -> None:
    calm = over_optimisation_chart(curve_of(("loop.round1", 2, 1.0, 0.6), ("loop.round2", 4, 2.0, 0.7)))
    assert "#c0392b" not in calm and "Trained on: mean score of rm" in calm and "win rate against sft" in calm
    alarmed = over_optimisation_chart(
        curve_of(("loop.round1", -0.1, 1.0, 0.7), ("loop.round2", 4, 2.0, 0.4), ("<ppo>", 4, 2.0, 0.6))
    )
    assert alarmed.count("#c0392b") >= 2 and "&lt;ppo&gt;" in alarmed and "<ppo>" not in alarmed


# The KL


def language_model(folder: Path, seed: int) -> str:
    make_model(folder, 0.5)
    torch.manual_seed(seed)
    Qwen2ForCausalLM(Qwen2Config.from_pretrained(folder, initializer_range=0.5)).save_pretrained(folder)
    return str(folder)


CONFIG = Evaluation(
    models=("ppo",),
    questions=Source(path="q.jsonl"),
    prompt_max_len=128,
    generate_max_len=24,
    micro_rollout_batch_size=3,
    dtype="float32",
)
ASKED = [Question(f"q{n}", "x", ({"role": "user", "content": f"Reverse w{n}"},), {}) for n in range(5)]


@pytest.mark.parametrize("rows", [1, 3, 64, None])
def test_log_ratios_are_those_of_the_models_token_by_token(rows: int | None, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"micro_rollout_batch_size": rows})
    places = {name: language_model(tmp_path / name, seed) for seed, name in enumerate(("sft", "ppo"))}
    answers = {"sft": ["one"] * 5, "ppo": [f"two {n}" * (n + 1) for n in range(5)]}
    found = log_ratios(ASKED, answers, places, config)
    assert set(found) == {"sft", "ppo"} and not found["sft"].any()
    renderer = Renderer(load_tokenizer(places["sft"]), "chat")
    models = {name: Qwen2ForCausalLM.from_pretrained(place).eval() for name, place in places.items()}
    for question, text, value in zip(ASKED, answers["ppo"], found["ppo"], strict=True):
        prompt, _ = renderer.prompt_within(question.messages, 128)
        document = renderer.answer_tokens(prompt, text).cut(len(prompt) + 24)
        tokens = torch.tensor([document.tokens])
        with torch.no_grad():
            tables = {
                name: torch.log_softmax(model(tokens).logits[0, :-1].double(), -1)
                for name, model in models.items()
            }
        said = range(len(prompt), len(document))
        expected = sum((tables["ppo"] - tables["sft"])[t - 1, document.tokens[t]].item() for t in said)
        assert value == pytest.approx(expected, abs=1e-3)


def test_the_mean_log_ratio_is_the_kl(tmp_path: Path) -> None:
    """One token of answer, sampled: the mean of the ratios comes near the sum over the vocabulary, which is
    the definition."""
    places = {name: language_model(tmp_path / name, seed) for seed, name in enumerate(("sft", "ppo"))}
    config = CONFIG.model_copy(update={"generate_max_len": 1, "micro_rollout_batch_size": 64})
    renderer = Renderer(load_tokenizer(places["sft"]), "chat")
    prompt, _ = renderer.prompt_within(ASKED[0].messages, 128)
    with torch.no_grad():
        ppo, sft = (
            torch.log_softmax(
                Qwen2ForCausalLM.from_pretrained(places[name]).eval()(torch.tensor([prompt])).logits[0, -1],
                -1,
            )
            for name in ("ppo", "sft")
        )
    letters = [renderer.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdefghij"]
    chances = torch.softmax(ppo[letters], -1)  # of answers that are one of ten letters
    torch.manual_seed(0)
    drawn = torch.multinomial(chances, 3000, replacement=True).tolist()
    texts = ["abcdefghij"[i] for i in drawn]
    questions = [Question(str(n), "x", ASKED[0].messages, {}) for n in range(len(texts))]
    ratios = log_ratios(questions, {"sft": texts, "ppo": texts}, places, config)["ppo"]
    exact = (chances * (ppo - sft)[letters]).sum().item()
    assert ratios.mean() == pytest.approx(exact, abs=4 * ratios.std() / math.sqrt(len(ratios)))
    assert ratios.std() > 0.1


def test_models_that_encode_answers_differently_have_no_kl(tmp_path: Path) -> None:
    places = {"sft": language_model(tmp_path / "sft", 0), "ppo": language_model(tmp_path / "ppo", 1)}
    tokenizer = load_tokenizer(places["ppo"])
    tokenizer.add_tokens(["two"])
    tokenizer.save_pretrained(places["ppo"])
    with pytest.raises(
        ValueError,
        match=r"^ppo and sft encode answers differently, so no KL between them can be measured: leave",
    ):
        log_ratios(ASKED, {"sft": ["two"] * 5, "ppo": ["two"] * 5}, places, CONFIG)


# The stage and the plan


def test_the_stage_measures_all_three_and_says_so(setting: Setting) -> None:
    make_reward_model(setting, "rm", 3)
    for seed, name in enumerate(("sft", "dpo", "ppo")):
        torch.manual_seed(seed)
        folder = setting.inputs[name]
        Qwen2ForCausalLM(Qwen2Config.from_pretrained(folder, initializer_range=0.3)).save_pretrained(folder)
    directory, report, values = evaluate(setting, proxy="rm", temperature=1.0)
    found = OverOptimisation.model_validate_json((directory / "report" / FILE).read_text())
    assert [point.model for point in found.points] == ["sft", "dpo", "ppo"] and found.judge == "rule"
    assert {p.model: p.win_rate for p in found.points[1:]} == {r.model: r.win_rate for r in report.win_rates}
    assert found.points[0].kl == 0 and all(abs(point.kl) > 0.1 for point in found.points[1:])
    assert values["kl/ppo"] == found.points[2].kl and values["proxy/dpo"] == found.points[1].proxy
    assert values["proxy/dpo"] != values["proxy/ppo"]
    again, _, _ = evaluate(setting, "again", proxy="rm", temperature=1.0)
    assert (again / "report" / FILE).read_text() == (directory / "report" / FILE).read_text()


TEXT = """
name: tiny
base_model: base/model
stages:
  sft: {data: {sources: train.jsonl}}
  reward_model: {data: {sources: pairs.jsonl}}
  ppo: {prompts: {sources: prompts.jsonl}, export_at: [10, 20]}
  evaluation: {models: [ppo.iteration10, ppo.iteration20, ppo], questions: {path: q.jsonl}, temperature: 1, proxy: reward_model}
  more: {stage: dpo, policy: ppo, data: {sources: pairs.jsonl}}
  both: {stage: evaluation, models: [ppo.iteration10, ppo, more], baseline: base, questions: {path: q.jsonl}}
"""


def test_checkpoints_of_a_ppo_run_are_models_by_name(planned: Planned) -> None:
    found = planned()
    ppo = found["ppo"]
    evaluation = found["evaluation"]
    inputs = found.inputs(evaluation)
    assert inputs["ppo.iteration10"] == str(ppo.run_dir / "exports" / "iteration10")
    assert inputs["ppo"] == str(ppo.run_dir / "checkpoint")
    assert evaluation.parents == ("ppo", "sft", "reward_model")
    assert inputs["reward_model"].endswith("/checkpoint")
    assert has_metric(evaluation.config, "over_optimised/ppo.iteration20")
    assert found["both"].config.parents == {"ppo.iteration10": "sft", "ppo": "sft", "more": "ppo"}  # type: ignore[union-attr]
    without = planned("ppo.export_at=[]", "evaluation.models=[ppo]", "both.models=[more]")
    assert without["ppo"].digest != ppo.digest


@pytest.mark.parametrize(
    ("override", "sentence"),
    rows_of_text(r"""
    evaluation.models=[ppo.iteration30] | ^stages\.evaluation\.models: unknown name 'ppo\.iteration30'; did you mean ppo\.iteration
    evaluation.temperature=0 | stages\.evaluation: proxy measures the KL on the models' answers.*set temperature to 1
    evaluation.judges=[{kind: reward}] | stages\.evaluation: the proxy reward_model is also the deciding judge.*put another
    evaluation.proxy=sft | stages\.evaluation\.proxy: sft is of kind sft, but a reward model is needed here
    ppo.export_at=[0] | stages\.ppo\.export_at\.0: input should be greater than 0
    """),
)
def test_wrong_curves_are_one_sentence(planned: Planned, override: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        planned(override)
