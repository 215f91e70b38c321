"""Serves checkpoints with a local vLLM server, for local judges and the alignment tax."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from transformers import AutoConfig

from rlhf_core.config import Vllm
from rlhf_core.hub.positions import positions_of
from rlhf_core.models.dtype import stored_dtype
from rlhf_core.models.lora import base_of
from rlhf_core.rollout.server import Server, serving
from rlhf_core.runs.lineage import stage_of
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.system.files import Digests, digest


class LocalModel(NamedTuple):
    """A checkpoint folder or Hub id to serve. `identity`: digest of its files, the same at every path."""

    path: str
    dtype: str
    max_model_len: int
    identity: str


def local_model(where: str, path: str, dtype: str, max_model_len: int | None, trust_remote_code: bool) -> LocalModel:
    """Returns the model to serve. `dtype` auto: as stored; `max_model_len` None: the model's own number of positions.

    Raises ValueError, beginning with `where`, when that number is not known or smaller than `max_model_len`.
    """
    config = AutoConfig.from_pretrained(base_of(path) or path, trust_remote_code=trust_remote_code)
    positions = positions_of(config.to_dict())
    if max_model_len is None and positions is None:
        raise ValueError(f"{where}: the model's config has no max_position_embeddings: set max_model_len")
    if max_model_len is not None and positions is not None and max_model_len > positions:
        raise ValueError(f"{where}: max_model_len is {max_model_len}, and the model has {positions} positions: lower it")
    length = max_model_len or positions
    assert length is not None
    identity = identity_of(path, getattr(config, "_commit_hash", None))
    return LocalModel(path, stored_dtype(config) if dtype == "auto" else dtype, length, identity)


@contextmanager
def served(model: LocalModel, name: str, log: Path, vllm: Vllm, seed: int, trust_remote_code: bool) -> Iterator[Server]:
    """Starts a server of `model` under `name`, and ends it after the block. `log`: its log file."""
    _free_gpu()
    with serving(
        model.path,
        name,
        log,
        seed=seed,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        kv_cache_gib=vllm.kv_cache_gib,
        tensor_parallel_size=vllm.tensor_parallel_size,
        gpu_memory_utilization=vllm.gpu_memory_utilization,
        trust_remote_code=trust_remote_code,
        start_timeout=vllm.start_timeout,
    ) as server:
        yield server


def identity_of(path: str, commit: str | None = None) -> str:
    """Returns a digest of a checkpoint's files (of an adapter and its base), from the manifest of the stage that wrote it if there is one.

    Returns a Hub id unchanged, with the commit when it is known.
    """
    if not Path(path).is_dir():
        return f"{path}@{commit}" if commit else path
    base = base_of(path)
    return digest([_files(Path(path)), identity_of(base) if base else None])


def _files(folder: Path) -> object:
    found = stage_of(folder)
    result = RunDir(found[0]).result() if found else None
    if found and result:
        inside = folder.resolve().relative_to(found[0].resolve()).as_posix() + "/"
        digests = {name.removeprefix(inside): info.sha256 for name, info in result.files.items() if name.startswith(inside)}
        if digests:
            return digest(digests)  # equal to `Digests.of` of the folder
    return Digests().of(folder)


def _free_gpu() -> None:
    """Frees GPU memory of models that this process no longer uses, because the server reserves a share of the whole GPU."""
    import torch

    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
