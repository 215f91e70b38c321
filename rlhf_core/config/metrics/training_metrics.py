"""Declares metrics and charts of SFT, the reward model, DPO and KTO. Values of steps in a result are means
over the last tenth of the steps, but at least four steps."""

from __future__ import annotations

from collections.abc import Iterable

from rlhf_core.config.metrics.metric import Condition, Metric, Panel
from rlhf_core.config.metrics.shared_metrics import (
    BAD_DATA,
    DATA,
    EXPERTS,
    FLOAT16,
    MERGED_AWAY,
    OVERFLOWS,
    SURVIVES,
)

HELD_OUT = Condition("with `eval_data`, on held-out data", lambda config: config.eval_data is not None)
WITH_NLL = Condition("with `nll_coef`", lambda config: bool(config.nll_coef))
MERGED = Condition(
    "with `lora` and `export: merged`",
    lambda config: config.lora is not None and config.lora.export == "merged",
)
UNSTABLE = "Training is unstable: lower the learning rate."
NOT_TRAINED = "Training did not reach the bound: check the learning rate, the number of steps and the data."

STEPS = (
    Metric("learning_rate", "learning rate"),
    Metric("steps", "optimiser steps, including skipped ones", "count"),
    Metric(
        "skipped_steps",
        "optimiser steps that `skip_nonfinite_steps` skipped because their loss or gradient norm was not"
        " finite",
        "count",
        failed=(
            "Some steps had a non-finite loss or gradient: look at their rows in the stage's"
            " nonfinite_steps.jsonl."
        ),
    ),
    Metric(
        "overflow_steps",
        "optimiser steps that were skipped because a scaled gradient overflowed float16",
        "count",
        FLOAT16,
        failed=OVERFLOWS,
    ),
    Metric(
        "loss_scale",
        "factor that the loss is multiplied by, and gradients divided by, at the end of training",
        when=FLOAT16,
    ),
    Metric(
        SURVIVES,
        "share of the adapters' update that the rounded weights contain; about 1 if none is lost"
        " ([rounding](../explanation/rounding.md#merged-adapters))",
        "share",
        MERGED,
        failed=MERGED_AWAY,
    ),
)


def held_out(metrics: Iterable[Metric], failed: str) -> tuple[Metric, ...]:
    """Returns these metrics for the held-out data, as `eval/NAME`."""
    found = []
    for metric in metrics:
        names = " ".join(f"eval/{name}" for name in metric.names.split())
        when = HELD_OUT if metric.when is None else HELD_OUT.also(metric.when)
        found.append(Metric(names, metric.meaning, metric.unit, when, failed=failed))
    return tuple(found)


def gradient_norm(failed: str = UNSTABLE) -> Metric:
    return Metric("grad_norm", "gradient norm before clipping", failed=failed)


SFT = (
    Metric(
        "loss",
        "mean negative log-likelihood per token",
        "nats",
        failed=(
            "The SFT did not fit its data: check the learning rate, the number of steps, and whether the chat"
            " template matches the data."
        ),
    ),
    *held_out(
        [Metric("loss", "the loss", "nats")],
        "The SFT is bad, and all later stages start from this model. A training loss far below this value"
        " means overfitting; one just as high means too little training or a wrong chat template.",
    ),
    EXPERTS,
    gradient_norm("The SFT is unstable: lower its learning rate, or look for odd rows in its data."),
    *STEPS,
    *DATA,
)

REWARD_MODEL = (
    Metric(
        "loss",
        "Bradley-Terry loss with the pairs' margins, plus the centering term",
        "",
        failed=(
            "The reward model did not fit its pairs: check the learning rate, the number of pairs, and"
            " whether labels contradict each other."
        ),
    ),
    Metric(
        "accuracy",
        "share of pairs ranked correctly",
        "share",
        failed="The reward model does not even rank the pairs it was trained on: labels may be swapped or"
        " random, or it was trained too little.",
    ),
    Metric("margin", "mean difference between the scores of chosen and rejected answers"),
    Metric("scores/chosen scores/rejected", "mean scores of chosen and of rejected answers"),
    Metric(
        "eval/loss",
        "Bradley-Terry loss without margins and centering",
        "nats",
        HELD_OUT,
        failed="The reward model is bad, or overconfident: it does not generalise to unseen pairs.",
    ),
    Metric(
        "eval/accuracy",
        "share of pairs ranked correctly",
        "share",
        HELD_OUT,
        failed=(
            "The reward model is bad: it ranks unseen pairs hardly better than chance (0.5), so PPO and every"
            " round would optimise a wrong reward. Check the labels of its pairs first."
        ),
    ),
    Metric(
        "eval/confidence",
        "mean probability that the model gives to its own ranking",
        "share",
        HELD_OUT,
        failed=(
            "The reward model's confidence differs from its accuracy: it is badly calibrated, often because"
            " of too many epochs."
        ),
    ),
    Metric("eval/pairs", "number of held-out pairs", "count", HELD_OUT),
    Metric(
        "score/mean score/std",
        "mean and standard deviation of the scores of both answers of the held-out pairs (without"
        " `eval_data`, of"
        " the first 512 training pairs), stored with the checkpoint for `normalize: stored`",
        failed="The reward model's scores are not on the expected scale: set normalize, or centering.",
    ),
    gradient_norm(),
    *STEPS,
    *DATA,
)

