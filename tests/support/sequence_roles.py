"""PPO's roles over two ranks that compute passes together, for tests/engines/test_zero_sequence.py: one rank,
which DeepSpeed takes whole.

python -m tests.support.sequence_roles MODELS OUT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.config import Ranks
from rlhf_core.data.documents import Document
from rlhf_core.stages.ppo.roles.actor import Actor
from rlhf_core.stages.ppo.roles.read_only import ReferenceModel, Reward
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec, Scored
from rlhf_core.stages.ppo.roles.trained import Critic, Update
from rlhf_core.stages.ppo.rollout_records import Experience, TeacherTokens
from tests.support.tiny_roles import documents, ppo

DOCUMENTS = 8


def arrays(found: Scored) -> list[list[float]]:
    return [[float(x) for x in values] for _, values in sorted(found, key=lambda item: item[0])]


def drawn_teacher(answer: Document, dice: np.random.Generator) -> TeacherTokens:
    """Returns five tokens and random masses at each token of an answer, the same on every rank."""
    count = int(answer.mask_array.sum())
    ids = dice.permuted(np.tile(np.arange(1, 31, dtype=np.int32), (count, 1)), axis=1)[:, :5]
    masses = np.log(dice.dirichlet(np.ones(6), count)).astype(np.float32)
    return TeacherTokens(np.zeros(len(answer), np.float32), ids, masses)


def read_and_train(models: Path, sharing: int, micro_tokens: int | None) -> dict[str, Any]:
    """What the roles make of some answers, before and after two optimiser steps of actor and critic."""
    ranks = Ranks(num_ranks_per_node=sharing)
    fields = {"entropy_coef": 0.1, "kl_in": "loss", "reference": "other", "teacher_top_k": 5}
    config = ppo(actor_ranks=ranks, critic_ranks=ranks, sequence_parallel_size=sharing, **fields)
    config = config.model_copy(update={"zero_stage": 3, "micro_train_tokens": micro_tokens})
    answers = [Document(d.tokens, d.mask) for d in documents(DOCUMENTS, seed=3)]

    def place(name: str) -> ModelSpec:
        return ModelSpec(str(models / name), "float32", 0, 4, False, micro_tokens, sharing)

    actor = Actor(place("sft"), config, 0)
    critic = Critic(place("rm"), config, 0)
    reference = ReferenceModel(place("other"), 1.0)
    reward = Reward(place("rm"))
    dice = np.random.default_rng(0)
    means = dict(
        old_logprobs=-3.4, sampler_logprobs=-3.4, ref_logprobs=-3.4, values=0.0, advantages=0.0, returns=0.0
    )
    experience = [
        Experience(
            answer,
            **{name: dice.normal(mean, 0.1, len(answer)).astype(np.float32) for name, mean in means.items()},
            teacher=drawn_teacher(answer, dice),
        )
        for answer in answers
    ]
    updates = [Update(list(range(start, start + 4)), 1e-3, 0.1) for start in (0, 4)]
    found = {
        "logprobs": arrays(actor.logprobs(answers)),
        "values": arrays(critic.values(answers)),
        "reference": arrays(reference.logprobs(answers)),
        "teacher": arrays([(i, said.logprobs.ravel()) for i, said in reference.top_tokens(answers, 5)]),
        "reward": arrays(reward.scores(answers)),
        "steps": [*actor.train(experience, updates).metrics, *critic.train(experience, updates).metrics],
    }
    return found | {
        "trained logprobs": arrays(actor.logprobs(answers)),
        "trained values": arrays(critic.values(answers)),
    }


if __name__ == "__main__":
    made = [read_and_train(Path(sys.argv[1]), 2, tokens) for tokens in (None, 40)]
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_text(json.dumps(made))
