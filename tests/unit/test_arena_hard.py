"""Arena-Hard's numbers against its formulas written out here a second time, and each of its known defects against ours.

The reference below follows `show_result.py` and `utils/math_utils.py` (v2.0) and `utils_math.py` (v0.1) of arena-hard-auto: loops over
rows, float32 tensors and torch's L-BFGS, where ours has arrays and Newton's method. Both get the same bootstrap indices.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evaluation.arena_files import folders, judgment_lines, label_of, read_judgments, read_styles, to_judgment, token_counter
from evaluation.arena_hard import (
    controlled,
    question_rows,
    reference_controlled,
    reference_raw,
    reference_rows,
    reference_v01,
    reference_v01_controlled,
    seeded_indices,
)
from evaluation.bradley_terry import RIDGE, fit
from evaluation.leaderboard import as_json, boards
from evaluation.scoring import arena_clusters, interval
from evaluation.style import FEATURES, Style, columns, features, style_of
from rlhf_core.types import Game, Judgment, Label

BASELINE = "o3-mini-2025-01-31"
ROUNDS = 100


def simulate(
    skills: dict[str, float], questions: int, seed: int, taste: float = 1.0, longer: dict[str, float] | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Judgments and answers as published. A judge leans by skill + question + `taste` x length difference, with five labels.

    `longer[model]` is how many times the baseline's length the model's answers have on average.
    """
    generator = np.random.default_rng(seed)
    judgments, answers = [], []
    lengths = {}
    for model in (BASELINE, *skills):
        factor = (longer or {}).get(model, 1.0)
        for q in range(questions):
            tokens = int(1 + 300 * factor * generator.lognormal(0, 0.5))
            lengths[model, q] = tokens
            metadata = {
                "token_len": tokens,
                "header_count": {f"h{n}": int(generator.poisson(tokens / 800)) for n in range(1, 7)},
                "list_count": {"ordered": int(generator.poisson(tokens / 200)), "unordered": int(generator.poisson(tokens / 150))},
                "bold_count": {"**": int(generator.poisson(tokens / 100)), "__": 0},
            }
            messages = [{"role": "user", "content": f"Question {q}"}, {"role": "assistant", "content": {"answer": f"{model} {q}"}}]
            answers.append({"uid": f"q{q}", "ans_id": "x", "model": model, "messages": messages, "tstamp": 1.0, "metadata": metadata})
    for model, skill in skills.items():
        for q in range(questions):
            mine, base = lengths[model, q], lengths[BASELINE, q]
            leaning = skill + generator.normal(0, 0.8) + taste * (mine - base) / (mine + base)
            games = [{"score": _label(generator, -leaning)}, {"score": _label(generator, leaning)}]
            for game in games:
                game |= {"judgment": {"answer": f"My verdict: [[{game['score']}]]"}, "prompt": [{"role": "system", "content": "judge"}]}
            judgments.append(
                {"uid": f"q{q}", "category": "hard_prompt", "judge": "gpt-4.1", "model": model, "baseline": BASELINE, "games": games}
            )
    return judgments, answers


def _label(generator: np.random.Generator, leaning_to_a: float) -> str:
    seen = leaning_to_a + generator.logistic(0, 1)
    return "A>>B" if seen > 2 else "A>B" if seen > 0.3 else "A=B" if seen > -0.3 else "B>A" if seen > -2 else "B>>A"


def publish(folder: Path, judgments: list[dict[str, Any]], answers: list[dict[str, Any]]) -> Path:
    """The folders of arena-hard-auto: one file for each model, in a folder of the judge."""
    for row in judgments:
        file = folder / "model_judgment" / str(row["judge"]) / f"{row['model']}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")
    for row in answers:
        file = folder / "model_answer" / f"{row['model']}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")
    return folder


# --- the reference, written out ---

POINTS = {
    "A>>B": [1, 1, 1], "A>B": [1], "A=B": [0.5], "B>A": [0], "B>>A": [0, 0, 0],
    "B<<A": [1, 1, 1], "B<A": [1], "B=A": [0.5], "A<B": [0], "A<<B": [0, 0, 0],
}  # fmt: skip


