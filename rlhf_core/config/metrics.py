"""Lists the metrics that a stage's result has for a configuration (the names that gates may use), their
charts, and what a failed gate on each usually means. The table of kinds (kinds.py) refers to these.

A name ends in `*` if the rest is known only after the run (a judge, a reason).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any, NamedTuple

from rlhf_core.config.judging.calibration import Calibration
from rlhf_core.config.judging.drift import Drift
from rlhf_core.config.judging.evaluation import AlignmentTax, Evaluation, Regression
from rlhf_core.config.judging.judges import ChatJudge, RuleJudge
from rlhf_core.config.judging.lm_eval_tasks import task_name
from rlhf_core.config.loops import Preferences
from rlhf_core.config.ppo import PPO, pass_sizes
from rlhf_core.config.rewards import RewardSources
from rlhf_core.config.sweep import Select

DATA = tuple(f"data/{name}" for name in ("rows", "kept", "truncated", "dropped", "tokens"))
PAIRS = ("loss", "accuracy", "margin", "rewards/chosen", "rewards/rejected")
LABELLED = ("loss", "accuracy", "margin", "desirable", "kl", "rewards/desirable", "rewards/undesirable")
REWARD_LOSS = ("loss", "accuracy", "margin", "scores/chosen", "scores/rejected")
REWARD_HELD_OUT = ("loss", "accuracy", "confidence", "pairs")
BALANCE = "router/balance"  # mixture-of-experts models only
# for merged adapters: the share of their update that survives the rounding of the weights
SURVIVES = "lora/survives"
ANSWERS = ("response/length", "response/truncated", "prompt/truncated")
POLICY_STEPS = ("loss", "clip_share", "ratio", "ratio_gap", "kl_old", "entropy", "grad_norm", "learning_rate")
FIRST_STEP = ("first_ratio", "first_ratio_gap")
RATES = ("win_rate", "ci_low", "ci_high", "length_controlled", "swap_consistency", "failed_games")
OVER_OPTIMISATION = ("kl", "proxy", "over_optimised")
JUDGING = ("judge_input_tokens/*", "judge_output_tokens/*", "judge_failed_games/*", "judge_cost/*")
ANSWERING = ("requests", "failed", "input_tokens", "output_tokens")
CALIBRATED = (
    "agreement",
    "agreement_decided",
    "kappa",
    "position_bias",
    "swap_consistency",
    "length_bias",
    "markdown_bias",
)
ERROR_GAPS = ("length_error_gap", "markdown_error_gap")
PEOPLE = ("human_agreement", "human_kappa", "human_repeat")
REWARD_MODEL = ("accuracy", "ci_low", "ci_high", "calibration_error", "longer_preferred", "longer_chosen")


def trained(
    *steps: str, held_out: tuple[str, ...] = (), after: tuple[str, ...] = ()
) -> Callable[[Any], Iterator[str]]:
    """Returns a function that yields a training stage's metrics. `steps`: of each optimiser step, and on
    eval_data unless `held_out` names others; `after`: at the end."""

    def names(config: Any) -> Iterator[str]:
        nll = ("nll",) if getattr(config, "nll_coef", 0) else ()
        balance = (BALANCE,) if hasattr(config, "router_aux_coef") else ()
        each = (*steps, *nll, *balance)
        yield from (*each, "grad_norm", "learning_rate", "steps", "skipped_steps")
        if config.lora is not None and config.lora.export == "merged":
            yield SURVIVES
        if config.eval_data is not None:
            yield from (f"eval/{name}" for name in held_out or each)
        yield from (*after, *DATA)

    return names


def sampled(config: Preferences) -> Iterator[str]:
    yield from ("prompts", "pairs" if config.post_processor == "dpo" else "answers", "dropped/*")
    yield from _rewarded(config.reward)
    yield from (*(f"reward/{name}" for name in ("best", "worst", "failed")), *ANSWERS, *DATA)


def reinforced(config: PPO) -> Iterator[str]:
    yield from _rewarded(config.reward)
    yield from (f"reward/{name}" for name in ("clipped", "first_fifth", "last_fifth", "rise_standard_error"))
    if config.overlong_buffer:
        yield "reward/overlong"
    if config.truncated_penalty:
        yield "reward/truncated"
    if config.has_reference:
        yield from ("kl/mean", "kl/per_answer", "kl/coef")
    yield from ("return/mean", "rollout/usable", "sync/probe_gap", "sync/probe_bound", "tokens", "iterations")
    yield from (f"policy/{name}" for name in POLICY_STEPS + FIRST_STEP)
    if config.sampler_is == "mask":
        yield "policy/empty_steps"
    if config.kl_in == "loss" and config.has_reference:
        yield "policy/kl_loss"
    if config.has_critic:
        yield from (
            f"value/{name}"
            for name in ("loss", "clip_share", "grad_norm", "learning_rate", "explained_variance")
        )
    if config.lora is not None and config.engine.adapters == "merged":
        yield SURVIVES
    if config.engine.drafts is not None:
        yield "rollout/tokens_per_step"
    if config.dynamic_filtering:
        yield from (
            f"filter/{name}" for name in ("rounds", "accepted", "groups", "reward_mean", "reward_std")
        )
    if config.environment is not None:
        yield from (f"environment/{name}" for name in ("turns", "attempts", "seconds"))
    if config.max_staleness:
        yield from (
            "rollout/age",
            *(("rollout/age_max", "rollout/waiting", "rollout/lead") if config.continuous else ()),
        )
    if config.eval_prompts is not None:
        yield from _validated(config)
    yield from (
        f"sampler/{name}"
        for name in ("gap", "gap_p99", "ratio_gap", "capped", "weight_mean", "weight_max", "ess")
    )
    yield from (BALANCE, *ANSWERS, *DATA)
    sleep = ("sleep", "wake") if config.engine.sleep else ()
    yield from (f"phase/{name}" for name in ("generate", "score", "credit", "train", "sync", "probe", *sleep))
    yield from ("floor/generate", "floor/score", "floor/train", "work/*", "memory/*")
    yield from (f"wait/{role}" for role in config.placed)


def _validated(config: PPO) -> Iterator[str]:
    """Yields the metrics of the best iteration. `eval/*/...` is for one of several data sources.
    `selection/...` is what it was chosen by."""
    assert config.eval_prompts is not None
    yield from (f"selection/reward/{name}" for name in ("mean", "ci_low", "ci_high"))
    yield from ("eval/best_iteration", "eval/response/length", "eval/response/truncated", "phase/validate")
    measured = ("reward", "right") if config.eval_right is not None else ("reward",)
    of_all = [f"{what}/{name}" for what in measured for name in ("mean", "ci_low", "ci_high")]
    if config.eval_right is not None:
        of_all += [f"pass@{k}" for k in pass_sizes(config.eval_samples)]
    yield from (f"eval/{name}" for name in of_all)
    if len(config.eval_prompts.sources) > 1:
        yield from (f"eval/*/{name}" for name in of_all)
    if len(config.reward) > 1:
        yield from (f"eval/reward/{source.title}/mean" for source in config.reward)


def _rewarded(sources: RewardSources) -> Iterator[str]:
    yield from ("reward/mean", "reward/std")
    yield from (f"reward/{source.title}/{name}" for source in sources for name in ("mean", "std", "failed"))


def judged(config: Evaluation) -> Iterator[str]:
    """Yields the metrics of a planned evaluation, in which rounds replace loops and the models' parents are
    known."""
    everyone = dict.fromkeys([*config.models, config.baseline, *(config.parents or {}).values()])
    yield "questions"
    yield from (f"{name}/{model}" for model in config.models for name in RATES)
    yield from (f"{name}_vs_parent/{model}" for model in config.parents or () for name in RATES)
    about = ("right",) if any(isinstance(judge, RuleJudge) for judge in config.judges) else ()
    yield from (
        f"{name}/{model}"
        for name in (*about, "length", "truncated", "prompt_truncated")
        for model in everyone
    )
    if len(config.judges) > 1:
        yield from ("judge_agreement", "judge_agreement/*")
    if any(isinstance(judge, ChatJudge) for judge in config.judges):
        yield from JUDGING
    for name, endpoint in config.endpoints.items():
        priced = ("cost",) if endpoint.input_price is not None and endpoint.output_price is not None else ()
        yield from (f"answer_{what}/{name}" for what in (*ANSWERING, *priced))
    if config.proxy is not None:
        yield from (
            f"{name}/{model}"
            for model in dict.fromkeys([config.baseline, *config.models])
            for name in OVER_OPTIMISATION
        )
    if config.reward_evaluation is not None:
        models = config.reward_evaluation.models
        yield from (f"reward_{name}/{model}" for model in models for name in REWARD_MODEL)
        yield from (f"reward_agreement/{first}/{second}" for first, second in permutations(models, 2))


def regressed(config: Regression) -> Iterator[str]:
    """Yields the metrics of an evaluation without its rates, and the outcomes of the suite's questions."""
    yield from (
        name for name in judged(config) if name.partition("/")[0].removesuffix("_vs_parent") not in RATES
    )
    for model in (model for model in config.models if model != config.baseline):
        yield from (f"{name}/{model}" for name in ("passed", "unjudged", "newly_failed", "recovered"))
    yield from ("history", "deviation", "out_of_band")


