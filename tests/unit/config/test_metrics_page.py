"""docs/reference/metrics.md is made from the tables of metrics, which fit kinds, charts and each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import (
    DPO,
    KTO,
    PPO,
    SFT,
    AlignmentTax,
    Calibration,
    Drift,
    Evaluation,
    Preferences,
    Publication,
    Regression,
    RewardModel,
)
from rlhf_core.config.gates import Gated
from rlhf_core.config.kinds import KINDS, metrics_of
from rlhf_core.config.metrics.metric import PLACE, Metric, after_run, meaning_of_failure
from rlhf_core.config.metrics.metrics_page import metrics_page

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
ROWS: dict[str, Any] = {"sources": "rows.jsonl"}
SAMPLED = {"prompts": ROWS, "reward": "source", "n_samples_per_prompt": 2}
JUDGED = {"baseline": "base", "questions": {"path": "questions.jsonl"}}
PRICED = {"model": "x", "base_url": "https://x", "input_price": 1.0, "output_price": 1.0}
CHAT = [{"kind": "rule"}, {"kind": "openai", "model": "judge"}]

CONFIGS: list[Gated] = [
    SFT.model_validate({"data": ROWS, "eval_data": ROWS}),
    RewardModel.model_validate({"data": ROWS, "eval_data": ROWS}),
    DPO.model_validate({"data": ROWS, "nll_coef": 0.1}),
    KTO.model_validate({"data": ROWS}),
    Preferences.model_validate(SAMPLED | {"post_processor": "dpo"}),
    Preferences.model_validate(SAMPLED | {"post_processor": "kto"}),
    PPO.model_validate(
        SAMPLED | dict(overlong_buffer=8, truncated_penalty=1, dynamic_filtering=True, eval_prompts=ROWS)
    ),
    PPO.model_validate(
        SAMPLED | {"kl_in": "loss", "kl_estimator": "k3", "max_staleness": 2, "sampler_is": "mask"}
    ),
    PPO.model_validate(SAMPLED | {"kl_in": "loss", "reference": "org/teacher", "teacher_top_k": 20}),
    PPO.model_validate(
        SAMPLED
        | dict(
            environment="guess", reward={"kind": "environment", "name": "source"}, advantage_estimator="rloo"
        )
    ),
    Evaluation.model_validate(
        JUDGED | {"models": ["model"], "parents": {"model": "model"}, "proxy": "x", "temperature": 1}
    ),
    Evaluation.model_validate(
        JUDGED | {"models": ["endpoint"], "judges": CHAT, "endpoints": {"endpoint": PRICED}}
    ),
    Evaluation.model_validate(
        JUDGED | {"models": ["model"], "reward_evaluation": {"models": ["model"], "data": ROWS}}
    ),
    Regression.model_validate(JUDGED | {"models": ["model"]}),
    Calibration.model_validate({"judge": CHAT[1], "labels": "labels.jsonl"}),
    AlignmentTax.model_validate({"models": ["model"], "baseline": "base", "tasks": ["task"]}),
    Drift.model_validate(
        {
            "model": "model",
            "prompts": ROWS,
            "past_prompts": ROWS,
            "kl": True,
            "anchors": {"pairs": JUDGED["questions"], "judge": CHAT[0]},
        }
    ),
    Publication.model_validate({"model": "model"}),
]


def test_the_page_is_current() -> None:
    page = metrics_page({name: kind.metrics for name, kind in KINDS.items()})
    assert PAGE.read_text() == page + "\n", "run: alignflow metrics-docs > docs/reference/metrics.md"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stage)
def test_a_configuration_has_each_metric_once(config: Gated) -> None:
    names = metrics_of(config)
    assert names and len(names) == len(set(names)) and not re.search("[A-Z]", "".join(names))


@pytest.mark.parametrize("name", KINDS)
def test_charts_and_main_metrics_are_metrics_of_the_kind(name: str) -> None:
    kind = KINDS[name]
    shown = [metric for panel in kind.charts or () for metric in (*panel.lines, panel.band) if metric]
    strange = [one for one in (*shown, *kind.main) if not any(metric.has(one) for metric in kind.metrics)]
    assert strange == []


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.module])
def test_names_and_their_places_are_declared_once(name: str) -> None:
    metrics = KINDS[name].metrics
    names = [one for metric in metrics for one in metric.names.split()]
    assert metrics and len(names) == len(set(names))
    assert [metric.names for metric in metrics if bool(PLACE.search(metric.names)) != bool(metric.of)] == []
    assert all(metric.meaning for metric in metrics)


def test_a_metric_of_two_places_has_a_name_for_each_pair() -> None:
    agreement = Metric("agreement/A/B more/A/B", "", of=lambda config: [("x", "y"), ("y", "x")])
    assert agreement.of_config(None) == ["agreement/x/y", "more/x/y", "agreement/y/x", "more/y/x"]
    assert agreement.has("agreement/x/z") and not agreement.has("agreement/x")


def test_the_reason_of_a_failed_gate_is_that_of_the_exact_name_first() -> None:
    metrics = [Metric("eval/ANY", "", of=after_run, failed="any"), Metric("eval/loss", "", failed="loss")]
    assert [meaning_of_failure(metrics, name) for name in ("eval/loss", "eval/more", "other")] == [
        "loss",
        "any",
        "",
    ]


def test_an_evaluation_has_the_rates_of_the_pairs_that_it_judges() -> None:
    """Not those of the baseline, nor against a parent that is the baseline."""
    config = Evaluation.model_validate(
        JUDGED | {"models": ["base", "dpo", "ppo"], "parents": {"dpo": "base", "ppo": "dpo", "base": "raw"}}
    )
    rates = [name for name in metrics_of(config) if name.startswith("win_rate")]
    assert rates == ["win_rate/dpo", "win_rate/ppo", "win_rate_vs_parent/ppo"]


def test_reward_models_agree_in_the_order_of_the_recipe() -> None:
    compared = {"models": ["a", "b", "c"], "data": ROWS}
    config = Evaluation.model_validate(JUDGED | {"models": ["dpo"], "reward_evaluation": compared})
    pairs = [name for name in metrics_of(config) if name.startswith("reward_agreement")]
    assert pairs == ["reward_agreement/a/b", "reward_agreement/a/c", "reward_agreement/b/c"]


@pytest.mark.parametrize("kind", [SFT, DPO, KTO])
def test_the_balance_of_experts_is_measured_where_it_is_trained(kind: type[Gated]) -> None:
    assert "router/balance" not in metrics_of(kind.model_validate({"data": ROWS}))
    assert "router/balance" in metrics_of(kind.model_validate({"data": ROWS, "router_aux_coef": 0.01}))
