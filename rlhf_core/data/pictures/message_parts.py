"""Reads the parts of a message's content and the image columns. Opens no files. Torch-free.

Content that is a list has parts: `{"type": "text", "text": ...}` and `{"type": "image", ...}` or `{"type":
"image_url", ...}`. A part without an image takes the next image of the row's column `images` or `image`; so
does each `<image>` in a text. If a row has such a column but its messages mark no places, the images go
before the text of the first user message.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlhf_core.data.pictures.picture_source import KNOWN_SUFFIXES, PictureSource

COLUMNS = ("images", "image")
MARKER = "<image>"  # the place of an image in a text
MAX_PICTURES = 256  # most images in a row, because all are decoded before its length is known
IMAGE_KINDS = ("image", "image_url", "input_image")
GIVEN = ("image", "image_url", "url", "path", "bytes")  # keys of a part that may hold the image
OTHER_MEDIA = re.compile("video|audio")
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|file:")
Content = str | list[dict[str, Any]]


def parts_of(value: Sequence[Any], place: str, folder: str | None) -> Content:
    """Returns content in parts: one text if all parts are texts, otherwise texts and images, `{"type":
    "image", "picture": PictureSource | None}`. `place` names the message in errors.

    Raises ValueError for parts of other kinds, such as video and audio, and for URLs.
    """
    parts: list[dict[str, Any]] = []
    for part in value:
        if not isinstance(part, Mapping):
            raise ValueError(
                f"{place} has a part that is not an object: use {{type, text}} or {{type, image}}"
            )
        given = {key: inner for key, inner in part.items() if inner is not None}
        kind = str(given.get("type", "text" if "text" in given else ""))
        if OTHER_MEDIA.search(kind) or {"video", "audio", "input_audio"} & given.keys():
            raise ValueError(f"{place} has a part of type {kind!r}: only texts and images are read")
        if kind in IMAGE_KINDS:
            cell = next((given[key] for key in GIVEN if key in given), None)
            if cell is None and isinstance(given.get("base64"), str):
                cell = f"data:,{given['base64']}"
            parts.append(
                {"type": "image", "picture": None if cell is None else source_of(cell, place, folder)}
            )
        elif kind == "text" and isinstance(given.get("text"), str):
            parts.append({"type": "text", "text": given["text"]})
        else:
            raise ValueError(f"{place} has a part of type {kind!r}: only texts and images are read")
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def source_of(cell: Any, place: str, folder: str | None) -> PictureSource:
    """Returns the source of an image. `cell` is a path, bytes, a base64 URL, or an object with some of these,
    as in `datasets` and in OpenAI's messages. Raises ValueError for other values and for other URLs."""
    if isinstance(cell, Mapping):
        inner = {key: value for key, value in cell.items() if value is not None}
        name = inner.get("path") if isinstance(inner.get("path"), str) else ""
        if isinstance(inner.get("bytes"), bytes | bytearray):
            return PictureSource(os.path.basename(str(name)), folder, bytes(inner["bytes"]))
        if "url" in inner or name:
            return source_of(inner.get("url", name), place, folder)
        return PictureSource("", folder)
    if isinstance(cell, bytes | bytearray):
        return PictureSource("", folder, bytes(cell))
    if not isinstance(cell, str):
        raise ValueError(f"{place} has an image that is {type(cell).__name__}: give a path or bytes")
    if cell.startswith("data:"):
        return PictureSource("", folder, _from_base64(cell.partition(",")[2]))
    if SCHEME.match(cell):
        raise ValueError(
            f"{place} names an image by the URL {cell[:60]!r}, but none is opened: store the image beside the"
            " data file and name it by its path"
        )
    return PictureSource(cell, folder)


def with_pictures(
    messages: Sequence[dict[str, Any]], row: Mapping[str, Any], where: str, folder: str | None
) -> list[dict[str, Any]]:
    """Returns the messages with the images of the row's columns put in their places. Raises ValueError if
    there are more or fewer images than places, or if an answer has an image."""
    cells = _cells(row) or _missing_cells(row, messages)
    if not cells and all(isinstance(message["content"], str) for message in messages):
        return list(messages)
    if len(cells) > MAX_PICTURES:
        raise ValueError(
            f"{where}: has {len(cells)} images, and at most {MAX_PICTURES} are read: drop the row"
        )
    placed = [dict(message) for message in messages]
    parts = list(_image_parts(placed))
    if len(parts) > MAX_PICTURES:
        raise ValueError(
            f"{where}: has {len(parts)} images, and at most {MAX_PICTURES} are read: drop the row"
        )
    if cells and not parts:
        marked = [message for message in placed if _is_marked(message)]
        for message in marked:
            message["content"] = _split(message["content"])
        if not marked:
            _put_first(placed, len(cells), where)
    places = sum(part["picture"] is None for part in _image_parts(placed))
    if places and places != len(cells):
        raise ValueError(
            f"{where}: has {len(cells)} images in its columns and {places} places for them: correct or drop"
            " the row"
        )
    if places:
        _fill(placed, iter([source_of(cell, where, folder) for cell in cells]))
    if any(message["role"] == "assistant" and not isinstance(message["content"], str) for message in placed):
        raise ValueError(f"{where}: has an image in an answer, but only text is trained on: drop the row")
    return placed


