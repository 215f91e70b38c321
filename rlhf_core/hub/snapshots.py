"""Fetches models that a stage names at a commit (`owner/name@COMMIT`) into the Hub client's cache before the
stage loads them. Torch-free.

Fetches safetensors, configuration and tokenizer, but never pickles, and code only with `trust_remote_code`.
An adapter's base is fetched too, at the commit that the adapter names. Complete files in the cache are not
fetched again, so a complete cache works offline.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from rlhf_core.hub.api import RETRIES, client_options, read_refusal, with_retries
from rlhf_core.hub.ids import is_hub_id, parted
from rlhf_core.hub.model_files import (
    ADAPTER_CONFIG,
    MODEL_FILES,
    SECOND_COPY,
    TOKENIZER,
    WEIGHTS,
    check_loads,
)

# everything but weights
DESCRIBING = (
    *TOKENIZER,
    "config.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    ADAPTER_CONFIG,
)


def fetched(inputs: Mapping[str, str], trust_remote_code: bool = False) -> dict[str, str]:
    """Returns a stage's inputs with every model at a commit replaced by its local folder. Raises ValueError
    when the Hub denies access to a model."""
    return {
        name: str(snapshot(place, trust_remote_code)) if is_hub_id(place) and "@" in place else place
        for name, place in inputs.items()
    }


def snapshot(place: str, trust_remote_code: bool = False) -> Path:
    """Returns the folder of `owner/name@REVISION` in the cache, with the complete model. An adapter's base is
    fetched too.

    Raises ValueError when the Hub rejects the request or the model has no safetensors, and ConnectionError
    when the Hub fails.
    """
    code = ("*.py",) if trust_remote_code else ()
    folder = _download(place, (*MODEL_FILES, *code, "README.md"))
    if not any(folder.glob(WEIGHTS[0])):
        raise ValueError(
            f"{place} has no safetensors weights: alignflow loads no pickles; choose a revision that has them"
        )
    check_loads(folder, trust_remote_code)
    base = pinned_base(folder)
    if base:
        snapshot(base, trust_remote_code)
    return folder


def described(place: str) -> Path:
    """Returns the folder of `owner/name@REVISION` in the cache, after fetching only configuration and
    tokenizer."""
    return _download(place, DESCRIBING)


def pinned_base(folder: Path) -> str | None:
    """Returns `owner/name@REVISION` of an adapter's base if the adapter names a revision; else None."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return None
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    base = str(config.get("base_model_name_or_path") or "")
    revision = config.get("revision")
    return f"{base}@{revision}" if revision and is_hub_id(base) else None


def cached(place: str) -> Path:
    """Like `snapshot`, but makes no request if the model is in the cache, as it is after `fetched`."""
    repo_id, revision = parted(place)
    with suppress(LocalEntryNotFoundError):  # not in the cache of this cluster node
        folder = Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
        if any(folder.glob(WEIGHTS[0])):
            return folder
    return snapshot(place, trust_remote_code=False)


def _download(place: str, patterns: tuple[str, ...]) -> Path:
    repo_id, revision = parted(place)

    def send() -> str:
        return snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=list(patterns),
            # other formats of the model, in subfolders
            ignore_patterns=[SECOND_COPY, *(f"*/{pattern}" for pattern in (*WEIGHTS, *TOKENIZER))],
            local_files_only=constants.is_offline_mode(),
            **client_options(),
        )

    try:
        return Path(
            with_retries("send the files", repo_id, send, RETRIES, read_refusal(revision or "main", "model"))
        )
    except LocalEntryNotFoundError:
        at = f" --revision {revision}" if revision else ""
        raise ValueError(
            f"{place} is not on this machine and the Hub cannot be reached: run `hf download {repo_id}{at}`"
            " where it can, with HF_HOME on a disk that this machine reads"
        ) from None
