"""The table of stage kinds. Torch-free: only a stage's own process imports its module.

A new kind consists of a config class, a module with `run(request, run)`, and an entry in `KINDS`
(CONTRIBUTING.md). Kinds from other packages are added when `rlhf_core.config` is imported
(outside_kinds.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from rlhf_core.config.gates import Gated
from rlhf_core.config.judging.calibration import Calibration
from rlhf_core.config.judging.drift import Drift
from rlhf_core.config.judging.evaluation import AlignmentTax, Evaluation, Regression
from rlhf_core.config.judging.lm_eval_tasks import task_name
from rlhf_core.config.judging.publication import Publication
from rlhf_core.config.metrics import (
    calibration_metrics,
    drift_metrics,
    evaluation_metrics,
    other_metrics,
    training_metrics,
)
from rlhf_core.config.metrics.metric import Metric, Panel, names_for
from rlhf_core.config.metrics.ppo import ppo_charts, ppo_metrics, sampling_metrics
from rlhf_core.config.ppo.ppo_config import PPO
from rlhf_core.config.sampled.loop_kinds import Iterative, IterativeDPO, IterativeFeedback
from rlhf_core.config.sampled.sampled_rounds import PostProcessor, Preferences
from rlhf_core.config.sweep import Select
from rlhf_core.config.training.preference import DPO, KTO
from rlhf_core.config.training.supervised import SFT, RewardModel


class Kind(NamedTuple):
    """A kind of stage. Only `config` and `module` are required."""

    config: type[Gated]  # its field `stage` has the kind's name as default
    # has `run(request, run)`, called by the `__main__` of its package. "": a loop, which the plan replaces by
    # stages
    module: str = ""
    version: int = 3  # raise it when a code change alters results, so that they are recomputed
    # the output that other stages may use
    makes: Literal["policy", "reward", "pairs", "report", "published", ""] = ""
    start: str = "model"  # the field that names the start model, whose tokenizer is used
    # fields that name models or stages, with the kinds or outputs that each allows
    names: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    scored: str = ""  # the field of the model that gets a scalar score head if it lacks one
    given_tokens: tuple[str, ...] = ()  # fields of models that get the token ids of the start model
    # post-processors that a preferences stage may use for this stage to train on its output
    takes: tuple[PostProcessor, ...] = ()
    main: tuple[str, ...] = ()  # for lists of runs, which show the first of these metrics in the result
    # replaces `main`; its argument is the configuration as JSON
    main_of: Callable[[Mapping[str, Any]], Iterable[str]] | None = None
    metrics: tuple[Metric, ...] = ()  # metrics of its result, which gates may name; default: `main`
    charts: tuple[Panel, ...] | None = ()  # curves on the page; (): of `main`; None: none
    counts: str = "step"  # the unit of the curves' x axis
    title: str = ""  # on the page and on model cards; default: the name of its config class

    @property
    def shown_as(self) -> str:
        return self.title or self.config.__name__

    def main_metrics(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the names of the main metrics of a stage with this configuration, as JSON."""
        return self.main if self.main_of is None else tuple(self.main_of(config))

    @property
    def is_loop(self) -> bool:
        """Whether the plan replaces the stage with the stages of its rounds."""
        return not self.module

    @property
    def publishes(self) -> bool:
        """Whether the stage publishes something, together with the verdicts of the gates it depends on."""
        return self.makes == "published"

    @property
    def panels(self) -> tuple[Panel, ...]:
        return self.charts or tuple(Panel(metric, {metric: ""}) for metric in self.main)

    @property
    def package(self) -> str:
        """The package whose `__main__` runs the stage: `evaluation`, or `rlhf_core` for all other kinds; ""
        for a loop."""
        first = self.module.partition(".")[0]
        return first if first in ("", "evaluation") else "rlhf_core"

    @property
    def has_vocabulary(self) -> bool:
        """Whether the trained model outputs the vocabulary rather than one score."""
        return self.makes != "reward"

    @property
    def output(self) -> str:
        """The key of the stage's output that other stages read."""
        return "checkpoint" if self.makes in ("policy", "reward") else self.makes


