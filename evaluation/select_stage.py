"""Runs a select stage, which chooses the best of several models from the judgments of a finished evaluation
and links its checkpoint.

Writes the folder `checkpoint`, with hard links to the chosen model's files, and `choice.json`, with all
differences.
"""

from __future__ import annotations

from pathlib import Path

from evaluation.scores.arena_files import read_judgments
from evaluation.scores.selection import choose
from rlhf_core.config import Select
from rlhf_core.records import EvalReport
from rlhf_core.runs.lineage import stage_of
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest
from rlhf_core.system.files import link_tree, write_text

CHOICE = "choice.json"


def run(request: StageRequest, run: RunDir) -> Outcome:
    """Chooses a model. Raises ValueError when the evaluation has no verdicts that compare the models."""
    config = request.config
    assert isinstance(config, Select), f"select got the config of a {config.stage} stage"
    report = Path(request.inputs[config.by])
    judged = EvalReport.read(report / "eval.json")
    if judged is None:
        raise ValueError(f"{report / 'eval.json'} is missing or damaged: run the stage {config.by} again")
    scores: dict[str, dict[str, float]] = {model: {} for model in config.of}
    for judgment in read_judgments(report / "judgments"):
        ours = (
            judgment.judge == judged.judge
            and judgment.baseline == judged.baseline
            and judgment.model in scores
        )
        if ours and judgment.score is not None:
            scores[judgment.model][judgment.uid] = judgment.score
    order = tuple(dict.fromkeys((config.simplest or config.of[0], *config.of)))
    choice = choose(scores, order)
    print(choice.sentence, flush=True)
    link(Path(request.inputs[choice.chosen]), run / "checkpoint")
    write_text(run / CHOICE, choice.model_dump_json(indent=2))
    metrics = {
        "clear": float(choice.clear),
        "chosen": float(config.of.index(choice.chosen) + 1),
        "questions": float(choice.questions),
    }
    for one in choice.differences:
        metrics |= {f"win_rate/{one.model}": one.win_rate, f"difference/{one.model}": one.difference}
        metrics |= {f"difference_low/{one.model}": one.low, f"difference_high/{one.model}": one.high}
    metrics["win_rate"] = metrics[f"win_rate/{choice.chosen}"]
    return Outcome(metrics, {"checkpoint": "checkpoint", "choice": CHOICE})


def link(checkpoint: Path, target: Path) -> None:
    """Links the files of a checkpoint into a new folder, or copies them if the file system does not support
    links."""
    made = stage_of(str(checkpoint))
    if made:
        RunDir(made[0]).remember_digests()  # links have the same digests as the original files
    link_tree(checkpoint, target)