def their_rows(judgments: list[dict[str, Any]]) -> list[tuple[str, str, float]]:
    """(uid, model, score) of each row; a battle with a failed game is left out."""
    rows = []
    for row in judgments:
        first, second = row["games"]
        if first is None or second is None or first["score"] is None or second["score"] is None:
            continue
        for score in POINTS[second["score"]] + [1 - point for point in POINTS[first["score"]]]:
            rows.append((row["uid"], row["model"], float(score)))
    return rows


def their_raw(scores: list[float], indices: np.ndarray) -> tuple[float, float, float]:
    means = [sum(scores[i] for i in drawn) / len(drawn) for drawn in indices]
    return float(np.mean(means)), float(np.quantile(means, 0.05)), float(np.quantile(means, 0.95))


def their_features(rows: list[tuple[str, str, float]], answers: list[dict[str, Any]]) -> torch.Tensor:
    table = {(row["model"], row["uid"]): row["metadata"] for row in answers}

    def counts(metadata: dict[str, Any]) -> list[int]:
        return [value if isinstance(value, int) else sum(value.values()) for value in metadata.values()]

    ours = torch.tensor([counts(table[model, uid]) for uid, model, _ in rows], dtype=torch.float32)
    base = torch.tensor([counts(table[BASELINE, uid]) for uid, _, _ in rows], dtype=torch.float32)
    final = torch.zeros_like(ours)
    final[:, 0] = (ours[:, 0] - base[:, 0]) / (ours[:, 0] + base[:, 0])
    dense, other = ours[:, 1:] / (ours[:, :1] + 1), base[:, 1:] / (base[:, :1] + 1)
    final[:, 1:] = (dense - other) / (dense + other + 1)
    return (final - final.mean(0)) / final.std(0)


