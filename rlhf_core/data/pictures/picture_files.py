"""Stores the images of prompts next to the rows of a stage, named by their content. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

from rlhf_core.data.pictures.picture_source import KNOWN_SUFFIXES, SUFFIXES, PictureSource
from rlhf_core.system.files import write_bytes

PICTURES = "pictures"  # folder next to the rows
PICTURE_FILE = re.compile(rf"{PICTURES}/[0-9a-f]{{32}}({'|'.join(map(re.escape, sorted(KNOWN_SUFFIXES)))})?")


def name_of(source: PictureSource) -> str:
    """Returns the path that rows contain for an image. Raises PictureFault if the image cannot be read."""
    content = source.encoded()
    suffix = next((names[0] for magic, names in SUFFIXES.items() if content.startswith(magic)), "")
    return f"{PICTURES}/{source.content_digest}{suffix}"


def store_picture(source: PictureSource, folder: Path) -> str:
    """Writes an image, encoded as in the data, unless it is already stored. Returns its `name_of`."""
    name = name_of(source)
    file = folder / name
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, source.encoded())
    return name
