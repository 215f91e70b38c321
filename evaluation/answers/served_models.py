"""Serves checkpoints with a local vLLM server, for local judges and the alignment tax."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from transformers import AutoConfig

from rlhf_core.config import AlignmentTax, EngineConfig, VllmJudge
from rlhf_core.models.lora import base_of
from rlhf_core.models.precision import stored_dtype
from rlhf_core.rollout.chat_models import longest_of
from rlhf_core.rollout.vllm.vllm_server import Server, serving
from rlhf_core.runs.lineage import stage_of
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.system.files import Digests, digest
from rlhf_core.system.gpu_allocator import free_unused


class LocalModel(NamedTuple):
    """A checkpoint folder or Hub id to serve. `identity` is a digest of its files, independent of their
    path."""

    path: str
    dtype: str
    max_model_len: int
    identity: str


def local_model(
    where: str, path: str, config: VllmJudge | AlignmentTax, run: RunDir, trust_remote_code: bool
) -> LocalModel:
    """Returns the model to serve. It is served in its stored dtype if `dtype` is auto, and with all of its
    positions if `max_model_len` is None.

    Digests of the model's files are cached in the artifacts folder that contains the run directory. Raises
    ValueError for the same reasons as `longest_of`.
    """
    model_config = AutoConfig.from_pretrained(base_of(path) or path, trust_remote_code=trust_remote_code)
    length = longest_of(where, model_config, config.max_model_len)
    dtype = stored_dtype(model_config) if config.dtype == "auto" else config.dtype
    digests = Digests(run.artifacts)
    identity = identity_of(path, digests, getattr(model_config, "_commit_hash", None))
    digests.save()
    return LocalModel(path, dtype, length, identity)


@contextmanager
def served(
    model: LocalModel, name: str, log: Path, engine: EngineConfig, seed: int, trust_remote_code: bool
) -> Iterator[Server]:
    """Starts a server that serves `model` under `name`, and stops it after the block. `log` is its log
    file."""
    free_unused()
    with serving(
        model.path,
        name,
        log,
        engine,
        seed=seed,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        trust_remote_code=trust_remote_code,
    ) as server:
        yield server


def identity_of(path: str, digests: Digests, commit: str | None = None) -> str:
    """Returns a digest of a checkpoint's files (for an adapter, with its base's), taken from the manifest of
    the stage that wrote the files, if there is a manifest.

    For a Hub id, returns the id, followed by the commit when it is known.
    """
    if not Path(path).is_dir():
        return f"{path}@{commit}" if commit else path
    base = base_of(path)
    return digest([_files(Path(path), digests), identity_of(base, digests) if base else None])


def _files(folder: Path, digests: Digests) -> str:
    found = stage_of(folder)
    result = RunDir(found[0]).result() if found else None
    if found and result:
        inside = folder.resolve().relative_to(found[0].resolve()).as_posix() + "/"
        known = {
            name.removeprefix(inside): info.sha256
            for name, info in result.files.items()
            if name.startswith(inside)
        }
        if known:
            return digest(known)  # the same value as `Digests.of` gives for the folder
    return digests.of(folder)