STAGES = "rlhf_core.stages"
JUDGED = {  # fields of evaluations and regressions that name stages
    "models": ("policy",),
    "baseline": ("policy",),
    "proxy": ("reward",),
    "calibration": ("calibration",),
}
KINDS = {
    "sft": Kind(
        SFT,
        f"{STAGES}.sft",
        makes="policy",
        names={"model": ("policy",), "answers": ("pairs",)},
        takes=("rejection_sampling", "conditional_sft"),
        metrics=training_metrics.SFT,
        main=("eval/loss", "loss"),
        charts=training_metrics.SFT_CHARTS,
    ),
    "reward_model": Kind(
        RewardModel,
        f"{STAGES}.reward_model",
        makes="reward",
        names={"model": ("policy",)},
        scored="model",
        metrics=training_metrics.REWARD_MODEL,
        main=("eval/accuracy", "accuracy"),
        charts=training_metrics.REWARD_MODEL_CHARTS,
        title="reward model",
    ),
    "dpo": Kind(
        DPO,
        f"{STAGES}.dpo",
        makes="policy",
        start="policy",
        names={"policy": ("policy",), "reference": ("policy",), "pairs": ("pairs",)},
        given_tokens=("reference",),
        takes=("dpo",),
        metrics=training_metrics.DPO,
        main=("eval/accuracy", "accuracy"),
        charts=training_metrics.DPO_CHARTS,
    ),
    "kto": Kind(
        KTO,
        f"{STAGES}.kto",
        makes="policy",
        start="policy",
        names={"policy": ("policy",), "reference": ("policy",), "answers": ("pairs",)},
        given_tokens=("reference",),
        takes=("kto", "dpo"),
        metrics=training_metrics.KTO,
        main=("eval/accuracy", "accuracy"),
        charts=training_metrics.KTO_CHARTS,
    ),
    "preferences": Kind(
        Preferences,
        f"{STAGES}.preferences.preferences_stage",
        makes="pairs",
        start="policy",
        names={"policy": ("policy",), "reward": ("reward",)},
        metrics=sampling_metrics.PREFERENCES,
        main=("pairs", "answers"),
    ),
    "iterative_dpo": Kind(IterativeDPO),
    "iterative": Kind(Iterative),
    "iterative_feedback": Kind(IterativeFeedback),
    "ppo": Kind(
        PPO,
        f"{STAGES}.ppo.ppo_stage",
        makes="policy",
        start="actor",
        names={
            "actor": ("policy",),
            "critic": ("policy", "reward"),
            "reference": ("policy",),
            "teachers": ("policy",),
            "reward": ("reward",),
        },
        scored="critic",
        given_tokens=("critic", "reference", "teachers"),
        metrics=ppo_metrics.REINFORCED,
        main_of=ppo_metrics.main_of,
        counts="iteration",
        charts=ppo_charts.PPO_CHARTS,
    ),
    "evaluation": Kind(
        Evaluation,
        "evaluation.evaluation_stage",
        makes="report",
        start="baseline",
        names=JUDGED,
        metrics=evaluation_metrics.EVALUATION,
        main_of=lambda config: (f"win_rate/{config['models'][-1]}",),
        charts=None,
    ),
    "regression": Kind(
        Regression,
        "evaluation.regression.regression_stage",
        makes="report",
        start="baseline",
        names=JUDGED,
        metrics=evaluation_metrics.REGRESSION,
        main_of=lambda config: (f"passed/{config['models'][-1]}",),
        charts=None,
    ),
    "calibration": Kind(
        Calibration,
        "evaluation.calibration.calibration_stage",
        makes="report",
        start="judge",
        names={"judge": ("reward", "policy")},
        metrics=calibration_metrics.CALIBRATION,
        main=("kappa", "agreement"),
        charts=None,
    ),
    "alignment_tax": Kind(
        AlignmentTax,
        "evaluation.alignment_tax.tax_stage",
        makes="report",
        start="baseline",
        names={"models": ("policy",), "baseline": ("policy",)},
        metrics=other_metrics.ALIGNMENT_TAX,
        main_of=lambda config: (f"tax/{task_name(task)}" for task in config["tasks"]),
        charts=None,
    ),
    "select": Kind(
        Select,
        "evaluation.select_stage",
        makes="policy",
        start="simplest",
        names={"of": ("policy",), "by": ("evaluation",), "simplest": ("policy",)},
        metrics=other_metrics.SELECT,
        main=("win_rate",),
        charts=None,
    ),
    "drift": Kind(
        Drift,
        "evaluation.drift.drift_stage",
        makes="report",
        names={"model": ("policy",), "reference": ("policy",), "evaluation": ("evaluation",)},
        metrics=drift_metrics.DRIFT,
        main=("prompts/divergence",),
        charts=None,
    ),
    "publication": Kind(
        Publication,
        f"{STAGES}.publication.publication_stage",
        makes="published",
        names={
            "model": ("policy", "reward"),
            "evaluation": ("evaluation",),
            "dataset": ("preferences", "evaluation"),
        },
        metrics=other_metrics.PUBLICATION,
        main=("files", "bytes"),
        charts=None,
    ),
}


def named(*wanted: str) -> tuple[str, ...]:
    """Returns the kinds that have one of these names or one of these outputs."""
    return tuple(name for name, kind in KINDS.items() if name in wanted or kind.makes in wanted)


def metrics_of(config: Gated) -> tuple[str, ...]:
    """Returns the names of the metrics that the stage's result can have. `*` matches names known only after
    the run."""
    kind = KINDS[config.stage]
    return tuple(names_for(kind.metrics, config)) if kind.metrics else kind.main


def has_metric(config: Gated, name: str) -> bool:
    """Returns whether the stage's result can have this metric."""
    return any(fnmatchcase(name, known) for known in metrics_of(config))
