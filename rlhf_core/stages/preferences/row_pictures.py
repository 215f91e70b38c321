"""Stores the images of a round's prompts next to its rows, which later stages read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_core.data.documents import Message, Prompt
from rlhf_core.data.pictures.picture_files import store_picture


def messages_of_row(prompt: Prompt, folder: Path) -> tuple[Message, ...]:
    """Returns the prompt's messages. Their images are files in `folder`, named by their content. Raises
    PictureFault if an image can no longer be read."""
    if not prompt.pictures:
        return prompt.messages
    names = iter([store_picture(picture.source, folder) for picture in prompt.pictures])

    def stored(part: dict[str, Any]) -> dict[str, Any]:
        return {"type": "image", "image": next(names)} if part["type"] == "image" else part

    return tuple(
        message
        if isinstance(message["content"], str)
        else {**message, "content": [stored(part) for part in message["content"]]}
        for message in prompt.messages
    )