def their_fit(design: torch.Tensor, outcomes: torch.Tensor) -> torch.Tensor:
    logits = torch.nn.Parameter(torch.full((design.shape[1],), 0.5))
    optimizer = torch.optim.LBFGS([logits], lr=1.0, max_iter=50, tolerance_grad=1e-9, tolerance_change=1e-9)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        chances = torch.sigmoid(design @ logits)
        loss = -(torch.log(chances) * outcomes + torch.log(1 - chances) * (1 - outcomes)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return logits.detach()


def their_controlled(rows: list[tuple[str, str, float]], style: torch.Tensor, indices: np.ndarray) -> dict[str, tuple[float, float, float]]:
    models = sorted({model for _, model, _ in rows} | {BASELINE})
    hot = torch.zeros(len(rows), len(models))
    for number, (_, model, _) in enumerate(rows):
        hot[number, models.index(model)] = 1
        hot[number, models.index(BASELINE)] = -1
    design, outcomes = torch.cat([hot, style], 1), torch.tensor([score for _, _, score in rows])
    fits = [their_fit(design[drawn], outcomes[drawn]) for drawn in indices]
    found = {}
    for number, model in enumerate(models):
        strength = [math.exp(c[number]) / (math.exp(c[number]) + math.exp(c[models.index(BASELINE)])) for c in fits]
        found[model] = tuple(float(np.quantile(strength, share)) for share in (0.5, 0.05, 0.95))
    return found  # type: ignore[return-value]


def their_v01(battles: list[tuple[str, str]], drawn: np.ndarray) -> dict[str, float]:
    """`battles`: (model, winner) with winner "model", "baseline" or "tie". Elo by logistic regression on doubled rows, then win rates."""
    models = [*sorted({model for model, _ in battles}), BASELINE]
    doubled = [battles[i] for i in drawn] * 2
    design = torch.zeros(len(doubled), len(models), dtype=torch.float64)
    wins = torch.zeros(len(doubled), dtype=torch.float64)  # of A, the baseline
    for number, (model, winner) in enumerate(doubled):
        design[number, models.index(BASELINE)], design[number, models.index(model)] = math.log(10), -math.log(10)
        wins[number] = winner == "baseline" or (winner == "tie" and number < len(doubled) // 2)
    weights = torch.nn.Parameter(torch.zeros(len(models), dtype=torch.float64))
    optimizer = torch.optim.LBFGS([weights], max_iter=500, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(design @ weights, wins)
        loss.backward()
        return loss

    optimizer.step(closure)
    elo = 400 * weights.detach().numpy() + 1000
    return {model: 1 / (1 + 10 ** ((elo[-1] - elo[number]) / 400)) for number, model in enumerate(models[:-1])}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]:
    """Three models, 100 questions, two battles failed: one game null, one without verdict."""
    skills, longer = {"ppo": 0.6, "dpo": 0.2, "tiny": -0.8}, {"ppo": 1.4, "tiny": 0.7}
    judgments, answers = simulate(skills, 100, seed=3, longer=longer)
    judgments.sort(key=lambda row: (row["model"], row["uid"]))  # files are read in this order
    judgments[7]["games"][0] = None
    judgments[140]["games"][1]["score"] = None
    return publish(tmp_path_factory.mktemp("arena") / "arena-hard-v2.0", judgments, answers), judgments, answers


def test_raw_scores_are_the_references(published: tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]) -> None:
    folder, judgments, _ = published
    rows = reference_rows(read_judgments(folders(folder).judgments))
    theirs = their_rows(judgments)
    assert list(zip(rows.uids, rows.models, rows.outcomes, strict=True)) == theirs
    for model in ("dpo", "ppo", "tiny"):
        scores = [score for _, name, score in theirs if name == model]
        indices = seeded_indices(len(scores), ROUNDS, seed=1)
        ours = reference_raw(rows.outcomes[[name == model for name in rows.models]], indices)
        assert 100 * np.array(ours) == pytest.approx(100 * np.array(their_raw(scores, indices)), abs=0.1)


@pytest.mark.parametrize("controls", [("length", "markdown"), ("length",), ("markdown",)])
def test_style_controlled_scores_are_the_references(
    published: tuple[Path, list[dict[str, Any]], list[dict[str, Any]]], controls: tuple[Any, ...]
) -> None:
    """Also each control alone, where the original's slicing loses the models' columns: the formula here slices the features."""
    folder, judgments, answers = published
    places = folders(folder)
    assert places.answers is not None
    rows = reference_rows(read_judgments(places.judgments), read_styles(places.answers))
    indices = seeded_indices(len(rows.outcomes), ROUNDS, seed=2)
    ours = reference_controlled(rows, controls, indices)
    theirs = their_controlled(their_rows(judgments), their_features(their_rows(judgments), answers)[:, columns(controls)], indices)
    assert set(ours.scores) == {"dpo", "ppo", "tiny"} and theirs[BASELINE][0] == 0.5
    for model, score in ours.scores.items():
        assert 100 * np.array(score) == pytest.approx(100 * np.array(theirs[model]), abs=0.1)
    assert list(ours.effects) == [FEATURES[column] for column in columns(controls)]


def test_v01_scores_are_the_references(published: tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]) -> None:
    _, judgments, _ = published
    ours = [to_judgment(_old(row)) for row in judgments]
    assert {j.baseline for j in ours} == {"gpt-4-0314"} and {j.category for j in ours} == {"arena-hard-v0.1"}
    rows = reference_rows(ours, whole_battles=False)
    battles = [(model, {1.0: "model", 0.5: "tie", 0.0: "baseline"}[float(o)]) for model, o in zip(rows.models, rows.outcomes, strict=True)]
    assert len(battles) > len(their_rows(judgments))  # a failed game leaves the other one in
    indices = seeded_indices(len(battles), 20, seed=0)
    scores = reference_v01(rows, indices)
    point = their_v01(battles, np.arange(len(battles)))
    rounds = [their_v01(battles, drawn) for drawn in indices]
    for model, score in scores.items():
        low, high = np.percentile([found[model] for found in rounds], [2.5, 97.5])
        assert 100 * np.array(score) == pytest.approx(100 * np.array([point[model], low, high]), abs=0.1)


