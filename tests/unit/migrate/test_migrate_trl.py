"""Commands and configs of TRL become recipes with the same meaning; what has no counterpart is listed, and
Python is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_core.migrate.script import Migrated, migrate
from rlhf_core.recipe.load_recipe import load_recipe
from tests.support.launch_scripts import migrated, told

DPO = r"""#!/bin/bash
accelerate launch --config_file zero3.yaml trl/scripts/dpo.py --model_name_or_path Qwen/Qwen2-0.5B \
  --dataset_name trl-lib/ultrafeedback_binarized --learning_rate 5e-7 --per_device_train_batch_size 2 \
  --gradient_accumulation_steps 8 --beta 0.1 --output_dir out --bf16
"""

SFT = r"""
MODEL=acme/base
trl sft --model_name_or_path $MODEL --dataset_name data/chats.jsonl --output_dir ./sft \
    --num_processes 4 --accelerate_config zero2 --assistant_only_loss --no_packing --report_to wandb \
    --per_device_train_batch_size 4 --num_train_epochs 2 --lr_scheduler_type cosine --warmup_steps 0.1 --seed 7 \
    --use_peft --lora_r 32 --lora_alpha 64 --lora_dropout 0.1 --lora_target_modules q_proj k_proj --warp_speed 9 \
    --neftune_noise_alpha 5 --eval_strategy steps --eval_steps 50 --dataset_test_split held
python -m trl.scripts.dpo --model_name_or_path sft --dataset_name acme/pairs --loss_type sigmoid sft --loss_weights 1.0 0.2 \
    --max_steps 100 --per_device_train_batch_size 2 --warmup_steps 20 --bf16 False --use_cpu
trl vllm-serve --model acme/base
"""

GRPO = r"""
accelerate launch --num_processes 8 --num_machines 2 -m trl grpo --model_name_or_path acme/base --dataset_name acme/math \
  --reward_funcs accuracy_reward my_lib.rewards.short --reward_weights 2.0 1.0 0.5 --reward_model_name_or_path acme/rm \
  --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_generations 16 --steps_per_generation 4 \
  --max_completion_length 256 --beta 0.04 --epsilon_high 0.28 --scale_rewards none --loss_type dr_grpo --use_vllm True \
  --temperature 0.9 --min_p 0.1
