"""Loads models from a folder or the Hub, wrapped so that a forward pass returns log-probs or scores (see
`policy.py`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_core.config import Lora
from rlhf_core.hub.model_config import num_experts
from rlhf_core.hub.model_files import layout_fault
from rlhf_core.hub.stored_head import has_trained_head, no_reward_head, several_labels
from rlhf_core.models.kernels.attention import (
    attention_for,
    set_attention,
)
from rlhf_core.models.kernels.liger import fuse
from rlhf_core.models.lora import add_lora, base_of, first_base, merge_adapter, merges_in_parts
from rlhf_core.models.multimodal.picture_language_models import load_causal
from rlhf_core.models.multimodal.wrapper import folder_of, is_wrapper, language_model, without_reports
from rlhf_core.models.policy import Policy, Scorer
from rlhf_core.models.precision import as_if_stored, unquantised
from rlhf_core.models.score_classes import add_score_class
from rlhf_core.models.weights.shards import Shards, as_they_come, gathered, require_data
from rlhf_core.models.weights.weight_reader import head_of_its_own


def load_policy(
    path: str,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    on_host: bool = False,
    shards: Shards | None = None,
) -> Policy:
    """Loads a causal language model from a folder or Hub id, safetensors only; an adapter is merged into its
    base. `on_host`: whether to load into host memory. Models that are offloaded later need this: on a GPU
    transformers allocates all weights as one block, which can be freed only as a whole."""
    return _policy(path, _options(dtype, trust_remote_code, on_host=on_host), shards)


def load_scorer(
    path: str,
    pad_token_id: int,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    on_host: bool = False,
    shards: Shards | None = None,
) -> Scorer:
    """Loads a reward model for scoring. Raises ValueError for a model without a trained head for one score.

    `AutoModelForSequenceClassification` reads the score at the last token that is not `pad_token_id`, so this
    id is stored in the config and must never end a document.
    """
    scorer = _load_scorer(
        path,
        pad_token_id,
        _options(dtype, trust_remote_code, on_host=on_host),
        _adapter_has_head(path),
        shards,
    )
    if not scorer.model.score.weight.any():
        raise ValueError(no_reward_head(path))
    return scorer


def trained_policy(
    path: str,
    dtype: str,
    trust_remote_code: bool,
    lora: Lora | None,
    seed: int,
    router_aux_coef: float = 0.0,
    shards: Shards | None = None,
) -> Policy:
    """Loads a policy to train. All weights are trained, or with `lora` only adapters, whose base weights have
    4 bits if configured. `shards` splits weights while they are read.

    Raises ValueError when experts are to be balanced and the model has none, and RuntimeError without the GPU
    or package for 4-bit weights.
    """
    policy = _policy(path, _options(dtype, trust_remote_code, lora), shards, balanced=router_aux_coef > 0)
    if policy.balanced and not num_experts(policy.model.config):
        raise ValueError(f"{path} has no experts to balance: leave router_aux_coef out")
    if lora is not None:
        add_lora(policy.model, lora, seed)
    return without_dropout(policy)


def trained_scorer(
    path: str,
    pad_token_id: int,
    dtype: str,
    trust_remote_code: bool,
    lora: Lora | None,
    seed: int,
    shards: Shards | None = None,
) -> Scorer:
    """Loads a reward model or critic to train, like `trained_policy`. Its head is always trained fully. A
    plain language model gets a head of zeros (see `Scorer.new_head`); a reward model keeps its head."""
    scorer = _load_scorer(path, pad_token_id, _options(dtype, trust_remote_code, lora), True, shards)
    if lora is not None:
        add_lora(scorer.model, lora, seed)
    return without_dropout(scorer)


Wrapped = TypeVar("Wrapped", bound=nn.Module)
# attributes that are read in each pass
NOISE = ("attention_dropout", "attn_dropout", "dropout", "input_jitter_noise", "jitter_noise")
# samples experts during training (SparseMixer-v2; Liu et al. 2024, arXiv:2409.12136)
DRAWS = "PhimoeTopKRouter"


def without_dropout(module: Wrapped) -> Wrapped:
    """Sets dropout, and noise before routers, to 0. Makes PhiMoE's routers, which sample experts in training,
    choose the best experts. Otherwise the loss would depend on the split of a step, and PPO's first ratio
    would not be 1. The config is unchanged."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in NOISE:
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
        if type(part).__name__ == DRAWS:
            vars(part)["train"] = partial(_stay_in_eval, part)
            part.eval()
    return module


def _stay_in_eval(part: nn.Module, mode: bool = True) -> nn.Module:
    """Keeps a module in evaluation mode; replaces its method `train`."""
    return nn.Module.train(part, False)


def _policy(path: str, options: dict[str, Any], shards: Shards | None, balanced: bool = False) -> Policy:
    model = _merged(load_causal, path, options, shards)
    head = model.get_output_embeddings()
    # `Policy` compares its outputs with the model's
    with gathered(shards, [] if head is None else list(head.parameters())):
        return Policy(model, balanced)


