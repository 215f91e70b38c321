"""Passes of roles of PPO where a recipe sets no size: fewer of them than with rows, and the same results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.config import PPO
from rlhf_core.data.documents import Document
from rlhf_core.stages.ppo.roles.actor import Actor
from rlhf_core.stages.ppo.roles.read_only import ReferenceModel, Reward
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec
from rlhf_core.stages.ppo.roles.trained import Critic, Update
from rlhf_core.stages.ppo.rollout_records import Experience
from rlhf_core.training.engine import TorchEngine
from tests.support.tiny_roles import models, plain_engine, ppo

__all__ = ["models", "plain_engine"]

LONGEST = 32  # positions of the models
ROWS: dict[str, Any] = {"micro_train_batch_size": 8, "micro_rollout_batch_size": 8}
DEFAULT: dict[str, Any] = {"micro_train_batch_size": None}
SHAPES = {
    "one": [5],
    "two": [3, LONGEST],
    "one long, many short": [LONGEST] + [4] * 40,
    "many short, one long": [4] * 40 + [LONGEST],
    "all equal": [6] * 24,
    "all of full length": [LONGEST] * 12,
    "shortest": [3] * 30,
}


def config(**fields: Any) -> PPO:
    sizes = {"prompt_max_len": 16, "generate_max_len": 16, "rollout_batch_size": 32, "train_batch_size": 64}
    return ppo(**sizes, kl_in="loss", kl_estimator="k2", entropy_coef=0.1, **fields)


def documents(lengths: Sequence[int]) -> list[Document]:
    generator = np.random.default_rng(0)
    return [
        Document(generator.integers(1, 31, n).tolist(), [False, False, *[True] * (n - 2)]) for n in lengths
    ]


def spec(folder: Path, fields: dict[str, Any]) -> ModelSpec:
    size = config(**fields).scoring_pass
    return ModelSpec(str(folder), "float32", 0, size.rows, False, size.tokens)


def experience_of(lengths: Sequence[int]) -> list[Experience]:
    generator = np.random.default_rng(1)
    items = []
    for document in documents(lengths):
        old, reference, values, advantages, returns = generator.normal(size=(5, len(document))).astype(
            np.float32
        )
        items.append(Experience(document, old - 3, old - 3, reference - 3, values, advantages, returns))
    return items


class Watched(TorchEngine):
    """Keeps the gradient of each step, and counts the passes."""

    gradients: list[torch.Tensor]
    passes: int

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        self.passes = getattr(self, "passes", 0) + 1
        super().backward(loss, last=last)

    def step(self, learning_rate: float) -> float:
        self.gradients = [p.grad.flatten() for p in self.module.parameters() if p.grad is not None]
        return super().step(learning_rate)


def trained(
    role: type[Actor] | type[Critic], folder: Path, lengths: Sequence[int], fields: dict[str, Any]
) -> tuple[dict[str, float], torch.Tensor, int]:
    """Returns the metrics, the gradient and the number of passes of one optimiser step."""
    built = role(spec(folder, fields), config(**fields), 0)
    built.engine.__class__ = Watched
    items = experience_of(lengths)
    metrics = built.train(items, [Update(list(range(len(items))), 1e-3, 0.1)]).metrics[0]
    engine = built.engine
    assert isinstance(engine, Watched)
    return metrics, torch.cat(engine.gradients), engine.passes


@pytest.mark.usefixtures("plain_engine")
@pytest.mark.parametrize("role", [Actor, Critic])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_has_the_gradient_of_rows(models: Path, role: type[Actor] | type[Critic], shape: str) -> None:
    lengths = SHAPES[shape]
    folder = models / ("sft" if role is Actor else "rm")
    metrics, gradient, passes = trained(role, folder, lengths, DEFAULT)
    expected, same, rows = trained(role, folder, lengths, ROWS)
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(gradient, same, rtol=1e-4, atol=1e-6)
    assert gradient.abs().max() > 1e-4, "something is learnt"
    assert rows == -(-len(lengths) // 8)
    assert passes == -(-sum(lengths) // (8 * LONGEST)), "as few as hold the tokens"


@pytest.mark.usefixtures("plain_engine")
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_those_of_rows(models: Path, shape: str) -> None:
    found = documents(SHAPES[shape])
    for ours, rows in (
        (ReferenceModel(spec(models / "sft", each), 1.0).logprobs(found) for each in (DEFAULT, ROWS)),
        (Reward(spec(models / "rm", each)).scores(found) for each in (DEFAULT, ROWS)),
    ):
        expected = dict(rows)
        assert sorted(i for i, _ in ours) == list(range(len(found)))
        for i, values in ours:
            np.testing.assert_allclose(values, expected[i], rtol=1e-4, atol=1e-5)
