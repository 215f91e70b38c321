"""What `alignflow plan` says about placements, and that what it says to write fits."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import Qwen2Config

from flows.cli.app import main
from tests.support.measured import LARGE

# Qwen2.5-7B
SEVEN = dict(hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4)


def save_base(folder: Path, **shape: Any) -> None:
    folder.mkdir(exist_ok=True)
    Qwen2Config(**shape).save_pretrained(folder)


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `alignflow plan` prints of a recipe with these stages and the base model `tmp_path / "base"`."""

    def printed(stages: dict[str, Any], *options: str) -> str:
        recipe = {"name": "tried", "base_model": str(tmp_path / "base"), "stages": stages}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        assert main(["plan", str(tmp_path / "recipe.yaml"), *options]) == 0
        return capsys.readouterr().out

    return printed


def test_the_command_names_every_stage_and_a_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_base(tmp_path / "base", **SEVEN, **LARGE)
    (tmp_path / "recipe.yaml").write_text(
        f"name: big\nbase_model: {tmp_path / 'base'}\nstages:\n  sft: {{data: {{sources: a.jsonl}},"
        " zero_stage: 3, ranks: {num_ranks_per_node: 4, gpus: 1}, micro_train_tokens: 8192}\n "
        " reward_model: {data: {sources: b.jsonl}, zero_stage: 2}\n  ppo: {prompts: {sources:"
        " c.jsonl}, zero_stage: 3, micro_train_tokens: 8192, micro_train_batch_size: 1}\n"
    )
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--gpus", "4"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"sft: [\d.]+ GiB per GPU on 4", printed)
    assert re.search(r"reward_model: 1\d\d\.\d GiB .* but a GPU has 140", printed)
    first = (
        "reward_model, ppo run on CPUs: the figures below are for GPUs, and apply only with `gpus: 1` in ranks"
        " and engines"
    )
    assert printed.startswith(f"{first}; there are no estimates for CPUs\n")
    assert "choose all together" in printed
    assert "actor and reference on 2, critic and reward on 1, vLLM on 1" in printed
    assert main(["plan", str(tmp_path / "recipe.yaml"), "ppo.engine.kind=transformers"]) == 0
    printed = capsys.readouterr().out
    assert "ppo: estimates exist only for vLLM engines, but kind is transformers" in printed
    assert "choose" not in printed
    (tmp_path / "base" / "config.json").unlink()
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 2
    shutil.rmtree(tmp_path / "base")
    capsys.readouterr()
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 2
    assert "base is no folder: name a local model folder" in " ".join(capsys.readouterr().err.split())


def test_a_recipe_for_cpus_is_told_so_first(tmp_path: Path, plan: Callable[..., str]) -> None:
    save_base(
        tmp_path / "base", hidden_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1
    )
    said = plan({"sft": {"data": {"sources": "a.jsonl"}}})
    assert said.startswith("this recipe runs on CPUs: the figures below are for GPUs")


def test_a_model_that_no_gpu_can_load_is_said_with_its_size(tmp_path: Path, plan: Callable[..., str]) -> None:
    (tmp_path / "base").mkdir()
    shape = dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)
    shape |= dict(num_key_value_heads=8, vocab_size=128256)
    (tmp_path / "base" / "config.json").write_text(json.dumps(shape))
    ranks = {"num_nodes": 4, "num_ranks_per_node": 8, "gpus": 1}
    common = {"dtype": "bfloat16", "micro_train_batch_size": 1, "gradient_checkpointing": 1, "zero_stage": 2}
    roles_ = dict.fromkeys(("actor_ranks", "critic_ranks", "reference_ranks", "reward_ranks"), ranks)
    stages = {
        "sft": {"data": {"sources": "a.jsonl"}, "ranks": ranks, **common},
        "reward_model": {"data": {"sources": "b.jsonl"}, "ranks": ranks, **common},
        "ppo": {
            "prompts": {"sources": "c.jsonl"},
            "colocate_all": True,
            "engine": {"num_engines": 32, "gpus": 1},
            **roles_,
            **common,
        },
    }
    said = " ".join(plan(stages, "--gpus", "32", "--gpu", "h100").split())
    assert said.startswith("estimates for"), "all of it runs on GPUs"
    assert re.search(
        r"sft: \d+\.\d GiB per GPU on 32 GPU\(s\) but a GPU has 79: with .*zero_stage: 3 it is \d\d\.\d", said
    )
    # what the recipe does not say is tried
    assert "choose all together, reference and reward sharded, Adam offloaded" in said
    said = " ".join(plan(stages, "--gpus", "4", "--gpu", "h100").split())
    more = r"more ranks with zero_stage 3, GPUs with more memory, or a smaller model"
    together = "because at their start actor, critic, reference, reward:reward_model, sampler take 1[0-9][0-9].[0-9] GiB of the same GPU"
    # of the placement that needs least, not of the recipe's ranks
    assert re.search(rf"none of these fits 79 GiB, {together}: {more}", said)