"""

CONFIG: dict[str, Any] = {
    "model_name_or_path": "acme/base",
    "dataset_name": "acme/thumbs",
    "desirable_weight": 1.5,
    "learning_rate": 5.0e-7,
    "bf16": True,
    "push_to_hub": False,
    "max_length": 2048,
    "env": {"TOKEN": "secret"},
}


def test_a_command_of_accelerate(tmp_path: Path) -> None:
    raw, found = migrated(tmp_path, DPO)
    stage = raw["stages"]["dpo"]
    assert raw["base_model"] == "Qwen/Qwen2-0.5B" and raw["seed"] == 42 and stage["policy"] == "base"
    assert stage["data"] == {"sources": [{"path": "trl-lib/ultrafeedback_binarized", "format": "columns"}]}
    assert stage["learning_rate"] == 5e-7
    assert stage["beta"] == 0.1
    assert stage["dtype"] == "bfloat16"
    assert stage["zero_stage"] == 3
    assert stage["train_batch_size"] == 2 * 8 * 8
    assert stage["micro_train_batch_size"] == 2
    assert stage["ranks"]["num_ranks_per_node"] == 8
    # Defaults of TRL that are not alignflow's.
    assert stage["max_epochs"] == 3
    assert stage["max_len"] == 1024
    assert stage["warmup_ratio"] == 0.0
    assert stage["min_lr_ratio"] == 0.0
    assert stage["betas"] == [0.9, 0.999] and stage["gradient_checkpointing"] is True
    assert stage["schedule"] == "linear"
    assert "schedule: linear" in told(found, "translated")["(no --lr_scheduler_type: linear)"]
    assert "not beside the script" in found.remarks[0].text
    (tmp_path / "zero3.yaml").write_text(
        "num_processes: 2\nnum_machines: 1\ndeepspeed_config: {zero_stage: 2}\n"
    )
    raw, found = migrated(tmp_path, DPO)
    stage = raw["stages"]["dpo"]
    assert (stage["train_batch_size"], stage["zero_stage"], stage["ranks"]["num_ranks_per_node"]) == (
        32,
        2,
        2,
    ) and not found.remarks


def test_a_chain_of_two_commands_with_adapters(tmp_path: Path) -> None:
    raw, found = migrated(tmp_path, SFT)
    sft = raw["stages"]["sft"]
    dpo = raw["stages"]["dpo"]
    assert (sft["model"], dpo["policy"], raw["seed"]) == ("base", "sft", 7)
    assert sft["data"]["sources"] == [
        {"path": "data/chats.jsonl", "format": "columns", "response_key": "completion"}
    ]
    assert sft["eval_data"]["sources"][0]["split"] == "held" and sft["eval_steps"] == 50
    assert sft["ranks"]["num_ranks_per_node"] == 4 and (sft["train_batch_size"], sft["zero_stage"]) == (16, 2)
    assert sft["lora"] == {"rank": 32, "alpha": 64.0, "targets": ["q_proj", "k_proj"]}
    assert (sft["learning_rate"], sft["warmup_ratio"], sft["max_epochs"]) == (2e-5, 0.1, 2)
    dropped = told(found, "dropped")
    assert "unknown option" in dropped["--warp_speed 9"] and "no noise" in dropped["--neftune_noise_alpha 5"]
    assert "no dropout" in dropped["--lora_dropout 0.1"] and "wandb" in dropped["--report_to wandb"]
    # `python` starts one process; 100 steps of 2 rows.
    assert dpo["ranks"] == {"num_nodes": 1, "num_ranks_per_node": 1, "gpus": 0.0}
    assert dpo["train_batch_size"] == 2
    assert dpo["data"]["max_samples"] == 200
    assert (dpo["warmup_steps"], dpo["nll_coef"], dpo["dtype"]) == (20, 0.2, "float32")
    assert "warmup_ratio" not in dpo
    assert "trl vllm-serve has no counterpart here" in found.remarks[-1].text


@pytest.mark.parametrize(
    ("options", "fields", "note"),
    [
        (
            "--warmup_steps 20 --warmup_ratio 0.1",
            {"warmup_steps": 20},
            ("dropped", "--warmup_ratio 0.1", "--warmup_steps is used"),
        ),
        (
            "--warmup_ratio 0.1 --warmup_steps 0",
            {"warmup_ratio": 0.1},
            ("translated", "--warmup_steps 0", "--warmup_ratio is used"),
        ),
        ("--warmup_steps 0", {"warmup_ratio": 0.0}, ("translated", "--warmup_steps 0", "warmup_ratio")),
    ],
)
def test_positive_warmup_steps_win(
    options: str, fields: dict[str, float], note: tuple[str, str, str], tmp_path: Path
) -> None:
    command = f"trl sft --model_name_or_path acme/base --dataset_name acme/chats {options}\n"
    raw, found = migrated(tmp_path, command)
    stage = raw["stages"]["sft"]
    assert {name: value for name, value in stage.items() if name.startswith("warmup")} == fields
    what, flag, text = note
    assert told(found, what)[flag] == text


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun --nnodes 2 --nproc_per_node 4",
        "accelerate launch --num_machines 2 --num_processes 8",
    ],
)
def test_machines_and_their_processes_are_read_from_each_launcher(launcher: str, tmp_path: Path) -> None:
    script = "trl/scripts/sft.py --model_name_or_path acme/base --dataset_name acme/chats"
    raw, _ = migrated(tmp_path, f"{launcher} {script}\n")
    ranks = raw["stages"]["sft"]["ranks"]
    assert (ranks["num_nodes"], ranks["num_ranks_per_node"]) == (2, 4)


def test_grpo(tmp_path: Path) -> None:
    raw, found = migrated(tmp_path, GRPO)
    stage = raw["stages"]["ppo"]
    assert stage["actor"] == "base" and stage["prompts"] == {"sources": [{"path": "acme/math"}]}
    assert stage["reward"] == [
        {"model": "acme/rm", "weight": 2.0},
        {"function": "rewards.py:accuracy_reward", "weight": 1.0},
        {"function": "my_lib/rewards.py:short", "weight": 0.5},
    ]
    assert stage["actor_ranks"] == {"num_nodes": 2, "num_ranks_per_node": 4, "gpus": 1.0}
    assert stage["colocate_all"] is True
    # 8 GPUs x 4 answers x 4 passes = 128 answers, of 8 prompts; an optimiser step takes 64 of them.
    assert stage["rollout_batch_size"] == 8
    assert stage["n_samples_per_prompt"] == 16
    assert stage["train_batch_size"] == 64
    assert stage["advantage_estimator"] == "dr_grpo"
    assert stage["loss_aggregation"] == "constant"
    assert stage["generate_max_len"] == 256
    assert stage["init_kl_coef"] == 0.04
    assert stage["kl_in"] == "loss"
    assert stage["kl_estimator"] == "k3"
    assert stage["eps_clip_high"] == 0.28
    assert stage["temperature"] == 0.9
    assert stage["num_episodes"] == 3
    assert found.recipe.stages["ppo"].actor_learning_rate == 1e-6
    assert stage["sampler_is"] == "mask"
    assert stage["sampler_is_level"] == "sequence"
    assert stage["sampler_is_clamp"][1] == 3.0
    assert stage["engine"]["gpu_memory_utilization"] == 0.3 and stage["engine"]["num_engines"] == 8
    assert "write it into rewards.py" in told(found, "approximated")["--reward_funcs accuracy_reward"]
    assert "temperature, top_p and top_k alone" in told(found, "dropped")["--min_p 0.1"]


def test_a_config_beside_the_script_and_one_alone(tmp_path: Path) -> None:
    (tmp_path / "thumbs.yaml").write_text(yaml.safe_dump(CONFIG))
    raw, found = migrated(tmp_path, "trl kto --config thumbs.yaml --max_length 512 --num_processes 1\n")
    stage = raw["stages"]["kto"]
    assert (stage["w_desirable"], stage["learning_rate"], stage["max_len"]) == (
        1.5,
        5e-7,
        512,
    ), "the command overrides the config"
    assert stage["data"]["sources"][0]["response_key"] == "completion" and "secret" not in found.text
    assert any("variables of env" in remark.text for remark in found.remarks)
    alone = migrate(tmp_path / "thumbs.yaml", 1)
    assert alone.recipe.stages["kto"].model_dump()["max_len"] == 2048
    (tmp_path / "a.yaml").write_text(
        yaml.safe_dump({"model_name_or_path": "acme/base", "dataset_name": "acme/pairs"})
    )
    with pytest.raises(
        ValueError,
        match="does not say for which command: give a script with the line `trl sft --config FILE`",
    ):
        migrate(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").rename(tmp_path / "reward_config.yaml")
    assert list(migrate(tmp_path / "reward_config.yaml", 1).recipe.stages) == ["reward_model"]
    (tmp_path / "run.sh").write_text("trl sft --config none.yaml\n")
    with pytest.raises(ValueError, match=r"line 1 of the script: .* none.yaml cannot be read \(No such file"):
        migrate(tmp_path / "run.sh")


def test_a_mixture_of_a_config(tmp_path: Path) -> None:
    entries = [
        {"path": "acme/a", "split": "train[:10%]"},
        {"path": "json", "data_files": "b.jsonl", "columns": ["messages"]},
    ]
    (tmp_path / "sft.yaml").write_text(
        yaml.safe_dump({"model_name_or_path": "acme/base", "datasets": entries})
    )
    found = migrate(tmp_path / "sft.yaml", 1)
    (tmp_path / "recipe.yaml").write_text(found.text)
    raw = yaml.safe_load(found.text)["stages"]["sft"]["data"]["sources"]
    assert [source["path"] for source in raw] == ["acme/a", "b.jsonl"] and raw[0]["split"] == "train[:10%]"
    assert [source["probability"] for source in raw] == [0.5, 0.5]
    assert "a source has no such field" in told(found, "dropped")["datasets: columns: ['messages']"]


def every_option(found: Migrated) -> set[str]:
    """The first word of the notes about the options of a command."""
    return {note.flag.split()[0] for note in found.notes}


@pytest.mark.parametrize("script", [DPO, SFT, GRPO])
def test_no_option_is_dropped_in_silence(tmp_path: Path, script: str) -> None:
    _, found = migrated(tmp_path, script)
    launcher = {"--config_file", "--num_processes", "--num_machines", "--accelerate_config", "--model"}
    given = {word for word in script.split() if word.startswith("--")} - launcher
    assert given <= every_option(found)
    load_recipe(tmp_path / "recipe.yaml", [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.py", "import torch\n"),
        ("train.sh", "from trl import SFTTrainer\ntrainer = SFTTrainer(model='a')\n"),
    ],
)
def test_a_python_script_is_refused_in_one_sentence(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(
        ValueError, match=r"it is a .* only commands are read: give the shell script"
    ) as error:
        migrate(tmp_path / name)
    assert "\n" not in str(error.value)
    (tmp_path / "pip.sh").write_text(
        "pip install trl\npython my_training.py --per_device_train_batch_size 4\n"
    )
    with pytest.raises(ValueError, match=r"no training command in it \(one that .* .*, or trl sft\|dpo\|kto"):
        migrate(tmp_path / "pip.sh")
