"""Writes checkpoints of trained models or adapters: safetensors, config, tokenizer."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterable, Iterator, Set
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.pad_token import with_pad_token
from rlhf_core.hub.ids import snapshot_of_hub
from rlhf_core.hub.model_files import PROCESSOR, WEIGHTS, stored_tensors
from rlhf_core.hub.vocabulary import tokenizer_place
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights, planned_weights
from rlhf_core.models.checkpoint.generation import used_values, with_stop_tokens
from rlhf_core.models.checkpoint.weight_files import add_file, fill, lay_out, meta
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.lora import ADAPTER, ADAPTER_WEIGHTS, has_head
from rlhf_core.models.multimodal.wrapper import copy_files, folder_of, require_stored, stored_names
from rlhf_core.models.weights.trained_encoder import TrainedEncoder
from rlhf_core.system.files import read_json, write_text

# the file and safetensors header entry of each stored weight
Stored = dict[str, tuple[Path, dict[str, Any]]]
OF_HEAD = re.compile(r"For[A-Z]\w*$")  # the part of a class name that says which head the class has
# keys of config.json
OF_WEIGHTS = ("architectures", "dtype", "transformers_version", "id2label", "label2id", "pad_token_id")


def save_model(
    model: PreTrainedModel,
    weights: Iterable[tuple[str, Tensor]],
    tokenizer_source: str,
    folder: Path,
    trust_remote_code: bool = False,
    encoder: TrainedEncoder | None = None,
) -> None:
    """Writes safetensors, config, generation config and tokenizer files to `folder`. `weights`: from
    `checkpoint_weights`, including the weights of a trained image `encoder`; they are written one by one."""
    save_description(model, tokenizer_source, folder, trust_remote_code)
    planned, left = plan_weights(model, encoder)
    whole = getattr(model, "whole", None)
    if whole:
        copy_files(whole, folder, WEIGHTS)
        add_file(folder, _added(planned, whole))
    else:
        lay_out(planned, folder)
        weights = chain(weights, _read(left))
    fill(folder.glob(WEIGHTS[0]), weights, planned)


def save_description(
    model: PreTrainedModel, tokenizer_source: str, folder: Path, trust_remote_code: bool
) -> None:
    """Writes all files of an export except the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = getattr(model, "whole", None)
    if whole:
        copy_files(whole, folder, ("config.json", *PROCESSOR))
        if not model.can_generate():
            describe_scorer(folder / "config.json", model)
    else:
        save_config(model, folder)
    tokenizer = save_tokenizer(tokenizer_source, folder, trust_remote_code)
    if model.can_generate():
        used_values(with_stop_tokens(model.generation_config, tokenizer)).save_pretrained(folder)


def plan_weights(
    model: PreTrainedModel, encoder: TrainedEncoder | None = None
) -> tuple[dict[str, Tensor], Stored]:
    """Returns the weights of an export as tensors without memory (see `meta`), and the subset found by
    `not_loaded`.

    Raises ValueError if a language model has a weight that its multimodal checkpoint lacks.
    """
    planned = planned_weights(model, encoder)
    whole = getattr(model, "whole", None)
    if whole:
        require_stored(planned.keys() - _added(planned, whole).keys(), whole)
        return planned, {}
    left = not_loaded(model, planned.keys())
    return planned | {key: meta(about["shape"], about["dtype"]) for key, (_, about) in left.items()}, left


def _added(planned: dict[str, Tensor], whole: Path) -> dict[str, Tensor]:
    """Returns the score head among the `planned` weights if the multimodal checkpoint has no score head."""
    stored = stored_names(whole)
    return {
        name: weight for name, weight in planned.items() if name.startswith("score.") and name not in stored
    }


