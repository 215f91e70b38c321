"""Writes checkpoints of trained models or adapters: safetensors, config, tokenizer."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.chat import Renderer
from rlhf_core.hub.ids import snapshot_of_hub
from rlhf_core.hub.vocabulary import tokenizer_place
from rlhf_core.models.load import load_policy
from rlhf_core.models.lora import ADAPTER, ADAPTER_WEIGHTS, has_head
from rlhf_core.models.weights import checkpoint_weights
from rlhf_core.models.wrapper import save_whole


def save_model(
    model: PreTrainedModel, state: dict[str, Tensor], tokenizer_source: str, folder: Path, trust_remote_code: bool = False
) -> None:
    """Writes safetensors, config, generation config and tokenizer files to `folder`. `state`: `checkpoint_weights`, on CPU."""
    folder.mkdir(parents=True, exist_ok=True)
    if whole := getattr(model, "whole", None):
        save_whole(model, state, whole, folder)
    else:
        config = copy.deepcopy(model.config)
        config.architectures, config.dtype = [type(model).__name__], model.dtype
        if hasattr(config, "quantization_config"):  # the written weights are not quantised
            del config.quantization_config
        config.save_pretrained(folder)
        save_torch_state_dict(state, folder)
    tokenizer = save_tokenizer(tokenizer_source, folder, trust_remote_code)
    if model.can_generate():
        with_stop_tokens(model.generation_config, tokenizer).save_pretrained(folder)


def with_stop_tokens(generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Adds the chat template's end-of-turn token to the stop tokens: the generation config of a base model names another token, and samples
    of the trained chat model would never stop."""
    try:
        ends = Renderer(tokenizer, "chat").stop_token_ids
    except ValueError:  # no chat template
        return generation
    named = generation.eos_token_id
    there = [] if named is None else [named] if isinstance(named, int) else list(named)
    missing = [token for token in ends if token not in there]
    if not missing:
        return generation
    changed = copy.deepcopy(generation)
    changed.eos_token_id = [*there, *missing] if len(there) + len(missing) > 1 else missing[0]
    return changed


def save_adapter(model: PreTrainedModel, state: dict[str, Tensor], base: str, folder: Path) -> None:
    """Writes the adapter alone, as peft reads it: its weights (`trained_weights`) and a config that names `base`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.copy(model.peft_config[ADAPTER])
    # A base in the Hub's cache is named by its repository, not by a folder of this machine.
    config.base_model_name_or_path, config.revision = snapshot_of_hub(base) or (base, None)
    config.inference_mode = True
    config.modules_to_save = ["score"] if has_head(model) else None
    config.save_pretrained(folder)
    save_file(state, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def save_tokenizer(source: str, folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_place(source), trust_remote_code=trust_remote_code)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_merged(adapter: str, folder: Path, dtype: str, trust_remote_code: bool = False) -> None:
    """Writes the base with the adapter of folder `adapter` merged into it."""
    model = load_policy(adapter, dtype, trust_remote_code).model
    weights = checkpoint_weights(model, lambda parameters: nullcontext())
    save_model(model, {name: weight.clone() for name, weight in weights}, adapter, folder, trust_remote_code)
