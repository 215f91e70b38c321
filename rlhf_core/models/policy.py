"""Wraps models: `Policy` returns token log-probs and entropies, `Scorer` one number per position.

Both accept packed rows: restarting position ids keep attention inside each document and its shared prompt
(with a block-diagonal mask, or with a varlen kernel; see `kernels/attention.py`). With `sequence`, several
ranks compute a pass together (see `kernels/sequence_ranks.py`), and each gets the whole result. The wrapped
transformers model is `.model`; checkpoints hold that model, never the wrapper.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
)

from rlhf_core.hub.model_config import more_than_text
from rlhf_core.hub.vocabulary import known_rows
from rlhf_core.models.experts import Replay, balance_loss, replayed
from rlhf_core.models.kernels.attention import (
    PLAIN,
    VARLEN,
    document_bounds,
    is_stateful,
    takes_varlen,
)
from rlhf_core.models.kernels.sequence_ranks import ALONE, SequenceRanks
from rlhf_core.models.kernels.state_layers import document_numbers
from rlhf_core.models.logprobs.logit_scale import backbone_of, logit_cap, logit_scale
from rlhf_core.models.logprobs.teacher_kl import TopTokens
from rlhf_core.models.logprobs.token_logprobs import (
    WHOLE,
    Entropy,
    Truncation,
    replaced_forward,
    token_logprobs,
)
from rlhf_core.models.logprobs.top_logprobs import top_logprobs
from rlhf_core.models.multimodal.picture_language_models import with_bounds
from rlhf_core.models.multimodal.picture_tower import PictureTower
from rlhf_core.models.weights.trained_encoder import TrainedEncoder
from rlhf_core.objectives.collate import Batch, BatchPictures, rounded, sent
from rlhf_core.objectives.masked import next_token_pairs
from rlhf_core.objectives.picture_reader import PictureReader


class TokenLogprobs(NamedTuple):
    """`logprobs[t] = log pi(tokens[t] | tokens[<t])` and the entropy of that distribution, fp32, (B, T); 0 at
    t = 0 and outside the mask.

    `entropy` is 0 everywhere unless requested. `balance` is the experts' balance loss summed over documents,
    if `Policy.balanced`. `teacher_kl` (B, T): the KL to a teacher (see `teacher_kl.py`), nats, if one was
    given. `top` (2 k + 1, B, T): the most probable tokens and their log-probs (see `top_logprobs.py`), if
    requested.
    """

    logprobs: Tensor
    entropy: Tensor
    balance: Tensor | None = None
    teacher_kl: Tensor | None = None
    top: Tensor | None = None


class Policy(nn.Module):
    """A causal language model that returns log-probs. In training, logits are kept like other activations,
    except with checkpointing.

    Raises ValueError for a model that reads more than text, or whose logits are neither a multiple of its
    head's outputs nor a capped multiple.
    """

    # whether each document needs its own row (`document_leak`); None: not tested
    document_leak: bool | None = None
    sequence: SequenceRanks = ALONE  # the ranks that compute each pass together
    # the encoder of images, and how they are read; None: the model is given texts
    tower: PictureTower | None = None
    reader: PictureReader | None = None
    # distributions are over the first `known` rows of the vocabulary; None: all
    known: int | None = None
    fp32_head = False  # the head's product is computed in fp32 (`fp32_head.py`)

    def __init__(self, model: PreTrainedModel, balanced: bool = False):
        super().__init__()
        if model.config.get_text_config() is not model.config:
            raise ValueError(more_than_text(model.name_or_path, type(model).__name__))
        self.model = model
        self.image_encoder: TrainedEncoder | None = None  # the weights of `tower` that are trained
        self.balanced = balanced
        self.scale = logit_scale(model)
        self.cap = logit_cap(model)
        self._replay: Replay | None = None

    def replay_routing(self) -> None:
        """Makes forward passes route tokens by `experts`, in families whose routing can be replayed."""
        if replayed(self.model.config.to_dict()):
            self._replay = Replay(self.model)

    def leave_out_padding(self, path: str) -> None:
        """Restricts distributions to the tokens of the tokenizer at `path`, as in the engines' sampling: the
        vocabulary's padding holds no tokens."""
        self.known = known_rows(path, self.model.config.vocab_size)

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
        top: Truncation = WHOLE,
        pictures: BatchPictures | None = None,
        teacher: TopTokens | None = None,
        top_k: int = 0,
    ) -> TokenLogprobs:
        """Returns the log-probs of all tokens, or only of the tokens in `mask` (B, T) and 0 elsewhere, which
        saves the head's work on prompts.

        `positions` and `mask` may be in host memory (see `Batch.host`), so that the host does not wait for
        the GPU. After `replay_routing`, `experts` (B, T, layers, k) are the experts of each token. `top`
        truncates the distributions (see `token_logprobs`). `pictures`: read by `tower`. `teacher`: a row for
        each token in `mask`, in the order of the batch. `top_k`: how many of the most probable tokens to
        return, instead of entropies and without a gradient.
        """
        ranks = self.sequence
        # kept until the next pass: layers may be recomputed for the backward pass
        if self._replay is not None:
            self._replay.table = None if experts is None else ranks.own(experts.flatten(0, 1))
        hidden, router_logits = _hidden(self, tokens, positions, self.balanced, pictures)
        wanted = ranks.own_pairs(next_token_pairs(positions, mask), tokens.numel())
        count = wanted.shape[1]
        padded = F.pad(wanted, (0, rounded(count) - count))
        sources, places = sent(padded, tokens.device)
        flat = hidden[sources]
        targets = tokens.flatten()[places]
        keep = self.training and not self.model.is_gradient_checkpointing
        head = self.model.get_output_embeddings()
        scaled = temperature / self.scale
        if top_k:
            values = top_logprobs(head, flat, targets, scaled, top_k, self.cap, self.known, self.fp32_head)
        else:
            assert teacher is None or mask is not None, "its rows are the tokens in the mask"
            near = None if teacher is None or mask is None else teacher.at(masked_rows(mask, padded[1]))
            values = torch.stack(
                token_logprobs(
                    head,
                    flat,
                    targets,
                    scaled,
                    entropy,
                    keep,
                    self.cap,
                    top,
                    self.known,
                    self.fp32_head,
                    near,
                )
            )
        table = values.new_zeros(len(values), tokens.numel())
        table = table.index_copy(1, places[:count], values[:, :count])
        table = ranks.summed(table).view(-1, *tokens.shape)
        router_logits = tuple(ranks.whole(logits, tokens.numel()) for logits in router_logits)
        balance = (
            balance_loss(router_logits, documents, self.model.config.num_experts_per_tok)
            if self.balanced
            else None
        )
        if top_k:
            return TokenLogprobs(table[0], torch.zeros_like(table[0]), balance, top=table[1:])
        return TokenLogprobs(table[0], table[1], balance, None if teacher is None else table[2])