def describe_scorer(file: Path, model: PreTrainedModel) -> None:
    """Changes the config.json of a multimodal model into the config.json of a reward model, which
    transformers loads as a whole; some families need alignflow's class for this (see `score_classes.py`)."""
    config = read_json(file)
    names = config.get("architectures") or [type(model).__name__]
    config["architectures"] = [OF_HEAD.sub("ForSequenceClassification", names[0])]
    config["id2label"] = {"0": "LABEL_0"}
    config["label2id"] = {"LABEL_0": 0}
    config["pad_token_id"] = model.config.pad_token_id
    if "text_config" in config:
        config["text_config"] = config["text_config"] | {"pad_token_id": model.config.pad_token_id}
    write_text(file, json.dumps(config, indent=2) + "\n")


def save_config(model: PreTrainedModel, folder: Path) -> None:
    """Writes the config.json of the checkpoint that the model was loaded from, but with the values that
    describe the exported weights. transformers would write its own release's names of values, which other
    tools may not recognise."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    if hasattr(config, "quantization_config"):  # the written weights are not quantised
        del config.quantization_config
    config.save_pretrained(folder)
    written = read_json(folder / "config.json")
    base = read_json(_base(model) / "config.json")
    # a config that comes with code needs the `auto_map` that transformers writes
    if base.get("model_type") == written["model_type"] and "auto_map" not in base:
        kept = {
            key: value for key, value in base.items() if key not in ("torch_dtype", "quantization_config")
        }
        described = kept | {key: written[key] for key in OF_WEIGHTS if key in written}
        write_text(folder / "config.json", json.dumps(described, indent=2) + "\n")


def not_loaded(model: PreTrainedModel, exported: Set[str]) -> Stored:
    """Finds the weights in a policy's checkpoint that transformers skips on purpose and that are not in
    `exported`, with the file and header entry of each.

    These are heads that predict further tokens, and keys of layers that reuse the keys of another layer.
    Returns an empty dict when the weights are quantised, have other names, or no longer exist.
    """
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    base = _base(model)
    if not model.can_generate() or not patterns or "quantization_config" in read_json(base / "config.json"):
        return {}
    files = stored_tensors(base)
    left = {
        key: (base / name, about)
        for name, tensors in files.items()
        for key, about in tensors.items()
        if key not in exported
    }
    # some weights are exported under names that are not in the checkpoint
    if len(exported) + len(left) > sum(map(len, files.values())):
        return {}
    return {key: found for key, found in left.items() if any(re.search(pattern, key) for pattern in patterns)}


def _read(stored: Stored) -> Iterator[tuple[str, Tensor]]:
    for key, (file, _) in stored.items():
        with safe_open(file, framework="pt") as tensors:
            yield key, tensors.get_tensor(key)


def _base(model: PreTrainedModel) -> Path:
    """Returns the folder from which a model was loaded; for a model on the Hub, its folder in the Hub
    client's cache."""
    return folder_of(model.name_or_path) if model.name_or_path else Path(os.devnull)


def save_adapter(model: PreTrainedModel, state: dict[str, Tensor], base: str, folder: Path) -> None:
    """Writes only the adapter, in peft's format: its weights (see `trained_weights`) and a config that names
    `base`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.copy(model.peft_config[ADAPTER])
    # A base in the Hub's cache is named by its repository, not by a folder on this machine.
    config.base_model_name_or_path, config.revision = snapshot_of_hub(base) or (base, None)
    config.inference_mode = True
    config.modules_to_save = ["score"] if has_head(model) else None
    config.save_pretrained(folder)
    save_file(state, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def save_tokenizer(source: str, folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Writes a model's tokenizer with the pad token used in training, and returns it."""
    tokenizer = with_pad_token(
        AutoTokenizer.from_pretrained(tokenizer_place(source), trust_remote_code=trust_remote_code)
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_merged(adapter: str, folder: Path, dtype: str, trust_remote_code: bool = False) -> None:
    """Writes the base model with the adapter in the folder `adapter` merged into it."""
    model = load_policy(adapter, dtype, trust_remote_code).model
    save_model(
        model, checkpoint_weights(model, lambda parameters: nullcontext()), adapter, folder, trust_remote_code
    )
