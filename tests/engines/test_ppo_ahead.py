"""PPO one step off policy, with all its engines: vLLM answers the next prompts while the models train on the
last answers.

One run, and the same gone on with from where a kill could have cut it off. What must hold is read from their
metrics, from the answers that waited in the state of the second, and from the actors exported on the way.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from rlhf_core.config import PPO, Ranks
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document
from rlhf_core.data.sources import prompts
from rlhf_core.models.load_model import load_policy
from rlhf_core.objectives.collate import collate
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.stages.ppo.measured.probe import NOISE_FREE
from rlhf_core.stages.ppo.sampling.sampled_answers import PromptOrder, Sampled
from rlhf_core.stages.ppo.sampling.stored import read_ahead
from tests.engines.test_ppo import (
    SAVED,
    SHARE,
    assert_same_end,
    common,
    finish,
    finish_and_keep,
    write_request,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ITERATIONS = 16
SEED = 7
# A third of the letters that a model without training writes are in it.
EARLY = (
    "def early(responses): return [sum(c in 'abcdefghijklm' for c in text) / max(1, len(text)) for text in"
    " responses]\n"
)


class Runs(NamedTuple):
    """Folders of the runs, and the answers that waited where one of them was cut off."""

    ahead: Path
    cut_off: Path
    waiting: Sampled


def ppo(material: Path, function: Path) -> PPO:
    here = {
        "max_steps": ITERATIONS,
        "num_episodes": ITERATIONS,
        "export_at": (SAVED - 1, SAVED),
        "max_epochs": 1,
        "min_lr_ratio": 1,
    }
    sizes = dict(rollout_batch_size=8, n_samples_per_prompt=4, train_batch_size=16, micro_train_batch_size=8)
    how = dict(
        advantage_estimator="grpo", reward=f"{function}:early", actor_ranks=Ranks(cpus=SHARE), max_staleness=1
    )
    plain = {"zero_stage": 0}  # plain torch, which is cut off and resumed here, DeepSpeed in test_ppo.py
    return PPO(**{**common(material), **here, **sizes, **how, **plain})


@pytest.fixture(scope="module")
def runs(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("ppo_ahead")
    (root / "checks.py").write_text(EARLY)
    config = ppo(material, root / "checks.py")
    ahead = root / "ahead"
    cut_off = root / "cut_off"
    write_request(ahead, config, {"base": str(material / "base")})
    finish_and_keep(ahead, cut_off)
    renderer = Renderer(load_tokenizer(str(material / "base")), config.prompts.template)
    order = PromptOrder(
        prompts(config.prompts, renderer, config.prompt_max_len, SEED).items, config.rollout_batch_size, SEED
    )
    waiting = read_ahead(cut_off / "state" / f"step-{SAVED}", order, config.n_samples_per_prompt)
    assert waiting is not None
    finish(cut_off)
    return Runs(ahead, cut_off, waiting)


def logprobs(model: Path, documents: list[Document]) -> list[np.ndarray]:
    policy = load_policy(str(model))
    with torch.no_grad():
        batches = [collate([[document]], 0) for document in documents]
        return [
            policy(b.tokens, b.positions, b.documents, 1.0).logprobs[b.documents >= 0].numpy()
            for b in batches
        ]


def test_it_learns(runs: Runs) -> None:
    lines = read_metrics(runs.ahead)
    assert len(lines) == ITERATIONS
    first, last = (
        np.array([(line["reward/mean"], line["reward/std"]) for line in part])
        for part in (lines[:4], lines[-4:])
    )
    # of the difference of two means of 4 x 32 answers
    error = np.sqrt(sum((part[:, 1] ** 2).mean() for part in (first, last)) / (4 * 32))
    assert last[:, 0].mean() - first[:, 0].mean() > 4 * error, [line["reward/mean"] for line in lines]


def test_answers_that_wait_are_those_of_the_weights_before_the_last_update(runs: Runs) -> None:
    rollouts = runs.waiting.rollouts
    assert runs.waiting.age == 1 and len(rollouts) == 32

    def gap(step: int) -> float:
        found = logprobs(
            runs.cut_off / "exports" / f"iteration{step}", [rollout.document for rollout in rollouts]
        )
        pairs = zip(found, rollouts, strict=True)
        return max(float(np.abs(got - r.sampler_logprobs)[r.document.mask_array].max()) for got, r in pairs)

    assert gap(SAVED - 1) < NOISE_FREE["float32"] < 10 * NOISE_FREE["float32"] < gap(SAVED)


def test_the_log_tells_their_age_and_how_far_the_weights_have_moved(runs: Runs) -> None:
    lines = read_metrics(runs.ahead)
    assert [line["rollout/age"] for line in lines] == [0] + [1] * (ITERATIONS - 1)
    assert lines[0]["sampler/ratio_gap"] < 1e-3 < min(line["sampler/ratio_gap"] for line in lines[1:])
    # engines and trainer agree once the weights have been sent, and training is on policy with itself
    for line in lines:
        assert line["sync/probe_gap"] < 1e-3 and line["policy/first_ratio_gap"] < 1e-5


def test_a_run_that_was_cut_off_ends_with_the_same_curve_and_weights(runs: Runs) -> None:
    assert_same_end(runs.ahead, runs.cut_off)


def test_the_wait_for_answers_is_separate_from_the_engines_work(runs: Runs) -> None:
    lines = read_metrics(runs.ahead)
    assert all(line["work/sampler/generate"] > 0 for line in lines[:-1])
    waits, work = (
        sum(line[name] for line in lines[:-1]) for name in ("phase/generate", "work/sampler/generate")
    )
    assert waits < work
    assert "work/sampler/generate" not in lines[-1], "nothing is answered that nobody trains on"
    for before, line in pairwise(lines):
        phases = sum(seconds for name, seconds in line.items() if name.startswith("phase/"))
        assert phases <= line["time"] - before["time"]
