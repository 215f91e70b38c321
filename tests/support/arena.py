"""Judgments and answers as arena-hard-auto publishes them, and its statistics written out a second time.

The reference below follows `show_result.py` and `utils/math_utils.py` (v2.0) and `utils_math.py` (v0.1):
loops over rows, float32 tensors and torch's L-BFGS, where ours has arrays and Newton's method. Both get the
same bootstrap indices.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

BASELINE = "o3-mini-2025-01-31"
ROUNDS = 100


def simulate(
    skills: dict[str, float],
    questions: int,
    seed: int,
    taste: float = 1.0,
    longer: dict[str, float] | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Judgments and answers as published. A judge leans by skill + question + `taste` x length difference,
    with five labels.

    `longer[model]` is how many times the baseline's length the model's answers have on average.
    """
    generator = np.random.default_rng(seed)
    judgments = []
    answers = []
    lengths = {}
    for model in (BASELINE, *skills):
        factor = (longer or {}).get(model, 1.0)
        for q in range(questions):
            tokens = int(1 + 300 * factor * generator.lognormal(0, 0.5))
            lengths[model, q] = tokens
            metadata = {
                "token_len": tokens,
                "header_count": {f"h{n}": int(generator.poisson(tokens / 800)) for n in range(1, 7)},
                "list_count": {
                    "ordered": int(generator.poisson(tokens / 200)),
                    "unordered": int(generator.poisson(tokens / 150)),
                },
                "bold_count": {"**": int(generator.poisson(tokens / 100)), "__": 0},
            }
            messages = [
                {"role": "user", "content": f"Question {q}"},
                {"role": "assistant", "content": {"answer": f"{model} {q}"}},
            ]
            answers.append(
                dict(uid=f"q{q}", ans_id="x", model=model, messages=messages, tstamp=1.0, metadata=metadata)
            )
    for model, skill in skills.items():
        for q in range(questions):
            mine = lengths[model, q]
            base = lengths[BASELINE, q]
            leaning = skill + generator.normal(0, 0.8) + taste * (mine - base) / (mine + base)
            games = [{"score": label(generator, -leaning)}, {"score": label(generator, leaning)}]
            for game in games:
                game |= {
                    "judgment": {"answer": f"My verdict: [[{game['score']}]]"},
                    "prompt": [{"role": "system", "content": "judge"}],
                }
            judgments.append(
                {
                    "uid": f"q{q}",
                    "category": "hard_prompt",
                    "judge": "gpt-4.1",
                    "model": model,
                    "baseline": BASELINE,
                    "games": games,
                }
            )
    return judgments, answers


def label(generator: np.random.Generator, leaning_to_a: float) -> str:
    seen = leaning_to_a + generator.logistic(0, 1)
    return (
        "A>>B"
        if seen > 2
        else "A>B"
        if seen > 0.3
        else "A=B"
        if seen > -0.3
        else "B>A"
        if seen > -2
        else "B>>A"
    )


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


def their_features(rows: list[tuple[str, str, float]], answers: list[dict[str, Any]]) -> torch.Tensor:
    table = {(row["model"], row["uid"]): row["metadata"] for row in answers}

    def counts(metadata: dict[str, Any]) -> list[int]:
        return [value if isinstance(value, int) else sum(value.values()) for value in metadata.values()]

    ours = torch.tensor([counts(table[model, uid]) for uid, model, _ in rows], dtype=torch.float32)
    base = torch.tensor([counts(table[BASELINE, uid]) for uid, _, _ in rows], dtype=torch.float32)
    final = torch.zeros_like(ours)
    final[:, 0] = (ours[:, 0] - base[:, 0]) / (ours[:, 0] + base[:, 0])
    dense = ours[:, 1:] / (ours[:, :1] + 1)
    other = base[:, 1:] / (base[:, :1] + 1)
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


def their_controlled(
    rows: list[tuple[str, str, float]], style: torch.Tensor, indices: np.ndarray
) -> dict[str, tuple[float, float, float]]:
    models = sorted({model for _, model, _ in rows} | {BASELINE})
    hot = torch.zeros(len(rows), len(models))
    for number, (_, model, _) in enumerate(rows):
        hot[number, models.index(model)] = 1
        hot[number, models.index(BASELINE)] = -1
    design = torch.cat([hot, style], 1)
    outcomes = torch.tensor([score for _, _, score in rows])
    fits = [their_fit(design[drawn], outcomes[drawn]) for drawn in indices]
    found = {}
    for number, model in enumerate(models):
        strength = [
            math.exp(c[number]) / (math.exp(c[number]) + math.exp(c[models.index(BASELINE)])) for c in fits
        ]
        found[model] = tuple(float(np.quantile(strength, share)) for share in (0.5, 0.05, 0.95))
    return found  # type: ignore[return-value]


def old_line(row: dict[str, Any]) -> dict[str, Any]:
    """A v0.1 line with the same verdicts."""
    games = [
        (
            {"user_prompt": "What?", "judgment": "words", "score": None}
            if game is None
            else {**game, "user_prompt": "What?", "judgment": "words"}
        )
        for game in row["games"]
    ]
    return {
        "question_id": row["uid"],
        "model": row["model"],
        "judge": "gpt-4-1106-preview",
        "games": [dict(g, prompt=None) for g in games],
    }


def published_benchmark(root: Path) -> tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]:
    """Three models, 100 questions, two battles failed: one game null, one without verdict."""
    skills = {"ppo": 0.6, "dpo": 0.2, "tiny": -0.8}
    longer = {"ppo": 1.4, "tiny": 0.7}
    judgments, answers = simulate(skills, 100, seed=3, longer=longer)
    judgments.sort(key=lambda row: (row["model"], row["uid"]))  # files are read in this order
    judgments[7]["games"][0] = None
    judgments[140]["games"][1]["score"] = None
    return publish(root / "arena-hard-v2.0", judgments, answers), judgments, answers
