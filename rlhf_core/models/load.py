"""Models from a folder or the Hub, wrapped so that a forward pass returns what the algorithms speak of.

`Policy` returns token log-probs and entropies, `Scorer` one number per position. Both take packed rows: position ids that
restart keep attention inside each document, and the prompt it goes on from (a block-diagonal mask, or a varlen kernel: `attention`).
The wrapped transformers model is `.model`; checkpoints hold that model, never the wrapper.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig, PreTrainedModel

from rlhf_core.config import Lora
from rlhf_core.data.collate import Batch, rounded, sent
from rlhf_core.masked import spoken
from rlhf_core.models.attention import VARLEN, attention_for, borders, carries, settled, takes_borders
from rlhf_core.models.experts import balance_loss, num_experts
from rlhf_core.models.head import logit_scale
from rlhf_core.models.kernels import fuse
from rlhf_core.models.lora import add_lora, base_of, merge_adapter
from rlhf_core.models.routing import Replay, replayed
from rlhf_core.models.token_logprobs import Entropy, token_logprobs


class TokenLogprobs(NamedTuple):
    """`logprobs[t] = log pi(tokens[t] | tokens[<t])` and the entropy of that distribution, fp32, (B, T); 0 at t = 0 and off the mask.

    `entropy` is 0 everywhere unless it was asked for.
    `balance` is the sum over documents of the experts' balance loss, for a policy that was asked for it (`Policy.balanced`).
    """

    logprobs: Tensor
    entropy: Tensor
    balance: Tensor | None = None


class Policy(nn.Module):
    """A causal language model that returns log-probs. In training logits are kept as other activations are: not with checkpointing.

    Raises ValueError for a model whose logits are more than a multiple of its head's outputs, or that reads more than text.
    """

    def __init__(self, model: PreTrainedModel, balanced: bool = False):
        super().__init__()
        if model.config.get_text_config() is not model.config:
            raise ValueError(
                f"{model.name_or_path} is {type(model).__name__}, which reads more than text: name a text model, or a checkpoint of its "
                f"language part alone"
            )
        self.model, self.balanced, self.scale = model, balanced, logit_scale(model)
        self._replay: Replay | None = None

    def replay_routing(self) -> None:
        """From now on `experts` says where tokens go, of families whose routing can be replayed."""
        if replayed(self.model.config.to_dict()):
            self._replay = Replay(self.model)

    @property
    def replays(self) -> bool:
        return self._replay is not None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        documents: Tensor,
        temperature: float = 1.0,
        entropy: Entropy = "no",
        mask: Tensor | None = None,
        experts: Tensor | None = None,
    ) -> TokenLogprobs:
        """Of every token, or of those under `mask` (B, T) and 0 elsewhere: prompts then cost nothing at the head.

        `positions` and `mask` may stay in the host's memory (`Batch.host`): then nothing here waits for the card. After
        `replay_routing` `experts` (B, T, layers, k) says to which experts tokens go.
        """
        if self._replay is not None:  # until the next pass: layers may be computed again for the backward pass
            self._replay.table = None if experts is None else experts.flatten(0, 1)
        hidden, router_logits = _hidden(self.model, tokens, positions, self.balanced)
        wanted = spoken(positions, mask)
        count = wanted.shape[1]
        sources, places = sent(F.pad(wanted, (0, rounded(count) - count)), tokens.device)
        flat, targets = hidden.flatten(0, 1)[sources], tokens.flatten()[places]
        keep = self.training and not self.model.is_gradient_checkpointing
        values = torch.stack(token_logprobs(self.model.get_output_embeddings(), flat, targets, temperature / self.scale, entropy, keep))
        values = values.new_zeros(2, tokens.numel()).index_copy(1, places[:count], values[:, :count])
        logprobs, entropies = values.view(2, *tokens.shape)
        balance = balance_loss(router_logits, documents, self.model.config.num_experts_per_tok) if self.balanced else None
        return TokenLogprobs(logprobs, entropies, balance)


def spoken_logprobs(policy: Callable[..., TokenLogprobs], batch: Batch, temperature: float = 1.0, entropy: Entropy = "no") -> TokenLogprobs:
    """`Policy.forward` of a batch, or an engine's around it, for the tokens that the loss speaks of; the host waits for nothing."""
    return policy(batch.tokens, batch.host.positions, batch.documents, temperature, entropy, batch.host.mask, batch.experts)


class Scorer(nn.Module):
    """A sequence-classification model with one label, read at every position: reward model and critic.

    `forward` returns (B, T) fp32 where position t has seen tokens <= t. The reward of a document is the value at its last
    token; the critic's `V(tokens[<t])` is `before` of this.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden, _ = _hidden(self.model, tokens, positions)
        return self.model.score(hidden).squeeze(-1).float()


def _hidden(model: PreTrainedModel, tokens: Tensor, positions: Tensor, routed: bool = False) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Last hidden states (B, T, H), and if `routed` the router logits of each layer, (B * T, E).

    Raises ValueError for packed rows of a model that is more than attention (`attention.carries`).
    """
    end_to_end = takes_borders(model)
    if carries(model) and bool(((positions[:, 1:-1] == 0) & (positions[:, 2:] == 1)).any()):
        raise ValueError(
            f"{type(model).__name__} has layers that carry from one document of a row into the next: set packing: false, and leave out "
            f"micro_train_tokens and micro_rollout_tokens"
        )
    shape = (1, -1) if end_to_end else tokens.shape
    asked: dict[str, Any] = {"output_router_logits": True} if routed else {}
    if end_to_end:
        asked |= borders(positions, tokens.device)
        if "keys" in asked and model.config._attn_implementation != VARLEN:
            raise ValueError(f"attention {model.config._attn_implementation} cannot go on from another document's prompt: lay it again")
    positions = sent(positions, tokens.device)
    backbone = model.base_model(input_ids=tokens.reshape(shape), position_ids=positions.reshape(shape), use_cache=False, **asked)
    return backbone.last_hidden_state.view(*tokens.shape, -1), backbone.router_logits if routed else ()


