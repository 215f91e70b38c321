"""The size of passes that a recipe's fields, or their absence, set."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from rlhf_core.config import DPO, KTO, PPO, SFT, Calibration, Evaluation, Preferences, Ranks, RewardModel
from rlhf_core.config.training.pass_size import FULL_PASS, ROWS, PassSize, pass_size

DATA = {"sources": "rows.jsonl"}


def sft(**fields: Any) -> SFT:
    return SFT(data=DATA, **fields)


def ppo(**fields: Any) -> PPO:
    return PPO(prompts=DATA, **fields)


def test_a_pass_is_the_tokens_of_eight_documents_of_full_length() -> None:
    found = {
        "sft": sft(max_len=512).train_pass,
        "kto": KTO(data=DATA, max_len=512).train_pass,
        "dpo": DPO(data=DATA, max_len=512).train_pass,  # pairs
        "reward_model": RewardModel(data=DATA, max_len=512).train_pass,
        "ppo": ppo(prompt_max_len=100, generate_max_len=28).train_pass,
        "scoring": ppo(prompt_max_len=100, generate_max_len=28).scoring_pass,
    }
    assert {name: size.tokens for name, size in found.items()} == {
        "sft": 4096,
        "kto": 4096,
        "dpo": 8192,
        "reward_model": 8192,
        "ppo": 1024,
        "scoring": 1024,
    }


def test_stages_that_score_have_the_same_default() -> None:
    lengths = {"prompt_max_len": 100, "generate_max_len": 28}
    judge = {"kind": "reward", "reward": "org/reward"}
    configs = [
        Preferences(prompts=DATA, **lengths),
        Evaluation(models=("sft",), questions={"path": "q.jsonl"}, **lengths),
        Calibration(judge=judge, labels="labels.jsonl", **lengths),
    ]
    for config in configs:
        assert config.scoring_pass.tokens == 1024
        rows = type(config).model_validate(config.model_dump() | {"micro_rollout_batch_size": 3})
        assert rows.scoring_pass == (3, None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"micro_train_batch_size": 8}, (8, None)),
        ({"micro_train_batch_size": 1}, (1, None)),
        ({"micro_train_tokens": 77}, (ROWS, 77)),
        ({"micro_train_batch_size": 4, "micro_train_tokens": 77}, (4, 77)),
    ],
)
def test_what_a_recipe_says_is_done(fields: dict[str, Any], expected: tuple[int, int | None]) -> None:
    assert sft(**fields).train_pass == expected
    assert ppo(**fields).train_pass == expected
    scoring = {name.replace("train", "rollout"): value for name, value in fields.items()}
    assert ppo(**scoring).scoring_pass == expected
    assert ppo(**scoring).train_pass == (ROWS, FULL_PASS), "the other pair of fields is not set"


def test_a_stored_config_without_the_fields_still_has_none() -> None:
    stored = type(sft()).model_validate_json(sft().model_dump_json())
    assert stored.train_pass == sft().train_pass == (ROWS, 8 * 512)


def test_no_pass_has_more_than_eight_documents_of_full_length() -> None:
    for longest, sharing in product((1, 2, 7, 48, 512, 2047, 2048, 2049, 16384, 16385, 131072), (1, 2, 8)):
        size = pass_size(None, None, longest, sharing)
        assert size.tokens is not None and longest <= size.tokens <= ROWS * longest
        assert size.tokens <= max(longest, FULL_PASS * sharing)
        assert size.most_tokens(longest) == size.tokens
        assert 1 <= size.most_documents(longest) <= ROWS


def test_long_documents_have_passes_of_few() -> None:
    assert sft(max_len=8192).train_pass.tokens == FULL_PASS
    assert sft(max_len=131072).train_pass.tokens == 131072
    four = {"ranks": Ranks(num_ranks_per_node=4), "sequence_parallel_size": 4}
    assert sft(max_len=8192, **four).train_pass.tokens == 4 * FULL_PASS
    assert sft(max_len=8192, **four, micro_train_batch_size=1, train_batch_size=4).train_pass == (1, None)


def test_rows_have_the_tokens_of_their_documents() -> None:
    assert PassSize(3, None).most_tokens(100) == 300 and PassSize(3, None).most_documents(100) == 3
    assert PassSize(3, 250).most_tokens(100) == 250 and PassSize(3, 250).most_documents(100) == 2
    assert PassSize(3, 50).most_documents(100) == 1


def test_any_batch_suits_passes_of_tokens() -> None:
    three = Ranks(num_ranks_per_node=3)
    assert sft(train_batch_size=7, ranks=three).train_batch_size == 7
    assert ppo(train_batch_size=4, actor_ranks=three, critic_ranks=three).train_batch_size == 4
    with pytest.raises(ValueError, match="train_batch_size=7 must be a multiple of micro_train_batch_size"):
        sft(train_batch_size=7, ranks=three, micro_train_batch_size=8)


def test_sft_without_packing_keeps_documents_apart_unless_tokens_are_set() -> None:
    assert sft().packs and not sft(packing=False).packs
    assert sft(packing=False, micro_train_tokens=4096).packs
