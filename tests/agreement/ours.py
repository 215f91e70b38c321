"""Our side of the comparison: the real stages, and the real loss of the actor on recorded tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlhf_core.config import DPO, KTO, PPO, SFT, Data, RewardModel, Source, StageConfig
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document
from rlhf_core.models.load_model import load_policy
from rlhf_core.objectives.actor_loss import PerToken, actor_loss, count
from rlhf_core.objectives.advantages import kl_estimate
from rlhf_core.objectives.collate import Batch, collate
from rlhf_core.objectives.losses import orpo_loss
from rlhf_core.objectives.sampler_weights import importance_weights
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.ppo.rewards.credit import estimate
from tests.agreement import material
from tests.agreement.material import CLIP_HIGH, CLIP_LOW, MAX_LENGTH
from tests.support.stage_request import stage_request
from tests.support.stage_work import WORK

CONFIGS = {"sft": SFT, "reward_model": RewardModel, "dpo": DPO, "kto": KTO}
Curve = dict[str, Any]


def config_of(case: material.Case, folder: Path) -> StageConfig:
    margin = "margin" if case.rows == "margins" else None
    fields: dict[str, Any] = {
        "data": Data(sources=(Source(path=str(folder / f"{case.rows}.jsonl"), margin_key=margin),)),
        "policy" if case.stage in ("dpo", "kto") else "model": "base",
        "max_len": 96,
        "train_batch_size": material.BATCH,
        "micro_train_batch_size": material.BATCH,
        "max_epochs": material.EPOCHS,
        "learning_rate": case.learning_rate,
        "warmup_ratio": 0.0,
        "min_lr_ratio": 1.0,
        **material.OPTIMISER,
        **case.ours,
    }
    return CONFIGS[case.stage](**fields)


def train(case: material.Case, folder: Path, run: Path) -> Curve:
    """Runs the stage; losses, gradient norms and learning rates of every step, and how far each weight moved
    (L2 norm).

    `loss` in our metrics is the preference loss, `nll` stands beside it; here they are put together, as they
    are trained on. KTO: `kl` too.
    """
    run.mkdir(parents=True)
    config = config_of(case, folder)
    request = stage_request(config, folder / "base", name="agreement", seed=material.SEED)
    WORK[case.stage](request, RunDir(run))
    lines = read_metrics(run)
    curve = {
        name: [line[name] for line in lines]
        for name in ("loss", "grad_norm", "learning_rate", "kl")
        if name in lines[0]
    }
    nll = case.ours.get("nll_coef")
    if nll:
        curve["loss"] = [loss + nll * line["nll"] for loss, line in zip(curve["loss"], lines, strict=True)]
    start, end = (load_file(path / "model.safetensors") for path in (folder / "base", run / "checkpoint"))
    return curve | {
        "moved": {
            name: float((weight - start.get(name, 0)).double().norm()) for name, weight in sorted(end.items())
        }
    }


def documents(folder: Path) -> list[Document]:
    """The rollout as documents, with the mask on the answers."""
    renderer = Renderer(load_tokenizer(str(folder / "base")), "chat")
    rollout = material.rollout()
    prompts = [renderer.prompt(prompt) for prompt in rollout.prompts]
    return [
        Document(p + a, [False] * len(p) + [True] * len(a))
        for p, a in zip(prompts, rollout.answers, strict=True)
    ]


def padded(rows: list[list[float]], batch: Batch) -> torch.Tensor:
    """Values of answer tokens, one list an answer, at their places in the batch; nan elsewhere, as nothing
    else may matter."""
    values = torch.full(batch.mask.shape, torch.nan)
    values[batch.mask] = torch.tensor([value for row in rows for value in row])
    return values


def advantages(
    case: material.RLCase, rewards: torch.Tensor, old: torch.Tensor, ref: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """One an answer, (N,), from `rewards` (N,) and log-probs (N, T); the KL is in the reward for RLOO."""
    config = PPO(
        prompts=Data(sources="none"),
        advantage_estimator=case.estimator,
        n_samples_per_prompt=material.ANSWERS,
    )
    kl = torch.where(mask, kl_estimate(old, ref, "k1"), 0)
    coef = case.beta if case.trainer == "RLOO" else 0.0
    found = estimate(
        rewards, kl, coef, torch.zeros_like(kl), mask, torch.ones_like(rewards, dtype=torch.bool), config
    )
    return torch.where(mask, found.credit.advantages, -torch.inf).amax(-1)


def rl_loss(case: material.RLCase, folder: Path, recorded: dict[str, list[list[float]]]) -> Curve:
    """Advantages, and loss and gradient of the actor's loss, on the recorded log-probs (`old`, `ref`,
    `sampler`)."""
    length = 1 if case.one_token else MAX_LENGTH
    items = [d.cut(d.mask.index(True) + length) for d in documents(folder)]
    batch = collate([[document] for document in items], load_tokenizer(str(folder / "base")).pad_token_id)
    old, ref, sampler = (
        padded([row[:length] for row in recorded[name]], batch) for name in ("old", "ref", "sampler")
    )
    policy = load_policy(str(folder / "base"))
    new = policy(batch.tokens, batch.positions, batch.documents).logprobs
    if case.on_policy:
        old = new.detach()
    weights = (
        torch.ones_like(old)
        if case.cap is None
        else importance_weights(old, sampler, batch.mask, 0.0, case.cap)
    )
    found = advantages(case, torch.tensor(material.rollout().rewards), old, ref, batch.mask)
    fields = {
        "eps_clip_low": CLIP_LOW,
        "eps_clip_high": CLIP_HIGH,
        "loss_aggregation": case.aggregation,
        "generate_max_len": MAX_LENGTH,
    }
    fields |= {"kl_in": "loss", "kl_estimator": "k3"} if case.beta and case.trainer == "GRPO" else {}
    config = PPO(prompts=Data(sources="none"), **fields | case.ours)
    spread = found[:, None].expand_as(new)
    per_token = PerToken(new, torch.zeros_like(new), old, ref, spread, weights, batch.mask, batch.documents)
    loss = actor_loss(
        per_token, len(items), count([item.mask_array for item in items]), config, case.beta
    ).loss
    loss.backward()
    return {"advantages": found.tolist(), **gradient(policy.model, float(loss.detach()))}


def odds_ratio(odds: material.Odds) -> Curve:
    """ORPO without its NLL: the loss, and the gradients of both log-probs in a row."""
    chosen, rejected = (torch.tensor(values, requires_grad=True) for values in (odds.chosen, odds.rejected))
    loss = orpo_loss(chosen, rejected, odds.lambd, len(odds.chosen)).loss + chosen.mean()
    gradients = torch.autograd.grad(loss, (chosen, rejected))
    return {"loss": float(loss.detach()), "last": torch.cat(gradients).tolist()}


def gradient(model: torch.nn.Module, loss: float) -> Curve:
    """The loss, the norm of each weight's gradient, and the whole gradient of the last norm's weights."""
    gradients = {
        name: parameter.grad
        for name, parameter in sorted(model.named_parameters())
        if parameter.grad is not None
    }
    norms = {name: float(gradient.double().norm()) for name, gradient in gradients.items()}
    return {"loss": loss, "norms": norms, "last": gradients["model.norm.weight"].tolist()}
