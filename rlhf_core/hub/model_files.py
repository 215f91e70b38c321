"""Lists the files that make up a model or an adapter, and checks, without reading the weights, that they can
be loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
# Mistral's releases hold the weights a second time, under other names, which transformers does not read.
SECOND_COPY = "consolidated*.safetensors"
HEADER_BYTES = 100_000_000  # maximum header size that safetensors reads
VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*")  # a tokenizer needs one of these
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
)
# for inputs other than text
PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
OTHERS = (
    "config.json",
    "generation_config.json",
    *PROCESSOR,
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "score_statistics.json",
    "prompt_suffix.json",
    "LICENSE*",
    "NOTICE*",
)
ADAPTER_CONFIG = "adapter_config.json"
MODEL_FILES = (*WEIGHTS, *TOKENIZER, *OTHERS, ADAPTER_CONFIG)


def model_files(checkpoint: Path, trust_remote_code: bool = False) -> list[Path]:
    """Returns the files of a checkpoint that make up the model, with `*.py` if `trust_remote_code` is set.

    Raises ValueError when the configuration, the weights or the tokenizer are missing.
    """
    if not checkpoint.is_dir():
        raise ValueError(
            f"{checkpoint} is not a folder with a model: publication needs the checkpoint of a finished stage"
        )
    config = ADAPTER_CONFIG if is_adapter(checkpoint) else "config.json"
    needed = {config: (config,), "safetensors weights": WEIGHTS[:1], "tokenizer": VOCABULARIES}
    for what, patterns in needed.items():
        if not any(True for pattern in patterns for _ in checkpoint.glob(pattern)):
            raise ValueError(
                f"{checkpoint} has no {what}: publish a folder written by save_pretrained, with its tokenizer"
            )
    patterns = MODEL_FILES + (("*.py",) if trust_remote_code else ())
    return sorted({file for pattern in patterns for file in checkpoint.glob(pattern) if file.is_file()})


def weight_files(folder: Path) -> list[Path]:
    """Returns a folder's safetensors files by name, without a second copy of the weights."""
    return sorted(file for file in folder.glob(WEIGHTS[0]) if not file.match(SECOND_COPY))


def is_adapter(checkpoint: Path) -> bool:
    """Returns whether a folder is a PEFT adapter."""
    return (checkpoint / ADAPTER_CONFIG).is_file()


def tensors_of(file: Path) -> dict[str, dict[str, Any]]:
    """Reads the header of a safetensors file: `dtype`, `shape` and `data_offsets` of each tensor, by name.

    Raises OSError, or ValueError when the file is not safetensors or its size contradicts its header.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            header = json.loads(opened.read(min(length, HEADER_BYTES)))
            tensors = {str(name): dict(about) for name, about in header.items() if name != "__metadata__"}
            end = 8 + length + max((int(about["data_offsets"][1]) for about in tensors.values()), default=0)
        except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
            raise ValueError(f"{file.name} is no safetensors file, or is cut off in its header") from None
    size = file.stat().st_size
    if size != end:
        raise ValueError(f"{file.name} has {size:,} bytes, and its header says {end:,}")
    return tensors


def layout_fault(folder: Path) -> str | None:
    """Returns why transformers or vLLM would not load all weight files of a model folder; None if both would.

    transformers prefers `model.safetensors` to an index, and loads nothing if both are missing. vLLM loads
    the files that the index lists.
    """
    if is_adapter(folder):
        return None
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    files = [file.name for file in weight_files(folder)]
    if single.is_file():
        if not index.is_file() or single.name in _listed(index):
            return None
        return (
            f"has {single.name} beside {index.name}, which lists other files, so it is unclear which weights"
            " are meant: move the ones that are not meant out of the folder"
        )
    if not files or index.is_file():
        return None
    return (
        f"has {files[0]}{f' and {len(files) - 1} more weight files' * (len(files) > 1)}, and neither"
        f" {single.name} nor {index.name}, which says what is in them: copy the index too, or save the model"
        " again with save_pretrained"
    )


def _listed(index: Path) -> set[str]:
    """Returns the names of the files that an index lists; empty if the index cannot be read, in which case
    `stored_tensors` rejects it."""
    try:
        return {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return set()


def stored_tensors(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns the headers of all weight files in a folder, keyed by file name.

    Raises OSError or ValueError for the same reasons as `tensors_of`, and ValueError when an index is invalid
    or names a missing file or tensor.
    """
    found = {file.name: tensors_of(file) for file in weight_files(folder)}
    for index in folder.glob(WEIGHTS[1]):
        try:
            places = dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ValueError(f"{index.name} is no index of weight files") from None
        for tensor, name in places.items():
            if name not in found:
                raise ValueError(f"{index.name} names {name}, and there is no such file")
            if tensor not in found[name]:
                raise ValueError(f"{index.name} names {tensor} in {name}, and it is not there")
    return found


def check_loads(folder: Path, trust_remote_code: bool = False) -> None:
    """Reads the configuration and the header of every weight file, but not the weights.

    Raises ValueError when transformers (peft for an adapter) cannot read the configuration, a weight file is
    truncated, there are no tensors, or the index names a missing tensor.
    """
    if is_adapter(folder):
        from peft import PeftConfig

        try:
            PeftConfig.from_pretrained(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"peft cannot read the {ADAPTER_CONFIG} of the adapter to publish: {error}"
            ) from error
    else:
        from transformers import AutoConfig

        try:
            AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"transformers cannot read the config.json of the model to publish: {error}"
            ) from error
    try:
        tensors = stored_tensors(folder)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the weights of the model to publish are damaged ({error}): run the stage that made it again"
        ) from None
    if not any(tensors.values()):
        raise ValueError("the weight files of the model to publish hold no tensor")
