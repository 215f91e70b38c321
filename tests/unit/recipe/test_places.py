"""What the paths in a recipe are relative to, and that a run from another folder has the same digests."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config import Recipe
from rlhf_core.recipe.load_recipe import dump_recipe, given_recipe, load_recipe, recipe_of
from rlhf_core.recipe.named_inputs import beside
from rlhf_core.recipe.plan import plan

TEXT = """
name: places
base_model: models/base
stages:
  sft: {data: {sources: data/chats.jsonl}}
  rm: {stage: reward_model, model: other, data: {sources: [{path: data/pairs.jsonl}]}}
  ppo: {actor: sft, advantage_estimator: reinforce_pp, reward: [rm, "checks.py:score", org/reward], prompts: {sources: data/prompts.jsonl}}
  evaluation: {models: [ppo, models/old], parents: {models/old: base}, questions: {path: org/questions}, judges: [{kind: rule}]}
  tax: {stage: alignment_tax, models: [ppo], tasks: [task.yaml, gsm8k]}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with its files; the working directory is beside it."""
    folder = tmp_path / "project"
    for name in ("models/base", "models/old", "other", "data"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(f'"{name}"')
    for name in ("chats", "pairs", "prompts"):
        (folder / "data" / f"{name}.jsonl").write_text(f'{{"{name}": 1}}\n')
    (folder / "checks.py").write_text("def score(responses): return [0 for _ in responses]\n")
    (folder / "task.yaml").write_text("task: own\n")
    (folder / "recipe.yaml").write_text(TEXT)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def digests(recipe: Recipe) -> dict[str, str]:
    return {node.name: node.digest for node in plan(recipe).nodes}


def test_inputs_are_beside_the_recipe_and_artifacts_in_the_working_directory(folder: Path) -> None:
    recipe = load_recipe("../project/recipe.yaml")
    sft, rm, ppo, evaluation, tax = recipe.stages.values()
    assert recipe.base_model == str(folder / "models/base") and rm.model == str(folder / "other")
    assert [config.data.sources[0].path for config in (sft, rm)] == [
        str(folder / "data" / f"{name}.jsonl") for name in ("chats", "pairs")
    ]
    # stages and Hub ids stay
    assert ppo.actor == "sft" and ppo.reward[0].model == "rm" and ppo.reward[2].model == "org/reward"
    assert ppo.reward[1].file == folder / "checks.py" and tax.tasks == (str(folder / "task.yaml"), "gsm8k")
    old = str(folder / "models/old")
    assert evaluation.models == ("ppo", old)
    assert evaluation.parents == {old: "base"}
    assert evaluation.questions.path == "org/questions"
    assert plan(recipe).artifacts == Path.cwd() / "artifacts"


def test_the_same_recipe_has_the_same_digests_from_each_folder_and_in_each_place(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = digests(load_recipe("../project/recipe.yaml"))
    monkeypatch.chdir(folder)
    assert digests(load_recipe("recipe.yaml")) == found
    assert load_recipe("recipe.yaml").base_model == "models/base", "messages name what the recipe says"
    (tmp_path / "elsewhere" / "kept.yaml").write_text(
        dump_recipe(recipe_of(beside(load_recipe("recipe.yaml"), Path.cwd(), absolute=True)[0]))
    )
    assert digests(load_recipe("../elsewhere/kept.yaml")) == found, "the recipe that a run keeps"
    moved = folder.rename(tmp_path / "moved")
    assert digests(load_recipe(moved / "recipe.yaml")) == found
    (moved / "other" / "config.json").write_text('"changed"')
    changed = digests(load_recipe(moved / "recipe.yaml"))
    assert {name for name in found if changed[name] != found[name]} == {"rm", "ppo", "evaluation", "tax"}


def test_overrides_and_recipes_that_are_no_file_are_relative_to_the_working_directory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere" / "base").mkdir()
    (tmp_path / "elsewhere" / "mine.jsonl").touch()
    recipe = load_recipe("../project/recipe.yaml", ["base_model=base", "sft.data.sources.0.path=mine.jsonl"])
    assert recipe.base_model == "base" and recipe.stages["sft"].data.sources[0].path == "mine.jsonl"
    assert recipe.stages["rm"].data.sources[0].path == str(folder / "data/pairs.jsonl")
    monkeypatch.chdir(folder)
    plain = load_recipe("recipe.yaml")
    assert given_recipe(plain) == plain
    assert digests(plain)["sft"] == digests(load_recipe(folder / "recipe.yaml"))["sft"]


def test_a_recipe_given_as_a_mapping_names_absolute_paths(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    raw = dict(name="x", base_model="models/base", stages={"sft": {"data": {"sources": "data/chats.jsonl"}}})
    told = "is relative, and a recipe given as a mapping has no folder: write an absolute path"
    with pytest.raises(ValueError) as refused:
        given_recipe(raw)
    assert str(refused.value).splitlines() == [
        f"parameter recipe: {path} {told}" for path in ("models/base", "data/chats.jsonl")
    ]
    data = {"data": {"sources": str(folder / "data/chats.jsonl")}}
    absolute = raw | {"base_model": str(folder / "models/base"), "stages": {"sft": data}}
    assert digests(given_recipe(absolute))["sft"] == digests(load_recipe("recipe.yaml"))["sft"]
    assert given_recipe(absolute | {"base_model": "owner/model"}).base_model == "owner/model"


def test_files_in_the_working_directory_alone_are_a_sentence_that_says_what_to_write(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "data" / "chats.jsonl").rename(tmp_path / "elsewhere" / "chats.jsonl")
    (folder / "recipe.yaml").write_text(
        TEXT.replace("data/chats.jsonl", "chats.jsonl").replace("models/base", "base")
    )
    (tmp_path / "elsewhere" / "base").mkdir()
    with pytest.raises(ValueError) as refused:
        load_recipe("../project/recipe.yaml")
    where = "paths in a recipe are relative to its file"
    assert str(refused.value).splitlines() == [
        f"{field}: {name}: {where}: there is no {folder / name}, but {tmp_path}/elsewhere/{name}: write"
        f" ../elsewhere/{name}"
        for field, name in (("base_model", "base"), ("stages.sft.data.sources.0", "chats.jsonl"))
    ]


def test_a_folder_beside_a_misspelt_one_is_proposed(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(TEXT.replace("base_model: models/base", "base_model: models/bas"))
    told = f"base_model: there is no {folder}/models/bas; did you mean models/base?"
    with pytest.raises(ValueError) as refused:
        load_recipe("../project/recipe.yaml")
    assert str(refused.value) == f"{told} (a model of the Hub of this name is written models/bas@main)"
    for other in ("models/bas@main", "models/base-it", "models/bose", "models/base2"):
        (folder / "recipe.yaml").write_text(TEXT.replace("base_model: models/base", f"base_model: {other}"))
        assert load_recipe("../project/recipe.yaml").base_model == other, "a model of the Hub"


def test_home_folders_are_expanded_and_decide_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    text = (
        TEXT.replace("models/", "~/models/").replace("data/", "~/data/").replace("checks.py", "~/checks.py")
    )
    text = text.replace("model: other", "model: ~/other").replace("task.yaml", "~/task.yaml")
    (folder.parent / "home.yaml").write_text(f"artifacts: ~/made\nstore: ~/kept\n{text}")
    recipe = load_recipe("../home.yaml")
    assert (recipe.artifacts, recipe.store) == (str(folder / "made"), str(folder / "kept"))
    assert "~" not in dump_recipe(recipe) and plan(recipe).artifacts == folder / "made"
    spelled_out = load_recipe("../project/recipe.yaml", [f"artifacts={folder}/made"])
    assert digests(recipe) == digests(spelled_out)
    overridden = load_recipe(
        "../project/recipe.yaml",
        ["artifacts=~/made", "sft.data.sources=~/data/chats.jsonl", "base_model=~/models/base"],
    )
    assert overridden == spelled_out
    assert (
        given_recipe(Recipe.model_validate(spelled_out.model_dump() | {"artifacts": "~/made"})) == spelled_out
    )


def test_a_home_folder_of_nobody_is_a_sentence(folder: Path) -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"^artifacts: ~noone-here/x: this machine knows no home folder ~noone-here; write the whole path"
        ),
    ):
        load_recipe("../project/recipe.yaml", ["artifacts=~noone-here/x"])
    assert not Path("~noone-here").exists()


def test_the_name_of_a_teacher_is_no_path_though_a_folder_is_called_like_it(folder: Path) -> None:
    stages = "stages: {ppo: {actor: base, reference: base, teachers: {other: other}, reward: none,"
    recipe = "name: places\nbase_model: models/base\n" + stages
    recipe += " advantage_estimator: reinforce_pp, prompts: {sources: data/prompts.jsonl}}}\n"
    (folder / "recipe.yaml").write_text(recipe)
    ppo = load_recipe("../project/recipe.yaml").stages["ppo"]
    assert {name: teacher.model for name, teacher in ppo.teachers.items()} == {"other": str(folder / "other")}
