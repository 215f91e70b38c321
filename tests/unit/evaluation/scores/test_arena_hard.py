"""Style-controlled scores of Arena-Hard: as arena-hard-auto computes them, and on planted effects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.scores.arena_files import (
    folders,
    judgment_lines,
    read_judgments,
    read_styles,
    to_judgment,
    token_counter,
)
from evaluation.scores.arena_hard import controlled, question_rows
from evaluation.scores.bradley_terry import fit, one_hot
from evaluation.scores.leaderboard import How, as_json, boards
from evaluation.scores.scoring import arena_sums, bootstrap_interval
from evaluation.scores.style import Style, style_of
from rlhf_core.judging.judge_reply import label_of
from rlhf_core.records import Game
from tests.support.arena import (
    BASELINE,
    ROUNDS,
    label,
    old_line,
    publish,
    published_benchmark,
    simulate,
    their_controlled,
    their_features,
    their_rows,
)

Published = tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return published_benchmark(tmp_path_factory.mktemp("arena"))


def test_our_judgments_are_read_by_the_reference_and_theirs_by_us(
    published: Published, tmp_path: Path
) -> None:
    folder, judgments, _ = published
    ours = read_judgments(folders(folder).judgments)
    (tmp_path / "judgments").mkdir()
    (tmp_path / "judgments" / "gpt-4.1.jsonl").write_text(judgment_lines(ours))
    again = [json.loads(line) for line in (tmp_path / "judgments" / "gpt-4.1.jsonl").read_text().splitlines()]
    assert their_rows(again) == their_rows(judgments)  # the reference's own reader takes our file
    assert read_judgments(folders(tmp_path).judgments) == ours
    assert ours[0].games[0].judgment["answer"].startswith("My verdict")


def test_v01_answers_and_answers_without_counts_have_a_style(tmp_path: Path) -> None:
    turn = {"content": "# Title\n- one\n- two\n**bold** text", "token_len": 9}
    old = {"question_id": "q", "model_id": "gpt-4-0314", "choices": [{"index": 0, "turns": [turn]}]}
    new = dict(uid="q", model="mine", messages=[{"role": "assistant", "content": {"answer": "1. one two"}}])
    (tmp_path / "a.jsonl").write_text(json.dumps(old) + "\n")
    assert read_styles(tmp_path) == {("gpt-4-0314", "q"): Style(9, 1, 2, 1)}
    (tmp_path / "b.jsonl").write_text(json.dumps(new) + "\n")
    with pytest.raises(ValueError, match=r"b.jsonl, line 1: the answer has no token_len"):
        read_styles(tmp_path)
    assert read_styles(tmp_path, lambda text: len(text.split()))["mine", "q"] == Style(3, 0, 1, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no judgments"),
        ("{", "line 1: is not valid JSON"),
        ("[]", "line 1: must be a JSON object"),
        ('{"uid": "q"}', "line 1: is not a judgment"),
        (
            '{"uid": "q", "judge": "j", "model": "m", "baseline": "b", "games": [null]}',
            "line 1: is not a judgment",
        ),
    ],
)
def test_folders_without_judgments_are_refused_in_one_sentence(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_judgments(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="is not a folder"):
        folders(tmp_path / "nowhere")


def test_one_battle_judged_twice_differently_is_refused(tmp_path: Path) -> None:
    judgments, _ = simulate({"ppo": 0.0}, 2, seed=0)
    other = json.loads(json.dumps(judgments[0]))
    other["games"][0]["score"] = "A>>B" if judgments[0]["games"][0]["score"] != "A>>B" else "B>>A"
    publish(tmp_path, [*judgments, judgments[1]], [])
    assert len(read_judgments(tmp_path)) == 2  # the same line twice counts once
    publish(tmp_path, [other], [])
    with pytest.raises(ValueError, match="has another judgment of"):
        read_judgments(tmp_path)


@pytest.mark.slow
def test_a_models_own_tokenizer_can_count(material: Path) -> None:
    assert token_counter(str(material / "base"))("one two three") >= 3


def test_defect_1_rows_of_a_question_are_not_independent() -> None:
    """The score's true standard deviation, over 400 simulated evaluations: ours tells it, the row bootstrap
    understates it."""
    truth = []
    rows_say = []
    ours_say = []
    for seed in range(400):
        rows = _correlated(60, seed)
        judged = [to_judgment(row) for row in rows]
        sums = arena_sums(judged)
        truth.append(sums.score)
        if seed < 60:
            outcomes = np.array([score for *_, score in their_rows(rows)])
            drawn = np.random.default_rng(seed).integers(len(outcomes), size=(300, len(outcomes)))
            rows_say.append(np.std(outcomes[drawn].mean(1)))
            low, high = bootstrap_interval(sums, 300, seed, level=0.6827)
            ours_say.append((high - low) / 2)
    assert np.mean(ours_say) / np.std(truth) == pytest.approx(1.0, abs=0.1)
    assert np.mean(rows_say) / np.std(truth) < 0.8


def _correlated(questions: int, seed: int) -> list[dict[str, Any]]:
    generator = np.random.default_rng(seed)
    rows = []
    for q in range(questions):
        leaning = generator.normal(0.3, 2.0)  # one per question: its two games agree more often than not
        games = [
            {"score": label(generator, -leaning), "judgment": {}},
            {"score": label(generator, leaning), "judgment": {}},
        ]
        rows.append(
            dict(uid=f"q{q}", category="hard_prompt", judge="j", model="m", baseline=BASELINE, games=games)
        )
    return rows


def test_defect_1_the_same_seed_gives_the_same_numbers(published: Published) -> None:
    judgments = read_judgments(folders(published[0]).judgments)
    styles = read_styles(published[0] / "model_answer")
    first, again, other = (
        boards(judgments, styles, How(("length",), resamples=200, seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_defect_2_style_control_works_with_one_model() -> None:
    """Equal skill, answers twice as long, a judge that likes length: raw says better, control must say even.
    The reference's is idle."""
    judgments, answers = simulate({"long": 0.0}, 1500, seed=5, taste=3.0, longer={"long": 2.0})
    judged = [to_judgment(row) for row in judgments]
    styles = {(row["model"], row["uid"]): style_of(row["metadata"]) for row in answers}
    raw = arena_sums(judged).score
    ours = controlled(question_rows(judged, styles, arena=True), ("length",), 200, 0).scores["long"]
    rows = their_rows(judgments)
    drawn = np.random.default_rng(0).integers(len(rows), size=(10, len(rows)))
    theirs, *_ = their_controlled(rows, their_features(rows, answers)[:, :1], drawn)["long"]
    assert raw > 0.65
    assert ours.low < 0.5 < ours.high and ours.high - ours.low < 0.12
    assert theirs > raw - 0.01


