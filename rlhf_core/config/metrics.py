"""Which metrics the result of a stage has, by its configuration: the names that gates may use (kinds.py).

Names end in `*` where the rest is known only after the run (a judge, a reason).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

from rlhf_core.config.evaluation import AlignmentTax, ChatJudge, Evaluation, RuleJudge
from rlhf_core.config.lm_eval_tasks import task_name
from rlhf_core.config.loops import Preferences
from rlhf_core.config.ppo import PPO
from rlhf_core.config.rewards import RewardSources

DATA = tuple(f"data/{name}" for name in ("rows", "kept", "truncated", "dropped", "tokens"))
PAIRS = ("loss", "accuracy", "margin", "rewards/chosen", "rewards/rejected")
LABELLED = ("loss", "accuracy", "margin", "desirable", "kl", "rewards/desirable", "rewards/undesirable")
REWARD_LOSS = ("loss", "accuracy", "margin", "scores/chosen", "scores/rejected")
REWARD_HELD_OUT = ("loss", "accuracy", "confidence", "pairs")
BALANCE = "router/balance"  # only of a mixture of experts
ANSWERS = ("response/length", "response/truncated", "prompt/truncated")
POLICY_STEPS = ("loss", "clip_share", "ratio", "ratio_gap", "kl_old", "entropy", "grad_norm", "learning_rate")
FIRST_STEP = ("first_ratio", "first_ratio_gap")
RATES = ("win_rate", "ci_low", "ci_high", "length_controlled", "swap_consistency", "failed_games")
OVER_OPTIMISATION = ("kl", "proxy", "over_optimised")
JUDGING = ("judge_input_tokens/*", "judge_output_tokens/*", "judge_failed_games/*", "judge_cost/*")
ANSWERING = ("requests", "failed", "input_tokens", "output_tokens")
REWARD_MODEL = ("accuracy", "ci_low", "ci_high", "calibration_error", "longer_preferred", "longer_chosen")


def trained(*steps: str, held_out: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> Callable[[Any], Iterator[str]]:
    """Of a training stage. `steps`: of each optimiser step, and of eval_data unless `held_out` names others; `after`: of the end."""

    def names(config: Any) -> Iterator[str]:
        nll = ("nll",) if getattr(config, "nll_coef", 0) else ()
        balance = (BALANCE,) if hasattr(config, "router_aux_coef") else ()
        each = (*steps, *nll, *balance)
        yield from (*each, "grad_norm", "learning_rate", "steps")
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
    yield from (f"reward/{name}" for name in ("first_fifth", "last_fifth", "rise_standard_error"))
    if config.overlong_buffer:
        yield "reward/overlong"
    yield from ("kl/mean", "kl/per_answer", "kl/coef", "return/mean", "rollout/usable", "sync/probe_gap", "tokens", "iterations")
    yield from (f"policy/{name}" for name in POLICY_STEPS + FIRST_STEP)
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


def judged(config: Evaluation) -> Iterator[str]:
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


def taxed(config: AlignmentTax) -> Iterator[str]:
    """Of each task's main metric. `tax/TASK` is the largest loss of any model, `tax_low/TASK` the largest lower bound of one."""
    tasks = [task_name(task) for task in config.tasks]
    models = list(dict.fromkeys(model for model in config.models if model != config.baseline))
    for task in tasks:
        yield from (f"tax/{task}", f"tax_low/{task}")
        yield from (f"{name}/{task}/{model}" for model in models for name in ("tax", "tax_low", "tax_high"))
        yield from (f"score/{task}/{model}" for model in (config.baseline, *models))
        yield f"documents/{task}"