def test_what_it_says_to_write_fits_when_it_is_written(tmp_path: Path, plan: Callable[..., str]) -> None:
    shape = dict(hidden_size=1536, intermediate_size=8960, num_attention_heads=12, num_key_value_heads=2)
    save_base(tmp_path / "base", **shape, tie_word_embeddings=True, **LARGE)
    common = {"micro_train_tokens": 65536, "micro_train_batch_size": 1, "dtype": "bfloat16"}
    stages: dict[str, Any] = {
        "sft": {"data": {"sources": "a.jsonl"}, "max_len": 2048, **common},
        "reward_model": {"data": {"sources": "b.jsonl"}},
        "ppo": {"prompts": {"sources": "c.jsonl"}, "colocate_critic_reward": True, **common},
    }

    def printed() -> str:
        said = plan(stages, "--gpus", "1", "--gpu", "h100")
        assert plan(stages, *"--gpus 1 --gpu-memory 79.2 --bandwidth 3".split()) == said
        assert "\nestimates for 79 GiB, 770 TFLOP/s and 3.0 TB/s a GPU" in f"\n{said}"
        return said

    before = printed()
    passes = re.search(
        r"sft: 1[78]\d\.\d GiB .* a GPU has 79: with (micro_train_tokens: \d+), (gradient_checkpointing: 0.0)"
        r" it is",
        before,
    )
    assert passes
    stages["sft"] |= yaml.safe_load("\n".join(passes.groups()))
    choice = yaml.safe_load(before.partition("In the recipe, under ppo:\n")[2])
    # what the recipe has and the placement has not is said as well
    assert choice["colocate_critic_reward"] is False
    stages["ppo"] |= choice
    after = printed()
    assert re.search(r"sft: [567]\d\.\d GiB per GPU on 1", after) and "a GPU has 79" not in after
    assert "choose as in the recipe" in after and "The recipe has it already" in after


@pytest.mark.parametrize(
    "wrong",
    [["--gpus", "-1"], ["--gpu-memory", "0"], ["--flops", "-3"], ["--bandwidth", "nan"], ["--network", "0"]],
)
def test_numbers_that_no_gpu_has_are_one_sentence(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "recipe.yaml", *wrong]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "--gpus, --gpu-memory, --flops, --bandwidth, --nodes and --network must be numbers above 0" in told


def test_a_recipe_gets_the_other_changes_it_needs(tmp_path: Path, plan: Callable[..., str]) -> None:
    save_base(tmp_path / "base", **SEVEN, **LARGE)
    batches = ("rollout_batch_size", "train_batch_size")
    four = {"ranks": {"num_ranks_per_node": 4, "gpus": 1}, "data": {"sources": "a.jsonl"}}
    stages = {
        "sft": {**four, "zero_stage": 1, "dtype": "bfloat16"},
        "reward_model": {**four},
        "ppo": {
            "prompts": {"sources": "c.jsonl"},
            "reward": [{"model": "reward_model", "ranks": {"gpus": 1}}, {"function": "a.py:f"}],
        },
        "odd": {
            "stage": "ppo",
            "prompts": {"sources": "c.jsonl"},
            **dict.fromkeys(batches, 9),
            "micro_train_batch_size": 9,
        },
    }
    said = plan(stages, "--gpus", "4", "--gpu-memory", "60")
    assert re.search(
        r"sft: .* a GPU has 60: with micro_train_tokens: \d+, gradient_checkpointing: \d.\d, zero_stage:"
        r" 3 it is 5\d",
        said,
    )
    assert re.search(r"reward_model: .*with dtype: bfloat16, but the recipe has float32", said)
    assert "odd: no placement suits its batch sizes and switches" in said
    choice = yaml.safe_load(said.partition("In the recipe, under ppo:\n")[2].partition("odd:")[0])
    assert choice["dtype"] == "bfloat16" and choice["reward"] == [
        {"model": "reward_model"},
        {"function": "a.py:f"},
    ]


