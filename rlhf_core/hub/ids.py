"""Parses Hub ids (`owner/name`, `owner/name@REVISION`) and finds the repository and commit of a local folder.
Torch-free."""

from __future__ import annotations

import os
import re
from pathlib import Path

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
AT_REVISION = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)@([\w.-]+)")
HUB_CACHE = re.compile(r"(models|datasets)--(.+?)--(.+)")
DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".gz", ".zst", ".arrow")


def shown(place: str) -> str:
    """Returns the name of a file, folder, URL or Hub id for public pages: a Hub id is unchanged, anything
    else becomes its last path component without a query."""
    if is_hub_id(place):
        return place
    return (
        re.split(r"[?#]", place.rstrip("/\\"))[0].replace("\\", "/").rpartition("/")[2]
        or place.strip("/\\")
        or "."
    )


def is_hub_id(place: str) -> bool:
    """Returns whether this is a Hub id (`owner/name`, `owner/name@REVISION`) rather than an existing path or
    a name with a data suffix."""
    repo_id = parted(place)[0]
    return (
        bool(HUB_ID.fullmatch(repo_id)) and not repo_id.endswith(DATA_SUFFIXES) and not os.path.exists(place)
    )


def is_remote(place: str) -> bool:
    """Returns whether this is a Hub id, including ids without an owner (`gpt2`), rather than an existing file
    or folder."""
    return is_hub_id(place) or (
        "/" not in place and not place.endswith(DATA_SUFFIXES) and not os.path.exists(place)
    )


def parted(place: str) -> tuple[str, str | None]:
    """Splits `owner/name@REVISION` into Hub id and revision; returns anything else unchanged, with None."""
    found = AT_REVISION.fullmatch(place)
    return (found[1], found[2]) if found else (place, None)


def snapshot_of_hub(path: str | Path) -> tuple[str, str] | None:
    """Returns the Hub repository and commit of a folder in the Hub client's cache; None for other folders."""
    parts = Path(path).parts
    for cached in (HUB_CACHE.fullmatch(folder.name) for folder in (Path(path), *Path(path).parents)):
        if cached and "snapshots" in parts:
            return f"{cached[2]}/{cached[3]}", parts[parts.index("snapshots") + 1]
    return None
