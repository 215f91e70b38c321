"""The choice of the attention kernel: the first that passes its self-test. Plain attention replaces each
kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf_core.models.kernels import attention, choose
from rlhf_core.models.kernels.choose import can_compute, kernel_for
from rlhf_core.models.kernels.self_test import MANY, AttentionKind, Heads
from rlhf_core.models.load_model import recompute
from rlhf_core.models.policy import Policy
from rlhf_core.objectives.collate import collate
from tests.unit.models.test_attention import plain_varlen
from tests.unit.models.test_models import FAMILIES, documents

CPU = torch.device("cpu")
HEADS = Heads(group=2, size=16)
SHARED_KINDS = [AttentionKind(HEADS, windowed, shared=True) for windowed in (False, True)]


class WrongGradient(torch.autograd.Function):
    """As FlashAttention-4 4.0.0b36 for some sizes of heads on Hopper: right values, wrong gradients."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.roll(1, 0)


def flash4(
    calls: list[str], change: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows
) -> Callable[..., Any]:
    def kernel(
        q: Any,
        k: Any,
        v: Any,
        *,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **named: Any,
    ) -> Any:
        calls.append("flash-attn-4")
        assert named["return_lse"], "as for a kernel with gradients"
        left, right = named["window_size"]
        # a window to the left alone is causal
        assert (named["causal"], right) == ((True, None) if left is None else (False, 0))
        longest = [int(edges.diff().max()) for edges in (cu_seqlens_q, cu_seqlens_k)]
        # kernels of one block are others
        assert max_seqlen_q >= max(longest[0], 256) and max_seqlen_k >= max(longest[1], 256)
        edges = (cu_seqlens_q, cu_seqlens_k, *longest)
        window = (-1 if left is None else left, 0)
        return (
            plain_varlen(
                change(q), k, v, *edges, scale=named["softmax_scale"], window_size=window, enable_gqa=True
            ),
            None,
        )

    return kernel


def flash2(calls: list[str]) -> Callable[..., Any]:
    def kernel(*rows: Any, softmax_scale: float, causal: bool, window_size: tuple[int, int]) -> torch.Tensor:
        calls.append("flash-attn")
        return plain_varlen(*rows, scale=softmax_scale, window_size=window_size, enable_gqa=True)

    return kernel


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def there(flash: Any, flash_4: Any, hopper: bool = True) -> None:
        monkeypatch.setattr(choose, "flash_kernel", lambda: flash)
        monkeypatch.setattr(choose, "flash4_kernel", lambda: flash_4)
        monkeypatch.setattr(choose, "_at_least_hopper", lambda device: hopper)

    return there


def attended(window: int, shared: bool) -> torch.Tensor:
    dice = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(count, heads, 16, generator=dice)
        for count, heads in ((5 if shared else 9, 4), (9, 2), (9, 2))
    )
    edges = [
        torch.tensor(counts, dtype=torch.int32) for counts in ([0, 1, 5] if shared else [0, 4, 9], [0, 4, 9])
    ]
    longest = [int(counts.diff().max()) for counts in edges]
    found = kernel_for(AttentionKind(HEADS, window >= 0, shared), CPU)(
        q, k, v, *edges, *longest, scale=0.25, window=window
    )
    expected = plain_varlen(q, k, v, *edges, *longest, scale=0.25, window_size=(window, 0), enable_gqa=True)
    torch.testing.assert_close(found, expected)
    return found


@pytest.mark.parametrize("window", [-1, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_flash_attention_4_is_preferred_from_hopper_on(
    window: int, shared: bool, install: Callable[..., None]
) -> None:
    calls: list[str] = []
    install(flash2(calls), flash4(calls))
    attended(window, shared)
    assert calls == ["flash-attn-4"] * 4, "tried three times, and called"
    attended(window, shared)
    assert calls == ["flash-attn-4"] * 5 and can_compute(SHARED_KINDS, CPU), "and not tried again"
    calls.clear()
    install(flash2(calls), flash4(calls), hopper=False)
    attended(window, shared)
    assert set(calls) == {"flash-attn"}


def test_a_kernel_with_wrong_gradients_is_rejected(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []
    install(flash2(calls), flash4(calls, WrongGradient.apply))
    attended(-1, False)
    assert calls[-1] == "flash-attn" and calls.count("flash-attn-4") == 1
    assert "flash-attn-4's attention for heads of 16 computes something else (off" in capsys.readouterr().out


def test_a_kernel_whose_last_bits_depend_on_gradients_is_rejected(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []
    install(flash2(calls), flash4(calls, lambda rows: rows * 1.004 if rows.requires_grad else rows))
    attended(-1, False)
    assert calls[-1] == "flash-attn" and calls.count("flash-attn-4") == 3
    assert "flash-attn-4's attention for heads of 16 gives other bits with" in capsys.readouterr().out


def test_a_kernel_that_fails_is_rejected(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def fails(rows: torch.Tensor) -> torch.Tensor:
        raise AttributeError("of another release of the compiler")

    install(flash2(calls), flash4(calls, fails))
    attended(3, True)
    assert calls[-1] == "flash-attn"
    assert (
        "for heads of 16 in windows after shared prompts does not run here (AttributeError: of another release"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("shared", [False, True])
def test_many_documents_have_a_self_test_of_their_own(shared: bool, install: Callable[..., None]) -> None:
    """FlashAttention-4 finds documents differently then."""
    sizes: list[int] = []

    def kernel(*rows: Any, softmax_scale: float, causal: bool, window_size: tuple[int, int]) -> torch.Tensor:
        sizes.append(len(rows[3]) - 1)
        return flash2([])(*rows, softmax_scale=softmax_scale, causal=causal, window_size=window_size) * (
            1 if sizes[-1] <= MANY else 2
        )

    install(kernel, None)
    kernel_for(AttentionKind(HEADS, shared=shared), CPU)
    assert sizes == [2]
    with pytest.raises(RuntimeError, match="of more than 256 documents"):
        kernel_for(AttentionKind(HEADS, shared=shared, many=True), CPU)
    assert sizes == [2, MANY + 1]


def test_a_self_test_in_a_recomputed_layer_changes_nothing(install: Callable[..., None]) -> None:
    """The first pass of SFT is a training pass."""
    gradients = []
    calls = list[str]()
    for share in (0, 1):
        install(flash2(calls), None)
        torch.manual_seed(0)
        policy = Policy(FAMILIES["llama"]().train())
        policy.model.set_attn_implementation(attention.VARLEN)
        recompute(policy.model, share)
        batch = collate([documents()], pad_token_id=0)
        policy(batch.tokens, batch.positions, batch.documents).logprobs.sum().backward()
        gradients.append([weight.grad for weight in policy.parameters() if weight.grad is not None])
    # a trial for each of the two stand-ins, two layers, and once more where they are recomputed
    assert len(calls) == (1 + 2) + (1 + 4)
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_out_of_memory_does_not_reject_a_kernel(install: Callable[..., None]) -> None:
    def full(rows: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    install(None, flash4([], full))
    with pytest.raises(torch.OutOfMemoryError):
        kernel_for(AttentionKind(HEADS), CPU)


def test_without_any_kernel_the_error_names_float32(install: Callable[..., None]) -> None:
    """PyTorch's own does not run on a CPU."""
    install(None, None)
    assert not can_compute(SHARED_KINDS, CPU)
    with pytest.raises(RuntimeError, match=r"no attention kernel here computes heads of 16 .* dtype float32"):
        kernel_for(AttentionKind(HEADS, windowed=True), CPU)
