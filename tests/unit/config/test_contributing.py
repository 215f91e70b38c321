"""The examples of CONTRIBUTING.md work in the files that it names. (Its stage:
tests/flows/test_new_stage.py.)"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import numpy as np
import pytest
import torch

import evaluation.judges.offline
import rlhf_core.data.rows.formats
import rlhf_core.objectives.advantages
import rlhf_core.objectives.losses
import rlhf_core.rewards.clients
from rlhf_core.config import DPO, AdvantageEstimator
from rlhf_core.data.questions import Question
from rlhf_core.objectives.advantages import GROUPED, grpo
from rlhf_core.objectives.losses import preference_loss
from rlhf_core.rewards.reward_contract import Sample

PAGE = Path(__file__).parents[3] / "CONTRIBUTING.md"


def example(name: str, module: ModuleType) -> Any:
    """What the page's block that defines `name` makes in a module."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (block,) = (block for block in blocks if re.match(rf"(def|class) {name}\b", block))
    space = dict(vars(module))
    exec(compile("from __future__ import annotations\n" + block, PAGE.name, "exec"), space)
    return space[name]


def test_the_loss() -> None:
    loss = example("hinge_loss", rlhf_core.objectives.losses)
    chosen = torch.tensor([0.0, -1.0])
    rejected = torch.tensor([-3.0, -1.0])
    found = loss(chosen, rejected, torch.zeros(2), torch.zeros(2), 0.5, 2.0)
    # 0 at a margin of 1.5, 1 at 0
    assert float(found.loss) == 0.5 and float(found.metrics["accuracy"]) == 0.5


def test_the_reward_source() -> None:
    source = example("Length", rlhf_core.rewards.clients)()
    assert list(source.score([Sample([], text, {}, True, text) for text in ("", "abc")]).rewards) == [
        0.0,
        3.0,
    ]


def test_the_estimator() -> None:
    estimator = example("best_of_n", rlhf_core.objectives.advantages)
    assert estimator(torch.tensor([[1.0, 3.0, 2.0, 0.0]])).tolist() == [[-0.25, 0.75, -0.25, -0.25]]


def test_the_judge() -> None:
    judge = example("ShorterJudge", evaluation.judges.offline)()
    match = evaluation.judges.offline.Match(Question("q", "x", (), {}), "long", "no")
    assert [game.score for game in judge.judge([match])] == ["B>A"]


def test_the_format() -> None:
    dolly = example("dolly", rlhf_core.data.rows.formats)
    row = {"instruction": "Sort 312", "context": "", "response": "123"}
    assert dolly("row 1", row).columns == {
        "prompt": [{"role": "user", "content": "Sort 312"}],
        "response": "123",
    }
    with pytest.raises(ValueError, match="'response' is missing or null"):
        dolly("row 1", {"instruction": "Sort 312"})


def test_every_name_of_a_loss_and_of_an_estimator_has_its_formula() -> None:
    chosen = torch.tensor([-1.0])
    rejected = torch.tensor([-2.0])
    found = {}
    for name in get_args(DPO.model_fields["loss"].annotation):
        config = DPO.model_validate({"data": {"sources": "p.jsonl"}, "loss": name})
        found[name] = float(preference_loss(config, chosen, rejected, chosen * 0, rejected * 0, 1.0).loss)
    assert found.pop("ipo_sum") == found["ipo"], "they differ in the log-probs that they are given"
    assert len(set(found.values())) == len(found) and np.isfinite(list(found.values())).all()
    assert GROUPED["grpo"] is grpo
    assert {*GROUPED, "gae", "reinforce_pp", "reinforce_pp_baseline"} == set(get_args(AdvantageEstimator))
