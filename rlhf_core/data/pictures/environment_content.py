"""Reads the content of an environment's messages: texts and images. Runs in an environment process and uses
only the standard library.

Images leave the process as base64, so that a file may change afterwards. Their content is checked where they
are decoded (see `picture_decoding.py`).
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.data.pictures.message_parts import GIVEN, IMAGE_KINDS, MAX_PICTURES, parts_of
from rlhf_core.data.pictures.picture_source import MAX_BYTES, PictureSource

Content = str | list[dict[str, Any]]
NO_IMAGES = (
    "the environment sends an image, which the policy does not read: set images: true in the stage's"
    " environment, with a model that reads images, or send text"
)

EXCESS = (
    f"error: the images of these results have more than {MAX_BYTES:,} bytes together, and this one is left"
    " out: ask for fewer or smaller ones"
)
TOO_MANY = f"error: an episode may have {MAX_PICTURES} images, and this one is left out"


def sent_content(content: Any, images: bool, folder: str | None) -> Content:
    """Returns content as JSON: a text, or a list of texts and images in base64 URLs. `images` says whether
    the stage reads images. `folder` is the folder of image files; with None, no file is read.

    Raises ValueError for other content, for images that the stage does not read, and for files outside the
    folder.
    """
    if isinstance(content, str):
        return _text(content)
    if not isinstance(content, Sequence):
        raise ValueError(f"content is a text or a list of parts, not {content!r:.80}")
    parts = parts_of([_with_bytes(part) for part in content], "a message", folder)
    if isinstance(parts, str):
        return _text(parts)
    if not images:
        raise ValueError(NO_IMAGES)
    return [_sent(part) for part in parts]


def with_own_images(content: Any, own: Mapping[str, str]) -> Any:
    """Returns content, in any form, in which each image path found in `own` is replaced by the encoded bytes
    of its file. `own`: the files of the row's images, by their paths as the row and the prompt name them. No
    other file is read. Raises ValueError for a file that can no longer be read."""
    if not own or not isinstance(content, list):
        return content
    return [_with_own_image(part, own) for part in content]


def _with_own_image(part: Any, own: Mapping[str, str]) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in IMAGE_KINDS:
        return part
    cell = next((part[key] for key in GIVEN if part.get(key) is not None), None)
    if isinstance(cell, Mapping):
        if isinstance(cell.get("bytes"), bytes | bytearray):  # the image; its path is only a name
            return part
        cell = cell.get("url") or cell.get("path")
    file = own.get(cell) if isinstance(cell, str) else None
    if file is None:
        return part
    folder, name = os.path.split(file)
    return {"type": "image", "image": PictureSource(name, folder).encoded()}


def check_size(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError if the images of new messages have more than MAX_BYTES in total, because they are
    sent in one line."""
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    sizes = [len(part.get("image", "")) for part in itertools.chain.from_iterable(contents)]
    if sum(sizes) * 3 / 4 > MAX_BYTES:
        raise ValueError(f"the images of new messages have more than {MAX_BYTES:,} bytes: make them smaller")


def images_that_fit(contents: Sequence[Content], before: int = 0) -> list[Content]:
    """Returns the contents of new messages, whose images are in base64 (`{"type": "image", "base64": ...}`).
    Each image beyond a limit is replaced by a sentence to the model. The limits are the total bytes of
    `check_size` and the number of images in an episode. `before`: the number of images sent earlier in the
    episode."""
    left = MAX_BYTES * 4 / 3  # characters
    images = before
    fitting: list[Content] = []
    for content in contents:
        if isinstance(content, str):
            fitting.append(content)
            continue
        parts = list[dict[str, Any]]()
        for part in content:
            size = len(in_base64(b"")) + len(part.get("base64", "")) if part["type"] == "image" else 0
            if size and images >= MAX_PICTURES:
                parts.append({"type": "text", "text": TOO_MANY})
            elif size > left:
                parts.append({"type": "text", "text": EXCESS})
            else:
                left -= size
                images += size > 0
                parts.append(part)
        fitting.append(parts)
    return fitting


def has_images(content: Any) -> bool:
    """Returns whether content in any form is a list with an image."""
    return count_images(content) > 0


def count_images(content: Any) -> int:
    """Returns the number of images in content in any form."""
    parts = content if isinstance(content, list) else []
    return sum(isinstance(part, Mapping) and part.get("type") in IMAGE_KINDS for part in parts)


def _text(text: str) -> str:
    """Returns a text without lone surrogates."""
    return text.encode(errors="replace").decode()


def _sent(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": _text(part["text"])}
    source: PictureSource | None = part["picture"]
    if source is None:
        raise ValueError("a part of a message is an image without content: give its path or bytes")
    return {"type": "image", "image": in_base64(source.encoded())}


def in_base64(content: bytes) -> str:
    """Returns bytes as a data URL in base64."""
    return f"data:;base64,{base64.b64encode(content).decode()}"


def _with_bytes(part: Any) -> Any:
    """Returns a part in which the bytes of a PNG replace any Pillow image. Returns a string as a text
    part."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        return part
    return {key: _png(value) if key in GIVEN else value for key, value in part.items()}


def _png(value: Any) -> Any:
    if not type(value).__module__.startswith("PIL.") or not hasattr(value, "save"):
        return value
    content = io.BytesIO()
    known = value.mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16")
    (value if known else value.convert("RGB")).save(content, "PNG")
    return content.getvalue()


def compared_content(content: Content) -> str:
    """Returns a string that is equal for content that is equal except for surrounding whitespace."""
    if isinstance(content, str):
        return content.strip()
    return "".join(_compared(part) for part in content).strip()


def _compared(part: Mapping[str, Any]) -> str:
    if part["type"] == "text":
        return str(part["text"])
    return f"<image {hashlib.sha256(part['image'].encode()).hexdigest()}>"