def their_v01_features(battles: list[tuple[str, str, str]], answers: list[dict[str, Any]], controls: tuple[str, ...]) -> np.ndarray:
    """Of A (the baseline) against B, by row: difference over sum + 1 of tokens and counts, then z-scores. `battles`: uid, model, winner."""
    elements = {"length": ["token_len"], "markdown": ["header_count", "list_count", "bold_count"]}
    names = [name for control in ("length", "markdown") if control in controls for name in elements[control]]
    table = {(row["model"], row["uid"]): row["metadata"] for row in answers}

    def count(model: str, uid: str, name: str) -> int:
        value = table[model, uid][name]
        return value if isinstance(value, int) else sum(value.values())

    rows = []
    for uid, model, _ in battles:
        pairs = [(count(BASELINE, uid, name), count(model, uid, name)) for name in names]
        rows.append([(a - b) / (a + b + 1) for a, b in pairs])
    table_of_rows = np.array(rows)
    return (table_of_rows - table_of_rows.mean(0)) / np.sqrt(((table_of_rows - table_of_rows.mean(0)) ** 2).mean(0))


def their_v01_controlled(battles: list[tuple[str, str, str]], style: np.ndarray, drawn: np.ndarray) -> tuple[dict[str, float], np.ndarray]:
    """Logistic regression without intercept and with scikit-learn's default penalty, |w|^2 / 2 beside the summed loss (C = 1), on the drawn
    rows and their copies; of a tie, the copy is won by the other side. Returns win rates and the coefficients of style."""
    models = [*sorted({model for _, model, _ in battles}), BASELINE]
    design, wins = [], []
    for copy in (0, 1):
        for i in drawn:
            _, model, winner = battles[i]
            row = [0.0] * len(models)
            row[models.index(BASELINE)], row[models.index(model)] = math.log(10), -math.log(10)
            design.append([*row, *style[i]])
            wins.append(1.0 if winner == "baseline" or (winner == "tie" and copy == 0) else 0.0)
    rows, won = torch.tensor(design, dtype=torch.float64), torch.tensor(wins, dtype=torch.float64)
    weights = torch.nn.Parameter(torch.zeros(rows.shape[1], dtype=torch.float64))
    optimizer = torch.optim.LBFGS([weights], max_iter=500, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(rows @ weights, won, reduction="sum") + (weights**2).sum() / 2
        loss.backward()
        return loss

    optimizer.step(closure)
    found = weights.detach().numpy()
    elo = 400 * found[: len(models)] + 1000
    elo += 1114 - elo[-1]
    return {model: 1 / (1 + 10 ** ((elo[-1] - elo[n]) / 400)) for n, model in enumerate(models[:-1])}, found[len(models) :]


@pytest.mark.parametrize("controls", [("length", "markdown"), ("length",), ("markdown",)])
def test_v01_style_controlled_scores_are_the_references(
    published: tuple[Path, list[dict[str, Any]], list[dict[str, Any]]], controls: tuple[Any, ...]
) -> None:
    _, judgments, answers = published
    ours = [to_judgment(_old(row)) for row in judgments]
    styles = {(row["model"].replace(BASELINE, "gpt-4-0314"), row["uid"]): style_of(row["metadata"]) for row in answers}
    rows = reference_rows(ours, styles, whole_battles=False)
    words = {1.0: "model", 0.5: "tie", 0.0: "baseline"}
    battles = [(uid, model, words[float(o)]) for uid, model, o in zip(rows.uids, rows.models, rows.outcomes, strict=True)]
    style = their_v01_features(battles, answers, controls)
    indices = seeded_indices(len(battles), 20, seed=0)
    found = reference_v01_controlled(rows, controls, indices)
    point, effects = their_v01_controlled(battles, style, np.arange(len(battles)))
    rounds = [their_v01_controlled(battles, style, drawn)[0] for drawn in indices]
    raw = reference_v01(rows, indices)
    for model, score in found.scores.items():
        low, high = np.percentile([values[model] for values in rounds], [2.5, 97.5])
        assert 100 * np.array(score) == pytest.approx(100 * np.array([point[model], low, high]), abs=0.1)
    assert max(abs(score.value - raw[model].value) for model, score in found.scores.items()) > 0.005, "the control changes something"
    assert [effect.value for effect in found.effects.values()] == pytest.approx(list(effects), abs=1e-3)
    assert list(found.effects) == [FEATURES[column] for column in columns(controls)]


def test_the_v01_board_has_v01s_own_style_control(published: tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]) -> None:
    _, judgments, answers = published
    ours = [to_judgment(_old(row)) for row in judgments]
    styles = {(row["model"].replace(BASELINE, "gpt-4-0314"), row["uid"]): style_of(row["metadata"]) for row in answers}
    (board,) = boards(ours, styles, ("length", "markdown"), "reference", 10, 0, 0.5)
    rows = reference_rows(ours, styles, whole_battles=False)
    expected = reference_v01_controlled(rows, ("length", "markdown"), seeded_indices(len(rows.outcomes), 100, 0)).scores
    assert {standing.model: standing.controlled for standing in board.standings} == expected


