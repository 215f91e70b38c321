"""Models from a folder or the Hub, wrapped so that a forward pass returns what the algorithms speak of.

`Policy` returns token log-probs and entropies, `Scorer` one number per position. Both take packed rows: position ids that
restart at 0 keep attention inside each document (transformers builds the block-diagonal mask, or runs varlen FlashAttention).
The wrapped transformers model is `.model`; checkpoints hold that model, never the wrapper.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rlhf_core.masked import shift_right

LOGITS_CHUNK = 2048  # positions whose logits exist at once: 2048 x 150k vocabulary x 4 bytes = 1.2 GB


class TokenLogprobs(NamedTuple):
    """`logprobs[t] = log pi(tokens[t] | tokens[<t])` and the entropy of that distribution, fp32, (B, T); 0 at t = 0."""

    logprobs: Tensor
    entropy: Tensor


class Policy(nn.Module):
    """A causal language model that returns log-probs; logits exist for one chunk of positions at a time."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, positions: Tensor, documents: Tensor, temperature: float = 1.0, entropy_gradient: bool = False
    ) -> TokenLogprobs:
        hidden = _hidden(self.model, tokens, positions)
        targets = torch.roll(tokens, -1, dims=1).flatten()  # position t speaks of token t + 1
        flat = hidden.flatten(0, 1)  # (B * T, H)
        head = self.model.get_output_embeddings()
        chunks = []
        for start in range(0, flat.shape[0], LOGITS_CHUNK):
            rows, wanted = flat[start : start + LOGITS_CHUNK], targets[start : start + LOGITS_CHUNK]
            if torch.is_grad_enabled() and flat.shape[0] > LOGITS_CHUNK:
                chunks.append(checkpoint(_chunk_logprobs, head, rows, wanted, temperature, entropy_gradient, use_reentrant=False))
            else:
                chunks.append(_chunk_logprobs(head, rows, wanted, temperature, entropy_gradient))
        logprobs, entropy = (torch.cat(parts).view(tokens.shape) for parts in zip(*chunks, strict=True))
        return TokenLogprobs(shift_right(logprobs, documents), shift_right(entropy, documents))


def _chunk_logprobs(head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """(N, H), (N,) -> log-probs and entropies (N,). The entropy carries a gradient where a loss speaks of it; else it is a metric."""
    logits = head(hidden).float()
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    log_z = torch.logsumexp(logits, -1)
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - log_z
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = log_z - (torch.softmax(logits, -1) * logits).sum(-1)
    return logprobs, entropy


class Scorer(nn.Module):
    """A sequence-classification model with one label, read at every position: reward model and critic.

    `forward` returns (B, T) fp32 where position t has seen tokens <= t. The reward of a document is the value at its last
    token; the critic's `V(tokens[<t])` is `shift_right` of this.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden = _hidden(self.model, tokens, positions)
        return self.model.score(hidden).squeeze(-1).float()


def _hidden(model: PreTrainedModel, tokens: Tensor, positions: Tensor) -> Tensor:
    """Last hidden states (B, T, H). Varlen FlashAttention reads document borders from positions only in a batch of one row."""
    varlen = model.config._attn_implementation == "flash_attention_2"
    shape = (1, -1) if varlen else tokens.shape
    backbone = model.base_model(input_ids=tokens.reshape(shape), position_ids=positions.reshape(shape), use_cache=False)
    return backbone.last_hidden_state.view(*tokens.shape, -1)


def load_policy(path: str, dtype: str = "float32", trust_remote_code: bool = False) -> Policy:
    """A causal language model from a folder or Hub id, safetensors only."""
    return Policy(AutoModelForCausalLM.from_pretrained(path, **_options(dtype, trust_remote_code)))


def load_scorer(path: str, pad_token_id: int, dtype: str = "float32", trust_remote_code: bool = False) -> Scorer:
    """A reward model or critic. From a plain language model the backbone is taken and the head starts at zero.

    `AutoModelForSequenceClassification` reads the score at the last token that is not `pad_token_id`, so that id is stored in
    the config and must be one that never ends a document.
    """
    model, info = AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=1, pad_token_id=pad_token_id, output_loading_info=True, **_options(dtype, trust_remote_code)
    )
    if any(name.startswith("score.") for name in info["missing_keys"]):
        nn.init.zeros_(model.score.weight)
    model.config.pad_token_id = pad_token_id
    return Scorer(model)


def _options(dtype: str, trust_remote_code: bool) -> dict[str, object]:
    attention = "flash_attention_2" if _has_flash_attention() and dtype == "bfloat16" else "sdpa"
    return {
        "dtype": getattr(torch, dtype),
        "attn_implementation": attention,
        "trust_remote_code": trust_remote_code,
        "use_safetensors": True,
    }


def _has_flash_attention() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        return False
    return True


def save_model(
    model: PreTrainedModel, state: dict[str, Tensor], tokenizer_source: str, folder: Path, trust_remote_code: bool = False
) -> None:
    """Writes safetensors, config, generation config and tokenizer files to `folder`. `state` holds all weights, on CPU."""
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, state_dict=state)
    AutoTokenizer.from_pretrained(tokenizer_source, trust_remote_code=trust_remote_code).save_pretrained(folder)
