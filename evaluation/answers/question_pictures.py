"""Images of questions: stores them beside the answers, and sends them to chat models."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.data.pictures.picture_decoding import decoded
from rlhf_core.data.pictures.picture_source import PictureFault, PictureSource
from rlhf_core.data.questions import Question
from rlhf_core.system.files import write_bytes

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

PICTURES = "pictures"  # folder of a report
PICTURE_FILE = re.compile(rf"{PICTURES}/[0-9a-f]{{32}}\.png")
LOSSLESS_PIXELS = 1 << 20  # larger images are sent as JPEG
SMALL = 320  # pixels of a side of an image on a page


def store_pictures(report: Path, questions: Sequence[Question]) -> None:
    """Writes each image of the questions to the report's folder, upright and in RGB, named by its content."""
    for source in {source.content_digest: source for each in questions for source in each.pictures}.values():
        file = report / _file_of(source)
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(file, _encoded(decoded(source), "PNG"))


def stored_messages(question: Question) -> list[dict[str, Any]]:
    """Returns a question's messages as JSON, with the path in the report's folder for an image."""
    return [{**message, "content": _parts(message["content"], _stored_part)} for message in question.messages]


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as chat endpoints read them, with their images in base64."""
    return [{**message, "content": _parts(message["content"], _sent_part)} for message in messages]


def with_images_of(question: Question, prompt: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a judge's messages with the images of the question before the text of the last one."""
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
    return part if part["type"] == "text" else {"type": "image", "image": _file_of(part["picture"])}


def _file_of(source: PictureSource) -> str:
    return f"{PICTURES}/{source.content_digest}.png"


def _sent_part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    image = decoded(part["picture"])
    kind = "PNG" if image.width * image.height <= LOSSLESS_PIXELS else "JPEG"
    return {"type": "image_url", "image_url": {"url": _data_url(image, kind)}}


def _encoded(image: PilImage, kind: str) -> bytes:
    content = io.BytesIO()
    image.save(content, kind)
    return content.getvalue()