def _load_scorer(
    path: str, pad_token_id: int, options: dict[str, Any], new_head: bool, shards: Shards | None
) -> Scorer:
    """Loads a scorer. `new_head`: a model (or the base of an adapter) without a head gets one of zeros;
    otherwise it is rejected."""
    auto = AutoModelForSequenceClassification
    added = False

    def load(source: str, **options: Any) -> PreTrainedModel:
        nonlocal added
        if not new_head and Path(source).is_dir() and not has_trained_head(Path(source)):
            raise ValueError(no_reward_head(path))
        config = options.pop("config", None) or AutoConfig.from_pretrained(
            source, trust_remote_code=options["trust_remote_code"]
        )
        add_score_class(config)
        config.num_labels = 1
        config.pad_token_id = pad_token_id
        with without_reports() if "key_mapping" in options else nullcontext():
            model, info = auto.from_pretrained(
                source, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
        if "key_mapping" in options:  # it is saved as a text model, unless `keep_whole`
            model.names_in_whole = model.__dict__.pop("_weight_conversions")
        missing = sorted(name for name in info["missing_keys"] if not name.startswith("score."))
        if missing:
            raise ValueError(
                f"{path} has no weight {missing[0]} ({len(missing)} are missing): name a whole model"
            )
        mismatched = {name for name, *_ in info["mismatched_keys"]}
        if mismatched == {"score.weight"}:
            raise ValueError(several_labels(path) if new_head else no_reward_head(path))
        if mismatched:
            raise ValueError(
                f"{path}: {min(mismatched)} has another shape than its config.json says: name a whole model"
            )
        if any(name.startswith("score.") for name in info["missing_keys"]):
            if not new_head:
                raise ValueError(no_reward_head(path))
            nn.init.zeros_(model.score.weight)
            added = True
        return model

    model = _merged(load, path, options, shards)
    model.config.pad_token_id = pad_token_id
    if not added:
        keep_whole(model, path)
    scorer = Scorer(model)
    scorer.new_head = added and not _adapter_has_head(path)
    return scorer


def keep_whole(model: PreTrainedModel, path: str) -> None:
    """Adds the other parts of a multimodal checkpoint to the export of a scorer's model, which was loaded
    from `path`. Changes nothing for a text model, or for a policy, whose export always contains these
    parts."""
    names = getattr(model, "names_in_whole", None)
    if names is not None:
        model._weight_conversions = names
        model.whole = folder_of(first_base(path))


def _adapter_has_head(path: str) -> bool:
    """Returns whether the adapter at `path`, or an adapter on which it is based, contains the head."""
    base = base_of(path)
    return base is not None and (has_trained_head(Path(path)) or _adapter_has_head(base))


def _merged(
    load: Callable[..., PreTrainedModel], path: str, options: dict[str, Any], shards: Shards | None
) -> PreTrainedModel:
    """Loads the model at `path`, or the language model of a multimodal model; an adapter is merged into its
    base. Raises ValueError for the same reasons as `language_model`, and if it is unclear which weight files
    belong together."""
    base = base_of(path)
    if base is None:
        if Path(path).is_dir() and (fault := layout_fault(Path(path))) is not None:
            raise ValueError(f"{path} {fault}")
        config = AutoConfig.from_pretrained(path, trust_remote_code=options["trust_remote_code"])
        if is_wrapper(config):
            options = options | language_model(path, config)
        whole = unquantised(path, config, options.get("quantization_config"))
        options = options | whole
        options = {
            "attn_implementation": attention_for(options["dtype"], options.get("config", config))
        } | options
        if shards is not None:
            options = options | {"device_map": None}  # each weight goes to the GPU when it is cut
            config = options.get("config", config)
            # transformers compares the two weights, and cut ones look alike
            if config.tie_word_embeddings and head_of_its_own(folder_of(path)):
                config.tie_word_embeddings = False
                options = options | {"config": config}
        with as_they_come(shards):
            model = load(path, **options | _gpu_device_map(path, options))
        require_data(model, shards)
        if whole:
            as_if_stored(model, model.dtype if options["dtype"] == "auto" else options["dtype"])
        if "key_mapping" in options and model.can_generate():
            model.whole = folder_of(path)
        return fuse(set_attention(model))
    if "quantization_config" in options:
        raise ValueError(
            f"{path} is an adapter, which cannot be merged into 4-bit weights: start from a merged checkpoint"
        )
    shards = shards if merges_in_parts(path) else None
    return merge_adapter(_merged(load, base, options, shards), path, shards)


def _options(
    dtype: str, trust_remote_code: bool, lora: Lora | None = None, on_host: bool = False
) -> dict[str, Any]:
    options: dict[str, Any] = {
        "dtype": dtype if dtype == "auto" else getattr(torch, dtype),
        "trust_remote_code": trust_remote_code,
        "use_safetensors": True,
    }
    if on_host:
        options["device_map"] = None  # not the map from `_gpu_device_map`
    return options | (_nf4(dtype) if lora is not None and lora.quantize == "nf4" else {})


def _gpu_device_map(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns options that load models below a third of free GPU memory directly onto the GPU, without a copy
    in host memory per rank."""
    if (
        not torch.cuda.is_available()
        or "device_map" in options
        or importlib.util.find_spec("accelerate") is None
    ):
        return {}
    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) if Path(path).is_dir() else 0
    return (
        {"device_map": {"": torch.cuda.current_device()}}
        if 0 < size < torch.cuda.mem_get_info()[0] / 3
        else {}
    )


def _nf4(dtype: str) -> dict[str, Any]:
    """Returns options that load weights in 4-bit NormalFloat with double quantisation (Dettmers et al. 2023,
    section 3)."""
    if not torch.cuda.is_available():
        raise RuntimeError(
            "lora.quantize=nf4 (QLoRA) needs an NVIDIA GPU, and there is none: set lora.quantize to none"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RuntimeError(
            "lora.quantize=nf4 (QLoRA) needs the package bitsandbytes: install it, or set lora.quantize to"
            " none"
        )
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, dtype),
        llm_int8_skip_modules=["lm_head", "score"],
    )
    return {"quantization_config": quantization, "device_map": {"": torch.cuda.current_device()}}


def recompute(model: PreTrainedModel, share: float) -> None:
    """Recomputes the activations of the first `share` of the layers in the backward pass."""
    if not share:
        return
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers[round(share * len(layers)) :]:
        layer.gradient_checkpointing = False
