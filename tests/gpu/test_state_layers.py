"""Families whose layers carry state, with several documents in a row on a GPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf_core.data.documents import Document
from rlhf_core.models.document_leak import detect_document_leak
from rlhf_core.models.kernels.attention import takes_varlen
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.policy import Policy
from rlhf_core.objectives.collate import collate
from tests.support.families import DELTA, make_family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RNG = random.Random(0)
DOCUMENTS = [[RNG.randrange(3, 80) for _ in range(n)] for n in (24, 3, 70, 1 + 128, 2, 33)]
FAMILIES = ("qwen3_5", "qwen3_5-moe", "qwen3-next", "lfm2")


def outcome(policy: Policy, rows: list[list[int]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs by document, and the gradients of their sum."""
    batch = collate(
        [[Document(DOCUMENTS[i], [False] + [True] * (len(DOCUMENTS[i]) - 1)) for i in row] for row in rows], 0
    ).to(DEVICE)
    found = policy(batch.tokens, batch.positions, batch.documents).logprobs
    found.sum().backward()
    gradients = {name: p.grad.float() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return torch.cat([found[batch.documents == i] for i in range(len(DOCUMENTS))]).detach().float(), gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_as_alone(family: str, material: Path, tmp_path: Path) -> None:
    if family != "lfm2":
        pytest.importorskip("fla")
    larger = {} if family == "lfm2" else {key: 64 for key in DELTA if key.endswith("head_dim")}
    policy = (
        load_policy(
            str(make_family(family, material / "base", tmp_path / "base", torch.bfloat16, larger)), "bfloat16"
        )
        .eval()
        .to(DEVICE)
    )
    detect_document_leak(policy, policy, DEVICE, packed=True)
    assert takes_varlen(policy.model) and policy.document_leak is False
    packed, gradients = outcome(policy, [[0, 1, 2], [3, 4, 5]])
    alone, expected = outcome(policy, [[i] for i in range(len(DOCUMENTS))])
    assert (packed - alone).abs().mean() < 0.03 and gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() < 0.1 * expected[name].norm() + 1e-6, name
