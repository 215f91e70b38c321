"""Loss, metrics and gradient are equal under any micro-batch split, any data-parallel split, and packed or
padded.

A tiny model gives each document its log-probs, values and scores. Units are pairs of documents (chosen,
rejected), so every loss runs on the same micro-batches.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from rlhf_core.objectives import losses
from rlhf_core.objectives.masked import before, document_mean, document_sum, gather_last
from rlhf_core.objectives.sampler_weights import importance_weights
from tests.unit.objectives.test_masked import positions_of

UNITS = 6
WIDTH = 3
CAPACITY = 24
SPLITS = {  # ranks of micro-batches of units
    "one unit at a time": [[[0], [1], [2], [3], [4], [5]]],
    "uneven micro-batches": [[[4, 0, 3], [1], [2, 5]]],
    "two ranks": [[[0, 1, 2]], [[3, 4, 5]]],
    "three uneven ranks": [[[5], [0]], [[1, 4, 2]], [[3]]],
}


def make_documents(dtype):
    generator = torch.Generator().manual_seed(7)
    documents = []
    for _ in range(2 * UNITS):
        length = int(torch.randint(3, 12, (1,), generator=generator))
        mask = torch.rand(length, generator=generator) < 0.6
        mask[0] = False
        mask[-1] = True
        names = ("old", "ref", "sampler", "advantages", "returns", "old_values")
        columns = {
            name: (torch.randn(length, generator=generator, dtype=torch.float64) * 0.5).to(dtype)
            for name in names
        }
        columns["weights"] = torch.full((length,), 1 / int(mask.sum()), dtype=dtype)
        features = torch.randn(length, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        documents.append({"mask": mask, "features": features, **columns})
    return documents


def lay_out(documents, packed):
    """(B, T) columns. Padded: one document a row. Packed: first fit into rows of CAPACITY. Padding holds nan
    wherever it may."""
    rows: list[list[int]] = []
    for k, document in enumerate(documents):
        size = len(document["mask"])
        room = [
            row for row in rows if packed and sum(len(documents[j]["mask"]) for j in row) + size <= CAPACITY
        ]
        if room:
            room[0].append(k)
        else:
            rows.append([k])
    batch = {"documents": torch.full((len(rows), CAPACITY), -1)}
    for name, column in documents[0].items():
        filler = {"mask": False, "features": 0.0}.get(name, float("nan"))
        batch[name] = torch.full((len(rows), CAPACITY, *column.shape[1:]), filler, dtype=column.dtype)
    for b, row in enumerate(rows):
        start = 0
        for k in row:
            end = start + len(documents[k]["mask"])
            batch["documents"][b, start:end] = k
            for name, column in documents[k].items():
                batch[name][b, start:end] = column
            start = end
    return batch


def every_loss(batch, theta, tokens):
    """Each loss on one micro-batch, with denominators of the whole step."""
    documents = batch["documents"]
    mask = batch["mask"]
    positions = positions_of(documents)
    n = int(documents.max()) + 1
    h = batch["features"] @ theta
    logprobs = before(-F.softplus(h), positions)
    values = before(h, positions)
    scores = gather_last(h, documents, n)
    total = document_sum(logprobs, mask, documents, n)
    mean = document_mean(logprobs, mask, documents, n)
    ref_total, ref_mean = (f(batch["ref"], mask, documents, n) for f in (document_sum, document_mean))
    is_weights = importance_weights(batch["old"], batch["sampler"], batch["mask"], 0.0, 2.0)
    c = slice(0, None, 2)
    r = slice(1, None, 2)
    sequence = losses.gspo_logprobs(logprobs, batch["old"], mask, documents, n)
    desirable = torch.arange(n) % 2 == 0

    def policy(new, denominator, weights=None, dual_clip=None):
        return losses.policy_loss(
            new,
            batch["old"],
            batch["advantages"],
            mask,
            0.2,
            0.3,
            is_weights,
            denominator,
            dual_clip=dual_clip,
            weights=weights,
        )

    return {
        "sft": losses.sft_loss(logprobs, mask, tokens),
        "reward": losses.reward_loss(scores[c], scores[r], 0.1, 0.01, UNITS),
        "dpo": losses.dpo_loss(total[c], total[r], ref_total[c], ref_total[r], 0.1, 0.1, "sigmoid", UNITS),
        "ipo": losses.dpo_loss(mean[c], mean[r], ref_mean[c], ref_mean[r], 0.1, 0.0, "ipo", UNITS),
        "simpo": losses.simpo_loss(mean[c], mean[r], 2.0, 1.0, UNITS),
        "orpo": losses.orpo_loss(mean[c], mean[r], 0.1, UNITS),
        "kto": losses.kto_loss(total, ref_total, desirable, 0.3, 0.1, 1.0, 1.3, 2 * UNITS),
        "ppo": policy(logprobs, tokens, dual_clip=1.5),
        "grpo": policy(logprobs, 2 * UNITS, weights=batch["weights"]),
        "gspo": policy(sequence, 2 * UNITS, weights=batch["weights"]),
        "kl_k2": losses.kl_loss(logprobs, batch["old"], batch["ref"], mask, is_weights, "k2", tokens),
        "kl_k3": losses.kl_loss(logprobs, batch["old"], batch["ref"], mask, is_weights, "k3", tokens),
        "value": losses.value_loss(values, batch["old_values"], batch["returns"], mask, 0.2, tokens),
    }


def step(documents, split, packed):
    """Loss, metrics and gradient of a whole optimiser step for each loss: sums over micro-batches, then over
    ranks."""
    tokens = float(sum(int(document["mask"].sum()) for document in documents))
    totals = {}
    for micro_batches in split:
        # each rank has its own copy
        theta = torch.linspace(-1, 1, WIDTH, dtype=documents[0]["features"].dtype).requires_grad_()
        for units in micro_batches:
            batch = lay_out([documents[k] for unit in units for k in (2 * unit, 2 * unit + 1)], packed)
            for name, (loss, metrics) in every_loss(batch, theta, tokens).items():
                (grad,) = torch.autograd.grad(loss, theta, retain_graph=True)
                for key, value in {"loss": loss.detach(), "gradient": grad, **metrics}.items():
                    totals[name, key] = totals.get((name, key), 0) + value
    return totals


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_loss_and_gradient_are_equal_under_any_split_and_layout(split, packed, dtype):
    documents = make_documents(dtype)
    whole = step(documents, [[list(range(UNITS))]], packed=False)
    parts = step(documents, split, packed)
    assert whole.keys() == parts.keys()
    for key, value in whole.items():
        assert value.isfinite().all(), key
        assert_close(parts[key], value, msg=lambda text, key=key: f"{key}: {text}")
        if key[1] == "gradient":
            assert value.abs().max() > 1e-4, f"{key}: no gradient to compare"


def test_the_packed_layout_really_packs():
    documents = make_documents(torch.float64)
    assert (
        len(lay_out(documents, packed=True)["documents"])
        < len(lay_out(documents, packed=False)["documents"])
        == 2 * UNITS
    )
