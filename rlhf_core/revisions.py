"""`owner/name@REVISION` in a recipe: a model or data set of the Hub at one commit. Torch-free.

A commit (40 hex digits) stands for itself and asks nobody. A branch or tag is looked up when a recipe is planned, on the Hub or, where
that is out of reach, in this machine's cache, and the commit found is kept in `<artifacts>/<recipe>/pins.json`: every later command of
this recipe means the same commit, until the pins are forgotten. Without @ a repository counts by name alone, as it is when it is loaded.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel

from rlhf_core.config import Source
from rlhf_core.lineage import parted
from rlhf_core.stage import write_text

COMMIT = re.compile(r"[0-9a-f]{40}")
PINS = "pins.json"
RepoType = Literal["model", "dataset"]
Config = TypeVar("Config", bound=BaseModel)


class Pin(NamedTuple):
    """A reference of a recipe and the commit it stands for."""

    reference: str
    commit: str


class Pins:
    """The commits behind the references of one recipe."""

    def __init__(self, folder: Path):
        self._file = folder / PINS
        self._known: dict[str, str] = {}
        self.used: dict[str, str] = {}
        with suppress(OSError, ValueError):
            self._known = dict(json.loads(self._file.read_text()))

    def pinned(self, place: str, repo_type: RepoType = "model") -> str:
        """The place with its branch or tag replaced by the commit. ValueError, one sentence, when nobody knows it."""
        repo_id, revision = parted(place)
        if revision is None or COMMIT.fullmatch(revision):
            return place
        key = f"{repo_type}:{place}"
        commit = self._known.get(key) or _look_up(repo_id, revision, repo_type)
        self._known[key] = self.used[place] = commit
        return f"{repo_id}@{commit}"

    def save(self) -> None:
        """Keeps what was used. A folder that cannot be written to is no error here: a run would tell."""
        if self.used:
            with suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_text(self._file, json.dumps(self._known, indent=2) + "\n")


def forget(folder: Path) -> None:
    """The next plan of the recipe of this folder looks its branches and tags up again."""
    (folder / PINS).unlink(missing_ok=True)


def pinned_sources(config: Config, pins: Pins) -> Config:
    """A config in which every data source at a branch or tag names the commit."""
    changed = {name: new for name in type(config).model_fields if (new := _pinned(value := getattr(config, name), pins)) is not value}
    return config.model_copy(update=changed) if changed else config


def _pinned(value: Any, pins: Pins) -> Any:
    if isinstance(value, Source):
        path = value.path if Path(value.path).exists() else pins.pinned(value.path, "dataset")
        return value if path == value.path else value.model_copy(update={"path": path})
    if isinstance(value, BaseModel):
        return pinned_sources(value, pins)
    if isinstance(value, tuple):
        new = tuple(_pinned(item, pins) for item in value)
        return value if all(a is b for a, b in zip(value, new, strict=True)) else new
    return value


def _look_up(repo_id: str, revision: str, repo_type: RepoType) -> str:
    from huggingface_hub import HfApi, constants  # half a second to import, and only branches and tags need it

    from rlhf_core.hub_requests import TOKEN_ENV, Patience, patiently, read_refusal

    what = "data set" if repo_type == "dataset" else "model"
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=os.environ.get(TOKEN_ENV, "").strip() or False, library_name="alignflow")
    try:
        if not constants.is_offline_mode():
            read = partial(api.repo_info, repo_id, revision=revision, repo_type=repo_type)
            info = patiently(f"find the {what}", repo_id, read, Patience(3), read_refusal(revision, what))
            return str(info.sha)
        reason = "HF_HUB_OFFLINE keeps everything off the Hub"
    except ConnectionError:
        reason = "the Hub cannot be reached"
    folder = Path(constants.HF_HUB_CACHE) / f"{repo_type}s--{repo_id.replace('/', '--')}"
    with suppress(OSError):
        commit = (folder / "refs" / revision).read_text().strip()
        if (folder / "snapshots" / commit).is_dir():
            return commit
    raise ValueError(
        f"{repo_id}@{revision}: {reason}, and this machine has no copy of that revision: name a commit in place of {revision}, or plan "
        f"this recipe once where the Hub can be reached"
    )
