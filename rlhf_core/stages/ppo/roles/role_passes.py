"""Arranges documents into passes of a role's model, and reads each document's results from a pass. The role's
ranks share the passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rlhf_core.config.training.optimiser_fields import ImageEncoder
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.documents import Document
from rlhf_core.data.packing import Passes
from rlhf_core.models.kernels.attention import can_share, row_width
from rlhf_core.models.logprobs.teacher_kl import TopTokens
from rlhf_core.models.picture_reading import reads_pictures, require_images
from rlhf_core.models.policy import Policy, Scorer
from rlhf_core.objectives.collate import Batch, collate, sent
from rlhf_core.objectives.picture_reader import PictureReader
from rlhf_core.stages.ppo.rollout_records import Experience
from rlhf_core.system import progress
from rlhf_core.training.engine import Engine
from rlhf_core.training.train_loop import Holder, passes_of_rank, replicas

Scored = list[tuple[int, np.ndarray]]  # (index of the document, its values)


class Read(NamedTuple):
    """Holds the values (B, T, ...) of a pass, possibly on a GPU, with the document indices `part` and the
    documents in `rows`. `real` is False on padding."""

    part: list[int]
    rows: list[list[Document]]
    real: np.ndarray
    values: Tensor


class ModelHolder(Holder, Protocol):
    """Defines the common attributes of an engine and a read-only model."""

    @property
    def module(self) -> Any: ...

    @property
    def device(self) -> torch.device: ...


class ModelSpec(NamedTuple):
    """Specifies the model that a role loads, the number of documents or tokens per scoring pass, and the
    number of ranks that compute the model together.

    Also says whether a model that is not trained multiplies in FP8, whether a reference computes its logits
    in fp32, and whether documents may have images.
    """

    path: str
    dtype: str
    pad_token_id: int
    micro_batch_size: int
    trust_remote_code: bool
    micro_tokens: int | None = None
    sharing: int = 1
    float8: bool = False
    fp32_head: bool = False
    pictures: bool = False


def read_pictures(module: Policy | Scorer, model: ModelSpec, image_encoder: ImageEncoder = "frozen") -> None:
    """Loads the image encoder of a model's checkpoint if the documents may have images. `image_encoder` says
    which of its parts are trained. Raises ValueError if a part is trained although no document has images."""
    require_images(image_encoder, model.pictures)
    if model.pictures:
        tokenizer = load_tokenizer(model.path, model.trust_remote_code)
        reads_pictures(module, model.path, tokenizer, model.dtype, model.sharing, image_encoder)


def score_share(
    holder: ModelHolder, documents: Sequence[Document], model: ModelSpec, forward: Callable[[Batch], Tensor]
) -> Scored:
    """Scores this rank's share of the documents, grouped by similar length. `forward` returns (B, T, ...)."""
    passes = passes_of(holder, model.micro_batch_size, model.micro_tokens)
    read: list[Read] = []
    parts = parts_of(documents, passes)
    mine = passes_of_rank(len(parts), holder)
    reader = reader_of(holder)
    for number, own in enumerate(mine):
        if reader is not None:  # decodes the images of the next pass while this one is computed
            ahead = mine[number : number + 2]
            reader.request([documents[i] for near in ahead for i in parts[near.place]])
        rows = passes.rows_of([documents[i] for i in parts[own.place]])
        batch = collate(rows, model.pad_token_id, replays(holder), reader).to(holder.device)
        with torch.no_grad():
            values = forward(batch).float()
        progress.made()
        if own.counted:
            read.append(Read(parts[own.place], rows, batch.real, values))
    return arrays_of(read)  # the host waits for the GPU only here


def arrays_of(read: Sequence[Read]) -> Scored:
    """Returns the values of all passes for each document, with zeros for a shared prompt."""
    scored: Scored = []
    for part, rows, real, values in read:
        packed = [document for row in rows for document in row]
        ends = np.cumsum([len(document) - document.shared for document in packed])
        own = np.split(values.cpu().numpy()[real], ends[:-1])
        progress.made()
        scored += [
            (i, np.pad(array, [(document.shared, 0), *[(0, 0)] * (array.ndim - 1)]))
            for i, document, array in zip(part, packed, own, strict=True)
        ]
    return scored


