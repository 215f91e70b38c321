"""The choice of a model by the questions of an evaluation: by simulated scores, and by a stage from an
evaluation's report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from evaluation.scores.arena_files import judgment_lines
from evaluation.scores.selection import choose
from evaluation.select_stage import run
from rlhf_core.config import Select
from rlhf_core.records import EvalReport, Game, Judgment
from rlhf_core.runs.run_dir import RunDir, run_in_directory
from rlhf_core.system import files
from tests.support.stage_request import stage_request

ORDER = ("a", "b", "c")


def simulated(rates: Mapping[str, float], questions: int, seed: int) -> dict[str, dict[str, float]]:
    """Scores 0 or 1 that are correlated between the models: a question that is hard is hard for all."""
    generator = np.random.default_rng(seed)
    hard = generator.random(questions)
    return {
        model: {
            f"q{i}": float(0.5 * hard[i] + 0.5 * own < rate)
            for i, own in enumerate(generator.random(questions))
        }
        for model, rate in rates.items()
    }


def test_a_clear_winner_is_chosen_and_a_lead_by_chance_is_not() -> None:
    clear = choose(simulated({"a": 0.4, "b": 0.6, "c": 0.45}, 600, 0), ORDER)
    assert (clear.chosen, clear.best, clear.clear, clear.equal) == ("b", "b", True, ("b",))
    assert clear.sentence.startswith("b is chosen: its win rate is 0.")
    assert clear.differences[1].low == clear.differences[1].high == 0
    chance = choose(simulated({"a": 0.5, "b": 0.52, "c": 0.3}, 200, 3), ORDER)
    assert chance.best == "b" and chance.chosen == "a" and not chance.clear and chance.equal == ("a", "b"), (
        chance
    )
    assert "no model is better than all others on 200 questions: b has the highest win" in chance.sentence
    assert chance.sentence.endswith("a is chosen, the simplest of these")
    # by the order, of equals
    assert choose(simulated({"a": 0.5, "b": 0.52, "c": 0.3}, 200, 3), ("c", "b", "a")).chosen == "b"


def test_equal_models_are_rarely_told_apart() -> None:
    """Of 300 sweeps over six models that are equally good, at most 5 % exclude any of them, plus two standard
    errors of the simulation."""
    models = "abcdef"
    wrong = [
        len(choose(simulated(dict.fromkeys(models, 0.5), 120, seed), models).equal) < len(models)
        for seed in range(300)
    ]
    assert sum(wrong) <= 15 + 2 * (300 * 0.05 * 0.95) ** 0.5


def test_a_paired_comparison_sees_what_two_intervals_would_not() -> None:
    """Models that differ on few questions, always in the same direction: their own intervals overlap."""
    scores = {"a": {f"q{i}": float(i % 2) for i in range(100)}}
    scores["b"] = {uid: 1.0 if i < 16 else score for i, (uid, score) in enumerate(scores["a"].items())}
    found = choose(scores, ("a", "b"))
    assert found.chosen == "b" and found.clear and found.differences[0].difference == pytest.approx(0.08)


def test_three_questions_make_no_model_clear() -> None:
    """All leads are equal, so that resamples of them would be, too."""
    lost, won = (dict.fromkeys(("q1", "q2", "q3"), score) for score in (0.0, 1.0))
    found = choose({"a": lost, "b": won}, ("a", "b"))
    assert (found.best, found.chosen, found.clear) == ("b", "a", False)
    assert found.differences[0].low < 0 < found.differences[0].high
    assert choose(
        {"a": dict.fromkeys(map(str, range(8)), 0.0), "b": dict.fromkeys(map(str, range(8)), 1.0)}, ("a", "b")
    ).clear


def test_only_common_questions_count() -> None:
    scores = {"a": {"q1": 1.0, "q2": 0.0, "q3": 0.0}, "b": {"q1": 1.0, "q2": 0.0}}
    assert choose(scores, ("a", "b")).questions == 2
    with pytest.raises(ValueError, match="no question has a verdict for every model,"):
        choose({"a": {"q1": 1.0}, "b": {"q2": 1.0}}, ("a", "b"))


def judgments(scores: Mapping[str, Mapping[str, float]], judge: str) -> list[Judgment]:
    label = {1.0: ("B>A", "A>B"), 0.0: ("A>B", "B>A"), 0.5: ("A=B", "A=B")}
    return [
        Judgment(
            uid=uid,
            category="all",
            judge=judge,
            model=model,
            baseline="sft",
            games=(
                Game(score=label[score][0], judgment={"answer": ""}),
                Game(score=label[score][1], judgment={"answer": ""}),
            ),  # type: ignore[arg-type]
        )
        for model, own in scores.items()
        for uid, score in own.items()
    ]


@pytest.fixture
def stage(tmp_path: Path) -> RunDir:
    """A select stage beside an evaluation whose two judges disagree, and beside two variants."""
    report = tmp_path / "stages" / "trial-1" / "report"
    (report / "judgments").mkdir(parents=True)
    decides = {"v.1": dict.fromkeys("pqrstuvw", 0.0), "v.2": dict.fromkeys("pqrstuvw", 1.0)}
    other = {"v.1": dict.fromkeys("pqrstuvw", 1.0), "v.2": dict.fromkeys("pqrstuvw", 0.0)}
    for judge, scores in (("rule", decides), ("second", other)):
        (report / "judgments" / f"{judge}.jsonl").write_text(judgment_lines(judgments(scores, judge)))
    empty = {"win_rates": (), "right": {}, "mean_tokens": {}, "truncated": {}}
    (report / "eval.json").write_text(
        EvalReport.model_validate({"baseline": "sft", "judge": "rule", **empty}).model_dump_json()
    )
    inputs = {"trial": str(report)}
    for name in ("v.1", "v.2"):
        folder = tmp_path / "stages" / f"{name}-1" / "checkpoint"
        (folder / "deep").mkdir(parents=True)
        (folder / "weights").write_text(name)
        (folder / "deep" / "more").write_text(name)
        inputs[name] = str(folder)
    run_dir = RunDir(tmp_path / "stages" / "best-1")
    config = Select(of=("v.1", "v.2"), by="trial", simplest="v.1")
    run_dir.prepare(stage_request(config, inputs, name="best", digest="d"))
    return run_dir


def test_a_stage_links_the_winner_by_the_first_judge(
    stage: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    (stage / "checkpoint").mkdir()
    (stage / "checkpoint" / "half").write_text("of a killed attempt")
    result = run_in_directory(stage.path, run)
    assert (stage / "checkpoint" / "weights").read_text() == "v.2"
    assert (stage / "checkpoint" / "weights").stat().st_nlink == 2, "no bytes are copied"
    assert set(result.files) == {"checkpoint/weights", "checkpoint/deep/more", "choice.json"}
    assert result.metrics["clear"] == 1
    assert result.metrics["chosen"] == 2
    assert result.metrics["win_rate"] == 1
    assert result.metrics["questions"] == 8
    assert result.metrics["difference/v.1"] == 1 and result.metrics["difference/v.2"] == 0
    assert "v.2 is chosen" in capsys.readouterr().out
    assert json.loads((stage / "choice.json").read_text())["best"] == "v.2"
    before = {name: info.sha256 for name, info in result.files.items()}
    files._hashed.clear()
    assert {name: files.file_digest(stage / name) for name in before} == before


def test_a_report_without_its_files_is_a_sentence(stage: RunDir) -> None:
    (Path(stage.request().inputs["trial"]) / "eval.json").unlink()
    with pytest.raises(ValueError, match=r"eval.json is missing or damaged: run the stage trial again"):
        run_in_directory(stage.path, run)
    assert stage.result() is None
