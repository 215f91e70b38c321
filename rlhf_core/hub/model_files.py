"""Lists the files that make up a model or an adapter, and checks that they can be loaded without reading the weights."""

from __future__ import annotations

import json
from pathlib import Path

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


def model_files(checkpoint: Path, trust_remote_code: bool = False) -> list[Path]:
    """Returns the files of a checkpoint that make up the model, with `*.py` when `trust_remote_code`.

    Raises ValueError when the configuration, the weights or the tokenizer are missing.
    """
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
    """Returns whether a folder is a PEFT adapter."""
    return (checkpoint / ADAPTER_CONFIG).is_file()


def check_loads(folder: Path, trust_remote_code: bool = False) -> None:
    """Reads the configuration and the header of every weight file, not the weights.

    Raises ValueError when transformers (peft for an adapter) cannot read the configuration, a weight file is cut, or the index names a
    missing tensor.
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
                raise ValueError(f"{index.name} names {tensor} in {name}, and it is not there: the checkpoint is incomplete")
    if not any(tensors.values()):
        raise ValueError("the weight files of the model to publish hold no tensor")
