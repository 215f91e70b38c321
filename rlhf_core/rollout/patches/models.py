"""Changes what vLLM reads and runs of a model. Everything here is for the releases in `patches.engine.MADE_FOR`, or for those it names.

- `complete_configs`: configs of Ministral 3 and Gemma 4 mean to vLLM what they mean to transformers.
- `find_gpt_oss_experts`: gpt-oss in bf16 is loaded; vLLM 0.24 looks for its experts under names that they had before.
- `read_language_models`: of a multimodal checkpoint the language model's weights are read; each weight that is read is progress.
- `run_qwen2_by_the_second_runner`: Qwen2 is run as Llama and Qwen3 are, with less Python work for each step.
- `rotate_separate_heads`: on CPU rotary embeddings of MLA and LFM2 are computed in PyTorch; vLLM computes them wrongly.
- `forget_packed_experts`: on CPU new weights of experts replace the old ones.
- `returns_routing`: whether vLLM returns the experts of each token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_core.models.wrapper import stored_names, text_names
from rlhf_core.rollout.patches.engine import applies
from rlhf_core.system import progress

WITH_ROUTING = ("0.24.",)


def patch_models() -> None:
    """Applies what concerns all engines, before one starts."""
    read_language_models()
    complete_configs()
    find_gpt_oss_experts()
    rotate_separate_heads()
    run_qwen2_by_the_second_runner()


def read_language_models() -> None:
    """Makes vLLM read of a multimodal checkpoint the language model's weights under the names of its own class (`text_names`). Each weight
    that is read is progress of this process."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    read = DefaultModelLoader.get_all_weights
    if not applies() or read.__name__ == "of_language_model":
        return

    def of_language_model(self: Any, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        folder = Path(model_config.model)
        text = model_config.hf_config is model_config.hf_text_config
        names = text_names(stored_names(folder)) if text and folder.is_dir() else None
        for name, weight in read(self, model_config, model):
            progress.made()
            if names is None or name in names:
                yield name if names is None else names[name], weight

    DefaultModelLoader.get_all_weights = of_language_model


def complete_configs() -> None:
    """Makes vLLM read configs with `completed`."""
    from vllm.config import model

    read = model.get_config
    if not applies() or read.__name__ == "get_completed":
        return

    def get_completed(*arguments: Any, **options: Any) -> Any:
        config = read(*arguments, **options)
        completed(config.get_text_config())
        return config

    model.get_config = get_completed


def completed(config: Any) -> None:
    """Writes into a language model's config what vLLM reads in other places than transformers.

    YaRN's attention factor, which vLLM 0.24 computes without `mscale_all_dim`; the scale of queries by position (Ministral 3).
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding

    if applies(("0.24.",)):
        with_earlier_names(config)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn" and "mscale_all_dim" not in inspect.signature(YaRNScalingRotaryEmbedding).parameters:
        factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")[1]
        rope |= {"apply_yarn_scaling": False, "attn_factor": factor}
    if config.model_type == "ministral3" and (beta := rope.get("llama_4_scaling_beta")) is not None:
        config.llama_4_scaling = {"original_max_position_embeddings": rope["original_max_position_embeddings"], "beta": beta}


def with_earlier_names(config: Any) -> None:
    """Writes into a config of transformers 5.17 or later what vLLM 0.24 reads: how earlier ones said what differs between layers."""
    if config.model_type == "gemma4_text":
        full = config.per_layer_config[config.layer_types.index("full_attention")]
        config.allow_global_per_layer_attribute_access = True
        config.global_head_dim, config.num_global_key_value_heads = full.head_dim, full.num_key_value_heads
    elif config.model_type == "olmo3" and "full_attention" in config.rope_parameters:
        config.rope_parameters = dict(config.rope_parameters["full_attention"])
    elif config.model_type == "granitemoehybrid":
        earlier = {"linear_attention": "mamba", "full_attention": "attention"}
        config.layer_types = [earlier.get(kind, kind) for kind in config.layer_types]


def find_gpt_oss_experts() -> None:
    """Makes vLLM 0.24 load gpt-oss's experts in bf16 (vllm#41184 moved its parameters)."""
    if not applies(("0.24.",)):
        return
    from vllm.model_executor.models.gpt_oss import GptOssModel

    load = GptOssModel._load_weights_other
    if load.__name__ == "load_moved":
        return

    def load_moved(self: Any, *arguments: Any) -> Any:
        *before, weights, stacked = arguments
        moved = ((name.replace(".mlp.experts.", ".mlp.experts.routed_experts."), weight) for name, weight in weights)
        return load(self, *before, moved, stacked)

    GptOssModel._load_weights_other = load_moved


def run_qwen2_by_the_second_runner() -> None:
    """Makes vLLM 0.24 run Qwen2 by its second model runner where that has all that is asked for. vLLM does so by default for Llama and
    Qwen3, which have the same layers but for biases. VLLM_USE_V2_MODEL_RUNNER=0 still chooses the first one. All processes of an engine
    have to choose the same."""
    from vllm.config import vllm

    if applies(("0.24.",)):
        vllm.DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES |= {"Qwen2ForCausalLM"}


def rotate_separate_heads() -> None:
    """Makes rotary embeddings on a CPU compute in PyTorch where heads are a dimension of their own (multi-head latent attention, LFM2):
    vLLM's kernel takes (tokens, heads x size) and computes others wrongly. Call it before the engine starts."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    own = RotaryEmbedding.forward_cpu
    if not applies() or own.__name__ == "of_separate_heads":
        return

    def of_separate_heads(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        return (own if query.dim() == 2 else RotaryEmbedding.forward_native)(self, positions, query, key)

    RotaryEmbedding.forward_cpu = of_separate_heads


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Drops the kernels of a model's experts. On CPU vLLM packs experts when it makes their kernel: without one the next load packs the new
    weights. Raises RuntimeError for experts on another release, which may keep the old ones."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is None:
            continue
        if not applies():
            raise RuntimeError("this vLLM may keep the old weights of experts on a CPU: install the version that the requirements name")
        method.moe_kernel = None


def returns_routing() -> bool:
    """Returns whether vLLM returns the experts of each token on this machine's GPU, for models that `experts.replayed` names.

    Blackwell's fused kernels choose experts themselves, and vLLM returns zeros (vllm#44116).
    """
    return torch.cuda.is_available() and torch.cuda.get_device_capability() < (10, 0) and applies(WITH_ROUTING)
