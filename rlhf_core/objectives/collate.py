"""Collates rows of documents into tensors. A padded row is a packed row with one document.

There is no attention mask: positions restart with each document, and the attention code finds document bounds
from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from rlhf_core.data.documents import Document
from rlhf_core.objectives.picture_reader import PictureReader


class DocumentSpan(NamedTuple):
    """A document with images: its row, its tokens `[start, stop)` in it, and how many images it has."""

    row: int
    start: int
    stop: int
    images: int


@dataclass(frozen=True)
class BatchPictures:
    """The images of a batch, in the order of its documents. places: bool, (B, T), True at the tokens whose
    embeddings image features replace. inputs: the image encoder's inputs by name, concatenated over the
    images."""

    places: torch.Tensor
    documents: tuple[DocumentSpan, ...]
    inputs: dict[str, torch.Tensor]

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> BatchPictures:
        """Returns the images with `change` applied to every tensor."""
        inputs = {name: change(tensor) for name, tensor in self.inputs.items()}
        return BatchPictures(change(self.places), self.documents, inputs)


@dataclass(frozen=True)
class Batch:
    """Tensors of shape (B, T).

    tokens: int64, the pad token on padding. positions: int64, 0, 1, ... in each sequence of each document;
    every pad has position 0, so that attention treats it as its own document. A document that continues a
    shared prompt starts at a later position, and attends to the first tokens of the last document that
    started at 0. documents: int64, index of the document in the flattened rows, -1 on pads. mask: bool, True
    for tokens in the loss. experts: int16, (B, T, layers, k), the experts that a sampler chose for each
    token, -1 if unknown; None if not requested or no document has them. pictures: None if no document has
    images. on_host: the same batch in host memory, if this one is on a GPU.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor
    mask: torch.Tensor
    experts: torch.Tensor | None = None
    pictures: BatchPictures | None = None
    on_host: Batch | None = None

    @property
    def host(self) -> Batch:
        """Returns the batch in host memory. Reading values from it does not make the host wait for the
        GPU."""
        return self.on_host or self

    @property
    def real(self) -> np.ndarray:
        """Returns a mask, (B, T) bool, that is False on padding. Selects elements with numpy, without
        PyTorch's threads (see `masked.next_token_pairs`)."""
        return np.asarray(self.host.documents.numpy() >= 0)

    def to(self, device: torch.device | str) -> Batch:
        """Returns a copy of the batch on a device. The copy to a GPU goes through pinned memory, without
        waiting."""
        device = torch.device(device)
        kept = self._each(torch.Tensor.pin_memory) if device.type == "cuda" else self
        return replace(kept._each(lambda tensor: sent(tensor, device)), on_host=kept)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        experts = None if self.experts is None else change(self.experts)
        pictures = None if self.pictures is None else self.pictures.each(change)
        return Batch(
            change(self.tokens),
            change(self.positions),
            change(self.documents),
            change(self.mask),
            experts,
            pictures,
        )


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a copy of `values` on `device`; the copy to a GPU goes through pinned memory, so that the host
    does not wait for the GPU's earlier work."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def rounded(count: int) -> int:
    """Returns `count` rounded up to one of a few sizes, all multiples of 8. Above 256 this adds at most about
    3 %.

    cuBLAS takes milliseconds to choose kernels for each new matrix size.
    """
    multiple = max(8, (1 << max(0, count - 1).bit_length()) // 64)
    return -(-count // multiple) * multiple


def collate(
    rows: Sequence[Sequence[Document]],
    pad_token_id: int,
    experts: bool = False,
    reader: PictureReader | None = None,
) -> Batch:
    """Returns one batch (B, T) from B rows of documents; T is the length of the longest row, `rounded`.

    With `experts` the batch contains the documents' experts. `reader` decodes the documents' images. Raises
    ValueError when there is no row or a document is empty, and when an image can no longer be read.
    """
    if not rows or any(len(document) == 0 for row in rows for document in row):
        raise ValueError("collate needs at least one row, and at least one token in each document")
    longest = max(sum(len(document) - document.shared for document in row) for row in rows)
    shape = (len(rows), rounded(longest))  # (B, T)
    tokens = torch.full(shape, pad_token_id, dtype=torch.int64)
    positions = torch.zeros(shape, dtype=torch.int64)
    documents = torch.full(shape, -1, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.bool)
    known = next(
        (document.experts for row in rows for document in row if experts and document.experts is not None),
        None,
    )
    chosen = None if known is None else torch.full((*shape, *known.shape[1:]), -1, dtype=torch.int16)
    index = 0
    for b, row in enumerate(rows):
        start = 0
        for document in row:
            here = slice(start, start + len(document) - document.shared)
            tokens.numpy()[b, here] = document.token_array[document.shared :]
            positions.numpy()[b, here] = document.positions[document.shared :]
            documents[b, here] = index
            mask.numpy()[b, here] = document.mask_array[document.shared :]
            if chosen is not None and document.experts is not None:
                chosen[b, start : here.stop - 1] = torch.from_numpy(
                    document.experts[document.shared :].astype(np.int16)
                )
            start = here.stop
            index = index + 1
    return Batch(tokens, positions, documents, mask, chosen, _pictures(rows, tokens, reader))


def _pictures(
    rows: Sequence[Sequence[Document]], tokens: torch.Tensor, reader: PictureReader | None
) -> BatchPictures | None:
    """Returns the images of the rows, or None if there are none."""
    if not any(document.pictures for row in rows for document in row):
        return None
    if reader is None:
        raise ValueError(
            "the data has images, and the model has no image encoder loaded: drop them, or use a stage that"
            " reads images"
        )
    places = torch.zeros_like(tokens, dtype=torch.bool)
    spans: list[DocumentSpan] = []
    sources = [picture.source for row in rows for document in row for picture in document.pictures]
    inputs: dict[str, list[torch.Tensor]] = {}
    for tensors in reader.read(sources):
        for name, values in tensors.items():
            inputs.setdefault(name, []).append(torch.from_numpy(np.ascontiguousarray(values)))
    for b, row in enumerate(rows):
        start = 0
        for document in row:
            for picture in document.pictures:
                here = slice(start + picture.start, start + picture.stop)
                places[b, here] = tokens[b, here] == reader.token_id
            stop = start + len(document) - document.shared
            if document.pictures:
                spans.append(DocumentSpan(b, start, stop, len(document.pictures)))
            start = stop
    return BatchPictures(places, tuple(spans), {name: torch.cat(parts) for name, parts in inputs.items()})
