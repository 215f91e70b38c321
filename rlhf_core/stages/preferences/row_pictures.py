"""Stores the images of a round's prompts beside its rows, which later stages read."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.data.documents import Message, Prompt
from rlhf_core.data.pictures.picture_source import SUFFIXES, PictureSource
from rlhf_core.system.files import write_bytes

PICTURES = "pictures"  # folder in the run directory


def messages_of_row(prompt: Prompt, folder: Path) -> tuple[Message, ...]:
    """Returns the prompt's messages, whose images are files in `folder`, named by their content. Raises
    PictureFault if an image can no longer be read."""
    if not prompt.pictures:
        return prompt.messages
    sources = iter(picture.source for picture in prompt.pictures)
    made = []
    for message in prompt.messages:
        if isinstance(message["content"], str):
            made.append(message)
            continue
        parts = [
            {"type": "image", "image": _stored(next(sources), folder)} if part["type"] == "image" else part
            for part in message["content"]
        ]
        made.append({**message, "content": parts})
    return tuple(made)


def _stored(source: PictureSource, folder: Path) -> str:
    content = source.encoded()
    suffix = next(names[0] for magic, names in SUFFIXES.items() if content.startswith(magic))
    name = f"{PICTURES}/{source.content_digest}{suffix}"
    file = folder / name
    if not file.is_file():
        file.parent.mkdir(exist_ok=True)
        write_bytes(file, content)
    return name