def test_documents_that_are_too_long_for_a_gpu_are_split_over_several(
    tmp_path: Path, plan: Callable[..., str]
) -> None:
    save_base(tmp_path / "base", **SEVEN, **LARGE)
    long = dict(
        max_len=131072, dtype="bfloat16", ranks={"num_ranks_per_node": 4, "gpus": 1}, micro_train_batch_size=1
    )
    stages = {
        name: {**long, "stage": "sft", "data": {"sources": "a.jsonl"}, "gradient_checkpointing": True}
        for name in ("alone", "split")
    }
    stages["split"] |= {"sequence_parallel_size": 4}
    said = plan(stages, "--gpus", "4", "--gpu", "h100")
    tries = (
        "a larger sequence_parallel_size, adam_offload, param_offload, more ranks, lora or a smaller model"
    )
    assert re.search(rf"alone: .* a GPU has 79: no pass is short enough: {tries}\n", said)
    assert re.search(r"split: \d\d\.\d GiB per GPU on 4 GPU\(s\), zero_stage \d\n", said)


def test_what_takes_less_memory_is_named_unless_the_recipe_has_it(
    tmp_path: Path, plan: Callable[..., str]
) -> None:
    save_base(tmp_path / "base", **SEVEN, **LARGE)
    on = {"num_nodes": 2, "num_ranks_per_node": 2, "gpus": 1}
    common = {
        "dtype": "bfloat16",
        "stage": "sft",
        "data": {"sources": "a.jsonl"},
        "ranks": on,
        "max_len": 65536,
        "train_batch_size": 4,
    }
    more = {
        "plain": {},
        "hpz": {"zero_hpz": True, "adam_offload": True},
        "lora": {"lora": {}, "param_offload": True},
    }
    stages = {name: common | {"micro_train_batch_size": 1} | fields for name, fields in more.items()}
    printed = plan(stages, "--gpus", "4", "--gpu-memory", "24")
    said = dict(re.findall(r"(\w+): [\d.]+ GiB per GPU .*no pass is short enough: (.*)", printed))
    split = "a larger sequence_parallel_size, "
    assert said == {
        "plain": f"{split}adam_offload, param_offload, more ranks, lora or a smaller model",
        "hpz": f"{split}no zero_hpz, param_offload, more ranks, lora or a smaller model",
        "lora": f"{split}more ranks or a smaller model",
    }


def test_what_no_placement_of_ppo_tries_is_named(tmp_path: Path, plan: Callable[..., str]) -> None:
    save_base(tmp_path / "base", **SEVEN, **LARGE)
    stage = {"prompts": {"sources": "c.jsonl"}, "reward": [{"function": "a.py:f"}], "dtype": "bfloat16"}
    stage |= dict(actor="base", critic="base", generate_max_len=131072, micro_rollout_batch_size=1)
    stage |= dict(rollout_batch_size=8, train_batch_size=8, micro_train_batch_size=1)
    said = plan({"ppo": stage}, "--gpus", "4", "--gpu-memory", "48")
    # host memory and shards are tried
    tries = "a larger sequence_parallel_size, more GPUs, lora or a smaller model"
    assert f"none of these fits 48 GiB, not even with shorter passes: {tries}\n" in said
    # phases of what needs the least memory
    assert "ppo, all together, weights and Adam offloaded" in " ".join(said.split())
