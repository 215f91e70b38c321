"""Metrics of an evaluation and of a regression suite. Their configurations are planned ones: rounds stand in
place of loops, and the models' parents are known."""

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
DISAGREE = "The judges disagree or fail: check them before you trust the win rates."
OUTSIDE_BAND = (
    "The final model's share is far from that of earlier results: too low is a regression, too high may be a"
    " leaked suite."
)
ASK_JUDGE = "The judge gave no verdict on questions of the suite: look at its answers and limits."


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
            failed="The model is not better by as much as required: look at the gates of the stages before it"
            " for the reason.",
        ),
        Metric(
            f"ci_low{suffix}/MODEL",
            "lower end of its 95 % interval",
            "share",
            of=of,
            failed="It is not certain that the model is better: more questions narrow the interval, a better"
            " model moves it.",
        ),
        Metric(
            f"ci_high{suffix}/MODEL",
            "upper end of its 95 % interval",
            "share",
            of=of,
            failed="The interval of the win rate ends outside its bound: look at the gates of the stages"
            " before it for the reason.",
        ),
        Metric(
            f"length_controlled{suffix}/MODEL",
            "predicted win rate of answers as long as the opponent's",
            "share",
            of=of,
            failed="The model wins by longer answers: its reward model probably likes length.",
        ),
        Metric(
            f"swap_consistency{suffix}/MODEL",
            "share of questions whose two games name the same winner, or both a tie",
            "share",
            of=of,
            failed="The judge changes its mind with the order of the answers: the judge is weak, whatever the"
            " models are.",
        ),
        Metric(
            f"failed_games{suffix}/MODEL",
            "games without a verdict",
            "count",
            of=of,
            failed="The judge gave no verdict in too many games: look at its answers and limits.",
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
        "The model gives too few right answers: look at the gates of the stages before it for the reason.",
    ),
    Metric("length/MODEL", "mean tokens of an answer", "tokens", of=everyone),
    Metric(
        "truncated/MODEL",
        "share of answers that are cut",
        "share",
        of=everyone,
        failed="The model's answers are cut: raise generate_max_len, or it never learned to stop.",
    ),
    Metric("prompt_truncated/MODEL", "share of prompts that are cut", "share", of=everyone),
)
JUDGES = (
    Metric(
        "judge_agreement",
        "share of battles with the baseline whose winner is the same by the first and by another judge,"
        " mean over"
        " the other judges",
        "share",
        SEVERAL_JUDGES,
        failed=DISAGREE,
    ),
    Metric("judge_agreement/JUDGE", "the same for one of them", "share", SEVERAL_JUDGES, after_run, DISAGREE),
    Metric(
        "judge_input_tokens/JUDGE judge_output_tokens/JUDGE",
        "tokens that a judge read and wrote",
        "tokens",
        BY_CHAT,
        after_run,
    ),
    Metric("judge_failed_games/JUDGE", "its games without a verdict", "count", BY_CHAT, after_run, DISAGREE),
    Metric("judge_cost/JUDGE", "its cost, where its prices are given", "US$", BY_CHAT, after_run),
)
ENDPOINTS = (
    Metric(
        "answer_requests/ENDPOINT answer_failed/ENDPOINT",
        "requests sent to an endpoint in this attempt, with retries; questions without an answer",
        "count",
        of=endpoints_of,
    ),
    Metric(
        "answer_input_tokens/ENDPOINT answer_output_tokens/ENDPOINT",
        "tokens that it read and wrote",
        "tokens",
        of=endpoints_of,
    ),
    Metric("answer_cost/ENDPOINT", "its cost, where its prices are given", "US$", of=priced_endpoints),
)
REWARD_MODELS = (
    Metric(
        "kl/MODEL",
        "with `proxy`: estimate of the KL from the baseline, may be negative",
        "nats/answer",
        of=with_proxy,
    ),
    Metric("proxy/MODEL", "with `proxy`: mean score by the proxy", of=with_proxy),
    Metric("over_optimised/MODEL", "with `proxy`: 1 if over-optimisation is certain, else 0", of=with_proxy),
    Metric(
        "reward_accuracy/REWARD",
        "with `reward_evaluation`: share of held-out pairs that a reward model ranks right; equal scores"
        " count"
        " half",
        "share",
        of=reward_models,
        failed="The reward model is bad: it does not rank held-out pairs well enough to train on.",
    ),
    Metric("reward_ci_low/REWARD reward_ci_high/REWARD", "its 95 % interval", "share", of=reward_models),
    Metric(
        "reward_calibration_error/REWARD",
        "expected calibration error",
        "share",
        of=reward_models,
        failed="The reward model is badly calibrated: its confidence is not its accuracy.",
    ),
    Metric(
        "reward_longer_preferred/REWARD",
        "share of the pairs of different length in which the model prefers the longer answer",
        "share",
        of=reward_models,
        failed="The reward model has a length bias: it prefers the longer answer more often than the labels"
        " do.",
    ),
    Metric(
        "reward_longer_chosen/REWARD",
        "share of the pairs of different length whose chosen answer is the longer one",
        "share",
        of=reward_models,
    ),
    Metric(
        "reward_agreement/REWARD/REWARD",
        "share of pairs that two reward models rank alike, in the order of the recipe",
        "share",
        of=pairs_of_reward_models,
    ),
)
WITHOUT_RATES = (*ANSWERS, *JUDGES, *ENDPOINTS, *REWARD_MODELS)
EVALUATION = (
    *rates("", models_of, "the baseline"),
    *rates("_vs_parent", trained_of, "its parent: the model in `parents`, else the one it was trained from"),
    *WITHOUT_RATES,
)
REGRESSION = (
    Metric(
        "passed/MODEL",
        "share of the suite's questions that the model does not lose; with `rule` as first judge: share of"
        " right answers",
        "share",
        of=models_of,
        failed="The model loses questions of the suite: `report/regression.md` of the stage has them with"
        " their reasons.",
    ),
    Metric(
        "unjudged/MODEL",
        "questions without a verdict, which do not pass",
        "count",
        of=models_of,
        failed=ASK_JUDGE,
    ),
    Metric(
        "newly_failed/MODEL",
        "questions that this model does not pass and an earlier one did: the final model of the last result"
        " whose gates passed (same baseline and judge); 0 without such a result",
        "count",
        of=models_of,
        failed="The model loses questions that an earlier one passed: `report/regression.md` has them with"
        " their reasons.",
    ),
    Metric("recovered/MODEL", "questions that it did not pass and this one does", "count", of=models_of),
    Metric(
        "history",
        "earlier results, whose gates passed, in the band",
        "count",
        failed="There are too few earlier results whose gates passed for a band.",
    ),
    Metric(
        "deviation",
        "the final model's share minus their mean, in standard deviations; 0 without earlier results",
        failed=OUTSIDE_BAND,
    ),
    Metric(
        "out_of_band",
        "1 when it is more than `band` standard deviations on either side, else 0",
        failed=OUTSIDE_BAND,
    ),
    *WITHOUT_RATES,
)
