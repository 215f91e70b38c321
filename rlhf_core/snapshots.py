"""Models of the Hub that a stage names at a commit (`owner/name@COMMIT`), in the client's cache, before the stage loads them. Torch-free.

Safetensors, configuration and tokenizer, never pickles; code only where `trust_remote_code` allows it. An adapter's base comes with it, at
the commit that the adapter names. What is whole in the cache is not sent again, and is enough without a network.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from rlhf_core.hub_requests import PATIENCE, TOKEN_ENV, patiently, read_refusal
from rlhf_core.lineage import is_hub_id, parted
from rlhf_core.published import ADAPTER_CONFIG, MODEL_FILES, TOKENIZER, WEIGHTS, check_loads
from rlhf_core.stage import StageRequest

DESCRIBING = (*TOKENIZER, "config.json", "chat_template.*", "additional_chat_templates/*.jinja", ADAPTER_CONFIG)  # no weights


def fetched(request: StageRequest) -> StageRequest:
    """The request with a folder for every model that it names at a commit. ValueError when the Hub has no such model for us."""
    folders = {
        name: str(snapshot(place, request.trust_remote_code)) for name, place in request.inputs.items() if is_hub_id(place) and "@" in place
    }
    return request.model_copy(update={"inputs": {**request.inputs, **folders}}) if folders else request


def snapshot(place: str, trust_remote_code: bool = False) -> Path:
    """The folder of `owner/name@REVISION` in the cache, with the whole model. An adapter's base is fetched too."""
    code = ("*.py",) if trust_remote_code else ()
    folder = _download(place, (*MODEL_FILES, *code, "README.md"))
    if not any(folder.glob(WEIGHTS[0])):
        raise ValueError(f"{place} has no safetensors weights: alignflow loads no pickles; choose a revision that has them")
    check_loads(folder, trust_remote_code)
    base = pinned_base(folder)
    if base:
        snapshot(base, trust_remote_code)
    return folder


def described(place: str) -> Path:
    """As `snapshot`, with configuration and tokenizer alone."""
    return _download(place, DESCRIBING)


def pinned_base(folder: Path) -> str | None:
    """`owner/name@REVISION` of the base that the adapter in a folder names with a revision; None for everything else."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return None
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    base, revision = str(config.get("base_model_name_or_path") or ""), config.get("revision")
    return f"{base}@{revision}" if revision and is_hub_id(base) else None


def cached(place: str, trust_remote_code: bool = False) -> Path:
    """The folder of `owner/name@REVISION`: from the cache alone if it is there, as after `fetched`; else as `snapshot`."""
    repo_id, revision = parted(place)
    with suppress(LocalEntryNotFoundError):  # on another machine of a cluster, which has a cache of its own
        folder = Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
        if any(folder.glob(WEIGHTS[0])):
            return folder
    return snapshot(place, trust_remote_code)


def _download(place: str, patterns: tuple[str, ...]) -> Path:
    repo_id, revision = parted(place)
    token = os.environ.get(TOKEN_ENV, "").strip() or False

    def send() -> str:
        return snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=[f"*/{pattern}" for pattern in (*WEIGHTS, *TOKENIZER)],  # other formats of the model in folders of their own
            endpoint=os.environ.get("HF_ENDPOINT"),
            token=token,
            library_name="alignflow",
            local_files_only=constants.is_offline_mode(),
        )

    try:
        return Path(patiently("send the files", repo_id, send, PATIENCE, read_refusal(revision or "main", "model")))
    except LocalEntryNotFoundError:
        raise ValueError(
            f"{place} is not on this machine and the Hub cannot be reached: run `alignflow pull {place} FOLDER` where it can, and name "
            f"that folder"
        ) from None