_PAIRS = (
    Metric(
        "loss",
        "the loss that the field `loss` names, without the nll_coef and router terms",
        failed=NOT_TRAINED,
    ),
    Metric(
        "accuracy",
        "share of pairs whose chosen answer has the larger implicit reward",
        "share",
        failed=(
            "DPO does not separate chosen from rejected answers: check the learning rate and beta, and"
            " whether the pairs really differ."
        ),
    ),
    Metric(
        "margin",
        "mean difference between the implicit rewards of chosen and rejected answers",
        failed=(
            "DPO separates the pairs by an unexpected margin: a huge one means that the policy moved far from"
            " its reference."
        ),
    ),
    Metric(
        "rewards/chosen",
        "implicit reward of the chosen answers: beta times the log-ratio to the reference (ipo: its mean over"
        " tokens; simpo and orpo: beta and lambd times the mean log-prob)",
        failed=(
            "DPO made the chosen answers less likely too: lower the learning rate, raise beta, or set"
            " nll_coef."
        ),
    ),
    Metric("rewards/rejected", "implicit reward of the rejected answers"),
    Metric("nll", "mean negative log-likelihood per token of the chosen answers", "nats", WITH_NLL),
    EXPERTS,
)
DPO = (
    *_PAIRS,
    *held_out(
        _PAIRS,
        "DPO does not generalise to unseen pairs: it overfits, or the unseen pairs are of a different kind.",
    ),
    gradient_norm(),
    *STEPS,
    *DATA,
)

_LABELLED = (
    Metric("loss", "the KTO loss, with the weights of both labels", failed=NOT_TRAINED),
    Metric(
        "accuracy",
        "share of answers whose log-ratio to the reference is above `kl` (desirable) or below it"
        " (undesirable)",
        "share",
        failed=(
            "KTO does not separate desirable from undesirable answers: check the learning rate, beta and the"
            " labels."
        ),
    ),
    Metric(
        "margin",
        "beta times the distance of the log-ratio from `kl`, positive on the side of the label; mean over"
        " answers",
    ),
    Metric("desirable", "share of desirable answers", "share"),
    Metric(
        "kl",
        "estimate of the KL to the reference from mismatched prompts and answers, at least 0",
        "nats/answer",
        failed="KTO moved far from its reference: lower the learning rate or raise beta.",
    ),
    Metric(
        "rewards/desirable rewards/undesirable", "implicit rewards: beta times the log-ratio to the reference"
    ),
    EXPERTS,
)
KTO = (
    *_LABELLED,
    *held_out(
        _LABELLED,
        "KTO does not generalise to unseen answers: it overfits, or the unseen answers are of a different"
        " kind.",
    ),
    Metric("data/desirable", "number of desirable answers in the data", "count", failed=BAD_DATA),
    gradient_norm(),
    *STEPS,
    *DATA,
)

LOSS = Panel("Loss", {"loss": "training", "eval/loss": "held out"})
ACCURACY = Panel(
    "Share of pairs ranked correctly", {"accuracy": "training", "eval/accuracy": "held out"}, level=0.5
)
GRADIENT = Panel("Gradient norm", {"grad_norm": ""})
SFT_CHARTS = (LOSS, Panel("Learning rate", {"learning_rate": ""}), GRADIENT)
REWARD_MODEL_CHARTS = (LOSS, ACCURACY, GRADIENT)
DPO_CHARTS = (
    LOSS,
    ACCURACY,
    Panel("Margin of the implicit reward", {"margin": ""}, level=0.0),
    Panel("Implicit rewards", {"rewards/chosen": "chosen", "rewards/rejected": "rejected"}, level=0.0),
)
KTO_CHARTS = (
    LOSS,
    Panel(
        "Share of answers on their label's side of the KL",
        {"accuracy": "training", "eval/accuracy": "held out"},
        level=0.5,
    ),
    Panel("Margin to the KL", {"margin": ""}, level=0.0),
    Panel(
        "Implicit rewards",
        {"rewards/desirable": "desirable", "rewards/undesirable": "undesirable"},
        level=0.0,
    ),
    Panel("KL to the reference", {"kl": ""}, level=0.0),
)
