"""Recipes changed at random: they are read, or refused in sentences of ours, whatever stands in them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import fsspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.recipe.load_recipe import given_recipe, load_recipe
from rlhf_core.recipe.plan import plan
from tests.support.mutations import fault_of, places

TEXT = """
name: tiny
base_model: org/base
seed: 1
store: s3://bucket/prefix
notify: {url_env: HOOK, events: [completed]}
stages:
  sft: {data: {sources: train.jsonl}, lora: {rank: 4}, gates: [{metric: loss, max: 2}]}
  reward_model: {data: {sources: [{path: a.jsonl, probability: 0.5}, {path: b.csv, probability: 0.5}]}}
  ppo: {prompts: {sources: prompts.jsonl}, reward: [reward_model, "checks.py:short"], engine: {cpus: 2}, betas: [0.9, 0.95]}
  loop: {stage: iterative_dpo, prompts: {sources: prompts.jsonl}, rounds: 2}
  evaluation:
    models: [ppo, loop, remote]
    questions: {path: q.jsonl}
    judges: [{kind: rule}, {kind: openai, model: judge}]
    endpoints: {remote: {model: m, base_url: "http://host/v1", more: {top_p: 0.9}}}
  publication: {model: ppo, evaluation: evaluation}
"""
RECIPE: dict[str, Any] = yaml.safe_load(TEXT)
# Texts that YAML reads as something else, or cannot read.
ODD = ("2001-13-45", "0x_", "1e5", "1e999", "~", "on", ".nan", "12:30:45", "=", "<<", "%", "\t1")
ODD = (*ODD, "!!int x", "!!set [1]", "&a [*a]", "*a", "{[a]: b}")
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.dates()
    | st.binary(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ("stages", "sft", "data", "sources", "0", "lora", "seed", "evaluation", "judges")
) | st.text(max_size=5)
SETTINGS = settings(max_examples=300)


def fault(content: bytes, *overrides: str) -> str:
    """Loads and plans a recipe. Returns what is wrong with the ValueError that refuses it, "" when nothing
    is, or when it is accepted. Any other exception passes through."""
    fsspec.filesystem("memory").pipe("/recipe.yaml", content)
    try:
        plan(load_recipe("memory://recipe.yaml", overrides))
    except ValueError as error:
        return fault_of(error)
    return ""


@st.composite
def recipes(draw: Callable[..., Any]) -> str:
    """The text of a recipe in which one to three values were replaced, dropped, swapped or given another
    key."""
    recipe = copy.deepcopy(RECIPE)
    odd = {}
    for number in range(draw(st.integers(1, 3))):
        holder, key = draw(st.sampled_from(places(recipe) or [({"a": 1}, "a")]))
        match draw(st.sampled_from(("replace", "odd", "drop", "swap", "rename"))):
            case "replace":
                holder[key] = draw(VALUES)
            case "odd":
                holder[key] = f"ODD{number}"
                odd[f"ODD{number}"] = draw(st.sampled_from(ODD))
            case "drop":
                del holder[key]
            case "swap":
                other, its_key = draw(st.sampled_from(places(RECIPE)))
                holder[key] = copy.deepcopy(other[its_key])
            case "rename" if isinstance(holder, dict):
                holder[draw(SCALARS)] = holder.pop(key)
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=draw(st.booleans()))
    for name, value in odd.items():
        text = text.replace(name, value)
    return text


@pytest.mark.slow
@SETTINGS
@given(recipes())
def test_a_recipe_with_other_values(text: str) -> None:
    assert not fault(text.encode("utf-8", "surrogatepass"))


@pytest.mark.slow
@SETTINGS
@given(st.data())
def test_a_recipe_with_other_lines_and_characters(data: st.DataObject) -> None:
    lines = TEXT.splitlines(keepends=True)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        match data.draw(st.sampled_from(("double", "drop", "insert", "cut"))):
            case "double":
                lines.insert(at, lines[at])
            case "drop":
                lines[at] = ""
            case "insert":
                lines[at] = lines[at].replace(
                    ":", ":" + data.draw(st.text(max_size=6) | st.sampled_from(ODD)), 1
                )
            case "cut":
                lines[at] = lines[at][: data.draw(st.integers(0, len(lines[at])))]
    assert not fault("".join(lines).encode("utf-8", "surrogatepass"))


@SETTINGS
@given(
    st.binary(max_size=200)
    | st.text(max_size=100).map(str.encode)
    | st.text("{}[]:-&*!|>'\"%@,# \n\tab1", max_size=60).map(str.encode)
)
def test_a_file_that_is_no_recipe(content: bytes) -> None:
    assert not fault(content)


@pytest.mark.slow
@SETTINGS
@given(
    st.lists(KEYS, max_size=5),
    st.sampled_from(ODD) | st.text(max_size=20) | VALUES.map(lambda value: yaml.safe_dump(value)),
)
def test_an_override(keys: list[str], value: str) -> None:
    assert not fault(TEXT.encode(), f"{'.'.join(keys)}={value}")


@pytest.mark.parametrize("override", ["seed=2", "sft.lora.rank=8"])
def test_the_recipe_is_right_before_it_is_changed(override: str) -> None:
    fsspec.filesystem("memory").pipe("/recipe.yaml", TEXT.encode())
    assert len(plan(load_recipe("memory://recipe.yaml", [override])).nodes) == 9


def told(*overrides: str, **more: object) -> list[str]:
    """The sentences that refuse the recipe with these overrides."""
    with pytest.raises(ValueError) as caught:
        given_recipe(RECIPE | {"stages": RECIPE["stages"] | more}, overrides)
    return str(caught.value).splitlines()


def test_all_wrong_overrides_are_told_at_once() -> None:
    lines = told("seed=x", "pppo.init_kl_coef=1", "sft.max_lenn=abc", "ppo.sampler_is=7", "sede=3")
    assert len(lines) == 5
    assert "unknown key 'sede'; did you mean seed?" in lines[0]
    assert lines[1].startswith("seed: ")
    sentences = ("did you mean ppo?", "did you mean max_len or max_norm?", "stages.ppo.sampler_is")
    for line, sentence in zip(
        told("pppo.init_kl_coef=1", "sft.max_lenn=abc", "ppo.sampler_is=7"), sentences, strict=True
    ):
        assert sentence in line
    assert len(told("sft", "ppo.=3", "seed=[")) == 3
    # with a wrong name of a stage
    assert len(told("sede=3", **{"a b": RECIPE["stages"]["sft"] | {"stage": "sft"}})) == 2


def test_words_that_yaml_reads_as_false() -> None:
    read = yaml.safe_load("{sampler_is: off, gated: no}")
    ppo = RECIPE["stages"]["ppo"]
    publication = RECIPE["stages"]["publication"]
    changed = {
        "ppo": ppo | {"sampler_is": read["sampler_is"]},
        "publication": publication | {"gated": read["gated"]},
    }
    loaded = [given_recipe(RECIPE | {"stages": RECIPE["stages"] | changed}, stored=True)]
    loaded.append(given_recipe(RECIPE, ["ppo.sampler_is=off", "publication.gated=no"], stored=True))
    for recipe in loaded:
        assert recipe.stages["ppo"].sampler_is == "off" and recipe.stages["publication"].gated == "no"  # type: ignore[attr-defined]