def _old(row: dict[str, Any]) -> dict[str, Any]:
    """A v0.1 line with the same verdicts."""
    games = [
        {"user_prompt": "What?", "judgment": "words", "score": None}
        if game is None
        else {**game, "user_prompt": "What?", "judgment": "words"}
        for game in row["games"]
    ]
    return {"question_id": row["uid"], "model": row["model"], "judge": "gpt-4-1106-preview", "games": [dict(g, prompt=None) for g in games]}


# --- files ---


def test_our_judgments_are_read_by_the_reference_and_theirs_by_us(
    published: tuple[Path, list[dict[str, Any]], list[dict[str, Any]]], tmp_path: Path
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
    new = {"uid": "q", "model": "mine", "messages": [{"role": "assistant", "content": {"answer": "1. one two"}}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(old) + "\n")
    assert read_styles(tmp_path) == {("gpt-4-0314", "q"): Style(9, 1, 2, 1)}
    (tmp_path / "b.jsonl").write_text(json.dumps(new) + "\n")
    with pytest.raises(ValueError, match=r"b.jsonl, line 1: the answer has no token_len"):
        read_styles(tmp_path)
    assert read_styles(tmp_path, lambda text: len(text.split()))["mine", "q"] == Style(3, 0, 1, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there are no judgments"),
        ("{", "line 1: is not valid JSON"),
        ("[]", "line 1: must be a JSON object"),
        ('{"uid": "q"}', "line 1: is no judgment"),
        ('{"uid": "q", "judge": "j", "model": "m", "baseline": "b", "games": [null]}', "line 1: is no judgment"),
    ],
)
def test_folders_without_judgments_are_refused_in_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_judgments(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="is no folder"):
        folders(tmp_path / "nowhere")


def test_one_battle_judged_twice_differently_is_refused(tmp_path: Path) -> None:
    judgments, _ = simulate({"ppo": 0.0}, 2, seed=0)
    other = json.loads(json.dumps(judgments[0]))
    other["games"][0]["score"] = "A>>B" if judgments[0]["games"][0]["score"] != "A>>B" else "B>>A"
    publish(tmp_path, [*judgments, judgments[1]], [])
    assert len(read_judgments(tmp_path)) == 2  # the same line twice counts once
    publish(tmp_path, [other], [])
    with pytest.raises(ValueError, match="before, otherwise"):
        read_judgments(tmp_path)


def test_a_models_own_tokenizer_can_count(material: Path) -> None:
    assert token_counter(str(material / "base"))("one two three") >= 3


# --- the five defects ---


def test_defect_1_rows_of_a_question_are_not_independent() -> None:
    """The score's true standard deviation, over 400 simulated evaluations: ours tells it, the row bootstrap understates it."""
    truth, rows_say, ours_say = [], [], []
    for seed in range(400):
        judged = [to_judgment(row) for row in _correlated(60, seed)]
        clusters = arena_clusters(judged)
        truth.append(clusters.score)
        if seed < 60:
            outcomes = reference_rows(judged).outcomes
            rows_say.append(np.std(outcomes[seeded_indices(len(outcomes), 300, seed)].mean(1)))
            low, high = interval(clusters, 300, seed, level=0.6827)
            ours_say.append((high - low) / 2)
    assert np.mean(ours_say) / np.std(truth) == pytest.approx(1.0, abs=0.1)
    assert np.mean(rows_say) / np.std(truth) < 0.8


def _correlated(questions: int, seed: int) -> list[dict[str, Any]]:
    generator = np.random.default_rng(seed)
    rows = []
    for q in range(questions):
        leaning = generator.normal(0.3, 2.0)  # one per question: its two games agree more often than not
        games = [{"score": _label(generator, -leaning), "judgment": {}}, {"score": _label(generator, leaning), "judgment": {}}]
        rows.append({"uid": f"q{q}", "category": "hard_prompt", "judge": "j", "model": "m", "baseline": BASELINE, "games": games})
    return rows


def test_defect_1_the_same_seed_gives_the_same_numbers(published: tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]) -> None:
    judgments = read_judgments(folders(published[0]).judgments)
    styles = read_styles(published[0] / "model_answer")
    first, again, other = (boards(judgments, styles, ("length",), "ours", 200, seed, 0.02) for seed in (1, 1, 2))
    assert first == again != other