@pytest.mark.parametrize("score", ["A", "A>>>B", "AB", "B>>>>A", "", None, 3, ["A>B"]])
def test_defect_3_labels_outside_the_whitelist_are_no_verdict(score: Any) -> None:
    games = [
        {"score": score, "judgment": {"answer": "[A]"}, "prompt": []},
        {"score": "B<<A", "judgment": {"answer": ""}, "prompt": []},
    ]
    judgment = to_judgment(
        {"uid": "q", "category": "c", "judge": "j", "model": "m", "baseline": "b", "games": games}
    )
    assert judgment.games[0].score is None
    assert judgment.games[1].score == "A>>B" and judgment.score == 1.0  # mirrored forms are verdicts
    assert arena_sums([judgment]).score == 1.0


def test_defect_4_failed_games_are_counted_and_too_many_fail_the_board(
    published: Published,
) -> None:
    judgments = read_judgments(folders(published[0]).judgments)
    (board,) = boards(judgments, None, How(resamples=50))
    assert sorted(row.failed for row in board.standings) == [0, 1, 1]
    failed = [
        j.model_copy(update={"games": (Game(score=None, judgment={}), j.games[1])}) for j in judgments[:12]
    ]
    with pytest.raises(ValueError, match=r"13 of 600 .* have no verdict, more than --max-failed 0.02 allows"):
        boards(failed + judgments[12:], None, How(resamples=50))


