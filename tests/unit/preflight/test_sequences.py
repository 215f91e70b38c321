"""`sequence_parallel_size` that ranks or models do not allow is one sentence, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.config import PPO, SFT, Ranks
from rlhf_core.preflight.sequence_checks import sequence_problems
from tests.support.text_rows import rows_of_text
from tests.unit.preflight.test_family import nodes

LONG = [
    f"{stage}.{field}"
    for stage in ("sft", "reward_model")
    for field in ("ranks.num_ranks_per_node=4", "sequence_parallel_size=4")
]
LONG += [
    "ppo.sequence_parallel_size=4",
    *(f"ppo.{role}_ranks.num_ranks_per_node=4" for role in ("actor", "critic")),
]


@pytest.mark.parametrize(
    ("config", "told"),
    rows_of_text(
        """
    {num_attention_heads: 12} | ''
    {num_attention_heads: 14} | '4 ranks cannot share the 14 attention heads of {base} equally: set it to a divisor'
    {num_attention_heads: 12, layer_types: [full_attention, linear_attention]} | '{base} has layers that carry state along a row (linear_attention): leave it out'
    {} | ''
    """,
        yaml_columns={1},
    ),
)
def test_models_that_ranks_cannot_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, object], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    for node in nodes(tmp_path, *LONG):
        expected = [f"stages.{node.name}.sequence_parallel_size: {told.format(base=base)}"] if told else []
        assert sequence_problems(node, lambda name: str(base)) == expected
    assert [sequence_problems(node, lambda name: str(base)) for node in nodes(tmp_path)] == [[], [], []]


def test_a_number_that_does_not_divide_the_ranks() -> None:
    data = {"sources": "rows.jsonl"}
    three = Ranks(num_ranks_per_node=3)
    with pytest.raises(
        ValueError,
        match=(
            "sequence_parallel_size=2 ranks compute each pass together, but ranks configures 3: set it to a divisor"
        ),
    ):
        SFT(data=data, ranks=three, sequence_parallel_size=2, train_batch_size=24)
    with pytest.raises(
        ValueError, match=r"sequence_parallel_size=3 ranks compute each .* critic_ranks configures 1"
    ):
        PPO(prompts=data, actor_ranks=three, sequence_parallel_size=3, train_batch_size=24)
    with pytest.raises(ValueError, match=r"micro_train_batch_size x .* sequence_parallel_size = 8 x 2 = 16"):
        SFT(
            data=data,
            ranks=Ranks(num_ranks_per_node=4),
            sequence_parallel_size=2,
            train_batch_size=24,
            micro_train_batch_size=8,
        )
    assert SFT(data=data, ranks=three, sequence_parallel_size=3, train_batch_size=8).train_batch_size == 8


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (("actor", "critic"), ["reward"]),  # the critic starts from it
        (("actor", "critic", "reward"), ["reward"]),
        (("actor", "critic", "reference"), ["reward", "other"]),
        (("reward",), []),
    ],
)
def test_models_of_ppo_that_are_only_read_are_shared_where_their_ranks_are(
    ranks: tuple[str, ...], told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, heads in (("actor", 4), ("reward", 5), ("other", 7)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"num_attention_heads": heads}))
    size = 2 if "actor" in ranks else 1
    fields = [
        "ppo.reference=base",
        f"ppo.sequence_parallel_size={size}",
        *(f"ppo.{role}_ranks.num_ranks_per_node=2" for role in ranks),
    ]
    (ppo,) = [node for node in nodes(tmp_path, *fields) if node.name == "ppo"]
    places = {"sft": "actor", "reward_model": "reward", "base": "other"}
    found = sequence_problems(ppo, places.__getitem__)
    assert sorted(found) == [
        f"stages.ppo.sequence_parallel_size: 2 ranks cannot share the {heads} attention heads of {place}"
        " equally: set it to a divisor"
        for place, heads in {"reward": 5, "other": 7}.items()
        if place in told
    ]
