"""Pairs from evaluations and from files of preferences: sides, names, draws, hostile texts, and what cannot
be read."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evaluation.labelling.items import draw
from tests.support.labelling import write_rows
from tests.support.text_rows import rows_of_text

COUNT = 30


def write_evaluation(
    folder: Path, texts: dict[str, str], judged: Sequence[tuple[str, str]], count: int = COUNT
) -> Path:
    """Writes a done evaluation: each model's answers are its text with the number of the question. `judged`:
    (model, baseline)."""
    for model, text in texts.items():
        rows: list[dict[str, Any]] = [
            {
                "uid": f"q{n}",
                "model": model,
                "messages": [
                    {"role": "user", "content": f"Question {n}?"},
                    {"role": "assistant", "content": {"answer": text.format(n)}},
                ],
                "metadata": {},
            }
            for n in range(count)
        ]
        write_rows(folder / "report/answers" / f"{model}.jsonl", rows)
    game = {"score": "A>B", "judgment": {"answer": "so"}, "prompt": []}
    judgments = [
        dict(uid=f"q{n}", category="all", judge="rule", model=model, baseline=baseline, games=[game, game])
        for model, baseline in judged
        for n in range(count)
    ]
    write_rows(folder / "report/judgments/rule.jsonl", judgments)
    (folder / "result.json").write_text("{}")
    return folder


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    folder = tmp_path / "artifacts/stages/evaluation-00aa"
    texts = {"sft": "sft says {0}", "dpo": "dpo says {0}", "ppo": "ppo says {0}"}
    write_evaluation(folder, texts, [("dpo", "sft"), ("ppo", "sft"), ("ppo", "dpo")])
    return tmp_path / "artifacts"


def test_an_evaluation_gives_the_battles_of_its_judges(artifacts: Path) -> None:
    drawn = draw("evaluation", 1000, 0, artifacts)
    assert (len(drawn.pairs), drawn.found, drawn.same) == (3 * COUNT, 3 * COUNT, 0)
    assert {(pair.model_a, pair.model_b) for pair in drawn.pairs} == {
        ("sft", "dpo"),
        ("sft", "ppo"),
        ("dpo", "ppo"),
    }, "A is the baseline"
    for pair in drawn.pairs:
        number = pair.uid.removeprefix("q")
        assert pair.prompt == ({"role": "user", "content": f"Question {number}?"},)
        assert pair.answer_a == f"{pair.model_a} says {number}"
        assert pair.answer_b == f"{pair.model_b} says {number}"
    assert len({pair.key for pair in drawn.pairs}) == 3 * COUNT


def test_two_models_can_be_named(artifacts: Path) -> None:
    drawn = draw("evaluation", 1000, 0, artifacts, ("ppo", "sft"))
    assert {(pair.model_a, pair.model_b) for pair in drawn.pairs} == {("ppo", "sft")}
    assert len(drawn.pairs) == COUNT
    with pytest.raises(ValueError, match="has no answers of gpt, only of dpo, ppo, sft"):
        draw("evaluation", 1000, 0, artifacts, ("ppo", "gpt"))


def test_two_models_that_nobody_judged(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "run", {"sft": "sft says {0}", "ppo": "ppo says {0}"}, [])
    (folder / "report/judgments/rule.jsonl").unlink()
    (folder / "report/judgments").rmdir()
    assert {(pair.model_a, pair.model_b) for pair in draw(str(folder), 100, 0, tmp_path).pairs} == {
        ("ppo", "sft")
    }


def test_places_of_an_evaluation(artifacts: Path) -> None:
    newer = write_evaluation(
        artifacts / "stages/evaluation-11bb", {"sft": "same", "ppo": "new {0}"}, [("ppo", "sft")]
    )
    os.utime(artifacts / "stages/evaluation-00aa/result.json", (1, 1))
    (artifacts / "mine").mkdir()
    stages = [
        {"kind": "sft", "run_dir": "stages/sft-1"},
        {"kind": "evaluation", "run_dir": "stages/evaluation-11bb"},
    ]
    (artifacts / "mine/run.json").write_text(json.dumps({"stages": stages}))
    places = ["evaluation", "mine", str(artifacts / "mine"), str(newer), str(newer / "report")]
    assert [len(draw(place, 1000, 0, artifacts).pairs) for place in places] == [COUNT] * 5
    old = str(artifacts / "stages/evaluation-00aa")
    assert len(draw(old, 1000, 0, artifacts).pairs) == 3 * COUNT


def test_a_draw_is_decided_by_the_seed_and_a_larger_one_continues_it(artifacts: Path) -> None:
    small, large, other = (
        draw("evaluation", count, seed, artifacts).pairs for count, seed in ((20, 0), (40, 0), (20, 1))
    )
    assert large[:20] == small and other != small and len(large) == 40
    assert len({pair.uid for pair in draw("evaluation", 30, 0, artifacts).pairs}) > 10, "not the first ones"


def test_equal_answers_are_left_out(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "run", {"sft": "same", "ppo": "same"}, [("ppo", "sft")])
    with pytest.raises(ValueError, match=r"has no pair of different answers to compare \(30 pairs\)"):
        draw(str(folder), 10, 0, tmp_path)


def test_half_a_character_of_a_model_becomes_a_replacement_character(tmp_path: Path) -> None:
    folder = write_evaluation(
        tmp_path / "run", {"sft": "cut \ud83d", "ppo": "whole \U0001f600 {0}"}, [("ppo", "sft")], 1
    )
    (pair,) = draw(str(folder), 10, 0, tmp_path).pairs
    assert (pair.answer_a, pair.answer_b) == ("cut \ufffd", "whole \U0001f600 0")
    assert pair.model_dump_json()


ASKED = {"role": "user", "content": "2 + 2"}
PREFERENCE = {"prompt": "2 + 2", "chosen": "4", "rejected": "5"}


@pytest.mark.parametrize(
    "row",
    [
        PREFERENCE,
        {"prompt": [ASKED], "answer_a": "4", "answer_b": "5"},
        {"chosen": [ASKED, {"role": "assistant", "content": "4"}], "rejected": [ASKED, {"role": "assistant", "content": "5"}]},
        {"chosen": "\n\nHuman: 2 + 2\n\nAssistant: 4", "rejected": "\n\nHuman: 2 + 2\n\nAssistant: 5"},
    ],
    ids=["columns", "answers", "conversations", "hh"],
)  # fmt: skip
def test_rows_of_a_file(tmp_path: Path, row: dict[str, Any]) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [row, row])
    (pair,) = draw(str(file), 10, 0, tmp_path).pairs
    assert (pair.prompt, pair.answer_a, pair.answer_b) == ((ASKED,), "4", "5")
    assert (pair.model_a, pair.model_b, pair.source) == (None, None, str(file)) and len(pair.uid) == 16


def test_labels_can_be_labelled_again(tmp_path: Path) -> None:
    row = dict(uid="q1", prompt="x", answer_a="1", answer_b="2", model_a="sft", model_b=None, verdict="A>B")
    (pair,) = draw(str(write_rows(tmp_path / "rows.jsonl", [row])), 10, 0, tmp_path).pairs
    assert (pair.uid, pair.model_a, pair.model_b) == ("q1", "sft", None)


def test_memory_is_bounded_by_the_draw(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n % 5000}", "answer_a": "1", "answer_b": "2"} for n in range(10_000)]
    drawn = draw(str(write_rows(tmp_path / "rows.jsonl", rows)), 50, 0, tmp_path)
    # a repeated row is drawn once
    assert drawn.found == 10_000 and len({pair.key for pair in drawn.pairs}) == 50
    alone = draw(str(write_rows(tmp_path / "half.jsonl", rows[:5000])), 50, 0, tmp_path)
    assert [pair.key for pair in alone.pairs] == [pair.key for pair in drawn.pairs]


@pytest.mark.parametrize(
    ("row", "told"),
    rows_of_text("""
    {prompt: x, answer_a: '1', answer_b: 2} | row 1: column 'answer_b' must be a string, found int
    {prompt: [], answer_a: '1', answer_b: '2'} | row 1: column 'prompt' must be a string or a list of messages
    {question: x, chosen: '1', rejected: '2'} | there is no column 'prompt'
    {prompt: x, chosen: '1'} | there is no column 'rejected'
    """),
)
def test_wrong_rows_are_told(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        draw(str(write_rows(tmp_path / "rows.jsonl", [row])), 10, 0, tmp_path)


def test_wrong_sources_are_told(artifacts: Path, tmp_path: Path) -> None:
    for source, told in (
        ("evaluatoin", "is neither a file of preferences .* nor an evaluation: .* has evaluation"),
        (str(tmp_path / "none.jsonl"), "there is no such file"),
        (str(artifacts), "has no answers"),
    ):
        with pytest.raises(ValueError, match=told):
            draw(source, 10, 0, artifacts)
    with pytest.raises(ValueError, match="is not an evaluation: leave --models out"):
        draw(str(write_rows(tmp_path / "rows.jsonl", [PREFERENCE])), 10, 0, tmp_path, ("a", "b"))
    (artifacts / "stages/evaluation-00aa/report/answers/sft.jsonl").write_text('{"uid": "q0"}\n')
    with pytest.raises(ValueError, match=r"sft.jsonl, line 1: is not an answer \(KeyError"):
        draw("evaluation", 10, 0, artifacts)
