"""Kernels in Triton's interpreter, on a CPU: token log-probs of whole and truncated distributions beside
PyTorch's."""

from __future__ import annotations

import os
import sys

import pytest

from tests.support.programs import captured

CODE = """
from itertools import product

import torch
from rlhf_core.models.kernels.logprobs import differentiate, floors, read
from rlhf_core.models.logprobs.token_logprobs import WHOLE, Truncation, _differentiate_with_torch, _floors, _read_with_torch

tops = WHOLE, Truncation(0.9), Truncation(1.0, 20), Truncation(0.8, 50), Truncation(1.0, 1)
for (rows, columns), top in product(((37, 97), (9, 9001)), tops):
    numbers = torch.Generator().manual_seed(0)
    logits, scale = 4 * torch.randn(rows, columns, generator=numbers), 1 / 0.7
    targets = torch.randint(0, columns, (rows,), generator=numbers)
    targets[: rows // 2] = logits[: rows // 2].argmax(-1)
    grads, entropy_grads = torch.randn(2, rows, generator=numbers)
    least, got = _floors(logits, targets, scale, top), None
    if top != WHOLE:
        got = floors(logits.clone(), targets, scale, *top)
        kept, found = ((logits * scale >= of[:, None]).sum(-1) for of in (least, got))
        assert (kept - found).abs().max() <= 1, "sums of probabilities differ in their last digits"
    expected, found = (f(logits.clone(), targets, scale, True, got) for f in (_read_with_torch, read))
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)
    for more in (None, entropy_grads):
        mine, wanted = (
            f(logits.clone(), targets, *read[1:], grads, more, scale, got)
            for f, read in ((differentiate, found), (_differentiate_with_torch, expected))
        )
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
print("compared")
"""


@pytest.mark.slow
def test_the_kernels_compute_what_pytorch_does() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = captured([sys.executable, "-c", CODE], env=environment, timeout=240)
    assert done.returncode == 0 and done.stdout.strip() == "compared", done.stderr[-2000:]