def masked_rows(mask: Tensor, places: Tensor) -> Tensor:
    """Returns an index (N,) for each of the flat `places` (N,): the index, among the tokens in `mask` (B, T),
    of the last such token at or before the place; 0 if there is none. Both arguments are in host memory."""
    before = np.cumsum(mask.numpy().ravel()) - 1
    return torch.from_numpy(before[places.numpy()].clip(0))


def masked_logprobs(
    policy: Callable[..., TokenLogprobs],
    batch: Batch,
    temperature: float = 1.0,
    entropy: Entropy = "no",
    top: Truncation = WHOLE,
    teacher: TopTokens | None = None,
    top_k: int = 0,
) -> TokenLogprobs:
    """Returns the result of `Policy.forward`, or of an engine around it, for the tokens of the batch's loss
    mask. The host does not wait for the GPU."""
    inputs: list[Any] = [
        batch.tokens,
        batch.host.positions,
        batch.documents,
        temperature,
        entropy,
        batch.host.mask,
        batch.experts,
        top,
    ]
    if teacher is not None or top_k:
        inputs += [batch.pictures, teacher, top_k]
    elif batch.pictures is not None:
        inputs.append(batch.pictures)
    return policy(*inputs)


class Scorer(nn.Module):
    """A sequence-classification model with one label and an output at every position: reward model and
    critic.

    `forward` returns (B, T) fp32, where position t depends on tokens <= t. The reward of a document is the
    value at its last token; the critic's `V(tokens[<t])` is `before` of these values. The head computes in
    fp32, because in bf16 a score of 8 has steps of 1/32.
    """

    document_leak: bool | None = None  # see `Policy.document_leak`
    new_head: bool = False  # the model had none and got one of zeros
    sequence: SequenceRanks = ALONE  # see `Policy.sequence`
    tower: PictureTower | None = None  # see `Policy.tower`
    reader: PictureReader | None = None

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.image_encoder: TrainedEncoder | None = None  # see `Policy.image_encoder`

    def forward(self, tokens: Tensor, positions: Tensor, pictures: BatchPictures | None = None) -> Tensor:
        hidden, _ = _hidden(self, tokens, positions, pictures=pictures)
        # through the module's call, in which ZeRO-3 gathers the head's weights
        with replaced_forward(self.model.score, partial(_scores, self.model.score)):
            scores = self.model.score(hidden).squeeze(-1)
        return self.sequence.whole(scores, tokens.numel()).unflatten(0, tokens.shape)


