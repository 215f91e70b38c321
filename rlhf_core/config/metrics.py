"""Which metrics the result of a stage has, by its configuration: what a gate may name. The stages themselves write them; a test compares.

Names end in `*` where only the run knows the rest (a judge, a reason).
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import permutations

from rlhf_core.config.evaluation import ChatJudge, Evaluation, Publication, RuleJudge
from rlhf_core.config.ppo import PPO
from rlhf_core.config.preference import DPO, KTO
from rlhf_core.config.rounds import Preferences
from rlhf_core.config.supervised import SFT, RewardModel
from rlhf_core.config.tax import AlignmentTax
from rlhf_core.config.training import Trainable
from rlhf_core.reward_sources import RewardSources
from rlhf_core.tax_tasks import task_name

Measured = SFT | RewardModel | DPO | KTO | Preferences | PPO | Evaluation | AlignmentTax | Publication
DATA = tuple(f"data/{name}" for name in ("rows", "kept", "truncated", "dropped", "tokens"))
PAIRS = ("loss", "accuracy", "margin", "rewards/chosen", "rewards/rejected")
LOSSES = {
    "sft": ("loss",),
    "reward_model": ("loss", "accuracy", "margin", "scores/chosen", "scores/rejected"),
    "dpo": PAIRS,
    "kto": ("loss", "accuracy", "margin", "desirable", "kl", "rewards/desirable", "rewards/undesirable"),
}  # of each optimiser step; also on eval_data, as eval/..., unless HELD_OUT says otherwise
HELD_OUT = {"sft": ("loss",), "reward_model": ("loss", "accuracy", "confidence", "pairs")}
AFTER = {"reward_model": ("score/mean", "score/std"), "kto": ("data/desirable",)}
BALANCE = "router/balance"  # only of a mixture of experts
ANSWERS = ("response/length", "response/truncated", "prompt/truncated")
POLICY_STEPS = (
    "loss",
    "clip_share",
    "ratio",
    "ratio_gap",
    "kl_old",
    "entropy",
    "grad_norm",
    "learning_rate",
    "first_ratio",
    "first_ratio_gap",
)
RATES = ("win_rate", "ci_low", "ci_high", "length_controlled", "swap_consistency", "failed_games")
OVER_OPTIMISATION = ("kl", "proxy", "over_optimised")
JUDGING = ("judge_input_tokens/*", "judge_output_tokens/*", "judge_failed_games/*", "judge_cost/*")
ANSWERING = ("requests", "failed", "input_tokens", "output_tokens")
REWARD_MODEL = ("accuracy", "ci_low", "ci_high", "calibration_error", "longer_preferred", "longer_chosen")


def has_metric(config: Measured, name: str) -> bool:
    """Whether the stage's result can have this metric."""
    return any(fnmatchcase(name, known) for known in metrics_of(config))


def metrics_of(config: Measured) -> tuple[str, ...]:
    """All names, in the order of the table."""
    if isinstance(config, Trainable):
        return tuple(_trained(config))
    if isinstance(config, Preferences):
        return tuple(_sampled(config))
    if isinstance(config, PPO):
        return tuple(_reinforced(config))
    if isinstance(config, Evaluation):
        return tuple(_judged(config))
    if isinstance(config, AlignmentTax):
        return tuple(_taxed(config))
    return ("files", "bytes")


def _trained(config: SFT | RewardModel | DPO | KTO) -> Iterator[str]:
    kind = config.stage
    steps = [*LOSSES[kind]]
    if isinstance(config, DPO) and config.nll_coef:
        steps.append("nll")
    if not isinstance(config, RewardModel):
        steps.append(BALANCE)
    yield from (*steps, "grad_norm", "learning_rate", "steps")
    if config.eval_data is not None:
        yield from (f"eval/{name}" for name in HELD_OUT.get(kind, steps))
    yield from (*AFTER.get(kind, ()), *DATA)


