"""Sets the environment variables that vLLM reads when it is first imported, and chooses how it runs a
model."""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError

from rlhf_core.cluster.rank_environment import RANK_VARIABLES
from rlhf_core.config.training.lora_fields import ADAPTER_RANKS
from rlhf_core.hub.api import client_options
from rlhf_core.hub.ids import parted
from rlhf_core.hub.model_config import experts_of_config, text_config, wraps_text_by_config
from rlhf_core.hub.model_files import ADAPTER_CONFIG
from rlhf_core.rollout.vllm.patches.table import is_release
from rlhf_core.system import progress
from rlhf_core.system.machine import num_gpus
from rlhf_core.system.processes import child_environment

CPU_BATCHED_TOKENS = 4096  # tokens of one engine step on CPU
# Without torch.compile; decoding steps are recorded as CUDA graphs.
UNCOMPILED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
# Batch sizes recorded as CUDA graphs; a batch runs at the next larger size. vLLM's own list has 51 sizes up
# to 512.
GRAPHS = (1, 2, 4, 8, *range(16, 129, 16), *range(160, 257, 32), *range(320, 513, 64))
OF_GRAPHS = {
    "speculative_config",
    "compilation_config",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "performance_mode",
    "enforce_eager",
}


def compilation(model: str) -> dict[str, Any]:
    """Returns vLLM's `compilation_config` for a checkpoint folder or Hub ID on a GPU; if it is empty, vLLM
    chooses.

    Models with experts are not compiled: with the code that vLLM 0.24 compiled at its first start (PyTorch
    2.11, H200), log-probs of a small Mixtral were off by a nat after the second start. vllm#56900 is a
    similar case.
    """
    if not num_gpus():
        return {}
    return UNCOMPILED if experts_of_config(text_config(config_of(model))) else {}


def graphs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns vLLM's option for the sizes of CUDA graphs on a GPU; empty if the recipe's `options` contain
    one that affects them."""
    if not num_gpus() or OF_GRAPHS & options.keys():
        return {}
    # like vLLM's own limit, since batches also include prompts
    most = 2 * int(options.get("max_num_seqs") or GRAPHS[-1])
    return {"cudagraph_capture_sizes": [size for size in GRAPHS if size <= most]}


def adapter_options(rank: int) -> dict[str, Any]:
    """Returns vLLM's options for one adapter of this rank; empty for rank 0."""
    return (
        {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": next(size for size in ADAPTER_RANKS if size >= rank),
        }
        if rank
        else {}
    )


def delta_rule(model: str) -> dict[str, Any]:
    """Returns vLLM's option for gated delta rules (Qwen3-Next, Qwen3.5) on a GPU. It selects Triton kernels,
    as in training; FlashInfer's would be compiled at the first start."""
    from vllm import EngineArgs

    kind = str(text_config(config_of(model)).get("model_type"))
    known = "gdn_prefill_backend" in EngineArgs.__dataclass_fields__
    return (
        {"gdn_prefill_backend": "triton"}
        if num_gpus() and known and kind.startswith(("qwen3_5", "qwen3_next"))
        else {}
    )


def config_of(model: str) -> dict[str, Any]:
    """Returns the config.json of a checkpoint folder or Hub ID; empty if it cannot be read, since vLLM
    reports the reason."""
    try:
        return dict(json.loads(_config_file(model).read_text()))
    except (OSError, EntryNotFoundError, ValueError):
        return {}


def _config_file(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model) / "config.json"
    repo_id, revision = parted(model)
    return Path(hf_hub_download(repo_id, "config.json", revision=revision, **client_options()))


@contextmanager
def whole_model(model: str, dtype: str, trust_remote_code: bool, pictures: bool = False) -> Iterator[str]:
    """Yields a checkpoint folder or Hub ID that vLLM can load: `model` itself, or a temporary folder that
    contains either the merged model of an adapter or, without `pictures`, the language model of a multimodal
    checkpoint."""
    with ExitStack() as stack:
        if (Path(model) / ADAPTER_CONFIG).is_file():
            from rlhf_core.models.checkpoint.save import save_merged

            folder = Path(stack.enter_context(TemporaryDirectory(prefix="alignflow-merged-")))
            stack.enter_context(progress.files(folder))
            save_merged(model, folder / "model", dtype, trust_remote_code)
            model = str(folder / "model")
        kind = config_of(model)
        if kind and wraps_text_by_config(kind) and not pictures and not runs_whole(kind):
            from rlhf_core.models.multimodal.wrapper import link_language_model

            folder = Path(stack.enter_context(TemporaryDirectory(prefix="alignflow-text-")))
            model = str(folder) if link_language_model(model, folder, trust_remote_code) else model
        yield model


