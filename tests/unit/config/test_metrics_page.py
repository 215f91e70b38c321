"""docs/reference/metrics.md has every metric that a stage's result can have."""

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
from rlhf_core.config.kinds import metrics_of

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()
ROWS: dict[str, Any] = {"sources": "rows.jsonl"}
SAMPLED = {"prompts": ROWS, "reward": "SOURCE", "n_samples_per_prompt": 2}
JUDGED = {"baseline": "MODEL", "questions": {"path": "questions.jsonl"}}
ENDPOINT = {"model": "x", "base_url": "https://x", "input_price": 1.0, "output_price": 1.0}
CHAT = [{"kind": "rule"}, {"kind": "openai", "model": "JUDGE"}]

CONFIGS: list[Gated] = [
    SFT.model_validate({"data": ROWS, "eval_data": ROWS}),
    RewardModel.model_validate({"data": ROWS, "eval_data": ROWS}),
    DPO.model_validate({"data": ROWS, "nll_coef": 0.1}),
    KTO.model_validate({"data": ROWS}),
    Preferences.model_validate(SAMPLED | {"post_processor": "dpo"}),
    Preferences.model_validate(SAMPLED | {"post_processor": "kto"}),
    PPO.model_validate(
        SAMPLED
        | {
            "overlong_buffer": 8,
            "truncated_penalty": 1,
            "dynamic_filtering": True,
            "eval_prompts": ROWS,
        }
    ),
    PPO.model_validate(
        SAMPLED | {"kl_in": "loss", "kl_estimator": "k3", "max_staleness": 2, "sampler_is": "mask"}
    ),
    PPO.model_validate(
        SAMPLED
        | {
            "environment": "guess",
            "reward": {"kind": "environment", "name": "SOURCE"},
            "advantage_estimator": "rloo",
        }
    ),
    Evaluation.model_validate(
        JUDGED | {"models": ["MODEL"], "parents": {"MODEL": "MODEL"}, "proxy": "x", "temperature": 1}
    ),
    Evaluation.model_validate(
        JUDGED | {"models": ["ENDPOINT"], "judges": CHAT, "endpoints": {"ENDPOINT": ENDPOINT}}
    ),
    Evaluation.model_validate(
        JUDGED | {"models": ["MODEL"], "reward_evaluation": {"models": ["MODEL"], "data": ROWS}}
    ),
    Regression.model_validate(JUDGED | {"models": ["MODEL"]}),
    Calibration.model_validate({"judge": CHAT[1], "labels": "labels.jsonl"}),
    AlignmentTax.model_validate({"models": ["MODEL"], "baseline": "BASE", "tasks": ["TASK"]}),
    Drift.model_validate(
        {
            "model": "MODEL",
            "prompts": ROWS,
            "past_prompts": ROWS,
            "kl": True,
            "anchors": {"pairs": JUDGED["questions"], "judge": CHAT[0]},
        }
    ),
    Publication.model_validate({"model": "MODEL"}),
]


def as_written(name: str) -> str:
    """Returns the name on the page, with placeholders for names of a recipe or a run."""
    name = re.sub(r"^(?!answer_)(\w+)/ENDPOINT$", r"\1/MODEL", name).replace("/BASE", "/MODEL")
    name = re.sub(r"^(\w+)_vs_parent/", r"\1/", name)
    return re.sub(r"^wait/.+$", "wait/ROLE", name).removesuffix("*")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stage)
def test_the_page_has_every_metric(config: Gated) -> None:
    names = {as_written(name) for name in metrics_of(config)}
    assert sorted(name for name in names if f"`{name}" not in PAGE) == []


def test_the_page_has_no_metric_that_no_stage_has() -> None:
    written = set(
        re.findall(
            r"`((?:policy|value|kl|sampler|filter|reward|data|response|prompt|floor|phase)/[\w/]+)`", PAGE
        )
    )
    assert len(written) > 40
    assert (
        written
        - {as_written(name) for config in CONFIGS for name in metrics_of(config)}
        - {"phase/sleep", "phase/wake"}
        == set()
    )
