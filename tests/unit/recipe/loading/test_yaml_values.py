"""Values of a recipe: YAML 1.2, merge keys, shorthands, and what is written reads back."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from rlhf_core.config import PPO, SFT
from rlhf_core.recipe.load_recipe import dump_recipe, load_recipe
from rlhf_core.recipe.yaml_text import dump, parse
from tests.support.tiny_recipe import TEXT, Write


def test_numbers_without_a_point_are_numbers(recipe: Write) -> None:
    loaded = load_recipe(recipe())
    sft = loaded.stages["sft"]
    ppo = loaded.stages["ppo"]
    assert isinstance(sft, SFT) and sft.learning_rate == 1e-3
    assert isinstance(ppo, PPO) and ppo.actor_learning_rate == 5e-7


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("yes", "yes"),
        ("off", "off"),
        ("1_000", "1_000"),
        ("=", "="),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("TRUE", True),
        ("~", None),
        ("", None),
    ],
)
def test_scalars_are_those_of_the_core_schema_of_yaml_1_2(text: str, value: object) -> None:
    read = parse(f"here: {text}", "text")["here"]
    assert (read, type(read)) == (value, type(value))
    assert parse(dump({"here": value}), "text") == {"here": value}


@pytest.mark.parametrize("text", ["1e-6", "0o10", "12:30", "yes", "010", "<<", "2024-01-01", "", "0b1"])
def test_a_text_that_looks_like_another_value_is_written_in_quotes(text: str) -> None:
    written = dump({"here": text})
    assert parse(written, "text") == yaml.safe_load(written) == {"here": text}


def test_merge_keys_give_what_the_own_keys_leave_open() -> None:
    text = """
    sft: &first {data: {sources: a.jsonl}, max_len: 64}
    second: {<<: *first, max_len: 32}
    third: {max_len: 16, <<: [*first, {seed: 5, max_len: 1}]}
    deep: {in: {it: &inner {<<: *first, max_len: 8}}}
    last: {<<: *inner}
    """
    read = parse(text, "text")
    data = {"data": {"sources": "a.jsonl"}}
    assert read["second"] == data | {"max_len": 32}
    assert read["third"] == data | {"max_len": 16, "seed": 5}
    assert read["last"] == read["deep"]["in"]["it"] == data | {"max_len": 8}
    assert read["sft"] == data | {"max_len": 64}


def test_a_recipe_with_merge_keys(recipe: Write) -> None:
    text = (
        TEXT.replace("  sft: {", "  sft: &sft {")
        + "  again: {<<: *sft, stage: sft, model: sft, max_len: 64}\n"
    )
    stages = load_recipe(recipe(text)).stages
    first = stages["sft"]
    again = stages["again"]
    assert isinstance(first, SFT) and isinstance(again, SFT)
    assert again == first.model_copy(update={"model": "sft", "max_len": 64})


def test_shorthands_of_reward_sources(recipe: Write) -> None:
    def sources(value: str) -> list[tuple[str, str, float]]:
        ppo = load_recipe(recipe(), [f"ppo.reward={value}", "ppo.critic=reward_model"]).stages["ppo"]
        assert isinstance(ppo, PPO)
        return [(source.kind, source.title, source.weight) for source in ppo.reward]

    assert sources("org/rm-7b") == [("model", "rm-7b", 1.0)]
    assert sources("lib/checks.py:short") == [("function", "short", 1.0)]
    assert sources("https://host:8000/score?x=1") == [("http", "host:8000", 1.0)]
    assert sources("{url: 'http://host', name: mine, weight: 2}") == [("http", "mine", 2.0)]
    assert sources("[rm, {weight: 0.5}, a.py:f, {function: b.py:g}]") == [
        ("model", "rm", 1.0),
        ("model", "reward_model", 0.5),
        ("function", "f", 1.0),
        ("function", "g", 1.0),
    ]


def test_dump_reads_back(recipe: Write, tmp_path: Path) -> None:
    loaded = load_recipe(recipe(), ["ppo.kl_target=0.1", "ppo.reward=[reward_model, a.py:f, 'http://host']"])
    (tmp_path / "again.yaml").write_text(dump_recipe(loaded))
    assert load_recipe(tmp_path / "again.yaml") == loaded


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            BOMB,
            "holds more than 100,000 values, with those that its aliases (*name) stand for; correct the YAML",
        ),
        ("name: &a [*a]", "holds more than 100,000 values"),
        ("name: " + "[" * 100_000, "its brackets are nested too deeply to be read; correct the YAML"),
    ],
)
def test_a_recipe_that_would_fill_the_memory(recipe: Write, text: str, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_recipe(recipe(text))
    assert str(caught.value).startswith(f"recipe {recipe(text)}: {told}") and "\n" not in str(caught.value)


def test_aliases_are_read(recipe: Write) -> None:
    """A byte order mark is read over."""
    loaded = load_recipe(
        recipe("\ufeff" + TEXT.replace("{sources: train.jsonl}", "&d {sources: train.jsonl}, eval_data: *d"))
    )
    assert isinstance(sft := loaded.stages["sft"], SFT) and sft.eval_data == sft.data
