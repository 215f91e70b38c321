"""Writes the published folder with a checkpoint's files, a card and scores. The folder appears completely or
not at all.

It is written next to its destination, checked, marked and renamed, so that a reader never finds an incomplete
model. The marker (`alignflow.json`) records who wrote the folder, from which stage, and every file with its
size and SHA-256. It allows the next publication to replace the folder; a folder without a marker belongs to
another program and is not replaced. Copies only files that a model needs, never pickles. An adapter (peft's
format) is published unchanged, except that its config names the Hub repository of its base model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from rlhf_core.hub.ids import HUB_ID, is_hub_id
from rlhf_core.hub.model_files import ADAPTER_CONFIG, check_loads, is_adapter, model_files
from rlhf_core.records import FileInfo, Frozen
from rlhf_core.runs.lineage import lineage, stage_of
from rlhf_core.system.files import file_digest

MARKER = "alignflow.json"
PLACES = ("_name_or_path", "name_or_path")  # config keys that store the path it was loaded from


class AdapterBase(NamedTuple):
    """Holds the Hub repository of an adapter's base model, and its commit if known."""

    repo_id: str
    revision: str | None


class Published(Frozen):
    """The marker of a published folder."""

    name: str
    digest: str
    files: dict[str, FileInfo]


def assemble(
    checkpoint: Path,
    folder: Path,
    texts: Mapping[str, str],
    name: str,
    digest: str,
    trust_remote_code: bool = False,
    base: AdapterBase | None = None,
) -> Published:
    """Publishes a checkpoint to a folder, together with `texts` (relative path -> content). `base` comes from
    `adapter_base`.

    Raises ValueError if the checkpoint is not a complete model, or if `folder` contains anything not
    published by alignflow.
    """
    files = {
        file.relative_to(checkpoint).as_posix(): file for file in model_files(checkpoint, trust_remote_code)
    }

    def finish(partial: Path) -> None:
        for name in ("config.json", "tokenizer_config.json"):
            _rewrite(partial / name)
        if base is not None:
            _rewrite(partial / ADAPTER_CONFIG, base)
        check_loads(partial, trust_remote_code)

    return put(files, folder, texts, name, digest, finish)


def put(
    files: Mapping[str, Path],
    folder: Path,
    texts: Mapping[str, str],
    name: str,
    digest: str,
    finish: Callable[[Path], None],
) -> Published:
    """Copies files (relative path -> file) and writes `texts` to `folder`, completely or not at all. `finish`
    checks the result before it is moved into place.

    In a run directory, weights are hard links, which take no space. A user's folder receives copies, which
    the user may change. Raises ValueError if `folder` contains anything not published by alignflow.
    """
    refuse_foreign(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial, old = (folder.with_name(f".{folder.name}.{digest}.{state}") for state in ("partial", "old"))
    for leftover in (partial, old):  # left by an interrupted publication
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    in_run = stage_of(folder) is not None
    for path, file in files.items():
        (partial / path).parent.mkdir(parents=True, exist_ok=True)
        if not (in_run and file.suffix == ".safetensors" and _linked(file.resolve(), partial / path)):
            shutil.copyfile(file, partial / path)
    for path, text in texts.items():
        (partial / path).parent.mkdir(exist_ok=True)
        (partial / path).write_text(text)
    finish(partial)
    published = Published(name=name, digest=digest, files=_manifest(partial))
    (partial / MARKER).write_text(published.model_dump_json(indent=2) + "\n")
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return published


def _linked(file: Path, place: Path) -> bool:
    with suppress(OSError):  # another file system, or one without hard links
        os.link(file, place)
    return place.exists()


def adapter_base(checkpoint: Path, base_repo: str | None) -> AdapterBase | None:
    """Returns the base model that a published adapter names: `base_repo`, otherwise the Hub repository of the
    base used in training. Returns None if the checkpoint is not an adapter.

    Raises ValueError if the base is a folder on this machine and `base_repo` is not set, because others could
    not load it. Also raises ValueError if `base_repo` is not a Hub ID, or is set for a model that is not an
    adapter.
    """
    if not is_adapter(checkpoint):
        if base_repo:
            raise ValueError(
                f"base_repo is {base_repo}, and the model to publish is whole, not an adapter: leave"
                " base_repo out"
            )
        return None
    if base_repo:
        if not HUB_ID.fullmatch(base_repo):
            raise ValueError(f"base_repo {base_repo!r} is not a Hub repository: write it as owner/name")
        return AdapterBase(base_repo, None)
    config = json.loads((checkpoint / ADAPTER_CONFIG).read_text())
    base = lineage(str(config.get("base_model_name_or_path") or ""))
    if base.kind != "hub":
        raise ValueError(
            f"the adapter to publish belongs to {base.name}, which is not on the Hub: set lora.export to"
            f" merged to publish a whole model, or base_repo to the repository that holds {base.name}"
        )
    return AdapterBase(base.name, base.digest or config.get("revision"))


def refuse_foreign(folder: Path) -> None:
    """Raises ValueError unless `folder` can be written: it is missing, empty, or was published by
    alignflow."""
    if (
        not folder.exists()
        or (folder.is_dir() and not any(folder.iterdir()))
        or read_marker(folder) is not None
    ):
        return
    raise ValueError(
        f"{folder} holds files that were not published by alignflow: name another folder, or move them away"
    )


def read_marker(folder: Path) -> Published | None:
    try:
        return Published.model_validate_json((folder / MARKER).read_text())
    except (OSError, ValidationError):
        return None


def _manifest(folder: Path) -> dict[str, FileInfo]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {
        file.relative_to(folder).as_posix(): FileInfo(size=file.stat().st_size, sha256=file_digest(file))
        for file in files
    }


def _rewrite(file: Path, base: AdapterBase | None = None) -> None:
    """Removes the path on this machine from which a model or tokenizer was loaded, unless it is a Hub ID.
    Sets an adapter's base model."""
    if not file.exists():
        return
    config = json.loads(file.read_text())
    named = {} if base is None else {"base_model_name_or_path": base.repo_id, "revision": base.revision}
    changed = _without_places(config) | named
    if changed != config:
        file.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n")


def _without_places(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        key: _without_places(item) for key, item in value.items() if key not in PLACES or is_hub_id(str(item))
    }