def passes_of(holder: ModelHolder, rows: int, tokens: int | None) -> Passes:
    share = can_share(holder.module.model, holder.device) and not (
        isinstance(holder.module, Policy) and holder.module.balanced
    )
    leak = bool(holder.module.document_leak)
    return Passes(rows, tokens, replicas(holder), share, leak, row_width(holder.module.model))


def replays(holder: ModelHolder) -> bool:
    return isinstance(holder.module, Policy) and holder.module.replays


def reader_of(holder: ModelHolder) -> PictureReader | None:
    reader: PictureReader | None = holder.module.reader
    return reader


def parts_of(documents: Sequence[Document], passes: Passes) -> list[list[int]]:
    """Returns the document indices of each pass. Keeps answers to the same prompt together if the prompt can
    be shared; otherwise groups similar lengths, to minimise padding."""

    def row_tokens(group: list[int]) -> int:
        return sum(
            len(document) - document.shared for document in passes.branched([documents[i] for i in group])
        )

    return [
        [i for group in part for i in group] for part in passes.split(passes.together(documents), row_tokens)
    ]


def documents_of(items: Sequence[Experience]) -> Callable[[list[int]], list[Document]]:
    """Returns a function that maps a pass, given as positions in `items`, to its documents."""
    return lambda part: [items[i].document for i in part]


def collate_rows(
    items: Sequence[Experience], passes: Passes, pad_token_id: int, engine: Engine
) -> tuple[Batch, list[list[Document]]]:
    """Returns the batch and its rows of documents."""
    rows = passes.rows_of([item.document for item in items])
    batch = collate(rows, pad_token_id, replays(engine), reader_of(engine))
    return batch.to(engine.device), rows


def token_values(
    batch: Batch, rows: Sequence[Sequence[Document]], arrays: Sequence[np.ndarray | float | None]
) -> Tensor | None:
    """Arranges per-token arrays of the batch's documents like its tokens: (B, T), zeros on padding. Returns
    None if all arrays are None. A number instead of an array applies to all response tokens; the other tokens
    get 0."""
    known = [array for array in arrays if array is not None]
    if not known:
        return None
    documents = [document for row in rows for document in row]
    own = [
        on_tokens(array, document)[document.shared :]
        for array, document in zip(known, documents, strict=True)
    ]
    values = np.zeros(batch.tokens.shape, np.float32)
    values[batch.real] = np.concatenate(own)
    return sent(torch.from_numpy(values), batch.tokens.device)


def teacher_rows(items: Sequence[Experience], vocabulary: int, device: torch.device) -> TopTokens | None:
    """Returns the teacher's tokens of all answers, concatenated: one row for each token in the batch's mask.
    Returns None without a teacher. Raises ValueError for an id beyond the actor's `vocabulary`; this is
    padding of a teacher without a tokenizer."""
    teachers = [item.teacher for item in items if item.teacher is not None]
    if not teachers:
        return None
    lengths = [np.count_nonzero(item.document.mask_array) for item in items]
    assert [len(teacher.ids) for teacher in teachers] == lengths, "teachers are of other documents"
    ids = np.concatenate([teacher.ids for teacher in teachers]).astype(np.int64)
    highest = int(ids.max(initial=-1))
    if highest >= vocabulary:
        raise ValueError(
            f"token {highest} is among the teacher's most probable ones, and the actor has {vocabulary}"
            " tokens: name a teacher with the same tokenizer"
        )
    logprobs = np.concatenate([teacher.logprobs for teacher in teachers])
    return TopTokens(sent(torch.from_numpy(ids), device), sent(torch.from_numpy(logprobs), device))


def on_tokens(values: np.ndarray | float, document: Document) -> np.ndarray:
    """Returns an array unchanged, and expands a number to all response tokens of the document, (T,)."""
    return (
        values
        if isinstance(values, np.ndarray)
        else np.where(document.mask_array, np.float32(values), np.float32(0))
    )
