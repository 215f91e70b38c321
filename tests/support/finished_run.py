"""A finished run of the demo's shape, made of real records (requests, results, metrics, an evaluation
report), with invented numbers.

For tests of what reads run directories. Nothing is trained; the numbers follow fixed formulas, so a test can
know them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from evaluation.report.summary import StageView
from evaluation.scores.over_optimisation import FILE as OVER_OPTIMISATION
from evaluation.scores.over_optimisation import OverOptimisation, QuestionValues, curve
from evaluation.scores.reward_accuracy import REWARD_MODELS, HeldOutPairs, RewardReports
from evaluation.scores.reward_accuracy import evaluate as evaluate_rewards
from evaluation.scores.style import FEATURES
from rlhf_core.config import (
    DPO,
    PPO,
    SFT,
    Data,
    Evaluation,
    Preferences,
    Publication,
    RewardJudge,
    RewardModel,
    RuleJudge,
    StageConfig,
)
from rlhf_core.records import EvalReport, Game, Judging, Judgment, Label, StyleEffect, WinRate
from rlhf_core.runs.run_dir import METRICS, Outcome, RunDir
from rlhf_core.system.files import digest
from tests.support.stage_request import stage_request

DATA = Data.model_validate({"sources": "data/rows.jsonl"})
PROMPTS = Data.model_validate({"sources": "data/prompts.jsonl"})
ROUND1 = "iterative_dpo.round1"
ROUND2 = "iterative_dpo.round2"
MODELS = ("ppo", ROUND1, ROUND2)
CONFIGS: dict[str, StageConfig] = {
    "sft": SFT(data=DATA),
    "reward_model": RewardModel(data=DATA, eval_data=DATA),
    "ppo": PPO(prompts=PROMPTS),
    f"{ROUND1}.preferences": Preferences(prompts=PROMPTS),
    f"{ROUND1}.dpo": DPO(pairs=f"{ROUND1}.preferences"),
    f"{ROUND2}.preferences": Preferences(policy=f"{ROUND1}.dpo", prompts=PROMPTS),
    f"{ROUND2}.dpo": DPO(policy=f"{ROUND1}.dpo", pairs=f"{ROUND2}.preferences"),
    "evaluation": Evaluation.model_validate(
        {"models": MODELS, "questions": {"path": "data/test.jsonl"}, "judges": [RuleJudge(), RewardJudge()]}
    ),
    "publication": Publication(model="iterative_dpo", evaluation="evaluation"),
}
PARENTS: dict[str, dict[str, str]] = {  # what the config calls it -> stage
    "sft": {},
    "reward_model": {"sft": "sft"},
    "ppo": {"sft": "sft", "reward_model": "reward_model"},
    f"{ROUND1}.preferences": {"sft": "sft", "reward_model": "reward_model"},
    f"{ROUND1}.dpo": {"sft": "sft", f"{ROUND1}.preferences": f"{ROUND1}.preferences"},
    f"{ROUND2}.preferences": {f"{ROUND1}.dpo": f"{ROUND1}.dpo", "reward_model": "reward_model"},
    f"{ROUND2}.dpo": {f"{ROUND1}.dpo": f"{ROUND1}.dpo", f"{ROUND2}.preferences": f"{ROUND2}.preferences"},
    "evaluation": {
        "sft": "sft",
        "ppo": "ppo",
        ROUND1: f"{ROUND1}.dpo",
        ROUND2: f"{ROUND2}.dpo",
        "reward_model": "reward_model",
    },
    "publication": {"iterative_dpo": f"{ROUND2}.dpo", "evaluation": "evaluation"},
}
SECONDS = dict(zip(CONFIGS, (21.4, 18.2, 131.7, 14.9, 9.3, 15.2, 9.1, 38.6, 1.4), strict=True))
DIGESTS = {name: digest(name) for name in CONFIGS}
RATES = dict(zip(MODELS, (0.655, 0.683, 0.71), strict=True))
CATEGORIES = ("copy", "count", "reverse", "sort", "sum")
QUESTIONS = 300


def run_dir(artifacts: Path, name: str) -> Path:
    return artifacts / "stages" / f"{name}-{DIGESTS[name]}"


def view(artifacts: Path, name: str, status: str = "done") -> StageView:
    parents = tuple(dict.fromkeys(PARENTS[name].values()))
    return StageView(name, CONFIGS[name].stage, parents, run_dir(artifacts, name), status)  # type: ignore[arg-type]


def finish(
    artifacts: Path,
    name: str,
    answer: Callable[[int], str] = lambda i: f"The answer is {i}.",
    lines: int = 60,
) -> StageView:
    """Makes one stage's directory, finished. `answer(i)` is the final model's answer to question i; `lines`
    of metrics."""
    config = CONFIGS[name]
    inputs = {
        named: str(run_dir(artifacts, parent) / "checkpoint") for named, parent in PARENTS[name].items()
    }
    if name == "sft":
        inputs["base"] = str(artifacts.parent / "models" / "base")
    request = stage_request(config, inputs, name=name, digest=DIGESTS[name])
    run = RunDir(run_dir(artifacts, name))
    run.prepare(request)
    rows = [{"step": i + 1, "time": 1.7e9 + i, **metrics(config.stage, i / lines, i)} for i in range(lines)]
    (run / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows if len(row) > 2))
    output = {"preferences": "pairs", "evaluation": "report", "publication": "published"}.get(
        config.stage, "checkpoint"
    )
    (run / output).mkdir()
    (run / output / "model.safetensors").write_bytes(b"weights")
    if config.stage == "evaluation":
        evaluate(run / output, answer)
    final = {key: value for key, value in rows[-1].items() if key not in ("step", "time")}
    if config.stage in ("sft", "reward_model", "dpo"):
        final |= {
            "data/rows": 2400.0,
            "data/kept": 2396.0,
            "data/truncated": 3.0,
            "data/dropped": 4.0,
            "data/tokens": 98214.0,
        }
    run.finish(request, Outcome(final, {output: output}), SECONDS[name])
    return view(artifacts, name)


def finished(
    artifacts: Path, answer: Callable[[int], str] = lambda i: f"The answer is {i}.", lines: int = 60
) -> list[StageView]:
    """All stages, finished, in topological order."""
    return [finish(artifacts, name, answer, lines) for name in CONFIGS]


def metrics(kind: str, x: float, i: int) -> dict[str, float]:
    """Invented metrics at share x of a run; the wiggle stands for noise."""
    wiggle = math.sin(12.9898 * i + 4.1) * math.cos(78.233 * i)
    if kind == "sft":
        held_out = {"eval/loss": 3.4 * math.exp(-3 * x) + 0.75} if i % 10 == 9 else {}
        loss = 3.5 * math.exp(-3 * x) + 0.7 + 0.08 * wiggle
        return {
            "loss": loss,
            "learning_rate": 1e-3 * (1 - x),
            "grad_norm": 1.2 - 0.6 * x + 0.2 * wiggle,
            "tokens": 4000.0,
            **held_out,
        }
    if kind == "reward_model":
        accuracy = 0.5 + 0.44 * (1 - math.exp(-5 * x))
        held_out = {"eval/accuracy": accuracy - 0.01, "eval/loss": 0.72 - 0.5 * x} if i % 10 == 9 else {}
        return {
            "loss": 0.69 - 0.5 * x + 0.04 * wiggle,
            "accuracy": min(1.0, accuracy + 0.04 * wiggle),
            **held_out,
        }
    if kind == "dpo":
        margin = 0.9 * x + 0.1 * wiggle
        rewards = {"rewards/chosen": 0.3 * x, "rewards/rejected": -0.6 * x - 0.1 * wiggle}
        return {
            "loss": 0.69 - 0.3 * x + 0.02 * wiggle,
            "accuracy": 0.55 + 0.35 * x + 0.04 * wiggle,
            "margin": margin,
            **rewards,
        }
    if kind == "ppo":
        return {
            "reward/mean": -0.4 + 1.5 * (1 - math.exp(-2 * x)) + 0.12 * wiggle,
            "reward/std": 0.9 - 0.3 * x,
            "kl/mean": 0.35 * x + 0.02 * wiggle,
            "kl/coef": 0.01,
            "policy/loss": -0.01 + 0.01 * wiggle,
            "policy/clip_share": 0.05 + 0.02 * wiggle,
            "policy/ratio": 1 + 0.004 * wiggle,
            "policy/ratio_gap": 0.02,
            "value/loss": 0.4 * math.exp(-3 * x) + 0.02 * wiggle,
            "value/explained_variance": 0.8 * (1 - math.exp(-4 * x)) - 0.1 + 0.05 * wiggle,
            "response/length": 14 + 3 * x + wiggle,
            "response/truncated": max(0.0, 0.03 - 0.02 * x + 0.01 * wiggle),
            "sampler/gap": 1e-3 + 2e-4 * wiggle,
            **{f"phase/{phase}": seconds * (1 + 0.1 * wiggle) for phase, seconds in PHASES.items()},
            **{"floor/generate": 0.2, "floor/score": 0.25, "wait/actor": 0.3, "wait/sampler": 0.7},
        }
    if kind == "preferences":
        return {"prompts": 256.0, "pairs": 201.0, "score/best": 0.9, "score/worst": -0.7}
    return {}


PHASES = {"generate": 0.7, "score": 0.4, "train_actor": 0.6, "train_critic": 0.5, "sync": 0.1}


def _games(of_baseline: Label, of_model: Label) -> tuple[Game, Game]:
    return Game(score=of_baseline, judgment={"answer": "B is right, A is wrong."}), Game(
        score=of_model, judgment={"answer": "by the rule"}
    )


# In game 0 A is the baseline, in game 1 the model.
GAMES = [_games("B>A", "A>B")] * 7 + [_games("B>A", "B>A")] + [_games("A>B", "B>A")] * 2


def evaluate(folder: Path, answer: Callable[[int], str]) -> None:
    """`eval.json`, second opinions, answers and judgments. The final model wins 7 of 10 questions, ties 1 and
    loses 2."""
    for part in ("answers", "judgments"):
        (folder / part).mkdir()
    for model in ("sft", *MODELS):
        rows = []
        for i in range(QUESTIONS):
            text = f"Maybe it is {i + 1}?" if model == "sft" else answer(i)
            question = {
                "role": "user",
                "content": f"Please {CATEGORIES[i % 5]} number {i}: how much is {i} plus 0?",
            }
            rows.append(
                {
                    "uid": f"q{i}",
                    "model": model,
                    "messages": [question, {"role": "assistant", "content": {"answer": text}}],
                }
            )
        (folder / "answers" / f"{model}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    battles = [
        Judgment(
            uid=f"q{i}",
            category=CATEGORIES[i % 5],
            judge="rule",
            model=model,
            baseline="sft",
            games=GAMES[i // 5 % 10],
        )
        for model in MODELS
        for i in range(QUESTIONS)
    ]
    (folder / "judgments" / "rule.jsonl").write_text(
        "".join(battle.model_dump_json() + "\n" for battle in battles)
    )
    (folder / OVER_OPTIMISATION).write_text(over_optimisation().model_dump_json())
    (folder / REWARD_MODELS).write_text(reward_reports().model_dump_json())
    (folder / "eval.json").write_text(report("rule", 0.0).model_dump_json())
    (folder / "second_opinions.json").write_text(
        json.dumps([report("reward_model", -0.05).model_dump(mode="json")])
    )


def over_optimisation() -> OverOptimisation:
    """Invented points: the reward of the last round rises, its win rate falls, and neither difference is
    noise."""
    generator = np.random.default_rng(0)
    shape = {
        "sft": (0.0, 0.0, 0.5),
        "ppo": (4.0, 1.0, 0.655),
        ROUND1: (6.0, 1.4, 0.683),
        ROUND2: (12.0, 2.5, 0.5),
    }
    measured = {}
    for model, (kl, proxy, won) in shape.items():
        battles = (
            np.full(QUESTIONS, 0.5) if model == "sft" else (np.arange(QUESTIONS) < won * QUESTIONS) * 1.0
        )
        measured[model] = QuestionValues(
            kl + generator.normal(0, kl, QUESTIONS), proxy + generator.normal(0, 0.5, QUESTIONS), battles
        )
    of_report = {rate.model: rate for rate in report("rule", 0.0).win_rates}
    rates = {model: of_report[model].model_copy(update={"win_rate": won, "ci_low": won - 0.05, "ci_high": won + 0.05})
             for model, (_, _, won) in shape.items() if model != "sft"}  # fmt: skip
    return curve("reward_model", "sft", measured, rates, 200, 0)


def reward_reports() -> RewardReports:
    """Two invented reward models, the second one louder."""
    generator = np.random.default_rng(0)
    differences = generator.normal(1.0, 1.5, 200)
    lengths = generator.integers(3, 20, (2, 200))
    pairs = HeldOutPairs([f"p{n // 2}" for n in range(200)], ["short", "long"] * 100, lengths[0], lengths[1])
    return evaluate_rewards(
        pairs, {"reward_model": differences, "second": 3 * differences + generator.normal(0, 1, 200)}, 10
    )


def report(judge: str, shift: float) -> EvalReport:
    def rate_of(model: str, baseline: str, rate: float) -> WinRate:
        return WinRate(
            model=model,
            baseline=baseline,
            judge=judge,
            win_rate=rate + shift,
            ci_low=rate + shift - 0.05,
            ci_high=rate + shift + 0.05,
            num_questions=QUESTIONS,
            num_failed=0,
            swap_consistency=0.96,
            num_won=round((rate + shift) * QUESTIONS) - 15,
            num_tied=30,
            num_lost=QUESTIONS - round((rate + shift) * QUESTIONS) - 15,
            by_category={category: rate + shift + 0.02 * n - 0.04 for n, category in enumerate(CATEGORIES)},
            length_controlled=rate + shift - 0.03,
            lc_low=rate + shift - 0.09,
            lc_high=rate + shift + 0.03,
        )

    effects = zip(FEATURES, (0.42, -0.1, 0.05, 0.0), strict=True)
    tokens = {"requests": 1800, "input_tokens": 1_234_567, "output_tokens": 98_765, "cost": 12.345}
    return EvalReport(
        baseline="sft",
        judge=judge,
        win_rates=tuple(rate_of(model, "sft", rate) for model, rate in RATES.items()),
        right=dict(zip(("sft", *MODELS), (0.47, 0.74, 0.79, 0.83), strict=True)),
        mean_tokens=dict(zip(("sft", *MODELS), (13.1, 12.4, 12.2, 11.9), strict=True)),
        truncated=dict.fromkeys(("sft", *MODELS), 0.01),
        agreement={"reward_model": 0.88} if judge == "rule" else {},
        against_parent=(rate_of(ROUND1, "ppo", 0.54), rate_of(ROUND2, ROUND1, 0.56)),
        style=tuple(
            StyleEffect(feature=name, effect=effect, ci_low=effect - 0.2, ci_high=effect + 0.2)
            for name, effect in effects
        ),
        judging=Judging(questions=QUESTIONS, games=1797, failed=3, **(tokens if judge == "rule" else {})),
    )