def calibrated(config: Calibration) -> Iterator[str]:
    yield from ("pairs", "uids", "labels", "annotators", "unjudged", "failed_games")
    for name in (*CALIBRATED, *ERROR_GAPS, *PEOPLE):
        yield from (name, f"{name}/ci_low", f"{name}/ci_high")
    if isinstance(config.judge, ChatJudge):
        yield from (f"judge_{name}" for name in ("input_tokens", "output_tokens", "cost"))


def taxed(config: AlignmentTax) -> Iterator[str]:
    """Yields the metrics computed from each task's main metric. `tax/TASK` is the largest loss of any model,
    `tax_low/TASK` the largest lower bound."""
    tasks = [task_name(task) for task in config.tasks]
    models = list(dict.fromkeys(model for model in config.models if model != config.baseline))
    for task in tasks:
        yield from (f"tax/{task}", f"tax_low/{task}")
        yield from (f"{name}/{task}/{model}" for model in models for name in ("tax", "tax_low", "tax_high"))
        yield from (f"score/{task}/{model}" for model in (config.baseline, *models))
        yield f"documents/{task}"


def selected(config: Select) -> Iterator[str]:
    """Yields a selection's metrics. `clear` is 1 if the best model is better than every other, else 0;
    `chosen` is the chosen model's number, from 1."""
    yield from ("win_rate", "clear", "chosen", "questions")
    yield from (
        f"{name}/{model}"
        for model in config.of
        for name in ("win_rate", "difference", "difference_low", "difference_high")
    )


