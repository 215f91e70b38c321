"""Roles of PPO as the stage makes them, on tiny random models and the plain engine: one process, no Ray; and
credit of random rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from rlhf_core.config import PPO, Data
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.rewards.clients import Rewards
from rlhf_core.stages.ppo.ppo_setup import setup_of
from rlhf_core.stages.ppo.rewards.credit import Credited, credit
from rlhf_core.stages.ppo.roles.actor import Actor
from rlhf_core.stages.ppo.roles.read_only import ReferenceModel
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec, on_tokens
from rlhf_core.stages.ppo.roles.trained import Critic
from rlhf_core.stages.ppo.rollout_records import Experience, Rollout, Scores
from rlhf_core.training.engine import AdamW, TorchEngine

SHAPE = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
PATHS = {"actor": "sft", "critic": "rm", "reference": "sft", "reward:reward_model": "rm"}


def ppo(**changes: object) -> PPO:
    small = {
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "train_batch_size": 4,
        "micro_train_batch_size": 4,
        "generate_max_len": 16,
    }
    return PPO(prompts=Data(sources="prompts.jsonl"), **{**small, **changes})


def documents(count: int, seed: int = 0) -> list[Document]:
    """Ragged ones with a prompt of two tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [3 + int(torch.randint(0, 6, (), generator=generator)) for _ in range(count)]
    return [
        Document(torch.randint(1, 31, (n,), generator=generator).tolist(), [False, False, *[True] * (n - 2)])
        for n in lengths
    ]


def drawn(docs: Sequence[Document]) -> list[list[np.ndarray]]:
    """Random log-probs, those of a reference, and values."""
    generator = np.random.default_rng(0)
    return [
        [generator.normal(size=len(d)).astype(np.float32) * np.array(d.mask, np.float32) for d in docs]
        for _ in range(3)
    ]


def credited(
    config: PPO, kl_coef: float = 0.0, rewards: Sequence[float] | None = None, paths: dict[str, str] = PATHS
) -> Credited:
    """Credit of eight random rollouts by the stage's own setup."""
    docs = documents(8)
    logprobs, ref_logprobs, values = drawn(docs)
    prompt = Prompt((), [1, 2], {}, False)
    rollouts = [Rollout(prompt, d, old, True) for d, old in zip(docs, logprobs, strict=True)]
    known = Rewards({"reward_model": np.array(rewards or [float(i) for i in range(8)])}, {})
    setup = setup_of(config, [prompt] * 8, paths, [0], 0)
    return credit(rollouts, Scores(logprobs, ref_logprobs, values, known), kl_coef, {}, config, setup.terms)


def said(found: Credited, name: str) -> list[np.ndarray]:
    """An array of each answer, on its own tokens."""
    return [on_tokens(getattr(e, name), e.document)[np.array(e.document.mask)] for e in found.experience]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, another one, and a reward model with a head that says something."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("sft", "other")):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(Qwen2Config(**SHAPE)).save_pretrained(folder / name)
    torch.manual_seed(2)
    reward = Qwen2ForSequenceClassification(Qwen2Config(**SHAPE, num_labels=1))
    torch.nn.init.normal_(reward.score.weight)
    reward.save_pretrained(folder / "rm")
    return folder


@pytest.fixture
def plain_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = lambda module, config, **_: TorchEngine(  # noqa: E731
        module, AdamW(config.betas, config.weight_decay, config.max_norm)
    )
    monkeypatch.setattr("rlhf_core.stages.ppo.roles.trained.make_engine", plain)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


def model(folder: Path) -> ModelSpec:
    return ModelSpec(str(folder), "float32", 0, 8, False)


def actor(models: Path, micro: int = 8, max_norm: float = 1.0, **changes: object) -> Actor:
    config = ppo(**changes).model_copy(update={"micro_train_batch_size": micro, "max_norm": max_norm})
    return Actor(model(models / "sft"), config, 0)


def critic(models: Path) -> Critic:
    return Critic(model(models / "rm"), ppo(), 0)


def experience(models: Path, scale: float = 1.0) -> list[Experience]:
    """On-policy experience of the policy `sft`, with `other` as reference and random advantages."""
    docs = documents(8, seed=3)
    old = dict(ReferenceModel(model(models / "sft"), 1.0).logprobs(docs))
    reference = dict(ReferenceModel(model(models / "other"), 1.0).logprobs(docs))
    generator = np.random.default_rng(1)
    random = [scale * generator.normal(size=len(d)).astype(np.float32) for d in docs]
    return [
        Experience(d, old[i], old[i], reference[i], 0 * a, a, a)
        for i, (d, a) in enumerate(zip(docs, random, strict=True))
    ]


def flat(role: Actor | Critic) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in role.engine.module.parameters()])
