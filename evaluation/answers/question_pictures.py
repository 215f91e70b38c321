"""Stores the images of questions next to the answers, and sends them to chat models."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.data.pictures.picture_decoding import decoded
from rlhf_core.data.pictures.picture_files import name_of, store_picture
from rlhf_core.data.pictures.picture_source import PictureFault, PictureSource
from rlhf_core.data.questions import Question

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

LOSSLESS_PIXELS = 1 << 20  # larger images are sent as JPEG
SMALL = 320  # pixels of a side of an image on a page


def store_pictures(report: Path, questions: Sequence[Question]) -> None:
    """Writes each image of the questions, unchanged, to the report's folder."""
    for question in questions:
        for source in question.pictures:
            store_picture(source, report)


def stored_messages(question: Question) -> list[dict[str, Any]]:
    """Returns a question's messages as JSON, with each image replaced by its path in the report's folder."""
    return [{**message, "content": _parts(message["content"], _stored_part)} for message in question.messages]


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as chat endpoints read them, with their images in base64."""
    return [{**message, "content": _parts(message["content"], _sent_part)} for message in messages]


def read_messages(messages: Sequence[Mapping[str, Any]], report: Path) -> list[dict[str, Any]]:
    """Returns the messages that `stored_messages` wrote, with the images from the report's folder."""
    read = partial(_read_part, report=report)
    return [{**message, "content": _parts(message["content"], read)} for message in messages]


def with_images_of(question: Question, prompt: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a judge's messages with the question's images before the text of the last message."""
    if not question.pictures:
        return [dict(message) for message in prompt]
    *before, last = prompt
    images = [_sent_part({"type": "image", "picture": source}) for source in question.pictures]
    content = [*images, {"type": "text", "text": last["content"]}]
    return [*(dict(message) for message in before), {**last, "content": content}]


def small_picture(file: Path) -> str:
    """Returns a stored image as a data URL, at most `SMALL` pixels wide and high; "" if it cannot be read."""
    try:
        image = decoded(PictureSource(file.name, str(file.parent)))
    except PictureFault:
        return ""
    image.thumbnail((SMALL, SMALL))
    return _data_url(image, "PNG")


def _data_url(image: PilImage, kind: str) -> str:
    return f"data:image/{kind.lower()};base64,{base64.b64encode(_encoded(image, kind)).decode()}"


def _parts(content: Any, part_of: Any) -> Any:
    return content if isinstance(content, str) else [part_of(part) for part in content]


def _stored_part(part: dict[str, Any]) -> dict[str, Any]:
    return part if part["type"] == "text" else {"type": "image", "image": name_of(part["picture"])}


def _read_part(part: dict[str, Any], report: Path) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    return {"type": "image", "picture": PictureSource(str(part["image"]), str(report))}


def _sent_part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    image = decoded(part["picture"])
    kind = "PNG" if image.width * image.height <= LOSSLESS_PIXELS else "JPEG"
    return {"type": "image_url", "image_url": {"url": _data_url(image, kind)}}


def _encoded(image: PilImage, kind: str) -> bytes:
    content = io.BytesIO()
    image.info.clear()  # such as comments
    image.save(content, kind)
    return content.getvalue()
