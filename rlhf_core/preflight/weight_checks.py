"""Finds model folders whose weights, config.json and vocabulary do not match each other. Reads only headers.
Torch-free."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from rlhf_core.hub.ids import is_remote
from rlhf_core.hub.model_files import ADAPTER_CONFIG, layout_fault, stored_tensors
from rlhf_core.hub.positions import stored_config
from rlhf_core.hub.vocabulary import stored_vocabulary, tokenizer_place

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FLOATS = ("F64", "F32", "F16", "BF16")
LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
# Maps the ends of tensor names to the config.json keys that give their shapes. Shapes that depend on the
# family (heads, experts) are left out.
VOCABULARY = ("vocab_size",)
HIDDEN = ("word_embed_proj_dim", "hidden_size", "n_embd")
INNER = ("intermediate_size",)
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "lm_head.weight", "embed_out.weight")
SHAPES = dict.fromkeys(EMBEDDINGS, (VOCABULARY, HIDDEN)) | {"mlp.down_proj.weight": (HIDDEN, INNER)}


def weight_problem(where: str, place: str, trust_remote_code: bool) -> dict[str, str]:
    """Returns {folder: why it cannot be loaded} if the weights are damaged, pickled, or do not match
    config.json or the tokenizer; otherwise {}. `where` is the model's place in the recipe. Checks an adapter
    without its base; a Hub id is checked only when it is fetched."""
    folder = Path(place)
    if is_remote(place):
        return {}
    config = stored_config(place)
    fault = None if trust_remote_code else _code(config)
    fault = fault or _stored(folder, config) or _vocabulary(place, config)
    return {place: f"{where}: {place} {fault}"} if fault else {}


def _code(config: dict[str, Any]) -> str | None:
    """Returns the fault if transformers does not know a model's family, so that loading it needs the code in
    its folder; None otherwise."""
    kind = config.get("model_type")
    package = importlib.util.find_spec("transformers")
    if not config.get("auto_map") or package is None or package.origin is None:
        return None
    auto = Path(package.origin).parent / "models" / "auto"
    known = (
        file.read_text()
        for file in (auto / "configuration_auto.py", auto / "auto_mappings.py")
        if file.is_file()
    )
    if any(f'"{kind}"' in text for text in known):
        return None
    return (
        "needs code of its own (auto_map in config.json; transformers does not know the model_type"
        f" {kind!r}); read that code and set trust_remote_code: true, or name another model"
    )


def _stored(folder: Path, config: dict[str, Any]) -> str | None:
    """Returns the fault if weight files are missing, pickled or damaged, or if their shapes do not match
    config.json; None otherwise."""
    try:
        files = stored_tensors(folder)
    except (OSError, ValueError) as error:
        return f"has damaged weights ({error}); copy or download the folder again"
    if not files:
        pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
        if pickles:
            return (
                f"has its weights as pickles ({pickles[0]}), which are not loaded; save them with"
                " save_pretrained, as safetensors"
            )
        return "has no weights (*.safetensors); give a whole model folder"
    if (folder / ADAPTER_CONFIG).is_file():
        return None
    fault = layout_fault(folder)
    if fault is not None:
        return fault
    unlike = _unlike(config, {name: about for tensors in files.values() for name, about in tensors.items()})
    return unlike and f"{unlike} in config.json; use the config.json that was saved with the weights"


def _unlike(config: dict[str, Any], tensors: dict[str, dict[str, Any]]) -> str | None:
    """Returns how the weights contradict config.json: an expected shape that no tensor of its kind has, or
    layers without weights. Returns None if they do not."""
    for end, keys in SHAPES.items():
        said = [
            next(((key, config[key]) for key in names if isinstance(config.get(key), int)), None)
            for names in keys
        ]
        named = {name: about for name, about in tensors.items() if f".{name}".endswith(f".{end}")}
        shapes = {name: about.get("shape") for name, about in named.items() if about.get("dtype") in FLOATS}
        if shapes and all(said) and [size for _, size in filter(None, said)] not in shapes.values():
            name, shape = next(iter(shapes.items()))
            told = " and ".join(f"{key}={size}" for key, size in filter(None, said))
            return f"has the shape {shape} in {name}, and {told}"
    layers = [int(found[1]) + 1 for found in map(LAYER.search, tensors) if found]
    number = config.get("num_hidden_layers")
    return (
        f"has weights of {max(layers)} layers, and num_hidden_layers={number}"
        if layers and max(layers) < (number or 0)
        else None
    )


def _vocabulary(place: str, config: dict[str, Any]) -> str | None:
    """Returns the fault if a tokenizer encodes text as ids beyond the last row of the embeddings; None
    otherwise. Special tokens may lie beyond it, because text is never encoded as a special token."""
    rows = config.get("vocab_size")
    tokens = stored_vocabulary(place)
    if not isinstance(rows, int) or not tokens or max(tokens.values()) < rows:
        return None
    added = (
        json.loads((Path(tokenizer_place(place)) / "tokenizer.json").read_text(encoding="utf-8")).get(
            "added_tokens"
        )
        or ()
    )
    special = {token["content"] for token in added if token.get("special")}
    beyond = {number: token for token, number in tokens.items() if number >= rows and token not in special}
    if not beyond:
        return None
    return (
        f"has a tokenizer with the token {beyond[max(beyond)]!r} at number {max(beyond)}, and embeddings for"
        f" {rows} tokens; call resize_token_embeddings(len(tokenizer)) on the model and save it"
    )
