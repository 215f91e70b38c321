"""Images are checked before any work: those of the first rows are decoded, with the stage's own limits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config import DPO, PPO, SFT, Data
from rlhf_core.hub.model_config import ONLY_TRAINED, PICTURE_FAMILIES
from rlhf_core.preflight.inputs import check_inputs
from rlhf_core.preflight.model_checks import image_problems
from rlhf_core.preflight.rows.template_length import RowsToRender, measure, measured, pair_of
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import plan
from tests.support.pictured_models import FAMILIES, STAGED, asked, make_pictured, square, write_rows
from tests.support.pictured_pairs import colour_row


@pytest.mark.parametrize("family", STAGED)
def test_rows_with_images_are_rendered(family: str, tmp_path: Path) -> None:
    folder = make_pictured(family, tmp_path / "base")
    (tmp_path / "a.png").write_bytes(square("red"))
    (tmp_path / "b.png").write_bytes(square("red")[:50])
    rows = [asked([{"type": "image", "image": name}]) for name in ("a.png", "b.png", "gone.png")]
    data = Data(sources=str(write_rows(tmp_path / "rows.jsonl", rows)))
    pair = pair_of(str(folder), data)
    asked_rows = RowsToRender(data.model_dump_json(), "sft", "max_len", 100)
    rendered = measure(pair, [asked_rows], False).rendered[asked_rows]
    assert rendered.refused == "" and rendered.items == 1
    assert "2 of 3 rows would be left out (image damaged: 1, image missing: 1" in rendered.warned[0]
    # in a process without torch: the same, or nothing, and then it is read here
    apart = measured({pair: [asked_rows]})
    assert all(each.rendered[asked_rows] == rendered for each in apart.values() if not isinstance(each, str))
    assert not any(isinstance(each, str) for each in apart.values())


def test_a_text_model_is_refused_with_the_row(material: Path, tmp_path: Path) -> None:
    data = Data(
        sources=str(write_rows(tmp_path / "rows.jsonl", [asked([{"type": "image", "image": "a.png"}])]))
    )
    asked_rows = RowsToRender(data.model_dump_json(), "sft", "max_len", 100)
    rendered = measure(pair_of(str(material / "base"), data), [asked_rows], False).rendered[asked_rows]
    assert "rows.jsonl, row 1: there are images" in rendered.refused


def test_a_policy_that_reads_no_images_is_told_before_the_run(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def problems(start: Path, images: bool = True, kind: str = "transformers") -> list[str]:
        fields = {
            "prompts": {"sources": "a.jsonl"},
            "environment": {"path": "a.py:f", "images": images},
            "advantage_estimator": "reinforce_pp",
            "engine": {"kind": kind},
        }
        node: Any = SimpleNamespace(name="ppo", config=PPO.model_validate(fields))
        return image_problems(node, lambda name: str(start))

    reads = make_pictured("qwen3_vl", tmp_path / "base")
    assert problems(reads) == [] == problems(material / "base", images=False)
    (told,) = problems(material / "base")
    assert told.startswith("stages.ppo.actor: the environment may send images (images: true), but ")
    assert "reads none: name a model of the families" in told
    monkeypatch.setattr("rlhf_core.data.prompt_rows.lacks_torchvision", lambda: "it lacks torchvision")
    (told,) = problems(reads, kind="vllm")
    assert told.endswith("which these engines do not read: it lacks torchvision")


def test_a_trained_encoder_needs_images_in_the_whole_data(tmp_path: Path) -> None:
    """A stage would find it only once its data is read, and ppo once its engines and models are loaded."""
    texts = str(write_rows(tmp_path / "texts.jsonl", [asked("no image")]))
    seen = str(write_rows(tmp_path / "seen.jsonl", [asked([{"type": "image", "image": "a.png"}])]))

    def problems(config: Any) -> list[str]:
        node: Any = SimpleNamespace(name="own", config=config)
        return image_problems(node, lambda name: None)

    def ppo(images: bool) -> PPO:
        fields = {"environment": {"path": "guess", "images": images}, "engine": {"kind": "transformers"}}
        fields |= {"prompts": {"sources": texts}, "advantage_estimator": "reinforce_pp"}
        return PPO.model_validate(fields | {"image_encoder": "projector"})

    told = "image_encoder: {} trains what reads images, and the data has none: leave it out"
    assert problems(SFT(data=Data(sources=texts), image_encoder="trained")) == [
        f"stages.own.{told.format('trained')}"
    ]
    assert problems(ppo(images=False)) == [f"stages.own.{told.format('projector')}"]
    assert problems(ppo(images=True)) == []
    assert problems(SFT(data=Data(sources=texts))) == []
    assert problems(SFT(data=Data(sources=seen), image_encoder="trained")) == []
    assert problems(DPO(pairs="asked", image_encoder="trained")) == []


@pytest.mark.parametrize("family", STAGED)
def test_a_recipe_with_images_has_no_problem(family: str, tmp_path: Path, monkeypatch: Any) -> None:
    make_pictured(family, tmp_path / "base")
    (tmp_path / "a.png").write_bytes(square("red"))
    write_rows(tmp_path / "rows.jsonl", [asked([{"type": "image", "image": "a.png"}])] * 4)
    write_rows(tmp_path / "pairs.jsonl", [colour_row("red", "a.png")] * 4)
    pairs = {"data": {"sources": "pairs.jsonl"}, "max_len": 100}
    stages = {
        "sft": {"data": {"sources": "rows.jsonl"}, "max_len": 100},
        "reward_model": {"model": "base", **pairs},
        "dpo": {"policy": "base", **pairs},
        "kto": {"policy": "base", **pairs},
    }
    Path(tmp_path / "recipe.yaml").write_text(
        json.dumps({"name": "reads-images", "base_model": "base", "stages": stages})
    )
    monkeypatch.chdir(tmp_path)
    planned = plan(load_recipe("recipe.yaml"))
    assert check_inputs(planned, planned.nodes) == []


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_prompts_with_images_need_an_engine_that_reads_them(
    family: str, tmp_path: Path, monkeypatch: Any
) -> None:
    make_pictured(family, tmp_path / "base")
    (tmp_path / "a.png").write_bytes(square("red"))
    (tmp_path / "right.py").write_text("def right(responses): return [1.0 for _ in responses]\n")
    prompt = asked([{"type": "image", "image": "a.png"}])["messages"][:1]
    write_rows(tmp_path / "asks.jsonl", [{"prompt": prompt}] * 4)
    monkeypatch.chdir(tmp_path)

    def problems(**engine: str) -> list[str]:
        stage = {
            **{"actor": "base", "prompts": {"sources": "asks.jsonl"}},
            "reward": {"function": "right.py:right"},
            **{"advantage_estimator": "grpo", "n_samples_per_prompt": 2, "rollout_batch_size": 4},
            **{"train_batch_size": 8, "micro_train_batch_size": 1, "prompt_max_len": 100},
            **{"generate_max_len": 8, "dtype": "float32", "engine": engine},
        }
        recipe = {"name": "reads-images", "base_model": "base", "stages": {"ppo": stage}}
        Path(tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
        planned = plan(load_recipe("recipe.yaml"))
        return check_inputs(planned, planned.nodes)

    assert problems(kind="transformers") == []
    assert any("set engine.kind to transformers" in told for told in problems())


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        ({"stage": "iterative", "post_processor": "rejection_sampling"}, "set post_processor to dpo or kto"),
        ({"stage": "iterative", "post_processor": "conditional_sft"}, "set post_processor to dpo or kto"),
        (
            {"stage": "preferences", "post_processor": "rejection_sampling"},
            "set post_processor to dpo or kto",
        ),
        ({"stage": "sft", "condition": "reward"}, "drop the row's images, or use one of these"),
    ],
)
def test_what_reads_no_images_is_refused_in_one_sentence(
    stage: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pictured("qwen3_vl", tmp_path / "base")
    (tmp_path / "a.png").write_bytes(square("red"))
    (tmp_path / "right.py").write_text("def right(responses): return [1.0 for _ in responses]\n")
    prompt = asked([{"type": "image", "image": "a.png"}])["messages"][:1]
    write_rows(tmp_path / "asks.jsonl", [{"prompt": prompt, "response": "red", "reward": 1.0}] * 4)
    monkeypatch.chdir(tmp_path)
    fields: dict[str, Any]
    if stage["stage"] == "sft":
        fields = {"data": {"sources": "asks.jsonl"}, "max_len": 100}
    else:
        fields = {"prompts": {"sources": "asks.jsonl"}, "reward": {"function": "right.py:right"}}
        fields |= {"policy": "base", "engine": {"kind": "transformers"}, "prompt_max_len": 100}
        fields["generate_max_len"] = 8
    recipe = {"name": "reads-none", "base_model": "base", "stages": {"own": fields | stage}}
    Path("recipe.yaml").write_text(json.dumps(recipe))
    planned = plan(load_recipe("recipe.yaml"))
    (problem,) = {problem.partition(": ")[2] for problem in check_inputs(planned, planned.nodes)}
    assert told in problem and "images" in problem


def test_rows_with_images_are_not_split_over_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pictured("qwen3_vl", tmp_path / "base")
    (tmp_path / "a.png").write_bytes(square("red"))
    write_rows(tmp_path / "rows.jsonl", [asked([{"type": "image", "image": "a.png"}])] * 4)
    monkeypatch.chdir(tmp_path)
    stage = {
        **{"data": {"sources": "rows.jsonl"}, "max_len": 100, "ranks": {"num_ranks_per_node": 2}},
        **{"sequence_parallel_size": 2, "train_batch_size": 4, "micro_train_batch_size": 2},
    }
    recipe = {"name": "reads-images", "base_model": "base", "stages": {"sft": stage}}
    Path("recipe.yaml").write_text(json.dumps(recipe))
    planned = plan(load_recipe("recipe.yaml"))
    assert any("set sequence_parallel_size to 1" in told for told in check_inputs(planned, planned.nodes))


def test_families_are_named_once() -> None:
    assert PICTURE_FAMILIES == FAMILIES
    assert set(ONLY_TRAINED) <= {f"{family}_text" for family in PICTURE_FAMILIES}