def test_defect_2_style_control_works_with_one_model() -> None:
    """Equal skill, answers twice as long, a judge that likes length: raw says better, control must say even. The reference's is idle."""
    judgments, answers = simulate({"long": 0.0}, 1500, seed=5, taste=3.0, longer={"long": 2.0})
    judged = [to_judgment(row) for row in judgments]
    styles = {(row["model"], row["uid"]): style_of(row["metadata"]) for row in answers}
    raw = arena_clusters(judged).score
    ours = controlled(question_rows(judged, styles, arena=True), ("length",), 200, 0).scores["long"]
    rows = reference_rows(judged, styles)
    theirs = reference_controlled(rows, ("length",), seeded_indices(len(rows.outcomes), 30, 0)).scores["long"]
    assert raw > 0.65
    assert ours.low < 0.5 < ours.high and ours.high - ours.low < 0.12
    assert theirs.value > raw - 0.01


@pytest.mark.parametrize("score", ["A", "A>>>B", "AB", "B>>>>A", "", None, 3, ["A>B"]])
def test_defect_3_labels_outside_the_whitelist_are_no_verdict(score: Any) -> None:
    games = [{"score": score, "judgment": {"answer": "[A]"}, "prompt": []}, {"score": "B<<A", "judgment": {"answer": ""}, "prompt": []}]
    judgment = to_judgment({"uid": "q", "category": "c", "judge": "j", "model": "m", "baseline": "b", "games": games})
    assert judgment.games[0].score is None
    assert judgment.games[1].score == "A>>B" and judgment.score == 1.0  # mirrored forms are verdicts
    assert arena_clusters([judgment]).score == 1.0


def test_defect_4_failed_games_are_counted_and_too_many_fail_the_board(
    published: tuple[Path, list[dict[str, Any]], list[dict[str, Any]]],
) -> None:
    judgments = read_judgments(folders(published[0]).judgments)
    (board,) = boards(judgments, None, (), "ours", 50, 0, max_failed=0.02)
    assert sorted(row.failed for row in board.standings) == [0, 1, 1]
    failed = [j.model_copy(update={"games": (Game(score=None, judgment={}), j.games[1])}) for j in judgments[:12]]
    with pytest.raises(ValueError, match=r"13 of 600 games have no verdict, more than --max-failed 0.02 allows"):
        boards(failed + judgments[12:], None, (), "ours", 50, 0, max_failed=0.02)


@pytest.mark.parametrize("controls", [("length",), ("markdown",), ("markdown", "length")])
def test_defect_5_each_control_works_alone(controls: tuple[Any, ...]) -> None:
    """With the original's slicing `length` keeps a model's column and loses the feature; here the effect is the feature's."""
    judgments, answers = simulate({"a": 0.3, "b": -0.3}, 300, seed=8, taste=2.5, longer={"a": 1.5})
    judged = [to_judgment(row) for row in judgments]
    styles = {(row["model"], row["uid"]): style_of(row["metadata"]) for row in answers}
    found = controlled(question_rows(judged, styles, arena=True), controls, 100, 0)
    assert set(found.scores) == {"a", "b"}
    if "length" in controls:
        assert found.effects["length"].low > 0  # the judge likes length
        assert found.scores["a"].value < arena_clusters([j for j in judged if j.model == "a"]).score - 0.03
    else:
        assert list(found.effects) == ["headers", "lists", "bold"]
        assert all(effect.low < 0 < effect.high or abs(effect.value) < 0.3 for effect in found.effects.values())


