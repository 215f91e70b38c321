"""Tokens of conversations with images are those of the model's own processor; images are never cut."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import Gemma3Processor

from rlhf_core.config import Data
from rlhf_core.data.chat import Renderer, load_tokenizer, picture_rendering
from rlhf_core.data.documents import Document
from rlhf_core.data.pictures.message_parts import without_sources
from rlhf_core.data.pictures.picture_decoding import decoded
from rlhf_core.data.pictures.picture_source import PictureSource
from rlhf_core.data.sources import answers_within, sft_documents
from tests.support.pictured_models import FAMILIES, asked, make_pictured, square, write_rows
from tests.support.release_processors import release_processor

ENCODER_INPUTS = ("pixel_values", "image_sizes", "image_grid_thw", "image_position_ids")


@pytest.fixture(scope="module", params=FAMILIES)
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = make_pictured(request.param, tmp_path_factory.mktemp("models") / request.param)
    return Renderer(load_tokenizer(str(folder)), "chat")


def image(colour: str, width: int = 16, height: int = 16) -> dict[str, Any]:
    return {"type": "image", "picture": PictureSource("", None, square(colour, width, height))}


def talk(*contents: Any) -> list[dict[str, Any]]:
    roles = ("user", "assistant") * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


TALKS = [
    talk([image("red"), text("What?")], "red\n\n"),
    talk([text("\n\nOne"), image("red", 40, 16), text("\n\n two "), image("blue")], "a", "And now?", "b"),
    talk("Hello.", "Hi.", [image("green", 24, 60), image("red")], "c"),
]


def own_tokens(
    renderer: Renderer, messages: Sequence[dict[str, Any]]
) -> tuple[list[int], dict[str, np.ndarray]]:
    """What the model's own processor makes of the rendered text and the images."""
    processor = release_processor(renderer.pictures)
    rendered = processor.tokenizer.apply_chat_template(without_sources(messages), tokenize=False)
    opened = [
        Image.open(io.BytesIO(part["picture"].data))
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] == "image"
    ]
    if not opened:
        return list(processor.tokenizer(rendered)["input_ids"]), {}
    nested = isinstance(processor, Gemma3Processor)
    found = processor(images=[opened] if nested else opened, text=[rendered], return_tensors="np")
    tensors = {name: found[name] for name in ENCODER_INPUTS if name in found}
    return found["input_ids"][0].tolist(), tensors