def _sampled(config: Preferences) -> Iterator[str]:
    yield from ("prompts", "pairs" if config.post_processor == "dpo" else "answers", "dropped/*")
    yield from _rewarded(config.reward)
    yield from (*(f"reward/{name}" for name in ("best", "worst", "failed")), *ANSWERS, *DATA)


def _reinforced(config: PPO) -> Iterator[str]:
    yield from _rewarded(config.reward)
    yield from (f"reward/{name}" for name in ("first_fifth", "last_fifth", "rise_standard_error"))
    if config.overlong_buffer:
        yield "reward/overlong"
    yield from ("kl/mean", "kl/per_answer", "kl/coef", "return/mean", "rollout/usable", "sync/probe_gap", "tokens", "iterations")
    yield from (f"policy/{name}" for name in POLICY_STEPS)
    if config.kl_in == "loss":
        yield "policy/kl_loss"
    if config.has_critic:
        yield from (f"value/{name}" for name in ("loss", "clip_share", "grad_norm", "learning_rate", "explained_variance"))
    if config.dynamic_filtering:
        yield from ("filter/rounds", "filter/accepted", "filter/groups")
    if config.one_step_off_policy:
        yield "rollout/age"
    yield from ("sampler/gap", "sampler/ratio_gap", "sampler/capped", "sampler/gap_p99", BALANCE, *ANSWERS, *DATA)
    sleep = ("sleep", "wake") if config.vllm.sleep else ()
    yield from (f"phase/{name}" for name in ("generate", "score", "credit", "train", "sync", "probe", *sleep))
    yield from ("floor/generate", "floor/score", "floor/train", "work/*", "memory/*")
    yield from (f"wait/{role}" for role in config.placed)


def _rewarded(sources: RewardSources) -> Iterator[str]:
    yield from ("reward/mean", "reward/std")
    yield from (f"reward/{source.title}/{name}" for source in sources for name in ("mean", "std", "failed"))


def _judged(config: Evaluation) -> Iterator[str]:
    """Of a planned evaluation, in which loops stand for their rounds and the models' parents are known."""
    everyone = dict.fromkeys([*config.models, config.baseline, *(config.parents or {}).values()])
    yield "questions"
    yield from (f"{name}/{model}" for model in config.models for name in RATES)
    yield from (f"{name}_vs_parent/{model}" for model in config.parents or () for name in RATES)
    about = ("right",) if any(isinstance(judge, RuleJudge) for judge in config.judges) else ()
    yield from (f"{name}/{model}" for name in (*about, "length", "truncated", "prompt_truncated") for model in everyone)
    if len(config.judges) > 1:
        yield from ("judge_agreement", "judge_agreement/*")
    if any(isinstance(judge, ChatJudge) for judge in config.judges):
        yield from JUDGING
    for name, endpoint in config.endpoints.items():
        priced = ("cost",) if endpoint.input_price is not None and endpoint.output_price is not None else ()
        yield from (f"answer_{what}/{name}" for what in (*ANSWERING, *priced))
    if config.proxy is not None:
        yield from (f"{name}/{model}" for model in dict.fromkeys([config.baseline, *config.models]) for name in OVER_OPTIMISATION)
    if config.reward_evaluation is not None:
        models = config.reward_evaluation.models
        yield from (f"reward_{name}/{model}" for model in models for name in REWARD_MODEL)
        yield from (f"reward_agreement/{first}/{second}" for first, second in permutations(models, 2))


def _taxed(config: AlignmentTax) -> Iterator[str]:
    """Of each task's main metric. `tax/TASK` is the largest loss of any model, `tax_low/TASK` the largest lower bound of one."""
    tasks = [task_name(task) for task in config.tasks]
    models = list(dict.fromkeys(model for model in config.models if model != config.baseline))
    for task in tasks:
        yield from (f"tax/{task}", f"tax_low/{task}")
        yield from (f"{name}/{task}/{model}" for model in models for name in ("tax", "tax_low", "tax_high"))
        yield from (f"score/{task}/{model}" for model in (config.baseline, *models))
        yield f"documents/{task}"
