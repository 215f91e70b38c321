"""Declares metrics of an evaluation and of a regression suite. They read planned configurations, in which
loops are replaced by their rounds and the models' parents are known."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from rlhf_core.config.judging.evaluation import Evaluation
from rlhf_core.config.judging.judges import ChatJudge, RuleJudge
from rlhf_core.config.metrics.metric import Condition, Metric, after_run, each

Places = list[tuple[str, ...]]

RATES = ("win_rate", "ci_low", "ci_high", "length_controlled", "swap_consistency", "failed_games")
BY_RULE = Condition(
    "with the judge `rule`", lambda config: any(isinstance(judge, RuleJudge) for judge in config.judges)
)
BY_CHAT = Condition(
    "with chat judges", lambda config: any(isinstance(judge, ChatJudge) for judge in config.judges)
)
SEVERAL_JUDGES = Condition("with several judges", lambda config: len(config.judges) > 1)
DISAGREE = "The judges disagree or fail: check them before you rely on the win rates."
OUTSIDE_BAND = (
    "The final model's share is far from the share in earlier results: a low one is a regression, a high one"
    " may mean that the suite leaked into training."
)
ASK_JUDGE = (
    "The judge gave no verdict on some questions of the suite: read its replies, and check its limits."
)


def models_of(config: Evaluation) -> Places:
    return each(model for model in dict.fromkeys(config.models) if model != config.baseline)


def trained_of(config: Evaluation) -> Places:
    """Returns the models whose parent is a model other than the baseline."""
    parents = config.parents or {}
    return [
        (model,) for (model,) in models_of(config) if parents.get(model) not in (None, model, config.baseline)
    ]


def everyone(config: Evaluation) -> Places:
    return each(dict.fromkeys([*config.models, config.baseline, *(config.parents or {}).values()]))


def with_proxy(config: Evaluation) -> Places:
    return each(dict.fromkeys([config.baseline, *config.models])) if config.proxy is not None else []


def reward_models(config: Evaluation) -> Places:
    named = config.reward_evaluation.models if config.reward_evaluation is not None else ()
    return each(dict.fromkeys(named))


def pairs_of_reward_models(config: Evaluation) -> Places:
    return list(combinations((model for (model,) in reward_models(config)), 2))


def endpoints_of(config: Evaluation) -> Places:
    return each(config.endpoints)


def priced_endpoints(config: Evaluation) -> Places:
    priced = (
        name
        for name, endpoint in config.endpoints.items()
        if endpoint.input_price is not None and endpoint.output_price is not None
    )
    return each(priced)


def rates(suffix: str, of: Callable[[Evaluation], Places], opponent: str) -> tuple[Metric, ...]:
    """Returns the metrics of the games of each model against an opponent."""
    return (
        Metric(
            f"win_rate{suffix}/MODEL",
            f"win rate against {opponent}; a tie counts as half a win",
            "share",
            of=of,
            failed=(
                "The model is not as much better as required: look for the reason in the gates of earlier"
                " stages."
            ),
        ),
        Metric(
            f"ci_low{suffix}/MODEL",
            "lower end of the win rate's 95 % interval",
            "share",
            of=of,
            failed=(
                "It is not certain that the model is better: use more questions to narrow the interval, or"
                " train a better model."
            ),
        ),
        Metric(
            f"ci_high{suffix}/MODEL",
            "upper end of the win rate's 95 % interval",
            "share",
            of=of,
            failed=(
                "The interval of the win rate ends outside its bound: look for the reason in the gates of"
                " earlier stages."
            ),
        ),
        Metric(
            f"length_controlled{suffix}/MODEL",
            "predicted win rate if the answers were as long as the opponent's",
            "share",
            of=of,
            failed="The model wins through longer answers: its reward model probably prefers length.",
        ),
        Metric(
            f"swap_consistency{suffix}/MODEL",
            "share of questions whose two games have the same winner, or are both ties",
            "share",
            of=of,
            failed=(
                "The judge's verdicts depend on the order of the answers: the judge is weak, whichever models"
                " it compares."
            ),
        ),
        Metric(
            f"failed_games{suffix}/MODEL",
            "games without a verdict",
            "count",
            of=of,
            failed="The judge gave no verdict in too many games: read its replies, and check its limits.",
        ),
    )


ANSWERS = (
    Metric("questions", "questions asked", "count"),
    Metric(
        "right/MODEL",
        "share of right answers",
        "share",
        BY_RULE,
        everyone,
        "The model gives too few right answers: look for the reason in the gates of earlier stages.",
    ),
    Metric("length/MODEL", "mean number of tokens per answer", "tokens", of=everyone),
    Metric(
        "truncated/MODEL",
        "share of answers that are cut",
        "share",
        of=everyone,
        failed=(
            "The model's answers are cut: raise generate_max_len, or check whether the model ever learned to"
            " stop."
        ),
    ),
    Metric("prompt_truncated/MODEL", "share of prompts that are cut", "share", of=everyone),
)
JUDGES = (
    Metric(
        "judge_agreement",
        "share of battles with the baseline in which the first judge and another judge choose the same"
        " winner, mean over the other judges",
        "share",
        SEVERAL_JUDGES,
        failed=DISAGREE,
    ),
    Metric(
        "judge_agreement/JUDGE",
        "share of such battles for one other judge",
        "share",
        SEVERAL_JUDGES,
        after_run,
        DISAGREE,
    ),
    Metric(
        "judge_input_tokens/JUDGE judge_output_tokens/JUDGE",
        "tokens that a judge read and wrote",
        "tokens",
        BY_CHAT,
        after_run,
    ),
    Metric(
        "judge_failed_games/JUDGE",
        "the judge's games without a verdict",
        "count",
        BY_CHAT,
        after_run,
        DISAGREE,
    ),
    Metric("judge_cost/JUDGE", "cost of the judge, where its prices are given", "US$", BY_CHAT, after_run),
)
ENDPOINTS = (
    Metric(
        "answer_requests/ENDPOINT answer_failed/ENDPOINT",
        "requests sent to an endpoint in this attempt, including retries; questions without an answer",
        "count",
        of=endpoints_of,
    ),
    Metric(
        "answer_input_tokens/ENDPOINT answer_output_tokens/ENDPOINT",
        "tokens that the endpoint's model read and wrote",
        "tokens",
        of=endpoints_of,
    ),
    Metric(
        "answer_cost/ENDPOINT",
        "cost of the answers, where the endpoint's prices are given",
        "US$",
        of=priced_endpoints,
    ),
)
REWARD_MODELS = (
    Metric(
        "kl/MODEL",
        "with `proxy`: estimate of the KL to the baseline; may be negative",
        "nats/answer",
        of=with_proxy,
    ),
    Metric("proxy/MODEL", "with `proxy`: mean score from the proxy", of=with_proxy),
    Metric(
        "over_optimised/MODEL",
        "with `proxy`: 1 if over-optimisation is statistically certain, else 0",
        of=with_proxy,
    ),
    Metric(
        "reward_accuracy/REWARD",
        "with `reward_evaluation`: share of held-out pairs that a reward model ranks correctly; equal scores"
        " count half",
        "share",
        of=reward_models,
        failed="The reward model is too weak to train on: it ranks too few held-out pairs correctly.",
    ),
    Metric(
        "reward_ci_low/REWARD reward_ci_high/REWARD",
        "lower and upper end of the 95 % interval of the accuracy",
        "share",
        of=reward_models,
    ),
    Metric(
        "reward_calibration_error/REWARD",
        "expected calibration error",
        "share",
        of=reward_models,
        failed="The reward model is badly calibrated: its confidence differs from its accuracy.",
    ),
    Metric(
        "reward_longer_preferred/REWARD",
        "share of pairs with answers of different length in which the model prefers the longer answer",
        "share",
        of=reward_models,
        failed="The reward model has a length bias: it prefers the longer answer more often than the labels"
        " do.",
    ),
    Metric(
        "reward_longer_chosen/REWARD",
        "share of pairs with answers of different length in which the labels prefer the longer answer",
        "share",
        of=reward_models,
    ),
    Metric(
        "reward_agreement/REWARD/REWARD",
        "share of pairs that two reward models rank the same way; the models appear in the order of the"
        " recipe",
        "share",
        of=pairs_of_reward_models,
    ),
)
WITHOUT_RATES = (*ANSWERS, *JUDGES, *ENDPOINTS, *REWARD_MODELS)
EVALUATION = (
    *rates("", models_of, "the baseline"),
    *rates(
        "_vs_parent", trained_of, "its parent: the model given in `parents`, else the one it was trained from"
    ),
    *WITHOUT_RATES,
)
REGRESSION = (
    Metric(
        "passed/MODEL",
        "share of the suite's questions that the model passes (does not lose); with `rule` as first judge:"
        " share of right answers",
        "share",
        of=models_of,
        failed=(
            "The model loses questions of the suite: the stage's `report/regression.md` lists them with their"
            " reasons."
        ),
    ),
    Metric(
        "unjudged/MODEL",
        "questions without a verdict, which count as not passed",
        "count",
        of=models_of,
        failed=ASK_JUDGE,
    ),
    Metric(
        "newly_failed/MODEL",
        "questions that this model fails but an earlier one passed: the final model of the last result whose"
        " gates passed (same baseline and judge); 0 without such a result",
        "count",
        of=models_of,
        failed=(
            "The model loses questions that an earlier one passed: the stage's `report/regression.md` lists"
            " them with their reasons."
        ),
    ),
    Metric(
        "recovered/MODEL",
        "questions that the earlier model failed but this one passes",
        "count",
        of=models_of,
    ),
    Metric(
        "history",
        "number of earlier results, all with passed gates, that form the band",
        "count",
        failed="Too few earlier results passed their gates to form a band.",
    ),
    Metric(
        "deviation",
        "the final model's share minus the mean of the earlier results, in standard deviations; 0 without"
        " earlier results",
        failed=OUTSIDE_BAND,
    ),
    Metric(
        "out_of_band",
        "1 if the final model's share is more than `band` standard deviations from the mean of the earlier"
        " results, else 0",
        failed=OUTSIDE_BAND,
    ),
    *WITHOUT_RATES,
)