def drifted(config: Drift) -> Iterator[str]:
    """Yields each signal with its interval, its change from the previous result and, if it is tested, its
    p-value."""
    tested = ["prompts/divergence", "prompts/length", "refusals/rise"]
    others = ["answers/length", "refusals/model", "refusals/reference", "judge/reward_correlation"]
    if config.kl:
        others.append("kl")
    if config.anchors:
        tested.append("anchors/shift")
        others.append("anchors/changed")
        yield "anchors/age_days"
    for signal in (*tested, *others):
        yield from (signal, f"{signal}_low", f"{signal}_high", f"{signal}/change")
    yield from (f"{signal}_p" for signal in tested)


class Panel(NamedTuple):
    """One small chart. `lines`: metric -> label; `band`: the metric drawn as +- around the first line;
    `level`: a dashed line."""

    title: str
    lines: dict[str, str]
    band: str | None = None
    level: float | None = None


LOSS = Panel("Loss", {"loss": "training", "eval/loss": "held out"})
ACCURACY = Panel(
    "Share of pairs ranked right", {"accuracy": "training", "eval/accuracy": "held out"}, level=0.5
)
SFT_CHARTS = (LOSS, Panel("Learning rate", {"learning_rate": ""}), Panel("Gradient norm", {"grad_norm": ""}))
REWARD_MODEL_CHARTS = (LOSS, ACCURACY, Panel("Gradient norm", {"grad_norm": ""}))
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
PPO_CHARTS = (
    Panel("Reward of the answers (band: ± 1 std)", {"reward/mean": "mean"}, band="reward/std"),
    Panel(
        "Reward on eval_prompts",
        {"eval/reward/mean": "mean", "eval/reward/ci_low": "95 % interval", "eval/reward/ci_high": ""},
    ),
    Panel("Right answers on eval_prompts", {"eval/right/mean": ""}),
    Panel("KL to the reference", {"kl/mean": ""}, level=0.0),
    Panel("Answer length (tokens)", {"response/length": ""}),
    Panel("Policy ratio", {"policy/ratio": ""}, level=1.0),
    Panel("Share of clipped tokens", {"policy/clip_share": ""}),
    Panel("Share of truncated answers", {"response/truncated": ""}),
    Panel("Value loss", {"value/loss": ""}),
    Panel("Explained variance of the values", {"value/explained_variance": ""}, level=0.0),
    Panel("Log-prob gap, sampler to trainer", {"sampler/gap": ""}),
)