def runs_whole(config: Mapping[str, Any]) -> bool:
    """Returns whether this vLLM runs a multimodal model as a whole, but without its image encoder, since vLLM
    0.24 has no text-only Qwen3.5."""
    return (
        bool(num_gpus())
        and str(config.get("model_type")).startswith("qwen3_5")
        and version("vllm").startswith("0.24.")
    )


def no_class_for(architecture: str) -> str | None:
    """Returns why vLLM cannot run a transformers class; None if it can, is not installed, or `architecture`
    is "". vLLM has its own classes, and also runs transformers classes that let it choose the attention."""
    set_vllm_environment(1)
    try:
        from vllm import __version__
        from vllm.model_executor.models.registry import ModelRegistry
    except ImportError:
        return None
    import transformers

    chooses = getattr(getattr(transformers, architecture or "-", None), "_supports_attention_backend", False)
    if not architecture or chooses or architecture in ModelRegistry.get_supported_archs():
        return None
    return (
        f"vLLM {__version__} has no class for {architecture}, so it cannot answer: set engine.kind to"
        " transformers, or train it by SFT, DPO or KTO"
    )


def unknown_option(options: Mapping[str, object]) -> str:
    """Returns a message that names an option in `engine.options` unknown to the installed vLLM; "" if it
    knows all of them or is not installed."""
    if not options:
        return ""
    set_vllm_environment(1)
    try:
        from vllm import EngineArgs, __version__
    except ImportError:
        return ""
    known = list(EngineArgs.__dataclass_fields__)
    strange = [name for name in options if name not in known]
    if not strange:
        return ""
    near = difflib.get_close_matches(strange[0], known, n=1)
    return f"vLLM {__version__} has no option {strange[0]!r}{f'; did you mean {near[0]}?' if near else ''}"


def require_known_options(options: Mapping[str, object]) -> None:
    """Raises ValueError with the message of `unknown_option`, if there is one."""
    told = unknown_option(options)
    if told:
        raise ValueError(f"engine.options: {told}")


def engine_flags(options: Mapping[str, object]) -> list[str]:
    """Returns the options in `engine.options` as flags of `vllm serve`."""
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [f"--{flag}", *map(str, value)]
        elif value is not None:
            flags += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return flags


def set_vllm_environment(kv_cache_gib: float) -> None:
    """Sets vLLM's environment variables: the engine runs in this process instead of a second one, sends no
    usage report, and does not reserve half the memory for its KV cache on CPU."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # vLLM 0.32 sets this only in its own commands
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    os.environ.update(quiet(kv_cache_gib))


def server_environment(kv_cache_gib: float) -> dict[str, str]:
    """Returns the environment of a vLLM server, which has its own processes: this process's environment
    without the settings of our process group.

    The server uses this process's GPUs (CUDA_VISIBLE_DEVICES is passed on). torch.distributed's variables
    would make it wait for other ranks.
    """
    ours = ("VLLM_ENABLE_V1_MULTIPROCESSING", *RANK_VARIABLES)
    passed_on = {name: value for name, value in child_environment().items() if name not in ours}
    # A server's engine is a separate process anyway; on CPU this saves an additional worker process and ten
    # seconds of imports.
    lean = {} if num_gpus() else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return passed_on | quiet(kv_cache_gib) | lean | {"VLLM_LOGGING_LEVEL": "INFO"}


def quiet(kv_cache_gib: float) -> dict[str, str]:
    return {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(kv_cache_gib))),
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    }


def returns_routing() -> bool:
    """Returns whether vLLM can report the experts of each token on this machine's GPU, for models that
    `experts.replayed` accepts.

    vLLM 0.32 reports none. On Blackwell, fused kernels choose the experts and vLLM returns zeros
    (vllm#44116).
    """
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() < (10, 0) and is_release("0.24.")
