"""The kernels of token log-probs beside the same in fp64 on the host."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

from rlhf_core.models.logprobs.token_logprobs import (  # noqa: E402
    Truncation,
    _differentiate_with_torch,
    _floors,
    _read_with_torch,
)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.9, 0), (1.0, 20), (0.8, 50), (0.999, 0), (1.0, 1)])
@pytest.mark.parametrize("columns", [97, 151936])
def test_truncated_distributions(columns: int, top_p: float, top_k: int) -> None:
    from rlhf_core.models.kernels.logprobs import differentiate, floors, read

    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(37, columns, generator=generator)
    targets = torch.randint(0, columns, (37,), generator=generator)
    scale = 1 / 0.7
    targets[:30] = logits[:30].argmax(-1)
    grads, entropy_grads = torch.randn(2, 37, generator=generator)
    least = _floors(logits, targets, scale, Truncation(top_p, top_k))
    got = floors(logits.cuda(), targets.cuda(), scale, top_p, top_k).cpu()
    assert least is not None
    kept, found_kept = ((logits * scale >= of[:, None]).sum(-1) for of in (least, got))
    # sums of 150,000 probabilities differ in their last digits
    assert ((kept - found_kept).abs() <= 1 + 0.01 * kept).all()
    # From here on with the kernel's own floors: a token at the floor is kept or not by its last bit.
    expected = _read_with_torch(logits, targets, scale, True, got)
    found = read(logits.cuda(), targets.cuda(), scale, True, got.cuda())
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), wanted, rtol=1e-4, atol=1e-4)
    wanted = _differentiate_with_torch(logits, targets, *expected[1:], grads, entropy_grads, scale, got)
    mine = differentiate(
        logits.cuda(), targets.cuda(), *found[1:], grads.cuda(), entropy_grads.cuda(), scale, got.cuda()
    )
    torch.testing.assert_close(mine.cpu(), wanted, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [97, 4096, 151936])
@pytest.mark.parametrize("scale", [1.0, 1 / 0.7])
def test_logprobs_entropies_and_gradients(dtype: torch.dtype, columns: int, scale: float) -> None:
    from rlhf_core.models.kernels.logprobs import differentiate, read

    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(37, columns, generator=generator)).to(dtype)
    targets = torch.randint(0, columns, (37,), generator=generator)
    logits[:9].scatter_(1, targets[:9, None], 30.0)  # likely tokens
    grads, entropy_grads = torch.randn(2, 37, generator=generator)
    exact = logits.double()
    expected = _read_with_torch(exact, targets, scale, True)
    found = read(logits.cuda(), targets.cuda(), scale, True)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got.cpu(), wanted.float(), rtol=1e-5, atol=2e-5)
    for more in (None, entropy_grads):
        wanted = _differentiate_with_torch(exact, targets, *expected[1:], grads, more, scale)
        on_gpu = None if more is None else more.cuda()
        got = differentiate(logits.cuda(), targets.cuda(), *found[1:], grads.cuda(), on_gpu, scale)
        assert got.dtype == dtype
        torch.testing.assert_close(
            got.cpu().double(),
            wanted.double(),
            rtol=2**-7 if dtype == torch.bfloat16 else 1e-3,
            atol=1e-5 * scale,
        )


@pytest.mark.parametrize("columns", [48, 1536, 8960, 28672])
def test_rows_in_fp8(columns: int) -> None:
    """Rows that are part of a wider matrix, one of them 0; some numbers are between two of FP8, to within the
    last digit of fp32."""
    from rlhf_core.models.kernels.float8 import FP8, rounded_rows
    from rlhf_core.models.kernels.round_rows import round_rows, transpose

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(129, columns + 3, generator=generator).to(torch.bfloat16)[:, :columns]
    rows[3] = 0
    rows[5, 7] = float("nan")
    rows[6, 9] = float("inf")
    for factors in (None, torch.rand(columns, generator=generator)):
        expected, wanted = rounded_rows(rows, factors)
        found, scales = round_rows(rows.cuda(), None if factors is None else factors.cuda(), FP8)
        torch.testing.assert_close(scales.cpu(), wanted, rtol=1e-6, atol=1e-37, equal_nan=True)
        usual = [row for row in range(129) if row not in (5, 6)]
        torch.testing.assert_close(found.cpu().float()[usual], expected.float()[usual], rtol=0.13, atol=2**-9)
        assert (found.cpu().float() != expected.float())[usual].float().mean() < 2e-3
        assert torch.equal(transpose(found).view(torch.uint8), found.view(torch.uint8).t())


def test_products_in_fp8() -> None:
    from rlhf_core.models.kernels.float8 import FP8, multiply

    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, 1536, generator=generator).to(FP8) for size in (997, 512))
    scales = torch.rand(997, generator=generator), torch.rand(512, generator=generator)
    expected = (left.double() * scales[0][:, None]) @ (right.double() * scales[1][:, None]).t()
    found = multiply(left.cuda(), scales[0].cuda(), right.cuda(), scales[1].cuda(), torch.bfloat16)
    error = (found.cpu().double() - expected).norm() / expected.norm()
    assert error < 4e-3, "bf16 rounds by 2^-9 of a number at most; sums of the GPU have 14 bits"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_a_head_in_fp32(dtype: torch.dtype, cap: float | None) -> None:
    """The matrix units add products of 16-bit numbers in fp32."""
    from rlhf_core.models.logprobs.token_logprobs import token_logprobs

    torch.manual_seed(0)
    head = torch.nn.Linear(1024, 151936, bias=False)
    torch.nn.init.normal_(head.weight, std=0.15)
    head = head.to("cuda", dtype)
    hidden = torch.randn(64, 1024).to("cuda", dtype).requires_grad_()
    targets = torch.randint(151936, (64,)).cuda()
    exact = hidden.double() @ head.weight.double().t()
    exact = exact if cap is None else cap * torch.tanh(exact / cap)
    expected = exact.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    plain, found = (
        token_logprobs(head, hidden, targets, 1.0, "no", True, cap, fp32=on)[0] for on in (False, True)
    )
    torch.testing.assert_close(found, expected.float(), atol=1e-4, rtol=1e-5)
    assert (plain - expected).abs().max() > 20 * (found - expected).abs().max()
    gradient, wanted = (torch.autograd.grad(each.sum(), hidden)[0].double() for each in (found, expected))
    assert (gradient - wanted).norm() < 2 * torch.finfo(dtype).eps * wanted.norm()