# --- symmetries ---

LABELS: tuple[Label, ...] = ("A>>B", "A>B", "A=B", "B>A", "B>>A")
verdicts = st.lists(st.tuples(st.sampled_from(LABELS), st.sampled_from(LABELS), st.integers(0, 9)), min_size=4, max_size=15)


def build(labels: list[tuple[Label, Label, int]], models: tuple[str, ...] = ("m",)) -> tuple[list[Judgment], dict[tuple[str, str], Style]]:
    judged, styles = [], {}
    for number, (first, second, extra) in enumerate(labels):
        model, uid = models[number % len(models)], f"q{number // len(models)}"
        styles[model, uid], styles["b", uid] = Style(10 + extra, extra % 3, 1, 0), Style(12, 1, 0, extra % 2)
        games = (Game(score=first, judgment={}), Game(score=second, judgment={}))
        judged.append(Judgment(uid=uid, category="c", judge="j", model=model, baseline="b", games=games))
    return judged, styles


@given(verdicts)
def test_swapping_the_sides_mirrors_the_controlled_score(labels: list[tuple[Label, Label, int]]) -> None:
    judged, styles = build(labels)
    mirrored = [j.model_copy(update={"model": "b", "baseline": "m", "games": (j.games[1], j.games[0])}) for j in judged]
    ours = controlled(question_rows(judged, styles, arena=True), ("length", "markdown"), 20, 0)
    theirs = controlled(question_rows(mirrored, styles, arena=True), ("length", "markdown"), 20, 0)
    assert theirs.scores["b"].value == pytest.approx(1 - ours.scores["m"].value, abs=1e-5)
    assert (theirs.scores["b"].low, theirs.scores["b"].high) == pytest.approx(
        (1 - ours.scores["m"].high, 1 - ours.scores["m"].low), abs=1e-5
    )
    for name, effect in ours.effects.items():
        assert theirs.effects[name].value == pytest.approx(effect.value, abs=1e-4)


@given(st.sampled_from(LABELS), st.lists(st.integers(0, 9), min_size=3, max_size=10))
def test_a_constant_judge_gives_one_half_whatever_the_style(label: Label, extras: list[int]) -> None:
    judged, styles = build([(label, label, extra) for extra in extras])
    found = controlled(question_rows(judged, styles, arena=True), ("length", "markdown"), 20, 0).scores["m"]
    assert tuple(found) == pytest.approx((0.5, 0.5, 0.5))


@given(verdicts, st.randoms(use_true_random=False))
def test_models_and_questions_in_any_order_and_under_any_name_give_the_same(labels: list[tuple[Label, Label, int]], random: Any) -> None:
    judged, styles = build(labels, models=("m", "n"))
    names = {"m": "zz", "n": "aa"}  # the other way around in the alphabet
    renamed = [j.model_copy(update={"model": names[j.model]}) for j in random.sample(judged, len(judged))]
    restyled = {(names.get(model, model), uid): style for (model, uid), style in styles.items()}
    ours = controlled(question_rows(judged, styles, arena=True), ("length",), 20, 0).scores
    theirs = controlled(question_rows(renamed, restyled, arena=True), ("length",), 20, 0).scores
    for model, score in ours.items():
        assert tuple(theirs[names[model]]) == pytest.approx(tuple(score), abs=1e-6)


@given(verdicts)
def test_repeating_every_question_keeps_the_controlled_score(labels: list[tuple[Label, Label, int]]) -> None:
    judged, styles = build(labels)
    copies = [j.model_copy(update={"uid": f"{j.uid}-copy"}) for j in judged]
    both = styles | {(model, f"{uid}-copy"): style for (model, uid), style in styles.items()}
    once, twice = (controlled(question_rows(js, both, arena=True), ("length",), 1, 0) for js in (judged, judged + copies))
    assert twice.scores["m"].value == pytest.approx(once.scores["m"].value, abs=1e-6)
    assert twice.effects["length"].value == pytest.approx(once.effects["length"].value, abs=1e-5)


