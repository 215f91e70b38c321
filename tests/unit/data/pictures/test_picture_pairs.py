"""Pairs and labelled answers to prompts with images: shapes of published preference data, faults, limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.config import Data
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document, Labelled, Pair
from rlhf_core.data.pictures.message_parts import sources_in
from rlhf_core.data.pictures.picture_source import CUT_AWAY, DAMAGED, MISNAMED, MISSING
from rlhf_core.data.rows.columns import Located, labelled_of, preference_of
from rlhf_core.data.rows.mixture import check_columns
from rlhf_core.data.sources import labelled_answers, preference_pairs
from rlhf_core.data.survey import Loaded
from tests.support.pictured_models import FAMILIES, make_pictured, square, write_rows
from tests.unit.data.pictures.test_hostile_pictures import HOSTILE

TEXT = {"type": "text", "text": "What?"}
PLACE: dict[str, Any] = {"type": "image"}
GIVEN = {**PLACE, "image": "a.png"}
ENDS = {"chosen": "red", "rejected": "green"}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": [{"type": "text", "text": text, "index": None}]}]


def whole(prompt: list[dict[str, Any]]) -> dict[str, Any]:
    return {side: [*prompt, *said(text)] for side, text in ENDS.items()}


SHAPES: dict[str, dict[str, Any]] = {
    "in the prompt": {"prompt": user(GIVEN, TEXT), **ENDS},
    "only a column": {"prompt": "What?", "image": "a.png", **ENDS},
    "marker": {"prompt": "<image>What?", "images": ["a.png"], **ENDS},
    "answers as messages": {
        "prompt": user({**PLACE, "text": None}, {**TEXT, "image": None}),
        "images": [{"bytes": None, "path": "a.png"}],
        **{side: said(text) for side, text in ENDS.items()},
    },
    "conversations": whole(user(GIVEN, TEXT)),
    "conversations and a column": {**whole(user(PLACE, TEXT)), "images": ["a.png"]},
    "conversations, marker": {**whole([{"role": "user", "content": "<image>What?"}]), "images": ["a.png"]},
    "conversations with their prompt": {
        "prompt": user(PLACE, TEXT),
        **whole(user(PLACE, TEXT)),
        "images": ["a.png"],
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def renderer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = make_pictured(request.param, tmp_path_factory.mktemp("models") / request.param)
    return Renderer(load_tokenizer(str(folder)), "chat")


def pairs_of(rows: list[dict[str, Any]], folder: Path, renderer: Renderer, limit: int = 200) -> Loaded[Pair]:
    data = Data(sources=str(write_rows(folder / "rows.jsonl", rows)))
    check_columns(data, "preference")
    return preference_pairs(data, renderer, limit, 0, folder / "state")


def labelled_in(
    rows: list[dict[str, Any]], folder: Path, renderer: Renderer, limit: int = 200
) -> Loaded[Labelled]:
    data = Data(sources=str(write_rows(folder / "rows.jsonl", rows)))
    check_columns(data, "labelled")
    return labelled_answers(data, renderer, limit, 0, folder / "state")


def image_tokens(document: Document, renderer: Renderer) -> int:
    return int((np.asarray(document.tokens) == renderer.pictures.token_id).sum())


@pytest.mark.parametrize("shape", SHAPES)
def test_both_answers_see_the_same_image(shape: str, renderer: Renderer, tmp_path: Path) -> None:
    """As a conversation that ends with the answer."""
    (tmp_path / "a.png").write_bytes(square("red"))
    (pair,) = pairs_of([SHAPES[shape]], tmp_path, renderer).items
    prompt = preference_of(Located("r", SHAPES[shape], folder=str(tmp_path))).prompt
    for document, text in ((pair.chosen, "red"), (pair.rejected, "green")):
        assert document == renderer.conversation([*prompt, {"role": "assistant", "content": text}])
        (picture,) = document.pictures
        assert picture.source.encoded() == square("red") and picture.stop <= document.answer_start
    assert pair.chosen.pictures == pair.rejected.pictures
    for desirable, labelled in zip(
        (True, False), labelled_in([SHAPES[shape]], tmp_path, renderer).items, strict=True
    ):
        assert labelled == Labelled(pair.chosen if desirable else pair.rejected, desirable)


def test_a_labelled_answer_sees_its_image(renderer: Renderer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(square("red"))
    rows = [{"prompt": "What?", "image": "a.png", "response": "red", "label": True}]
    rows += [{"prompt": "What?", "image": "gone.png", "response": "red", "label": False}]
    loaded = labelled_in(rows, tmp_path, renderer)
    (item,) = loaded.items
    assert item.desirable and len(item.document.pictures) == 1
    assert loaded.report.survey.dropped == {MISSING: 1}
    pair = {"prompt": "What?", "image": "gone.png", **ENDS}
    both = labelled_in([rows[0], pair], tmp_path, renderer)
    assert both.report.survey.dropped == {MISSING: 2} and both.report.survey.images == 1


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {"prompt": "Hi", **ENDS, "chosen": [{"role": "assistant", "content": [GIVEN]}]},
            "chosen answer has an",
        ),
        (
            {**whole(user(GIVEN, TEXT)), "rejected": [*user(TEXT), *said("green")]},
            "differ only in their last",
        ),
        ({**whole(user(TEXT)), "prompt": user(GIVEN, TEXT)}, "the prompt has other images"),
        ({"prompt": user(PLACE, TEXT), **ENDS}, "has 0 images in its columns and 1 places"),
        ({"prompt": user({"type": "video", "video": "a.mp4"}), **ENDS}, "only texts and images are read"),
        ({"prompt": user({**PLACE, "image": "https://x.org/a.png"}), **ENDS}, "none is opened"),
    ],
)
def test_rows_that_are_refused(row: dict[str, Any], told: str) -> None:
    for read in (preference_of, labelled_of):
        with pytest.raises(ValueError, match=told) as error:
            read(Located("rows.jsonl, row 1", row, folder="/data"))
        assert str(error.value).startswith("rows.jsonl, row 1") and "\n" not in str(error.value)


def test_a_pair_with_an_unusable_image_is_a_finding(renderer: Renderer, tmp_path: Path) -> None:
    files = {"gone": None, "b.png": square("red")[:50], "c.jpg": square("green")}
    files |= {name.replace(" ", "-"): content for name, (content, _) in HOSTILE.items()}
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    good = (tmp_path / "a.png").write_bytes(square("red")) and GIVEN
    rows = [{"prompt": user(good, {**PLACE, "image": name}, TEXT), **ENDS} for name in files]
    loaded = pairs_of([*rows, {"prompt": "Hi", **ENDS}], tmp_path, renderer, 400)
    survey = loaded.report.survey
    assert len(loaded.items) == 2 and survey.images == 4
    assert survey.kept == 2 and sum(survey.dropped.values()) == len(HOSTILE) + 2
    assert survey.dropped[DAMAGED] >= 2 and survey.dropped[MISSING] == 1
    found = {finding.name: finding for finding in survey.findings}
    assert found[MISSING].example.endswith("rows.jsonl, row 1")
    assert found[MISNAMED].example.endswith("rows.jsonl, row 3")


def test_all_images_unusable_is_told(renderer: Renderer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"all 2 rows were dropped \(image missing: 2\): correct the images"):
        pairs_of([{"prompt": user(GIVEN), **ENDS}] * 2, tmp_path, renderer)


def test_no_limit_cuts_inside_an_image(renderer: Renderer, tmp_path: Path) -> None:
    """The oldest turns go first, then the beginning of the question's text, then the ends of the answers. The
    question's images stay, or the pair is dropped."""
    (tmp_path / "a.png").write_bytes(square("red"))
    before = [*user(GIVEN, {"type": "text", "text": "Old."}), *said("yes")]
    question = user({"type": "text", "text": "abcdefghij "}, GIVEN, {"type": "text", "text": "What?"})
    row = {"prompt": [*before, *question], "chosen": "x" * 30, "rejected": "y" * 20}
    text = {"prompt": "Hi", "chosen": "a", "rejected": "b"}
    (full,) = pairs_of([row], tmp_path, renderer, 400).items
    one = image_tokens(full.chosen, renderer) // 2
    seen = set()
    for limit in range(renderer.frame_len + 5, len(full.chosen) + 2):
        loaded = pairs_of([row, text], tmp_path, renderer, limit)
        survey = loaded.report.survey
        if len(loaded.items) == 1:
            assert survey.dropped == {CUT_AWAY: 1} and survey.facts[CUT_AWAY] == 0.5
            seen.add(0)
            continue
        pair = loaded.items[0]
        seen.add(len(pair.chosen.pictures))
        assert pair.chosen.pictures == pair.rejected.pictures
        assert (CUT_AWAY in survey.facts) == (len(pair.chosen.pictures) == 1)
        start = pair.chosen.answer_start
        assert list(pair.chosen.tokens[:start]) == list(pair.rejected.tokens[:start])
        for document in (pair.chosen, pair.rejected):
            assert len(document) <= limit and any(document.mask)
            assert image_tokens(document, renderer) == one * len(document.pictures)
            for picture in document.pictures:
                assert document.tokens[picture.start] == renderer.pictures.token_id
                assert document.tokens[picture.stop - 1] == renderer.pictures.token_id
                assert picture.stop <= start
        decoded = renderer.tokenizer.decode(list(pair.chosen.tokens[:start]))
        assert "What?" in decoded or "abcdefghij" not in decoded
    assert seen == {0, 1, 2}


def test_the_same_prompt_with_other_images_is_no_duplicate(renderer: Renderer, tmp_path: Path) -> None:
    for name in ("red", "green"):
        (tmp_path / f"{name}.png").write_bytes(square(name))
    rows = [{"prompt": "What?", "image": f"{name}.png", **ENDS} for name in ("red", "green")]
    survey = pairs_of(rows, tmp_path, renderer).report.survey
    assert "duplicate rows" not in survey.facts or survey.facts["duplicate rows"] == 0
    again = pairs_of([rows[0], rows[0]], tmp_path, renderer).report.survey
    assert again.facts["duplicate rows"] == 0.5
    prompt = preference_of(Located("r", rows[0], folder=str(tmp_path))).prompt
    assert [source.name for source in sources_in(prompt)] == ["red.png"]