def unpadded(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same, with the pixels of images that were padded to one size in one dimension."""
    sizes = tensors.get("image_sizes")
    if sizes is None:
        return tensors
    pairs = zip(tensors["pixel_values"], sizes, strict=True)
    pixels = [padded[:, :height, :width].ravel() for padded, (height, width) in pairs]
    return {**tensors, "pixel_values": np.concatenate(pixels)}


@pytest.mark.parametrize("messages", TALKS)
def test_tokens_and_tensors_are_those_of_the_processor(reader: Renderer, messages: list[Any]) -> None:
    document = reader.conversation(messages)
    tokens, found = own_tokens(reader, messages)
    assert list(document.tokens) == tokens[: len(document)]
    rest = reader.tokenizer.decode(tokens[len(document) :])
    assert not rest.strip()
    sent = [reader.pictures.tensors(picture.source) for picture in document.pictures]
    assert sent[0].keys() == found.keys()
    for name, expected in unpadded(found).items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in sent]), expected)


def test_images_of_any_size_take_as_many_tokens_as_the_processor_says(reader: Renderer) -> None:
    sizes = [(1, 1), (3, 50), (37, 23), (90, 11), (64, 64), (200, 131)]
    messages = talk([image("red", *size) for size in sizes], "x")
    document = reader.conversation(messages)
    tokens, _ = own_tokens(reader, messages)
    assert list(document.tokens) == tokens[: len(document)]
    assert len(document.pictures) == len(sizes)


@pytest.mark.parametrize("messages", TALKS)
def test_the_mask_is_on_answers_and_never_on_images(reader: Renderer, messages: list[Any]) -> None:
    document = reader.conversation(messages)
    tokens = np.asarray(document.tokens)
    mask = np.asarray(document.mask)
    assert not (mask & (tokens == reader.pictures.token_id)).any()
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    end = reader.tokenizer.convert_ids_to_tokens(reader.end_token_id)
    assert reader.tokenizer.decode(tokens[mask]) == "".join(answer + end for answer in answers)
    own = [(tokens[start:stop] == reader.pictures.token_id).sum() for start, stop, _ in document.pictures]
    assert sum(own) == (tokens == reader.pictures.token_id).sum() and all(own)
    for start, stop, _ in document.pictures:
        assert tokens[start] == tokens[stop - 1] == reader.pictures.token_id


def test_an_image_is_never_cut(reader: Renderer) -> None:
    document = reader.conversation(TALKS[1])
    first, second = document.pictures
    for limit in range(1, len(document)):
        cut = document.cut(limit)
        inside = any(picture.start < limit < picture.stop for picture in document.pictures)
        assert len(cut) == limit or (inside and len(cut) in (first.start, second.start))
        assert cut.pictures == tuple(p for p in document.pictures if p.stop <= len(cut))
        images = (np.asarray(cut.tokens) == reader.pictures.token_id).sum()
        assert images == sum(
            (np.asarray(document.tokens[p.start : p.stop]) == reader.pictures.token_id).sum()
            for p in cut.pictures
        )


def test_what_does_not_fit_is_dropped_and_counted(reader: Renderer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(square("red"))
    part = {"type": "image", "image": "a.png"}
    rows = [asked([part, text("What?")]), asked("Hi")]
    later = asked("Hi")
    later["messages"] += asked([text("w" * 90), part], "no")["messages"]
    data = Data(sources=str(write_rows(tmp_path / "rows.jsonl", [*rows, later])))
    whole = sft_documents(data, reader, 400, 0, tmp_path / "state")
    assert whole.report.survey.images == 2 and not whole.report.survey.truncated
    limit = whole.items[0].pictures[0].stop - 1
    cut = sft_documents(data, reader, max(limit, len(whole.items[1])), 0, tmp_path / "state").report.survey
    assert cut.facts["images cut away"] >= 1 / 3 and cut.truncated == 1


def test_a_control_token_typed_in_a_text_is_no_image(reader: Renderer) -> None:
    placeholder = reader.pictures._processor.image_token
    document = reader.conversation(talk([text(f"a {placeholder} b"), image("red")], placeholder))
    assert len(document.pictures) == 1
    typed = reader.tokenizer.convert_ids_to_tokens(reader.pictures.token_id)
    assert reader.conversation(talk(f"a {typed}", typed)).pictures == ()


def test_documents_keep_their_images_on_disk_and_in_pickles(reader: Renderer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(square("red"))
    part = {"type": "image", "image": "a.png"}
    rows = [asked("Hi"), asked([part, text("What?"), part]), asked([part])]
    data = Data(sources=str(write_rows(tmp_path / "rows.jsonl", rows)))
    for folder in (tmp_path / "state", tmp_path / "state", None):
        documents = sft_documents(data, reader, 400, 0, folder).items
        assert [len(document.pictures) for document in documents] == [0, 2, 1]
        for document in (documents[1], pickle.loads(pickle.dumps(documents[1]))):
            assert document == documents[1]
            assert {picture.source.encoded() for picture in document.pictures} == {square("red")}


def test_a_plain_template_and_a_template_without_images_refuse_them(reader: Renderer) -> None:
    with pytest.raises(ValueError, match="a plain template has no place for images"):
        Renderer(reader.tokenizer, "Q: {}").conversation(TALKS[0])
    tokenizer = load_tokenizer(str(reader.tokenizer.name_or_path))
    tokenizer.chat_template = str(tokenizer.chat_template).replace(reader.pictures._processor.image_token, "")
    with pytest.raises(ValueError, match=r"writes 0 placeholders .* for 1 images"):
        Renderer(tokenizer, "chat").conversation(TALKS[0])


def test_documents_with_images_share_no_prompt(reader: Renderer) -> None:
    one, other = (reader.conversation(talk([image(colour)], "x")) for colour in ("red", "blue"))
    assert list(one.tokens) == list(other.tokens) and one != other
    assert other.after(one).shared == 0
    assert isinstance(other.after(one), Document)


def test_an_image_is_decoded_once_while_its_row_is_cut(
    reader: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []

    def counted(source: PictureSource) -> Image.Image:
        opened.append(source)
        return decoded(source)

    monkeypatch.setattr(picture_rendering, "decoded", counted)
    turns: list[dict[str, Any]] = []
    for number in range(6):
        turns.append({"role": "user", "content": [image("red", 16 + number, 20), text("What?" * 8)]})
        turns.append({"role": "assistant", "content": "red"})
    whole = len(reader.prompt(turns[:-1]))
    document, is_cut = reader.document_within(turns[:-1], whole // 2)
    assert is_cut and len(document.pictures) < 6
    assert len(opened) == 6


def test_a_result_of_a_tool_with_an_image_is_cut_like_one_of_text(
    reader: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a template that wants calls before results."""
    template = reader.tokenizer.chat_template
    refusing = (
        "{% for message in messages %}{% if message.role == 'tool' and loop.first %}"
        "{{ raise_exception('results follow calls') }}{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(reader.tokenizer, "chat_template", refusing + template)
    strict = Renderer(reader.tokenizer, "chat")
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "old " * 60},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "look"},
        {"role": "tool", "content": [image("red"), text("seen")]},
    ]
    limit = len(strict.prompt(messages)) - 100
    documents, _, over = answers_within("row", strict, messages, ("a", "b"), limit)
    assert over and all(len(document.pictures) == 1 for document in documents)