def test_copies_of_all_questions_keep_the_centre_of_the_controlled_interval() -> None:
    judged, styles = build([("B>A", "A>B", 9), ("B>A", "B>A", 1), ("A>B", "B>A", 4), ("A=B", "A>B", 7), ("B>A", "A>B", 2)] * 12)
    copies = [j.model_copy(update={"uid": f"{j.uid}-copy"}) for j in judged]
    both = styles | {(model, f"{uid}-copy"): style for (model, uid), style in styles.items()}
    once, twice = (controlled(question_rows(js, both, arena=True), ("length",), 2000, 0).scores["m"] for js in (judged, judged + copies))
    assert (twice.low + twice.high) / 2 == pytest.approx((once.low + once.high) / 2, abs=0.01)
    assert (twice.high - twice.low) / (once.high - once.low) == pytest.approx(2**-0.5, abs=0.05)


def test_newton_reaches_the_minimum_that_bfgs_finds() -> None:
    generator = np.random.default_rng(0)
    design, weights = generator.normal(size=(200, 4)), generator.integers(0, 4, size=(3, 200)).astype(float)
    outcomes = (generator.random(200) < 0.6).astype(float)
    from scipy.optimize import minimize

    for row, found in zip(weights, fit(design, outcomes, weights, np.full(4, RIDGE)), strict=True):
        share = row / row.sum()

        def loss(c: np.ndarray, share: np.ndarray = share) -> float:
            logits = design @ c
            return float((share * (np.logaddexp(0, logits) - outcomes * logits)).sum() + RIDGE / 2 * c @ c)

        assert found == pytest.approx(minimize(loss, np.zeros(4), method="BFGS", tol=1e-10).x, abs=1e-4)


def test_a_model_that_always_wins_has_a_finite_strength() -> None:
    judged, styles = build([("B>>A", "A>>B", n) for n in range(8)])
    score = controlled(question_rows(judged, styles, arena=True), ("length", "markdown"), 50, 0).scores["m"]
    assert 0.98 < score.value < 1 and score.low > 0.95


def test_equal_styles_are_no_difference_and_empty_answers_no_error() -> None:
    styles = [Style(0, 0, 0, 0), Style(7, 1, 2, 3)]
    assert (features(styles, styles) == 0).all()
    (row,) = features([Style(30, 0, 0, 0)], [Style(10, 0, 11, 0)])
    assert row == pytest.approx([0.5, 0, -1 / 2, 0])


# --- the board ---


def test_the_reference_board_is_the_references_and_ours_stands_beside(
    published: tuple[Path, list[dict[str, Any]], list[dict[str, Any]]],
) -> None:
    folder, judgments, _ = published
    judged, styles = read_judgments(folders(folder).judgments), read_styles(folder / "model_answer")
    (reference,) = boards(judged, styles, ("length", "markdown"), "reference", 100, 0, 0.02)
    (ours,) = boards(judged, styles, ("length", "markdown"), "ours", 100, 0, 0.02)
    assert [row.model for row in ours.standings] == [row.model for row in reference.standings] == ["ppo", "dpo", "tiny"]
    for mine, theirs in zip(ours.standings, reference.standings, strict=True):
        rows = [score for _, model, score in their_rows(judgments) if model == mine.model]
        assert theirs.score.value == pytest.approx(np.mean(rows), abs=0.02)
        assert mine.score.value == pytest.approx(np.mean(rows), abs=0.005)  # but for the games the reference leaves out
        assert mine.controlled is not None and theirs.controlled is not None
        assert mine.questions == 100 and 0 <= mine.swap_consistency <= 1 and mine.tokens is not None
    assert json.loads(as_json([ours]))[0]["standings"][0]["score"]["value"] == ours.standings[0].score.value
    with pytest.raises(ValueError, match="needs the answer of"):
        boards(judged, {}, ("length",), "ours", 100, 0, 0.02)


def test_labels_in_lower_case_are_labels() -> None:
    assert label_of("b>>a") == "B>>A"