def _cells(row: Mapping[str, Any]) -> list[Any]:
    """Returns the values of the row's image column, with {} for each missing image. Returns an empty list if
    the row has no such column, or if the column holds something else."""
    column = next((name for name in COLUMNS if row.get(name) not in (None, [], "")), None)
    value = [] if column is None else row[column]
    cells = [{} if cell is None else cell for cell in value] if isinstance(value, list | tuple) else [value]
    known = all(isinstance(cell, str | bytes | bytearray | Mapping) for cell in cells)
    return cells if known and any(map(_is_picture, cells)) else []


def _missing_cells(row: Mapping[str, Any], messages: Sequence[dict[str, Any]]) -> list[Any]:
    """Returns a missing image for each `<image>` in the messages of a row with an empty image column."""
    is_empty = any(name in row and row[name] in (None, [], "") for name in COLUMNS)
    marks = sum(message["content"].count(MARKER) for message in messages if _is_marked(message))
    return [{}] * marks if is_empty else []


def _put_first(messages: Sequence[dict[str, Any]], count: int, where: str) -> None:
    first = next((message for message in messages if message["role"] == "user"), None)
    if first is None:
        raise ValueError(f"{where}: has images but no user message to put them in: add one")
    first["content"] = [{"type": "image", "picture": None}] * count + [
        {"type": "text", "text": first["content"]}
    ]


def _is_picture(cell: Any) -> bool:
    if isinstance(cell, Mapping):
        return bool({"bytes", "path", "url"} & cell.keys())
    if isinstance(cell, bytes | bytearray):
        return True
    if not isinstance(cell, str):
        return False
    return cell.startswith("data:image/") or os.path.splitext(cell)[1].lower() in KNOWN_SUFFIXES


def _image_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        if not isinstance(message["content"], str):
            yield from (part for part in message["content"] if part["type"] == "image")


def _is_marked(message: Mapping[str, Any]) -> bool:
    return (
        isinstance(message["content"], str)
        and message["role"] != "assistant"
        and MARKER in message["content"]
    )


def _split(text: str) -> list[dict[str, Any]]:
    """Returns the parts of a text in which `<image>` marks images."""
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(MARKER)):
        if number:
            parts.append({"type": "image", "picture": None})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _fill(messages: list[dict[str, Any]], pictures: Iterator[PictureSource]) -> None:
    for message in messages:
        if not isinstance(message["content"], str):
            message["content"] = [
                {"type": "image", "picture": next(pictures)}
                if part["type"] == "image" and part["picture"] is None
                else part
                for part in message["content"]
            ]


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b"\0"  # reported as a finding, like any other bytes that are not an image


def sources_in(messages: Sequence[Mapping[str, Any]]) -> list[PictureSource]:
    """Returns the images of messages, in order."""
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            found += [part["picture"] for part in content if "picture" in part]
    return found


def without_sources(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages in the form that chat templates read, with only `{"type": "image"}` for an
    image."""
    return [
        {**message, "content": [_shown(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else dict(message)
        for message in messages
    ]


def _shown(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image"} if part["type"] == "image" else part


def picture_names_in(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the name of each image of messages in the form of `named_pictures`, in order."""
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [part["image"] for content in contents for part in content if part["type"] == "image"]


def with_texts(content: Content, texts: Sequence[str]) -> Content:
    """Returns content with its texts (`texts_of`) replaced by `texts`."""
    if isinstance(content, str):
        return texts[0]
    own = iter(texts)
    return [{"type": "text", "text": next(own)} if part["type"] == "text" else part for part in content]


def texts_of(content: Content) -> list[str]:
    """Returns the texts of content, in order."""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def with_sources(
    messages: Sequence[Mapping[str, Any]], sources: Iterable[PictureSource]
) -> list[dict[str, Any]]:
    """Returns messages in which `sources`, in order, replace the names of images (see `named_pictures`).
    Raises ValueError if there are more or fewer sources than images."""
    left = iter(sources)
    found = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = [
                {"type": "image", "picture": next(left, None)} if part["type"] == "image" else part
                for part in content
            ]
        found.append({**message, "content": content})
    if None in sources_in(found) or next(left, None) is not None:
        raise ValueError("messages name more or fewer images than there are: sample the answers again")
    return found


def named_pictures(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages as JSON, with `{"type": "image", "image": name}` for an image. An image without a
    name gets a digest of its content instead."""
    return [
        dict(message)
        if isinstance(message["content"], str)
        else {**message, "content": [_with_name(part) for part in message["content"]]}
        for message in messages
    ]


def _with_name(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "image":
        return part
    picture: PictureSource = part["picture"]
    return {"type": "image", "image": picture.name or picture.identity}


def content_text(content: Content) -> str:
    """Returns content as text. Each image is replaced by its identity, or by its name if nothing else is
    known (see `named_pictures`)."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else _marker(part) for part in content)


def shown_text(content: Content) -> str:
    """Returns the text of content, without images and their markers."""
    if isinstance(content, str):
        return content.replace(MARKER, "")
    return "".join(texts_of(content))


def marked_text(content: Content) -> str:
    """Returns content as text, with `<image>` in place of each image."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else MARKER for part in content)


def _marker(part: Mapping[str, Any]) -> str:
    picture: PictureSource | None = part.get("picture")
    name = part.get("image", "") if picture is None else picture.identity
    return f"<image {name}>" if name else MARKER
