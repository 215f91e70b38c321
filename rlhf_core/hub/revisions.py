"""Resolves `owner/name@REVISION` of a model or data set in a recipe to a commit on the Hub. Torch-free.

A commit (40 hex digits) needs no request. A branch or tag is looked up when a recipe is planned, on the Hub
or, if that cannot be reached, in this machine's cache. The commit is stored in
`<artifacts>/<recipe>/pins.json`, and all later commands on this recipe use it until `forget`. A Hub id
without @ is not resolved; its default branch is loaded when it is used.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel

from rlhf_core.config import Source
from rlhf_core.hub.ids import parted
from rlhf_core.system.files import read_json, write_text

COMMIT = re.compile(r"[0-9a-f]{40}")
PINS = "pins.json"
RepoType = Literal["model", "dataset"]
Config = TypeVar("Config", bound=BaseModel)


class Pin(NamedTuple):
    """A reference in a recipe, `owner/name@REVISION`, with its commit, or an inbox with the newest row used
    from it."""

    reference: str
    commit: str


class Pins:
    """The commits of one recipe's references, stored in `folder`. `used`: the commits used by this plan."""

    def __init__(self, folder: Path):
        self._file = folder / PINS
        self._known: dict[str, str] = read_json(self._file)
        self.used: dict[str, str] = {}

    def pinned(self, place: str, repo_type: RepoType = "model") -> str:
        """Returns `place` with its branch or tag replaced by the commit. Raises ValueError when it cannot be
        found."""
        repo_id, revision = parted(place)
        if revision is None or COMMIT.fullmatch(revision):
            return place
        key = f"{repo_type}:{place}"
        commit = self._known.get(key) or _look_up(repo_id, revision, repo_type)
        self._known[key] = self.used[place] = commit
        return f"{repo_id}@{commit}"

    def kept(self, what: str, shown: str, newest: Callable[[], int | None]) -> int | None:
        """Returns the number stored for `what`. If there is none, stores and returns the result of `newest`
        (None: no number yet)."""
        if what not in self._known and (number := newest()) is not None:
            self._known[what] = str(number)
        if what not in self._known:
            return None
        self.used[shown] = f"row {self._known[what]}"
        return int(self._known[what])

    def save(self) -> None:
        """Writes the commits if any were used. Ignores a folder that cannot be written to, because a run
        reports it."""
        if self.used:
            with suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_text(self._file, json.dumps(self._known, indent=2) + "\n")


def forget(folder: Path) -> None:
    """Removes the pins in a recipe's folder, so that its next plan looks up branches and tags again."""
    (folder / PINS).unlink(missing_ok=True)


def pinned_sources(config: Config, pins: Pins) -> Config:
    """Returns the config with the branch or tag of every data source replaced by its commit. Raises
    ValueError for the same reasons as `Pins.pinned`."""
    changed = {
        name: new
        for name in type(config).model_fields
        if (new := _pinned(value := getattr(config, name), pins)) is not value
    }
    return config.model_copy(update=changed) if changed else config


def _pinned(value: Any, pins: Pins) -> Any:
    if isinstance(value, Source):
        path = value.path if os.path.exists(value.path) else pins.pinned(value.path, "dataset")
        return value if path == value.path else value.model_copy(update={"path": path})
    if isinstance(value, BaseModel):
        return pinned_sources(value, pins)
    if isinstance(value, tuple):
        new = tuple(_pinned(item, pins) for item in value)
        return value if all(a is b for a, b in zip(value, new, strict=True)) else new
    return value


def _look_up(repo_id: str, revision: str, repo_type: RepoType) -> str:
    # takes half a second to import, and only branches and tags need it
    from huggingface_hub import HfApi, constants

    from rlhf_core.hub.api import Retries, client_options, read_refusal, with_retries

    what = "data set" if repo_type == "dataset" else "model"
    api = HfApi(**client_options())
    try:
        if not constants.is_offline_mode():
            read = partial(api.repo_info, repo_id, revision=revision, repo_type=repo_type)
            info = with_retries(f"find the {what}", repo_id, read, Retries(3), read_refusal(revision, what))
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
        f"{repo_id}@{revision}: {reason}, and this machine has no copy of that revision: name a commit in"
        f" place of {revision}, or plan this recipe once where the Hub can be reached"
    )