# Each key is a metric or its first part. The longer match is used.
SFT_MEANS = {
    "loss": (
        "The SFT did not fit its data: learning rate, number of steps, or a chat template that does not"
        " match it."
    ),
    "eval/loss": (
        "The SFT is bad: everything after it starts from this model. A training loss far below it means"
        " overfitting, one as high means too little training or a wrong chat template."
    ),
    "grad_norm": "The SFT is unstable: lower its learning rate, or look for odd rows in its data.",
}
REWARD_MODEL_MEANS = {
    "loss": (
        "The reward model did not fit its pairs: learning rate, number of pairs, or contradicting labels."
    ),
    "accuracy": (
        "The reward model does not even rank the pairs it was trained on: labels may be swapped or random, or"
        " it was trained too little."
    ),
    "eval/loss": "The reward model is bad, or overconfident: it does not generalise to unseen pairs.",
    "eval/accuracy": (
        "The reward model is bad: it ranks unseen pairs little better than a coin (0.5), so PPO and every"
        " round would optimise a wrong reward. Check the labels of its pairs first."
    ),
    "eval/confidence": (
        "The reward model's confidence is not its accuracy: it is badly calibrated, often from too many"
        " epochs."
    ),
    "score": (
        "The reward model's scores lie on another scale than expected: normalise them, or set centering."
    ),
}
DPO_MEANS = {
    "accuracy": (
        "DPO does not separate chosen from rejected answers: learning rate or beta, or pairs without a real"
        " difference."
    ),
    "margin": (
        "DPO separates the pairs by another margin than expected: a huge one means it left its reference far"
        " behind."
    ),
    "rewards/chosen": (
        "DPO made the chosen answers less likely too: lower its learning rate, raise beta, or add nll_coef."
    ),
    "eval": "DPO does not generalise to unseen pairs: overfitting, or another kind of pairs.",
}
KTO_MEANS = {
    "accuracy": (
        "KTO does not separate desirable from undesirable answers: learning rate or beta, or wrong labels."
    ),
    "kl": "KTO left its reference far behind: lower its learning rate or raise beta.",
    "eval": "KTO does not generalise to unseen answers: overfitting, or another kind of answers.",
}
PREFERENCES_MEANS = {
    "pairs": (
        "Sampling gave too few pairs: all answers to a prompt score the same; raise temperature or"
        " n_samples_per_prompt."
    ),
    "answers": "Sampling gave too few answers to train on: lower min_reward, or raise generate_max_len.",
    "dropped": (
        "Many prompts gave no training row: raise temperature, n_samples_per_prompt or generate_max_len."
    ),
    "reward": (
        "The sampled answers are rewarded otherwise than expected: the policy or the reward model before this"
        " stage is bad."
    ),
}
PPO_MEANS = {
    "reward": (
        "PPO's reward is outside its bound: a low one means it does not learn (learning rate, or a reward"
        " model it cannot optimise), a very high one with short or odd answers means it exploits the reward"
        " model."
    ),
    "eval": (
        "Answers to prompts that are not trained on are bad, though the training's may be good: PPO exploits"
        " its reward, or learned its prompts by heart."
    ),
    "selection": (
        "The validation that the checkpoint was chosen by is the largest of all, so it is too good: a gate on"
        " eval/reward is about answers that were not chosen."
    ),
    "kl": (
        "PPO left its reference far behind: lower actor_learning_rate or raise init_kl_coef, and distrust its"
        " reward."
    ),
    "policy/clip_share": (
        "PPO's steps are too large: many tokens are clipped; lower actor_learning_rate or max_epochs."
    ),
    "policy/ratio": (
        "PPO's steps are too large: the policy moves far within one rollout; lower actor_learning_rate."
    ),
    **dict.fromkeys(
        ("policy/first_ratio", "policy/first_ratio_gap"),
        "Sampling and training disagree before the first step: not PPO is bad, but its log-probs; compare"
        " dtypes.",
    ),
    "policy/empty_steps": (
        "Steps had no token whose weight is within sampler_is_clamp: widen it, or look at sampler/gap."
    ),
    "policy/kl_old": "PPO's steps are too large: lower actor_learning_rate or max_epochs.",
    "policy/entropy": (
        "PPO's policy has collapsed to few answers, or came apart: look at its answers, learning rate and"
        " entropy_coef."
    ),
    "policy/grad_norm": "PPO is unstable: lower actor_learning_rate.",
    "value": "PPO's critic does not predict the returns: raise critic_learning_rate or freezing_actor_steps.",
    "sampler": (
        "vLLM's log-probs are far from the trainer's: the samples come from another policy; compare dtypes"
        " and versions."
    ),
    "sync": (
        "vLLM's log-probs are far from the trainer's right after a weight update: weights did not arrive"
        " whole."
    ),
    "response/length": (
        "Answers have another length than expected: a reward model that likes long answers is the usual"
        " cause."
    ),
    "rollout": (
        "Many answers could not be learned from: a reward source failed, or a prompt's answers lost their"
        " rewards."
    ),
}
EVALUATION_MEANS = {
    "win_rate": (
        "The model is not better by as much as required: look at the gates of the stages before it for the"
        " reason."
    ),
    "ci_low": (
        "It is not sure that the model is better: more questions narrow the interval, a better model"
        " moves it."
    ),
    "ci_high": (
        "The interval of the win rate ends outside its bound: look at the gates of the stages before it for"
        " the reason."
    ),
    "length_controlled": "The model wins by longer answers: its reward model probably likes length.",
    "swap_consistency": (
        "The judge changes its mind with the order of the answers: the judge is weak, whatever the models"
        " are."
    ),
    "failed_games": "The judge gave no verdict in too many games: look at its answers and limits.",
    "judge": "The judges disagree or fail: check them before you trust the win rates.",
    "right": (
        "The model gives too few right answers: look at the gates of the stages before it for the reason."
    ),
    "truncated": "The model's answers are cut: raise generate_max_len, or it never learned to stop.",
    "reward_accuracy": "The reward model is bad: it does not rank held-out pairs well enough to train on.",
    "reward_calibration_error": "The reward model is badly calibrated: its confidence is not its accuracy.",
    "reward_longer_preferred": (
        "The reward model has a length bias: it prefers the longer answer more often than the labels do."
    ),
}
REGRESSION_MEANS = {
    "passed": (
        "The model loses questions of the suite: `report/regression.md` of the stage has them with their"
        " reasons."
    ),
    "newly_failed": (
        "The model loses questions that an earlier one passed: `report/regression.md` has them with their"
        " reasons."
    ),
    "unjudged": "The judge gave no verdict on questions of the suite: look at its answers and limits.",
    "out_of_band": (
        "The final model's share is far from that of earlier results: too low is a regression, too high may"
        " be a leaked suite."
    ),
    "deviation": (
        "The final model's share is far from that of earlier results: too low is a regression, too high may"
        " be a leaked suite."
    ),
    "history": "There are too few earlier results whose gates passed for a band.",
}
CALIBRATION_MEANS = {
    "agreement": (
        "The judge names another winner than people too often: compare it with human_agreement, and try"
        " another judge or prompt."
    ),
    "kappa": (
        "The judge agrees with people little more than by chance: do not let it decide. Few labels make the"
        " interval wide."
    ),
    "position_bias": (
        "The judge favours a position: each pair is judged in both orders, but such verdicts become ties; try"
        " another judge."
    ),
    "swap_consistency": "The judge changes its mind with the order of the answers: it is unsure or weak.",
    "length": (
        "The judge prefers long answers more than people do: read length_controlled/MODEL, or take another"
        " judge."
    ),
    "markdown": (
        "The judge prefers headers, lists and bold text more than people do: distrust wins of models that use"
        " them."
    ),
    "human": (
        "People do not agree with each other or with themselves: make the labelling instructions clearer"
        " before you blame a judge."
    ),
    "failed_games": "The judge gave no verdict in too many games: look at its answers and limits.",
    "unjudged": "The judge gave no verdict on too many pairs: look at its answers and limits.",
    "pairs": "There are too few labelled pairs: label more.",
}
ALIGNMENT_TAX_MEANS = {
    "tax": (
        "Alignment cost the model what it could do before: look at its KL to the reference, and at the data"
        " it was trained on."
    ),
    "tax_low": (
        "It is sure that alignment cost the model what it could do before: look at its KL to the reference"
        " first."
    ),
    "tax_high": (
        "It is not sure that the model kept what it could do before: more documents narrow the interval."
    ),
    "score": "A model scores otherwise than expected on this task: compare it with the baseline's score.",
}
SELECT_MEANS = {
    "clear": (
        "No model is better than all others by this evaluation: more questions narrow the intervals, or keep"
        " the simplest model."
    ),
    "win_rate": "The chosen model loses to the baseline too often: look at the stages it was trained by.",
}
DRIFT_MEANS = {
    "prompts": (
        "Users ask otherwise than the prompts that were trained on: read new prompts, and add such ones to"
        " training and evaluation."
    ),
    "answers/length": (
        "Answers have another length than the reference's: a reward model or judge that likes length is the"
        " usual cause."
    ),
    "refusals": (
        "The model refuses another share of the questions than the reference: look at its refusals, and at"
        " the last rounds' pairs."
    ),
    "judge/reward_correlation": (
        "The judge and the reward model disagree: the rounds may exploit the reward model; train it anew."
    ),
    "anchors": (
        "The judge gives other verdicts on the same answers than before: its model or prompt has changed, so"
        " win rates of different weeks do not compare. Calibrate it again."
    ),
    "kl": "The model is far from the reference: distrust its reward, and look at its answers.",
}
ANY = {
    SURVIVES: (
        "Merging lost a part of the adapters' update, or the update is too small for it: take the adapter"
        " alone (lora.export)."
    ),
    "skipped_steps": (
        "Steps had a loss or gradient that is not finite: look at their rows in nonfinite_steps.jsonl of the"
        " stage."
    ),
    "response/truncated": (
        "Answers are cut at generate_max_len, or episodes at max_turns: raise it, or the policy never learned"
        " to stop (a bad SFT)."
    ),
    "prompt/truncated": "Prompts are cut at prompt_max_len: raise it.",
    "data": (
        "The data is not what was expected: `alignflow data RECIPE` shows what was dropped or cut and why."
    ),
    "router": "The experts are not evenly used: raise router_aux_coef.",
    "loss": "Training did not reach the bound: learning rate, number of steps, or the data.",
    "grad_norm": "Training is unstable: lower the learning rate.",
}  # for every kind, if its own table has no entry
