"""Resume states of what is trained on a GPU: copied to pinned memory, written while the next steps change
it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_core.training import state_writer
from rlhf_core.training.state_files import KINDS, WeightPart, read_parts
from rlhf_core.training.state_writer import StateWriter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
SIZE = 5_000_000  # elements of a weight, more than a chunk


def test_a_state_is_that_of_the_moment_at_which_it_was_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_writer, "CHUNK", 2**22)
    torch.manual_seed(0)
    trained = [
        WeightPart(name, 0, {kind: torch.randn(SIZE, device="cuda") for kind in KINDS}) for name in ("a", "b")
    ]
    writer = StateWriter(0, 1)
    for step in range(3):  # the second and the third one use the memory of the first
        expected = [{kind: tensor.cpu() for kind, tensor in part.tensors.items()} for part in trained]
        writer.start(tmp_path, step, trained)
        assert all(chunk.is_pinned() for chunk in writer._chunks)
        for part in trained:
            for tensor in part.tensors.values():
                tensor.mul_(1.5).add_(step)
        writer.finish()
        found = [
            WeightPart(name, 0, {kind: torch.zeros(SIZE, device="cuda") for kind in KINDS})
            for name in ("a", "b")
        ]
        read_parts(tmp_path, found, ["a", "b"])
        for part, wanted in zip(found, expected, strict=True):
            assert all(torch.equal(part.tensors[kind].cpu(), wanted[kind]) for kind in KINDS)
    assert len(writer._chunks) == -(-2 * 3 * SIZE // 2**22), "no memory is taken twice"
