"""Published shapes of data sets: each becomes the rows that its columns would have been, and what prefers
nothing is dropped by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import Data
from rlhf_core.data.chat import Renderer
from rlhf_core.data.rows.formats import recognise
from rlhf_core.data.rows.mixture import check_columns, load_rows
from rlhf_core.data.sources import labelled_answers, preference_pairs, prompts, sft_documents
from rlhf_core.data.survey import Loaded
from tests.support.data_rows import assistant, user


def data(path: Path, rows: list[Any], **source: Any) -> Data:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Data.model_validate({"sources": [{"path": str(path), **source}]})


def reasons(loaded: Loaded[Any]) -> dict[str, int]:
    return loaded.report.survey.dropped


def completion(response: str, score: float, **more: Any) -> dict[str, Any]:
    return {"model": "m", "response": response, "overall_score": score, **more}


ULTRAFEEDBACK = {
    "source": "sharegpt",
    "instruction": "2 + 2",
    "completions": [completion("5", 2.0), completion("4", 8.5), completion("maybe 4", 6.0)],
}
BINARIZED = {
    "prompt": "2 + 2",
    "prompt_id": "x",
    "chosen": [user("2 + 2"), assistant("4")],
    "rejected": [user("2 + 2"), assistant("5")],
    "messages": [user("2 + 2"), assistant("4")],
    "score_chosen": 8.5,
    "score_rejected": 2.0,
}
ARENA = {
    "question_id": "x",
    "model_a": "a",
    "model_b": "b",
    "winner": "model_b",
    "conversation_a": [user("2 + 2"), assistant("5")],
    "conversation_b": [user("2 + 2"), assistant("4")],
    "turn": 1,
}
HH = {"chosen": "\n\nHuman: 2 + 2\n\nAssistant: 4", "rejected": "\n\nHuman: 2 + 2\n\nAssistant: 5"}
SHAREGPT = {"id": "x", "conversations": [{"from": "human", "value": "2 + 2"}, {"from": "gpt", "value": "4"}]}


@pytest.mark.parametrize(
    ("row", "form"),
    [(ULTRAFEEDBACK, "ultrafeedback"), (BINARIZED, "ultrafeedback"), (ARENA, "arena"), (HH, "hh")],
)
def test_a_published_preference_is_the_pair_it_means(
    row: dict[str, Any], form: str, tmp_path: Path, renderer: Renderer
) -> None:
    assert recognise(row) == form
    (plain,) = preference_pairs(
        data(tmp_path / "plain.jsonl", [{"prompt": "2 + 2", "chosen": "4", "rejected": "5"}]), renderer, 64, 0
    ).items
    for chosen in ("auto", form):
        mixture = data(tmp_path / "rows.jsonl", [row], format=chosen)
        check_columns(mixture, "preference")
        assert preference_pairs(mixture, renderer, 64, 0).items == [plain]
    assert [item.desirable for item in labelled_answers(mixture, renderer, 64, 0).items] == [True, False]
    if form != "hh":  # the answer preferred is one to learn from
        assert sft_documents(mixture, renderer, 64, 0).items == [plain.chosen]
    assert prompts(mixture, renderer, 64, 0).items[0].messages == (user("2 + 2"),)


@pytest.mark.parametrize("row", [ULTRAFEEDBACK, BINARIZED])
def test_ultrafeedbacks_margin_is_the_difference_of_its_scores_when_it_is_asked_for(
    row: dict[str, Any], tmp_path: Path, renderer: Renderer
) -> None:
    for key, margin in (("margin", 6.5), (None, 0.0)):
        mixture = data(tmp_path / "rows.jsonl", [row], margin_key=key)
        check_columns(mixture, "preference")
        assert [pair.margin for pair in preference_pairs(mixture, renderer, 64, 0).items] == [margin]


def test_ultrafeedback_is_scored_by_its_ratings_where_it_has_no_overall_score(
    tmp_path: Path, renderer: Renderer
) -> None:
    def rated(response: str, *ratings: str) -> dict[str, Any]:
        return {
            "response": response,
            "annotations": {str(i): {"Rating": rating} for i, rating in enumerate(ratings)},
        }

    rows = [
        {"instruction": "x", "completions": [rated("worse", "5", "1"), rated("better", "4", "N/A")]},
        {
            "instruction": "x",
            "completions": [
                {"response": "worse", "fine-grained_score": 1.5},
                {"response": "better", "fine-grained_score": 2},
            ],
        },
    ]
    for row in load_rows(data(tmp_path / "rows.jsonl", rows, margin_key="margin"), 0):
        assert (row["chosen"], row["rejected"]) == ("better", "worse") and row["margin"] in (1.0, 0.5)


def test_rows_without_a_preference_are_dropped_and_counted_by_reason(
    tmp_path: Path, renderer: Renderer
) -> None:
    arena = [ARENA, {**ARENA, "winner": "tie"}, {**ARENA, "winner": "tie (bothbad)"}]
    arena.append({**ARENA, "conversation_a": [user("2 + 2"), assistant("5"), user("no"), assistant("4")]})
    feedback = [
        ULTRAFEEDBACK,
        {**ULTRAFEEDBACK, "completions": ULTRAFEEDBACK["completions"][:1]},
        {**ULTRAFEEDBACK, "completions": [completion("4", 5.0), completion("5", 5.0)]},
    ]
    dialogues = [
        HH,
        {**HH, "rejected": "\n\nHuman: 3 + 3\n\nAssistant: 6"},
        {**HH, "chosen": HH["chosen"] + "\n\nHuman: thanks"},
    ]
    for rows, dropped in (
        (arena, {"a tie": 2, "conversations that differ before the last answer": 1}),
        (feedback, {"a single completion": 1, "equal scores": 1}),
        ([BINARIZED, {**BINARIZED, "score_rejected": 8.5}], {"equal scores": 1}),
        (
            dialogues,
            {
                "conversations that differ before the last answer": 1,
                "no answer at the end of the dialogue": 1,
            },
        ),
    ):
        mixture = data(tmp_path / "rows.jsonl", rows)
        loaded = preference_pairs(mixture, renderer, 64, 0)
        assert (loaded.report.survey.items, loaded.report.survey.kept) == (len(rows), 1)
        assert reasons(loaded) == dropped
        assert len(load_rows(mixture, 0, "preference")) == 1
        assert len(prompts(mixture, renderer, 64, 0).items) == len(rows), "a prompt needs no preference"
    # A first row that prefers nothing does not hide what the format has.
    check_columns(data(tmp_path / "rows.jsonl", [arena[1], ARENA]), "preference")
    # Binarized rows hold a conversation of their own: what is preferred does not matter to SFT.
    assert (
        sft_documents(
            data(tmp_path / "rows.jsonl", [{**BINARIZED, "score_rejected": 8.5}]), renderer, 64, 0
        ).report.survey.kept
        == 1
    )


def test_dialogues_of_several_turns_keep_their_turns(tmp_path: Path, renderer: Renderer) -> None:
    start = "\n\nHuman: hello\n\nAssistant: hello you\n\nHuman: bye"
    rows = [{"chosen": start + "\n\nAssistant: bye", "rejected": start + "\n\nAssistant: no"}]
    (pair,) = preference_pairs(data(tmp_path / "rows.jsonl", rows), renderer, 96, 0).items
    assert pair.chosen == renderer.answer([user("hello"), assistant("hello you"), user("bye")], "bye")


def test_sharegpt_conversations_are_messages(tmp_path: Path, renderer: Renderer) -> None:
    turns = [{"from": "system", "value": "be brief"}, *SHAREGPT["conversations"]]
    mixture = data(tmp_path / "rows.jsonl", [SHAREGPT, {"conversations": turns}])
    check_columns(mixture, "sft")
    first, second = sft_documents(mixture, renderer, 96, 0).items
    assert first == renderer.answer([user("2 + 2")], "4")
    assert second == renderer.conversation(
        [{"role": "system", "content": "be brief"}, user("2 + 2"), assistant("4")]
    )
    assert prompts(mixture, renderer, 96, 0).items[0].messages == (user("2 + 2"),)


@pytest.mark.parametrize(
    ("row", "bad", "message"),
    [
        (ULTRAFEEDBACK, {"completions": []}, "'completions' must be a list of objects"),
        (
            ULTRAFEEDBACK,
            {"completions": [completion("4", 1.0), {"response": "5"}]},
            "'fine-grained_score' must be a finite number, found None",
        ),
        (BINARIZED, {"score_chosen": "much"}, "'score_chosen' must be a finite number, found 'much'"),
        (BINARIZED, {"score_chosen": float("nan")}, "'score_chosen' must be a finite number, found nan"),
        (ARENA, {"winner": "a"}, "'winner' must be model_a, model_b or tie, found 'a'"),
        (
            ARENA,
            {"conversation_b": [user("2 + 2")]},
            "'conversation_b' must be a conversation that ends with an assistant message",
        ),
        (HH, {"rejected": "5"}, "'rejected' must begin with"),
        (
            SHAREGPT,
            {"conversations": [{"from": "tool", "value": "4"}]},
            "turn 1 of 'conversations' is from 'tool', known are",
        ),
    ],
)
def test_a_wrong_row_is_named_with_what_to_do(
    row: dict[str, Any], bad: dict[str, Any], message: str, tmp_path: Path
) -> None:
    mixture = data(tmp_path / "rows.jsonl", [row, {**row, **bad}])
    with pytest.raises(ValueError) as told:
        load_rows(mixture, 0)
    assert str(told.value).startswith(f"{mixture.sources[0].path}, row 2: ") and message in str(told.value)
    assert any(
        todo in str(told.value)
        for todo in ("correct or drop the row", "correct the row", "rename or drop it")
    )


def test_a_format_that_lacks_what_a_stage_needs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"there is no column 'chosen', nor 'rejected'; .*: set chosen_key and rejected_key in",
    ):
        check_columns(data(tmp_path / "rows.jsonl", [SHAREGPT]), "preference")


def test_columns_with_names_of_their_own_are_not_taken_for_another_format() -> None:
    assert recognise({"prompt": "x", "chosen": "\n\nHuman: y", "rejected": "\n\nHuman: z"}) == "columns"
    assert recognise({"conversations": "a text"}) == "columns" == recognise({"messages": [user("x")]})
