from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import find_packed_sequence_indices

from rlhf_core.data.documents import Document
from rlhf_core.objectives.collate import collate, rounded

PAD = 99
A = Document([1, 2, 3], [False, True, True])
B = Document([4], [True])
C = Document([5, 6], [False, True])


def test_two_packed_rows_by_hand() -> None:
    batch = collate([[A, B], [C]], PAD)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, *[PAD] * 4], [5, 6, *[PAD] * 6]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert batch.documents.tolist() == [[0, 0, 0, 1, -1, -1, -1, -1], [2, 2, -1, -1, -1, -1, -1, -1]]
    assert batch.mask.int().tolist() == [[0, 1, 1, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert (batch.tokens.dtype, batch.mask.dtype) == (torch.int64, torch.bool)


@pytest.mark.parametrize(
    ("length", "width"), [(1, 8), (3, 8), (8, 8), (9, 16), (513, 528), (16_100, 16_128), (16_384, 16_384)]
)
def test_width_is_rounded_up(length: int, width: int) -> None:
    assert collate([[Document([1] * length, [True] * length)]], PAD).tokens.shape == (1, width)


def test_sizes_are_few_and_little_is_added() -> None:
    lengths = range(1, 40_000)
    assert all(length <= rounded(length) <= max(length + 7, length * 33 / 32) for length in lengths)
    assert len({rounded(length) for length in lengths if length > 4096}) < 130
    assert rounded(0) == 0


def test_transformers_reads_the_same_document_borders() -> None:
    # B and C: a document of one token, and a row that begins with one, are where a border is easily lost.
    batch = collate([[A, B, C], [B, A], [C]], PAD)
    packed = find_packed_sequence_indices(batch.positions)
    assert packed is not None
    real = batch.documents >= 0
    same_in_transformers = packed[:, :, None] == packed[:, None, :]
    same_here = batch.documents[:, :, None] == batch.documents[:, None, :]
    both_real = real[:, :, None] & real[:, None, :]
    assert torch.equal(same_in_transformers[both_real], same_here[both_real])
    assert not (same_in_transformers & (real[:, :, None] != real[:, None, :])).any(), (
        "a pad attends to a document, or the reverse"
    )


def test_nothing_to_collate_is_refused() -> None:
    for rows in ([], [[Document([], [])]]):
        with pytest.raises(ValueError, match="at least one"):
            collate(rows, PAD)
