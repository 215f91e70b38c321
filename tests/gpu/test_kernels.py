"""The kernels of token log-probs beside the same in fp64 on the host."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

from rlhf_core.models.token_logprobs import Truncation, _differentiate_with_torch, _floors, _read_with_torch  # noqa: E402


@pytest.mark.parametrize(("top_p", "top_k"), [(0.9, 0), (1.0, 20), (0.8, 50), (0.999, 0), (1.0, 1)])
@pytest.mark.parametrize("columns", [97, 151936])
def test_truncated_distributions(columns: int, top_p: float, top_k: int) -> None:
    from rlhf_core.models.kernels.logprobs import differentiate, floors, read

    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(37, columns, generator=generator)
    targets, scale = torch.randint(0, columns, (37,), generator=generator), 1 / 0.7
    targets[:30] = logits[:30].argmax(-1)
    grads, entropy_grads = torch.randn(2, 37, generator=generator)
    least = _floors(logits, targets, scale, Truncation(top_p, top_k))
    got = floors(logits.cuda(), targets.cuda(), scale, top_p, top_k).cpu()
    assert least is not None
    kept, found_kept = ((logits * scale >= of[:, None]).sum(-1) for of in (least, got))
    assert ((kept - found_kept).abs() <= 1 + 0.01 * kept).all(), "sums of 150,000 probabilities differ in their last digits"
    # From here on with the kernel's own floors: a token at the floor is kept or not by its last bit.
    expected = _read_with_torch(logits, targets, scale, True, got)
    found = read(logits.cuda(), targets.cuda(), scale, True, got.cuda())
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), wanted, rtol=1e-4, atol=1e-4)
    wanted = _differentiate_with_torch(logits, targets, *expected[1:], grads, entropy_grads, scale, got)
    mine = differentiate(logits.cuda(), targets.cuda(), *found[1:], grads.cuda(), entropy_grads.cuda(), scale, got.cuda())
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
        torch.testing.assert_close(got.cpu().double(), wanted.double(), rtol=2**-7 if dtype == torch.bfloat16 else 1e-3, atol=1e-5 * scale)