def load_policy(path: str, dtype: str = "float32", trust_remote_code: bool = False, on_host: bool = False) -> Policy:
    """A causal language model from a folder or Hub id, safetensors only; an adapter is merged into the model it names. `on_host`: in host
    memory, even where it could go to the card, as a model should that is to leave it: transformers takes one block of the card for all
    weights, which stays taken as long as anything else has a place in it."""
    return Policy(_load(AutoModelForCausalLM, path, _options(dtype, trust_remote_code, on_host=on_host)))


def load_scorer(path: str, pad_token_id: int, dtype: str = "float32", trust_remote_code: bool = False, on_host: bool = False) -> Scorer:
    """A reward model or critic. From a plain language model the backbone is taken and the head starts at zero.

    `AutoModelForSequenceClassification` reads the score at the last token that is not `pad_token_id`, so that id is stored in
    the config and must be one that never ends a document.
    """
    return _load_scorer(path, pad_token_id, _options(dtype, trust_remote_code, on_host=on_host))


def trained_policy(path: str, dtype: str, trust_remote_code: bool, lora: Lora | None, seed: int, router_aux_coef: float = 0.0) -> Policy:
    """A policy to train: whole, or frozen with adapters, on 4-bit weights if `lora` says so.

    Raises ValueError when experts are to be balanced and the model has none, RuntimeError when 4-bit weights cannot be had here.
    """
    policy = Policy(_load(AutoModelForCausalLM, path, _options(dtype, trust_remote_code, lora)), balanced=router_aux_coef > 0)
    if policy.balanced and not num_experts(policy.model.config):
        raise ValueError(f"{path} has no experts to balance: leave router_aux_coef out")
    if lora is not None:
        add_lora(policy.model, lora, seed)
    return without_dropout(policy)


def trained_scorer(path: str, pad_token_id: int, dtype: str, trust_remote_code: bool, lora: Lora | None, seed: int) -> Scorer:
    """As `trained_policy`, for a reward model or critic; its head is trained whole."""
    scorer = _load_scorer(path, pad_token_id, _options(dtype, trust_remote_code, lora))
    if lora is not None:
        add_lora(scorer.model, lora, seed)
    return without_dropout(scorer)


Wrapped = TypeVar("Wrapped", bound=nn.Module)


def without_dropout(module: Wrapped) -> Wrapped:
    """With dropout the loss would depend on how a step is split, and PPO's first ratio would not be 1. The stored config keeps its own."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("attention_dropout", "dropout"):  # what attention hands to its kernel
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return module


def _load_scorer(path: str, pad_token_id: int, options: dict[str, Any]) -> Scorer:
    auto = AutoModelForSequenceClassification
    missing: set[str] = set()

    def load(source: str, **options: Any) -> PreTrainedModel:
        model, info = auto.from_pretrained(source, num_labels=1, pad_token_id=pad_token_id, output_loading_info=True, **options)
        missing.update(info["missing_keys"])
        if any(name.startswith("score.") for name in missing):
            nn.init.zeros_(model.score.weight)
        return model

    model = _merged(load, path, options)
    model.config.pad_token_id = pad_token_id
    return Scorer(model)


def _load(auto: Any, path: str, options: dict[str, Any]) -> PreTrainedModel:
    return _merged(auto.from_pretrained, path, options)


def _merged(load: Callable[..., PreTrainedModel], path: str, options: dict[str, Any]) -> PreTrainedModel:
    """The model at `path`, or the base of the adapter at `path` with that adapter merged into it."""
    base = base_of(path)
    if base is None:
        return fuse(settled(load(path, **options | _card(path, options))))
    if "quantization_config" in options:
        raise ValueError(f"{path} is an adapter, which cannot be merged into 4-bit weights: start from a merged checkpoint")
    return merge_adapter(_merged(load, base, options), path)


def _options(dtype: str, trust_remote_code: bool, lora: Lora | None = None, on_host: bool = False) -> dict[str, Any]:
    options: dict[str, Any] = {
        "dtype": dtype if dtype == "auto" else getattr(torch, dtype),
        "attn_implementation": attention_for(dtype),
        "trust_remote_code": trust_remote_code,
        "use_safetensors": True,
    }
    if on_host:
        options["device_map"] = None  # not `_card`'s
    return options | (_nf4(dtype) if lora is not None and lora.quantize == "nf4" else {})


def _card(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Files of a small enough model go straight to the card: nothing waits for host memory, of which each rank would take a copy."""
    if not torch.cuda.is_available() or "device_map" in options or importlib.util.find_spec("accelerate") is None:
        return {}
    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) if Path(path).is_dir() else 0
    return {"device_map": {"": torch.cuda.current_device()}} if 0 < size < torch.cuda.mem_get_info()[0] / 3 else {}


def _nf4(dtype: str) -> dict[str, Any]:
    """Weights in 4 bits: normal floats, the quantisation constants quantised too (Dettmers et al. 2023, section 3)."""
    if not torch.cuda.is_available():
        raise RuntimeError("lora.quantize=nf4 (QLoRA) needs an NVIDIA GPU, which is not here: set lora.quantize to none")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RuntimeError("lora.quantize=nf4 (QLoRA) needs the package bitsandbytes: install it, or set lora.quantize to none")
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, dtype),
        llm_int8_skip_modules=["lm_head", "score"],
    )
    return {"quantization_config": quantization, "device_map": {"": torch.cuda.current_device()}}
