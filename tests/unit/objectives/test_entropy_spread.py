"""Percentiles of the entropy from counts that ranks add: against numpy's, at the edges, however tokens are split."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_core.objectives import entropy_spread
from rlhf_core.objectives.entropy_spread import LEAST, MOST, PERCENTILES, entropy_counts, entropy_percentiles


def percentiles(values: torch.Tensor, mask: torch.Tensor | None = None) -> list[float]:
    counts = entropy_counts(values, torch.ones_like(values, dtype=torch.bool) if mask is None else mask)
    return [entropy_percentiles(counts)[f"policy/entropy_p{at}"] for at in PERCENTILES]


def test_percentiles_are_those_of_numpy_to_two_percent() -> None:
    """Values over six orders of magnitude, as entropies have."""
    values = torch.from_numpy(np.random.default_rng(0).lognormal(-3, 3, 5000).astype(np.float32)).clamp(
        1e-5, 12
    )
    expected = np.percentile(values.numpy(), PERCENTILES, method="inverted_cdf")
    np.testing.assert_allclose(percentiles(values[None]), expected, rtol=0.018)


def test_only_tokens_under_the_mask_count() -> None:
    values = torch.tensor([[5.0, 1.0, 1.0], [9.0, 9.0, 1.0]])
    mask = torch.tensor([[False, True, True], [False, False, True]])
    assert percentiles(values, mask) == pytest.approx([1.0] * 3, rel=0.018)


def test_passes_add_up() -> None:
    values = torch.rand(4, 50) * 3
    whole = entropy_counts(values, values > 0.5)
    parts = entropy_counts(values[:1], values[:1] > 0.5) + entropy_counts(values[1:], values[1:] > 0.5)
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)
    assert whole.sum() == (values > 0.5).sum()


@pytest.mark.parametrize("value", [0.0, -1e-7, LEAST / 2])
def test_no_entropy_is_0(value: float) -> None:
    assert percentiles(torch.full((1, 3), value)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("value", [LEAST, 0.5, 12.5])
def test_equal_entropies_have_one_value(value: float) -> None:
    assert percentiles(torch.full((2, 3), value)) == pytest.approx([value] * 3, rel=0.018)


def test_one_token_and_one_beyond_all_bins() -> None:
    assert percentiles(torch.tensor([[2.0]])) == pytest.approx([2.0] * 3, rel=0.018)
    assert percentiles(torch.tensor([[1e6]])) == [MOST] * 3


def test_the_edges_are_copied_to_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    edges = entropy_spread.EDGES

    def to(device: torch.device) -> torch.Tensor:
        copies.append(device)
        return edges

    entropy_spread.edges_on.cache_clear()
    monkeypatch.setattr(entropy_spread, "EDGES", SimpleNamespace(to=to))
    for _ in range(3):
        assert percentiles(torch.full((1, 2), 0.5)) == pytest.approx([0.5] * 3, rel=0.018)
    assert copies == [torch.device("cpu")]
