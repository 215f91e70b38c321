"""Mixture-of-experts models: the balance loss, and weights under the names of their checkpoints."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import rlhf_core.stages.sft
from rlhf_core.config import SFT, Data
from rlhf_core.data.documents import Document
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights
from rlhf_core.models.experts import balance_loss
from rlhf_core.models.load_model import load_policy, trained_policy
from rlhf_core.objectives.collate import collate
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.support.families import FAMILIES, MOE, make_family, model_class
from tests.support.stage_request import stage_request

DOCUMENTS = [Document(list(range(3, 3 + n)), [False] + [True] * (n - 1)) for n in (9, 4, 13, 6)]


@pytest.fixture(params=MOE, scope="module")
def checkpoint(
    request: pytest.FixtureRequest, material: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return make_family(request.param, material / "base", tmp_path_factory.mktemp(request.param))


def by_loop(logits: torch.Tensor, top_k: int) -> float:
    """`E * sum_i f_i P_i` of one document and one layer, as the paper writes it."""
    tokens, experts = logits.shape
    probabilities = logits.softmax(-1).tolist()
    total = 0.0
    for i in range(experts):
        f = (
            sum(i in sorted(range(experts), key=lambda j, row=row: -row[j])[:top_k] for row in probabilities)
            / tokens
        )
        total += experts * f * sum(row[i] for row in probabilities) / tokens
    return total


def test_the_loss_of_one_document_and_layer_equals_the_papers_and_transformers() -> None:
    logits = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    ours = balance_loss([logits], torch.zeros(1, 7, dtype=torch.int64), top_k=2)
    torch.testing.assert_close(ours, torch.tensor(by_loop(logits, 2)))
    torch.testing.assert_close(ours, load_balancing_loss_func((logits,), num_experts=4, top_k=2))


def test_documents_add_up_layers_are_averaged_and_pads_do_not_count() -> None:
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(10, 4, generator=generator) for _ in range(3)]
    documents = torch.tensor([[0, 0, 0, -1, -1], [1, 1, 2, 2, -1]])
    expected = sum(by_loop(layer[rows], 2) for layer in layers for rows in ([0, 1, 2], [5, 6], [7, 8])) / 3
    torch.testing.assert_close(balance_loss(layers, documents, top_k=2), torch.tensor(expected))


def test_evenly_used_experts_have_the_smallest_loss() -> None:
    even = torch.eye(4).repeat(3, 1) * 9
    torch.testing.assert_close(
        balance_loss([even], torch.zeros(1, 12, dtype=torch.int64), top_k=1), torch.tensor(1.0)
    )
    skewed = torch.tensor([[9.0, 0, 0, 0]]).repeat(12, 1)
    assert balance_loss([skewed], torch.zeros(1, 12, dtype=torch.int64), top_k=1) > 3.9


def test_packed_padded_and_split_have_the_same_balance_and_gradient(checkpoint: Path) -> None:
    policy = trained_policy(str(checkpoint), "float32", False, None, 0, router_aux_coef=0.1)

    def gradient(split: list[list[list[Document]]]) -> tuple[float, dict[str, torch.Tensor]]:
        policy.zero_grad()
        total = 0.0
        for rows in split:
            batch = collate(rows, pad_token_id=0)
            balance = policy(batch.tokens, batch.positions, batch.documents).balance
            balance.backward()
            total += float(balance.detach())
        return total, {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}

    value, expected = gradient([[[d] for d in DOCUMENTS]])
    assert any("gate" in name for name in expected)
    for split in ([[DOCUMENTS]], [[DOCUMENTS[:2]], [DOCUMENTS[2:]]], [[[d]] for d in DOCUMENTS]):
        other, got = gradient(split)
        assert other == pytest.approx(value, rel=1e-5)
        for name, grad in expected.items():
            torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-6)


def test_experts_have_the_names_of_the_checkpoint(checkpoint: Path) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    weights = dict(checkpoint_weights(load_policy(str(checkpoint)).model, lambda parameters: nullcontext()))
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in stored.items())


def test_sft_balances_experts_when_configured(checkpoint: Path, material: Path, tmp_path: Path) -> None:
    def train(coef: float) -> list[float]:
        config = SFT(
            model="base",
            data=Data(sources=str(material / "sft.jsonl"), max_samples=64),
            train_batch_size=8,
            micro_train_batch_size=4,
            max_len=64,
            learning_rate=3e-3,
            router_aux_coef=coef,
        )
        folder = tmp_path / str(coef)
        folder.mkdir()
        request = stage_request(config, checkpoint, seed=3)
        rlhf_core.stages.sft.run(request, RunDir(folder))
        return [line["router/balance"] for line in read_metrics(folder)]

    weak = train(1e-9)
    strong = train(1.0)
    assert strong[0] == pytest.approx(weak[0]), "the same model before the first step"
    assert strong[-1] < strong[0] and strong[-1] < weak[-1]


def test_a_model_without_experts_has_nothing_to_balance(material: Path) -> None:
    with pytest.raises(ValueError, match="has no experts to balance: leave router_aux_coef out"):
        trained_policy(str(material / "base"), "float32", False, None, 0, router_aux_coef=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_and_transformers_loads_the_checkpoint(
    family: str, material: Path, tmp_path: Path
) -> None:
    base = make_family(family, material / "base", tmp_path / "base")
    config = SFT(
        model="base",
        data=Data(sources=str(material / "sft.jsonl"), max_samples=32),
        train_batch_size=8,
        micro_train_batch_size=4,
        max_len=64,
        learning_rate=3e-3,
        packing=family != "granite-hybrid",  # its state would cross documents
    )
    (tmp_path / "run").mkdir()
    request = stage_request(config, base, seed=3)
    rlhf_core.stages.sft.run(request, RunDir(tmp_path / "run"))
    losses = [line["loss"] for line in read_metrics(tmp_path / "run")]
    assert losses[-1] < losses[0]
    before = load_file(base / "model.safetensors")
    after = load_file(tmp_path / "run" / "checkpoint" / "model.safetensors")
    assert before.keys() == after.keys()
    _, info = model_class(family).from_pretrained(tmp_path / "run" / "checkpoint", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert any(not torch.equal(before[name], weight) for name, weight in after.items())
