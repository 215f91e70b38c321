"""Rows with images, in the shapes of published chat data; refusals, and findings of the data report."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import Data
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document
from rlhf_core.data.pictures.message_parts import sources_in
from rlhf_core.data.pictures.picture_source import PICTURE_FAULTS, PictureFault
from rlhf_core.data.rows.columns import (
    Located,
    conversation_of,
    preference_of,
    prompt_of,
    text_preference_of,
)
from rlhf_core.data.rows.mixture import check_columns
from rlhf_core.data.sources import sft_documents
from rlhf_core.data.survey import Loaded
from tests.support.pictured_models import asked, make_pictured, square, write_rows
from tests.unit.data.pictures.test_hostile_pictures import HOSTILE

RED = square("red")
TEXT = {"type": "text", "text": "What?"}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = make_pictured("qwen3_vl", tmp_path_factory.mktemp("models") / "qwen")
    return Renderer(load_tokenizer(str(folder)), "chat")


def located(row: dict[str, Any], folder: str | None = "/data") -> Located:
    return Located("rows.jsonl, row 1", row, folder=folder)


def load(rows: list[dict[str, Any]], folder: Path, renderer: Renderer, limit: int = 200) -> Loaded[Document]:
    data = Data(sources=str(write_rows(folder / "rows.jsonl", rows)))
    check_columns(data, "sft")
    return sft_documents(data, renderer, limit, 0, folder / "state")


SHAPES: dict[str, dict[str, Any]] = {
    "path": asked([{"type": "image", "image": "a.png"}, TEXT]),
    "typed without, column": {**asked([{"type": "image"}, TEXT]), "images": ["a.png"]},
    "nulls of Arrow": {
        **asked([{"type": "image", "text": None}, {**TEXT, "image": None}]),
        "image": {"bytes": None, "path": "a.png"},
    },
    "marker": {**asked("<image>What?"), "images": ["a.png"]},
    "only a column": {**asked("What?"), "image": "a.png"},
    "prompt and response": {"prompt": "What?", "response": "yes", "image": {"bytes": None, "path": "a.png"}},
    "url of OpenAI": asked([{"type": "image_url", "image_url": {"url": "a.png"}}, TEXT]),
    "in a path key": asked([{"type": "image", "path": "a.png"}, TEXT]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_with_an_image(shape: str) -> None:
    question, answer = conversation_of(located(SHAPES[shape]))
    image, text = question["content"]
    assert text == TEXT and answer["content"] == "yes"
    assert (
        image["type"] == "image" and image["picture"].name == "a.png" and image["picture"].folder == "/data"
    )


def test_bytes_of_all_kinds() -> None:
    coded = base64.b64encode(RED).decode()
    for cell in (RED, {"bytes": RED, "path": "there/a.png"}, f"data:image/png;base64,{coded}"):
        (question, _) = conversation_of(located(asked([{"type": "image", "image": cell}, TEXT]), None))
        assert sources_in([question])[0].data == RED
    (question, _) = conversation_of(located(asked([{"type": "image", "base64": coded}]), None))
    assert sources_in([question])[0].data == RED


def test_several_images_keep_their_order() -> None:
    row = {**asked("one <image> two <image>."), "images": ["a.png", "b.png"]}
    (question, _) = conversation_of(located(row))
    assert [part.get("text") or part["picture"].name for part in question["content"]] == [
        *("one ", "a.png", " two ", "b.png", ".")
    ]


def test_texts_in_parts_are_a_text() -> None:
    (question, _) = conversation_of(located(asked([TEXT, {"type": "text", "text": " Why?"}])))
    assert question["content"] == "What? Why?"


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (asked([{"type": "video", "video": "a.mp4"}, TEXT]), "a part of type 'video': only texts and images"),
        (asked([{"type": "input_audio", "input_audio": {}}, TEXT]), "only texts and images are read"),
        (asked([{"type": "image", "image": "https://x.org/a.png"}, TEXT]), "none is opened: store the image"),
        (asked([{"type": "image", "image": "file:///etc/passwd"}, TEXT]), "none is opened: store the image"),
        ({**asked("a <image> b <image>"), "images": ["a.png"]}, "has 1 images in its columns and 2 places"),
        (asked([{"type": "image"}, TEXT]), "has 0 images in its columns and 1 places"),
        (asked([7]), "a part that is not an object"),
        (asked([{"type": "image", "image": 7}]), "an image that is int: give a path or bytes"),
        (asked("What?", [{"type": "image", "image": "a.png"}]), "an image in an answer"),  # type: ignore[arg-type]
    ],
)
def test_rows_that_are_refused(row: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as error:
        conversation_of(located(row))
    assert str(error.value).startswith("rows.jsonl, row 1") and "\n" not in str(error.value)


def test_other_stages_refuse_images_and_leave_other_columns_alone() -> None:
    told = "row 1: has images, which are read only by sft .* in prompts of ppo, rounds and evaluations: drop"
    with pytest.raises(ValueError, match=told):
        prompt_of(located({"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}))
    with pytest.raises(ValueError, match=told):
        prompt_of(located({"prompt": "What?", "image": "a.png"}))
    pair = {"prompt": "What?", "chosen": "a", "rejected": "b", "images": [{"bytes": RED, "path": None}]}
    with pytest.raises(ValueError, match=told):
        text_preference_of(located(pair))
    for cell in ("docker.io/library/python:3.11", "python:3.11", 7, None, []):
        assert prompt_of(located({"prompt": "What?", "image": cell}))[0]["content"] == "What?"


def test_a_column_image_of_other_values_leaves_the_text_alone() -> None:
    text = "Draw an SVG <image> element"
    row = {"prompt": text, "response": "<svg/>", "image": "swebench/django:latest"}
    question, _ = conversation_of(located(row))
    assert question["content"] == text
    (prompt,) = prompt_of(located({"prompt": text, "image": "python:3.11"}))
    assert prompt["content"] == text


def test_an_image_that_is_missing_among_others_keeps_its_place() -> None:
    row = {**asked("<image><image>What?"), "images": [None, "a.png"]}
    question, _ = conversation_of(located(row))
    assert [source.name for source in sources_in([question])] == ["", "a.png"]


def test_the_number_of_images_in_a_row_is_limited() -> None:
    with pytest.raises(ValueError, match="has 257 images, and at most 256"):
        conversation_of(located({**asked("What?"), "images": ["a.png"] * 257}))
    parts = [{"type": "image", "image": "a.png"}] * 257
    with pytest.raises(ValueError, match="has 257 images, and at most 256"):
        conversation_of(located(asked([*parts, TEXT])))


def test_other_images_in_the_prompt_of_a_comparison_are_refused() -> None:
    ends = {
        side: [{"role": "user", "content": "What?"}, {"role": "assistant", "content": side}] for side in "ab"
    }
    prompt = [{"role": "user", "content": [{"type": "image"}, TEXT]}]
    row = {"prompt": prompt, "chosen": ends["a"], "rejected": ends["b"]}
    with pytest.raises(ValueError, match="row 1: the prompt has other images than the messages"):
        preference_of(located(row))


def test_a_text_model_refuses_images(material: Path, tmp_path: Path) -> None:
    renderer = Renderer(load_tokenizer(str(material / "base")), "chat")
    told = r"rows.jsonl, row 1: there are images, but .*base \(.*\) cannot be trained on any: name a model"
    with pytest.raises(ValueError, match=told):
        load([{**asked("What?"), "image": "a.png"}], tmp_path, renderer)


def test_each_unusable_image_is_a_finding_with_its_row(reader: Renderer, tmp_path: Path) -> None:
    (tmp_path / "good.png").write_bytes(RED)
    (tmp_path / "wrong.jpg").write_bytes(RED)
    rows = [asked([{"type": "image", "image": name}, TEXT]) for name in ("good.png", "wrong.jpg")]
    facts = ["image with another suffix"]
    for number, (data, fact) in enumerate(HOSTILE.values()):
        (tmp_path / f"{number}.png").write_bytes(data)
        rows.append(asked([{"type": "image", "image": f"{number}.png"}, TEXT]))
        facts.append(fact)
    rows.append(asked([{"type": "image", "image": "../x.png"}, TEXT]))
    rows.append(asked([{"type": "image", "image": "gone.png"}, TEXT]))
    facts += ["image outside of the data's folder", "image missing"]
    documents, report, _ = load(rows, tmp_path, reader)
    survey = report.survey
    assert survey.rows == len(rows) and survey.kept == len(documents) == 2 and survey.images == 2
    found = {finding.name: finding for finding in survey.findings}
    for number, fact in enumerate(facts, start=2):
        assert fact in found
        if facts.index(fact) == number - 2:
            assert found[fact].example == f"{tmp_path / 'rows.jsonl'}, row {number}"
    assert {fact: facts.count(fact) for fact in PICTURE_FAULTS if fact in facts} == {
        fact: count for fact, count in survey.dropped.items() if fact in PICTURE_FAULTS
    }


def test_an_extreme_shape_is_a_finding(reader: Renderer, tmp_path: Path) -> None:
    (tmp_path / "good.png").write_bytes(RED)
    (tmp_path / "line.png").write_bytes(square("red", 900, 1))
    rows = [asked([{"type": "image", "image": name}, TEXT]) for name in ("good.png", "line.png")]
    survey = load(rows, tmp_path, reader).report.survey
    assert survey.dropped == {"image refused by the model's processor": 1}


def test_the_same_question_about_other_images_is_no_duplicate(reader: Renderer, tmp_path: Path) -> None:
    rows = [
        asked(
            [
                {"type": "image", "image": f"data:image/png;base64,{base64.b64encode(square(c)).decode()}"},
                TEXT,
            ]
        )
        for c in ("red", "green", "red")
    ]
    facts = load(rows, tmp_path, reader).report.survey.facts
    assert facts["duplicate rows"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("stored", ["path", "bytes"])
def test_parquet_keeps_images_encoded(stored: str, reader: Renderer, tmp_path: Path) -> None:
    import datasets

    (tmp_path / "a.png").write_bytes(RED)
    good = {"bytes": RED, "path": None} if stored == "bytes" else {"bytes": None, "path": "a.png"}
    cells = [good, {"bytes": RED[:60], "path": None}]  # the library's own decoding of the second would raise
    struct = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = datasets.Features(
        prompt=datasets.Value("string"),
        response=datasets.Value("string"),
        # the library would look for the file in the working directory
        image=datasets.Image() if stored == "bytes" else struct,
    )
    columns = {"prompt": ["What?"] * 2, "response": ["yes", "no"], "image": cells}
    datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "rows.parquet")
    data = Data(sources=str(tmp_path / "rows.parquet"))
    documents, report, _ = sft_documents(data, reader, 200, 0, tmp_path / "state")
    assert len(documents) == 1 and report.survey.dropped == {"image damaged": 1}
    (picture,) = documents[0].pictures
    assert picture.source.encoded() == RED


def test_the_prompt_of_a_pair_may_repeat_images_of_its_conversations_in_other_ways() -> None:
    part = {"type": "image", "image": "b.png"}
    asked_twice = [
        *(
            {"role": "user", "content": [{"type": "image", "image": "a.png"}]},
            {"role": "assistant", "content": "x"},
        ),
        {"role": "user", "content": [part, {"type": "text", "text": "What?"}]},
    ]
    marked = [{"role": "user", "content": "<image>What?"}]
    place = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    for prompt, start, images in (
        ([asked_twice[-1]], asked_twice, None),
        (place, marked, ["b.png"]),
    ):
        answers = {side: [*start, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
        row = {"prompt": prompt, **answers} | ({"images": images} if images else {})
        assert sources_in(preference_of(located(row)).prompt)[-1].name == "b.png"
    other = [
        {"role": "user", "content": [{"type": "image", "image": "c.png"}, {"type": "text", "text": "What?"}]}
    ]
    answers = {
        side: [*asked_twice, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")
    }
    with pytest.raises(ValueError, match="the prompt has other images"):
        preference_of(located({"prompt": other, **answers}))


def test_a_marker_without_an_image_is_a_missing_image() -> None:
    for empty in (None, [], ""):
        (source,) = sources_in(conversation_of(located({**asked("<image>What?"), "images": empty})))
        with pytest.raises(PictureFault, match="neither a path nor bytes"):
            source.encoded()
