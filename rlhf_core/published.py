"""The folder that is published: a checkpoint's files, a card and scores, put in place whole or not at all.

It is written beside its destination, checked, marked, and renamed, so that a reader never sees half a model. The marker
(`alignflow.json`: who wrote it, from which stage, every file with size and SHA-256) is what allows the next publication to replace it;
a folder without one belongs to somebody else. Only files a model needs are taken; pickles are never among them.
An adapter (peft's format) is published as it is, and names the Hub repository of the model it belongs to.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from rlhf_core.lineage import HUB_ID, is_hub_id, lineage
from rlhf_core.stage import file_digest
from rlhf_core.types import FileInfo, Frozen

MARKER = "alignflow.json"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model")
OTHERS = (
    "config.json",
    "generation_config.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "score_statistics.json",
    "prompt_suffix.json",
    "LICENSE*",
    "NOTICE*",
)
ADAPTER_CONFIG = "adapter_config.json"
MODEL_FILES = (*WEIGHTS, *TOKENIZER, *OTHERS, ADAPTER_CONFIG)
PLACES = ("_name_or_path", "name_or_path")  # keys of a config that remember where it was loaded from


class AdapterBase(NamedTuple):
    """The model on the Hub that an adapter belongs to, and its commit when that is known."""

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
    """Publishes a checkpoint to a folder, together with `texts` (relative path -> content). `base`: of `adapter_base`.

    Raises ValueError when the checkpoint is not a whole model, or when `folder` holds something that was not published by alignflow.
    """
    files = {file.relative_to(checkpoint).as_posix(): file for file in model_files(checkpoint, trust_remote_code)}

    def finish(partial: Path) -> None:
        for name in ("config.json", "tokenizer_config.json"):
            _forget_places(partial / name)
        if base is not None:
            _name_base(partial / ADAPTER_CONFIG, base)
        check_loads(partial, trust_remote_code)

    return put(files, folder, texts, name, digest, finish)


def put(
    files: Mapping[str, Path], folder: Path, texts: Mapping[str, str], name: str, digest: str, finish: Callable[[Path], None]
) -> Published:
    """Copies files (relative path -> file) and writes `texts` to `folder`, whole or not at all; `finish` checks it before it is in place.

    Raises ValueError when `folder` holds something that was not published by alignflow.
    """
    refuse_foreign(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial, old = (folder.with_name(f".{folder.name}.{digest}.{state}") for state in ("partial", "old"))
    for rest in (partial, old):  # of a publication that was cut off
        shutil.rmtree(rest, ignore_errors=True)
    partial.mkdir()
    for path, file in files.items():
        (partial / path).parent.mkdir(exist_ok=True)
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


def model_files(checkpoint: Path, trust_remote_code: bool = False) -> list[Path]:
    """The files of a checkpoint that make up the model; ValueError when an essential kind is missing."""
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint} is not a folder with a model: publication needs the checkpoint of a finished stage")
    config = ADAPTER_CONFIG if is_adapter(checkpoint) else "config.json"
    needed = {config: (config,), "safetensors weights": WEIGHTS[:1], "tokenizer": ("tokenizer.json", "*.model", "vocab.*")}
    for what, patterns in needed.items():
        if not any(True for pattern in patterns for _ in checkpoint.glob(pattern)):
            raise ValueError(f"{checkpoint} has no {what}: publish a folder written by save_pretrained, with its tokenizer")
    patterns = MODEL_FILES + (("*.py",) if trust_remote_code else ())
    return sorted({file for pattern in patterns for file in checkpoint.glob(pattern) if file.is_file()})


def is_adapter(checkpoint: Path) -> bool:
    return (checkpoint / ADAPTER_CONFIG).is_file()


def adapter_base(checkpoint: Path, base_repo: str | None) -> AdapterBase | None:
    """What a published adapter names as its base: `base_repo`, else the Hub repository it was trained on; None for a whole model.

    Raises ValueError when the base is a folder of this machine and no repository is named for it: a stranger could load neither.
    """
    if not is_adapter(checkpoint):
        if base_repo:
            raise ValueError(f"base_repo is {base_repo}, and the model to publish is whole, not an adapter: leave base_repo out")
        return None
    if base_repo:
        if not HUB_ID.fullmatch(base_repo):
            raise ValueError(f"base_repo {base_repo!r} is not a Hub repository: write it as owner/name")
        return AdapterBase(base_repo, None)
    config = json.loads((checkpoint / ADAPTER_CONFIG).read_text())
    base = lineage(str(config.get("base_model_name_or_path") or ""))
    if base.kind != "hub":
        raise ValueError(
            f"the adapter to publish belongs to {base.name}, which is not on the Hub: set lora.export to merged to publish a whole model, "
            f"or base_repo to the repository that holds {base.name}"
        )
    return AdapterBase(base.name, base.digest or config.get("revision"))


def refuse_foreign(folder: Path) -> None:
    """ValueError unless `folder` is free: absent, empty, or published by alignflow before."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())) or read_marker(folder) is not None:
        return
    raise ValueError(f"{folder} holds files that were not published by alignflow: name another folder, or move them away")


def read_marker(folder: Path) -> Published | None:
    try:
        return Published.model_validate_json((folder / MARKER).read_text())
    except (OSError, ValidationError):
        return None


def check_loads(folder: Path, trust_remote_code: bool = False) -> None:
    """Reads the configuration and the header of every weight file, not the weights.

    Raises ValueError when transformers cannot read the configuration, a weight file is cut, or the index names a tensor that is not there.
    """
    from safetensors import SafetensorError, safe_open

    if is_adapter(folder):
        from peft import PeftConfig

        try:
            PeftConfig.from_pretrained(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"peft cannot read the {ADAPTER_CONFIG} of the adapter to publish: {error}") from error
    else:
        from transformers import AutoConfig

        try:
            AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"transformers cannot read the config.json of the model to publish: {error}") from error
    tensors: dict[str, set[str]] = {}
    for file in folder.glob(WEIGHTS[0]):
        try:
            with safe_open(file, framework="numpy") as weights:
                tensors[file.name] = set(weights.keys())
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file.name} of the model to publish is damaged ({error}): run the stage that made it again") from None
    for index in folder.glob(WEIGHTS[1]):
        for tensor, name in json.loads(index.read_text())["weight_map"].items():
            if tensor not in tensors.get(name, set()):
                raise ValueError(f"{index.name} promises {tensor} in {name}, and it is not there: the checkpoint is not whole")
    if not any(tensors.values()):
        raise ValueError("the weight files of the model to publish hold no tensor")


def _manifest(folder: Path) -> dict[str, FileInfo]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): FileInfo(size=file.stat().st_size, sha256=file_digest(file)) for file in files}


def _forget_places(file: Path) -> None:
    """Drops the folder of this machine that a model or tokenizer was loaded from; a Hub id stays."""
    if not file.exists():
        return
    config = json.loads(file.read_text())
    cleaned = _without_places(config)
    if cleaned != config:
        file.write_text(json.dumps(cleaned, indent=2, ensure_ascii=False) + "\n")


def _name_base(file: Path, base: AdapterBase) -> None:
    config = json.loads(file.read_text()) | {"base_model_name_or_path": base.repo_id, "revision": base.revision}
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _without_places(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_places(item) for key, item in value.items() if key not in PLACES or is_hub_id(str(item))}
