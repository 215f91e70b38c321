"""Writes the safetensors files of a checkpoint weight by weight, so that at most one weight is in memory.

The files are first created with their headers, then each weight is written to its place. Names, headers and
the split into files are the same as with `huggingface_hub.save_torch_state_dict`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from rlhf_core.hub.model_files import tensors_of
from rlhf_core.system import progress
from rlhf_core.system.files import read_json, write_text

# Names of dtypes in safetensors, in its storage order.
DTYPES = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
ADDED = "model-score.safetensors"  # file of a head, in addition to the files of an index
ORDER = {dtype: place for place, dtype in enumerate(NAMES)}


def meta(shape: Iterable[int], dtype: torch.dtype | str) -> Tensor:
    """Returns a tensor without memory that has this shape and dtype (or safetensors name of a dtype)."""
    return torch.empty(tuple(shape), dtype=DTYPES[dtype] if isinstance(dtype, str) else dtype, device="meta")


def lay_out(weights: Mapping[str, Tensor], folder: Path, shard_bytes: int | str = "5GB") -> None:
    """Creates the files for weights of these shapes and dtypes (see `meta`), with an index if there are
    several files. The contents are undefined."""
    split = split_torch_state_dict_into_shards(dict(weights), max_shard_size=shard_bytes)
    for name, keys in split.filename_to_tensors.items():
        make_file(folder / name, {key: weights[key] for key in keys})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_text(folder / INDEX, json.dumps(index, indent=2))


def add_file(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Creates another file for weights of these shapes and dtypes (see `meta`) in a checkpoint's folder, and
    lists it in the index. Does nothing without weights. The contents are undefined."""
    if not weights:
        return
    index = folder / INDEX
    single = folder / "model.safetensors"
    if index.is_file():
        listed = read_json(index)
    else:  # transformers prefers a file with this name to an index
        known = single.rename(folder / "model-00001-of-00002.safetensors")
        listed = {"metadata": {}, "weight_map": dict.fromkeys(tensors_of(known), known.name)}
    name = ADDED if index.is_file() else "model-00002-of-00002.safetensors"
    make_file(folder / name, weights)
    listed["weight_map"] |= dict.fromkeys(weights, name)
    sizes = [tensors_of(folder / file) for file in sorted(set(listed["weight_map"].values()))]
    ends = [about["data_offsets"] for tensors in sizes for about in tensors.values()]
    listed["metadata"] = listed.get("metadata", {}) | {"total_size": sum(end - start for start, end in ends)}
    write_text(index, json.dumps(listed, indent=2))


def make_file(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Creates a safetensors file for tensors of these shapes and dtypes. The contents are undefined."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in sorted(tensors, key=lambda key: (ORDER[tensors[key].dtype], key)):
        start = end
        end = end + tensors[key].nbytes
        header[key] = {
            "dtype": NAMES[tensors[key].dtype],
            "shape": list(tensors[key].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)


def fill(files: Iterable[Path], weights: Iterable[tuple[str, Tensor]], expected: Iterable[str]) -> None:
    """Writes weights to their places in `files`, in the files' dtypes. Raises ValueError for a weight that
    has no place in the files or has another shape, and if any of the `expected` names is missing."""
    missing = set(expected)
    with ExitStack() as stack:
        places: dict[str, tuple[Any, int, dict[str, Any]]] = {}
        for file in files:
            opened = stack.enter_context(file.open("r+b"))
            begin = 8 + int.from_bytes(opened.read(8), "little")
            places |= {key: (opened, begin, about) for key, about in tensors_of(file).items()}
        for key, weight in weights:
            if key not in places or list(weight.shape) != places[key][2]["shape"]:
                raise ValueError(
                    f"the checkpoint has no place for the weight {key} of shape {list(weight.shape)}: it"
                    " cannot be written"
                )
            opened, begin, about = places[key]
            data = weight.detach().to("cpu", DTYPES[about["dtype"]]).contiguous()
            opened.seek(begin + about["data_offsets"][0])
            opened.write(data.reshape(-1).view(torch.uint8).numpy().data)
            missing.discard(key)
            progress.made()
    if missing:
        raise ValueError(f"the weight {min(missing)} ({len(missing)} such) was not there to be written")