def token_scores(scorer: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Runs `Scorer.forward`, or an engine around it, on a batch. Returns (B, T) fp32. The host does not wait
    for the GPU."""
    inputs: list[Any] = [batch.tokens, batch.host.positions]
    if batch.pictures is not None:
        inputs.append(batch.pictures)
    return scorer(*inputs)


def _scores(head: nn.Module, hidden: Tensor) -> Tensor:
    weight = cast(Tensor, head.weight)
    bias = cast(Tensor | None, head.bias)
    return F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())


def _hidden(
    module: Policy | Scorer,
    tokens: Tensor,
    positions: Tensor,
    routed: bool = False,
    pictures: BatchPictures | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns the last hidden states (B * T, H) and, if `routed`, the router logits of each layer, (B * T,
    E), both for this rank's part of the tokens.

    Raises ValueError for packed rows of a model that carries state across their documents' borders.
    """
    model = module.model
    ranks = module.sequence
    end_to_end = takes_varlen(model) and not module.document_leak
    if (
        not end_to_end
        and is_stateful(model)
        and bool(((positions[:, 1:-1] == 0) & (positions[:, 2:] == 1)).any())
    ):
        raise ValueError(
            f"{type(model).__name__} has layers that carry state along a row, which holds several documents"
        )
    options: dict[str, Any] = {"output_router_logits": True} if routed else {}
    seen = None
    if pictures is None and module.tower is not None:
        seen = module.tower.unseen(tokens)
    if pictures is not None:
        assert module.tower is not None, "loaded with the data (models/picture_reading.py)"
        assert ranks.size == 1, "refused by the stage"
        seen = module.tower.seen(tokens, positions, pictures)
        tokens = seen.tokens
    if end_to_end:
        tokens = ranks.own(tokens.flatten())[None]
        positions = ranks.filled(positions.flatten())
        options |= document_bounds(positions, tokens.device)
        if is_stateful(model):
            options["seq_idx"] = sent(document_numbers(positions.cpu()), tokens.device)
        if "keys" in options and model.config._attn_implementation not in (VARLEN, PLAIN):
            raise ValueError(
                f"attention {model.config._attn_implementation} cannot go on from another document's prompt:"
                " repeat the prompt"
            )
        positions = ranks.own(positions)[None]
        options |= {"sequence": ranks} if ranks.size > 1 else {}
    assert end_to_end or ranks.size == 1, "made sure when the ranks were joined (models/sequence_split.py)"
    placed = sent(positions if seen is None else seen.positions_of(positions), tokens.device)
    with nullcontext() if seen is None else seen.embedded(model, tokens.shape):
        found = backbone_of(model)(
            input_ids=tokens,
            position_ids=with_bounds(model.config, placed),
            use_cache=False,
            **options if seen is None else options | seen.options(model, tokens, positions),
        )
    return found.last_hidden_state.flatten(0, 1), found.router_logits if routed else ()
