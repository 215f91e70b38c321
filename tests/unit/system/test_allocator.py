"""Segments that grow: who does without them, and what is shown to other processes lies outside. The allocator
itself needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlhf_core.system import gpu_allocator
from rlhf_core.system.gpu_allocator import (
    _apply,
    give_up_segments,
    move_to_pinned,
    pinned_bytes,
    shared_bytes,
    wants_segments,
)


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ("expandable_segments:True", None),
        ("expandable_segments:True,max_split_size_mb:64", "max_split_size_mb:64"),
        (
            "roundup_power2_divisions:[256:1,512:2], expandable_segments:True",
            "roundup_power2_divisions:[256:1,512:2]",
        ),
        ("", None),
    ],
)
def test_only_this_setting_is_given_up(settings: str, left: str | None) -> None:
    environment = dict(
        PYTORCH_CUDA_ALLOC_CONF=settings, PYTORCH_ALLOC_CONF=settings, OTHER="expandable_segments:True"
    )
    give_up_segments(environment)
    assert environment.get("PYTORCH_CUDA_ALLOC_CONF") == environment.get("PYTORCH_ALLOC_CONF") == left
    assert environment["OTHER"] == "expandable_segments:True"


def test_memory_to_be_shown_is_asked_for_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def empty(size: int, **_: object) -> SimpleNamespace:
        done.append(f"{size} bytes")
        if size < 0:
            raise RuntimeError("out of memory")
        return SimpleNamespace(size=size)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", done.append)
    card = torch.device("cuda")
    asked = "expandable_segments:True,max_split_size_mb:64"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert not wants_segments() and shared_bytes(3, card).size == 3
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", asked)
    assert wants_segments() and shared_bytes(5, card).size == 5
    with pytest.raises(RuntimeError, match="out of memory"):
        shared_bytes(-1, card)
    off = "max_split_size_mb:64,expandable_segments:False"
    assert done == ["3 bytes", off, "5 bytes", asked, off, "-1 bytes", asked]
    assert shared_bytes(7, torch.device("cpu")).size == 7 and done[-1] == "7 bytes" and len(done) == 8


def test_a_pytorch_without_the_private_function_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(torch.cuda.memory, "_set_allocator_settings")
    _apply("expandable_segments:False")
    assert "take expandable_segments out of PYTORCH_ALLOC_CONF" in capsys.readouterr().out


def test_a_pinned_block_takes_a_power_of_two() -> None:
    assert [pinned_bytes(size) for size in (0, 1, 2**30, 2**30 + 1, 3e9)] == [0, 1, 2**30, 2**31, 2**32]


def blocks(tensors: list[torch.Tensor]) -> list[int]:
    """Bytes of the blocks that these share."""
    found = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.numel()
    }
    return sorted(found.values(), reverse=True)


def test_little_more_is_pinned_than_tensors_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes as of a layer, in thousandths: each alone would take 1.4 times as much."""
    monkeypatch.setattr(gpu_allocator, "BLOCK", 2**22)
    shapes = [
        (152, 3584),
        *[(189, 358), (189, 358), (358, 189), (358, 358), (51, 358), (51, 358), (358, 358), (358,), (358,)]
        * 28,
    ]
    tensors = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
    held = sum(tensor.nbytes for tensor in tensors)
    assert sum(pinned_bytes(tensor.nbytes) for tensor in tensors) > 1.4 * held
    move_to_pinned(tensors)
    assert sum(blocks(tensors)) < 1.02 * held
    assert all(size == pinned_bytes(size) for size in blocks(tensors))


def test_tensors_share_blocks_and_keep_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_allocator, "BLOCK", 4096)
    shapes: list[tuple[int, ...]] = [(30, 10), (3,), (), (0, 4), (900, 3), (7, 7), (2048,)]
    dtypes = [
        torch.float32,
        torch.bool,
        torch.int64,
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
        torch.uint8,
    ]
    tensors = [(100 * torch.rand(shape)).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    tensors.append(torch.arange(12.0).view(3, 4).t())
    weight = torch.nn.Parameter(torch.ones(5, 5))
    before = [tensor.clone() for tensor in tensors]
    move_to_pinned([*tensors, weight])
    for tensor, held in zip(tensors, before, strict=True):
        assert torch.equal(tensor, held) and tensor.dtype == held.dtype
        assert not tensor.numel() or tensor.data_ptr() % 64 == 0
    assert blocks([*tensors, weight]) == [
        8192,
        2048,
    ], "the largest tensor's block, and a power of two of the rest"
    assert torch.equal(weight, torch.ones(5, 5)) and weight.requires_grad