@pytest.mark.parametrize("controls", [("length",), ("markdown",), ("markdown", "length")])
def test_defect_5_each_control_works_alone(controls: tuple[Any, ...]) -> None:
    """With the original's slicing `length` keeps a model's column and loses the feature; here the effect is
    the feature's."""
    judgments, answers = simulate({"a": 0.3, "b": -0.3}, 300, seed=8, taste=2.5, longer={"a": 1.5})
    judged = [to_judgment(row) for row in judgments]
    styles = {(row["model"], row["uid"]): style_of(row["metadata"]) for row in answers}
    found = controlled(question_rows(judged, styles, arena=True), controls, 100, 0)
    assert set(found.scores) == {"a", "b"}
    if "length" in controls:
        assert found.effects["length"].low > 0  # the judge likes length
        assert found.scores["a"].value < arena_sums([j for j in judged if j.model == "a"]).score - 0.03
    else:
        assert list(found.effects) == ["headers", "lists", "bold"]
        assert all(
            effect.low < 0 < effect.high or abs(effect.value) < 0.3 for effect in found.effects.values()
        )


def test_the_fit_is_the_references(published: Published) -> None:
    """The medians of the bootstraps of the rows, with its z-scored features and the same rows drawn."""
    _, judgments, answers = published
    rows = their_rows(judgments)
    style = their_features(rows, answers)
    drawn = np.random.default_rng(2).integers(len(rows), size=(ROUNDS, len(rows)))
    indicators, names = one_hot([model for _, model, _ in rows])
    design = np.hstack([indicators, style.numpy().astype(np.float64)])
    weights = np.stack([np.bincount(one, minlength=len(rows)) for one in drawn]).astype(np.float64)
    found = fit(design, np.array([score for *_, score in rows]), weights, np.full(design.shape[1], 1e-9))
    ours = dict(zip(names, np.median(1 / (1 + np.exp(-found[:, : len(names)])), axis=0), strict=True))
    theirs = their_controlled(rows, style, drawn)
    assert set(ours) == {"dpo", "ppo", "tiny"} and theirs[BASELINE][0] == 0.5
    assert {name: 100 * value for name, value in ours.items()} == pytest.approx(
        {name: 100 * theirs[name][0] for name in ours}, abs=0.1
    )


def test_judgments_of_the_older_format_are_scored(published: Published) -> None:
    _, judgments, _ = published
    ours = [to_judgment(old_line(row)) for row in judgments]
    assert {j.baseline for j in ours} == {"gpt-4-0314"} and {j.category for j in ours} == {"arena-hard-v0.1"}
    assert boards(ours, None, How(resamples=10, max_failed=0.5))


def test_a_boards_scores_are_the_means_of_the_references_rows(published: Published) -> None:
    folder, judgments, _ = published
    judged = read_judgments(folders(folder).judgments)
    styles = read_styles(folder / "model_answer")
    (ours,) = boards(judged, styles, How(("length", "markdown"), resamples=100))
    assert [row.model for row in ours.standings] == ["ppo", "dpo", "tiny"]
    for mine in ours.standings:
        rows = [score for _, model, score in their_rows(judgments) if model == mine.model]
        # but for the games the reference leaves out
        assert mine.score.value == pytest.approx(np.mean(rows), abs=0.005)
        assert mine.controlled is not None
        assert mine.questions == 100 and 0 <= mine.swap_consistency <= 1 and mine.tokens is not None
    assert json.loads(as_json([ours]))[0]["standings"][0]["score"]["value"] == ours.standings[0].score.value
    with pytest.raises(ValueError, match="needs the answer of"):
        boards(judged, {}, How(("length",), resamples=100))


def test_labels_in_lower_case_are_labels() -> None:
    assert label_of("b>>a") == "B>>A"
