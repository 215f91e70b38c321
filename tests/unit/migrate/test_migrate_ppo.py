"""Launch scripts of PPO become recipes: groups of cards, engines, rewards, estimators."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config import PPO
from rlhf_core.migrate.script import Migrated
from tests.support.launch_scripts import PPO_COLOCATED, PPO_GROUPS, REQUIRED, migrated, told


def test_ppo_with_four_groups(tmp_path: Path) -> None:
    raw, found = migrated(tmp_path, PPO_GROUPS, "ppo groups.sh")
    assert raw["name"] == "ppo-groups"
    assert raw["base_model"] == "acme/base-8b-sft"
    assert raw["seed"] == 7
    assert list(raw["stages"]) == ["ppo"]
    ppo = found.recipe.stages["ppo"]
    assert isinstance(ppo, PPO)
    sizes = {
        name: (ranks.num_nodes, ranks.num_ranks_per_node, ranks.gpus) for name, ranks in ppo.groups.items()
    }
    assert sizes == {
        "actor": (1, 4, 1),
        "critic": (1, 4, 1),
        "reference": (1, 2, 1),
        "reward:rm-8b": (2, 1, 1),
        "reward:safety-8b": (2, 1, 1),
    }
    assert (ppo.engine.num_engines, ppo.engine.gpus, ppo.engine.gpu_memory_utilization) == (4, 1, 0.85)
    assert ppo.actor == "base"
    assert [source.title for source in ppo.reward] == ["rm-8b", "safety-8b"]
    assert ppo.critic is None
    assert ppo.train_batch_size == 128
    assert ppo.micro_train_batch_size == 4
    assert ppo.rollout_batch_size == 1024
    assert ppo.micro_rollout_batch_size == 16
    assert (ppo.prompt_max_len, ppo.generate_max_len, ppo.zero_stage, ppo.dtype) == (512, 768, 3, "bfloat16")
    assert ppo.actor_learning_rate == 5e-7
    assert ppo.critic_learning_rate == 9e-6
    assert ppo.init_kl_coef == 0.01
    assert ppo.lambd == 1
    assert ppo.schedule == "constant"
    assert ppo.freezing_actor_steps == 0
    assert ppo.save_steps == 20
    assert ppo.keep_checkpoints == 2
    assert ppo.sampler_is == "off"
    assert ppo.normalize_reward and ppo.gradient_checkpointing
    first, second = ppo.prompts.sources
    assert first.path == "acme/chat"
    assert first.probability == 0.75
    assert first.prompt_key == "context"
    assert first.format == "columns"
    assert (second.path, second.probability) == ("data/math.jsonl", 0.25)
    assert (ppo.prompts.template, ppo.prompts.max_samples) == ("chat", 100000)

    dropped = told(found, "dropped")
    alike = told(found, "approximated")
    assert dropped["--warp_speed 9"].startswith("unknown flag")
    assert "chooses this itself" in dropped["--flash_attn"]
    assert ppo.adam_offload == ("actor", "critic") and "--adam_offload" not in dropped
    assert "the folder helpful of acme/chat is" in alike["--prompt_data acme/chat@helpful,data/math.jsonl"]
    assert "run directory of stage ppo" in alike["--save_path ./out/ppo-$(date +%m%d)"]
    assert "0123456789abcdef" not in found.text and "--use_wandb ***" in dropped
    assert all(
        f"# {line}" in found.text
        for line in ("Translated, flag -> field:", "Approximated; check these:", "Dropped, and why:")
    )


def test_ppo_with_everything_colocated(tmp_path: Path) -> None:
    _, found = migrated(tmp_path, PPO_COLOCATED)
    ppo = found.recipe.stages["ppo"]
    assert isinstance(ppo, PPO)
    assert {ranks.world_size for ranks in ppo.groups.values()} == {8}
    assert (ppo.engine.num_engines, ppo.engine.sleep, ppo.engine.gpu_memory_utilization) == (8, True, 0.5)
    assert ppo.betas == (0.9, 0.98)
    assert ppo.max_norm == 1.0
    assert ppo.lambd == 0.95
    assert ppo.value_clip == 0.5
    assert ppo.dtype == "bfloat16"
    assert ppo.kl_in == "loss"
    assert ppo.kl_estimator == "k2"
    assert ppo.sampler_is == "clamp"
    assert ppo.sampler_is_clamp == (0.4, 4.0)
    assert (ppo.eps_clip_low, ppo.eps_clip_high, ppo.reward_clip) == (0.2, 0.28, 5)
    assert (ppo.prompt_max_len, ppo.generate_max_len, ppo.micro_train_tokens) == (2048, 1024, 16384)
    assert ppo.rollout_batch_size == 1024
    assert ppo.n_samples_per_prompt == 2
    assert ppo.prompts.sources[0].prompt_key == "messages"
    alike = told(found, "approximated")
    dropped = told(found, "dropped")
    assert "k1 has no gradient" in alike["--algo.kl.use_loss"]
    assert "shares this setting" in dropped["--critic.max_norm 0.5"]
    assert ppo.colocate_all and ppo.ref_reward_offload


def test_one_group_for_everything(tmp_path: Path) -> None:
    text = (
        "python -m openrlhf.cli.train_ppo_ray --num_nodes 2 --num_gpus_per_node 4 --colocate_all --pretrain"
        " a/b --reward_pretrain a/rm --prompt_data p.jsonl --bf16 --apply_chat_template"
    )
    _, found = migrated(tmp_path, text)
    ppo = found.recipe.stages["ppo"]
    assert isinstance(ppo, PPO)
    assert {(ranks.num_nodes, ranks.num_ranks_per_node) for ranks in ppo.groups.values()} == {(2, 4)}
    assert ppo.engine.num_engines == 8
    assert (ppo.init_kl_coef, ppo.zero_stage) == (0.02, 2)  # the dialect's defaults


@pytest.mark.parametrize(
    ("more", "stage"), [("", 0), ("--adam_offload", 1), ("--critic_num_gpus_per_node 2", 1)]
)
def test_no_zero_stays_so_where_a_recipe_may_say_it(more: str, stage: int, tmp_path: Path) -> None:
    flags = "--pretrain a/b --reward_pretrain a/rm --prompt_data p --bf16 --zero_stage 0 "
    flags += " ".join(
        f"--{role}_num_gpus_per_node 1"
        for role in ("actor", "ref", "reward") + (() if "critic" in more else ("critic",))
    )
    _, found = migrated(tmp_path, f"python train_ppo_ray.py {flags} {more}")
    ppo = found.recipe.stages["ppo"]
    assert isinstance(ppo, PPO) and ppo.zero_stage == stage


def test_models_that_share_cards_get_equal_groups(tmp_path: Path) -> None:
    flags = (
        "--pretrain a/b --reward_pretrain a/rm --prompt_data p --bf16 --actor_num_gpus_per_node 4"
        " --critic_num_gpus_per_node 2"
    )
    shared = (
        "--colocate_actor_ref --colocate_critic_reward --reward_num_gpus_per_node 8 --vllm_num_engines 2"
        " --vllm_tensor_parallel_size 2"
    )
    _, found = migrated(tmp_path, f"python train_ppo_ray.py {flags} {shared}")
    ppo = found.recipe.stages["ppo"]
    assert isinstance(ppo, PPO) and ppo.engine.num_engines == 2 and ppo.engine.gpus == 1
    sizes = {name: ranks.world_size for name, ranks in ppo.groups.items()}
    assert sizes == {"actor": 4, "critic": 2, "reference": 4, "reward:rm": 2}
    assert (
        "whose GPUs it shares"
        in told(found, "approximated")["--reward_num_nodes, --reward_num_gpus_per_node"]
    )
    _, found = migrated(
        tmp_path, f"python train_ppo_ray.py {flags} --colocate_all_models --vllm_num_engines 3"
    )
    ppo = found.recipe.stages["ppo"]
    assert isinstance(ppo, PPO)
    assert {ranks.world_size for ranks in ppo.groups.values()} == {4} and ppo.engine.num_engines == 4


def test_rollouts_are_whole_optimiser_steps(tmp_path: Path) -> None:
    flags = (
        "--pretrain a/b --reward_pretrain a/rm --prompt_data p --bf16 --rollout_batch_size 48"
        " --train_batch_size 128"
    )
    _, found = migrated(
        tmp_path, f"python train_ppo_ray.py {flags} --actor_num_gpus_per_node 2 --critic_num_gpus_per_node 4"
    )
    ppo = found.recipe.stages["ppo"]
    assert isinstance(ppo, PPO) and (
        ppo.rollout_batch_size,
        ppo.train_batch_size,
        ppo.micro_train_batch_size,
    ) == (48, 48, None)


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("--remote_rm_url http://localhost:5000/score,http://other:5000/score", ["http", "http"]),
        ("--remote_rm_url ./checks.py", ["function"]),
        ("--reward_pretrain a/rm --critic_pretrain a/b", ["model"]),
    ],
)
def test_rewards(tmp_path: Path, reward: str, expected: list[str]) -> None:
    text = f"python train_ppo_ray.py --pretrain a/b --prompt_data p --bf16 --advantage_estimator gae {reward}"
    _, found = migrated(tmp_path, text)
    ppo = found.recipe.stages["ppo"]
    assert (
        isinstance(ppo, PPO) and [source.kind for source in ppo.reward] == expected and ppo.critic == "base"
    )


def test_a_password_in_an_address_is_not_copied(tmp_path: Path) -> None:
    reward = "--remote_rm_url http://me:hidden@rewards:5000/score,http://other:5000/score"
    _, found = migrated(tmp_path, f"python train_ppo_ray.py --pretrain a/b --prompt_data p --bf16 {reward}")
    assert "hidden" not in found.text
    assert any("***@rewards" in note.flag and "api_key_env" in note.text for note in found.notes)


def test_folders_without_a_slash_and_a_reward_model_named_as_the_base(tmp_path: Path) -> None:
    raw, _ = migrated(
        tmp_path, "python train_ppo_ray.py --pretrain llama --reward_pretrain llama,rm --prompt_data p --bf16"
    )
    assert raw["base_model"] == "llama"
    assert raw["stages"]["ppo"]["actor"] == "base"
    assert raw["stages"]["ppo"]["reward"] == ["./llama", "./rm"]


def test_an_estimator_without_a_critic(tmp_path: Path) -> None:
    text = (
        "python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path a/b --reward.remote_url r.py"
        " --data.prompt_dataset p --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8"
        " --critic.model_name_or_path a/c --critic.freezing_steps 5 --rollout.top_p 0.9"
    )
    _, found = migrated(tmp_path, text)
    ppo = found.recipe.stages["ppo"]
    assert isinstance(ppo, PPO) and (ppo.advantage_estimator, ppo.critic, ppo.freezing_actor_steps) == (
        "grpo",
        None,
        0,
    )
    dropped = told(found, "dropped")
    assert dropped["--critic.model_name_or_path a/c"] == "grpo has no critic" and ppo.top_p == 0.9


def test_asynchronous_training(tmp_path: Path) -> None:
    def read(flags: str) -> tuple[PPO, Migrated]:
        _, found = migrated(tmp_path, f"python train_ppo_ray.py {REQUIRED['train_ppo_ray']} {flags}")
        ppo = found.recipe.stages["ppo"]
        assert isinstance(ppo, PPO)
        return ppo, found

    ppo, found = read("--async_train")
    assert (ppo.max_staleness, ppo.sampler_is) == (1, "truncate")
    assert (
        told(found, "approximated")["--async_train"]
        == "max_staleness: answers one update old, with sampler_is: truncate"
    )
    ppo, found = read("--train.async_enable --enable_vllm_is_correction")
    assert ppo.max_staleness and "--train.async_enable" in told(found, "translated")
    ppo, found = read("--async_train --colocate_all_models --vllm_enable_sleep")
    assert ppo.colocate_all and not ppo.max_staleness
    assert (
        told(found, "dropped")["--async_train"]
        == "max_staleness does not go with colocate_all and engine.sleep"
    )
    assert not read("--async_train False")[0].max_staleness
    ppo, _ = read("--async_train --dynamic_filtering --n_samples_per_prompt 4")
    assert (ppo.max_staleness, ppo.dynamic_filtering) == (1, True)
    ppo, found = read("--async_train --dynamic_filtering --n_samples_per_prompt 4 --colocate_critic_reward")
    assert (ppo.max_staleness, ppo.dynamic_filtering) == (0, True)
    assert "colocate_critic_reward" in told(found, "dropped")["--async_train"]


AIAK = """ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "/workspace/AIAK-RLHF"}' \\
  -- python3 training/train_ppo_ray_optim.py --num_nodes 2 --num_gpus_per_node 4 --colocate_all \\
  --pretrain /models/sft --reward_pretrain /models/rm --prompt_data p.jsonl --bf16 --apply_chat_template --aiak_only 1
"""
AIAK_JOB = """apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: ppo}
spec:
  pytorchReplicaSpecs:
    Master:
      template:
        spec:
          containers:
            - name: pytorch
              image: example/aiak:1
              command: ["/bin/bash", "-c"]
              args:
                - |
                  ray start --head
"""


@pytest.mark.parametrize("name", ["launch.sh", "job.yaml"])
def test_the_entry_point_of_aiak(name: str, tmp_path: Path) -> None:
    text = (
        AIAK
        if name == "launch.sh"
        else AIAK_JOB + "".join(f"{' ' * 18}{line}\n" for line in AIAK.splitlines())
    )
    raw, found = migrated(tmp_path, text, name)
    ppo = found.recipe.stages["ppo"]
    assert isinstance(ppo, PPO) and raw["base_model"] == "/models/sft"
    assert {(ranks.num_nodes, ranks.num_ranks_per_node) for ranks in ppo.groups.values()} == {(2, 4)}
    assert ppo.colocate_all
    assert "unknown flag" in told(found, "dropped")["--aiak_only 1"]


def test_held_out_prompts_are_validated(tmp_path: Path) -> None:
    more = (
        "--eval_dataset data/held.jsonl --eval_steps 20 --eval_n_samples_per_prompt 4 --eval_temperature 0.6"
    )
    _, found = migrated(tmp_path, f"{PPO_COLOCATED.rstrip()} {more}\n")
    ppo = found.recipe.stages["ppo"]
    assert isinstance(ppo, PPO) and ppo.eval_prompts is not None
    assert (ppo.eval_prompts.sources[0].path, ppo.eval_steps, ppo.eval_samples) == ("data/held.jsonl", 20, 4)
    assert ppo.eval_temperature == 0.6
    assert told(found, "translated")["--eval_temperature 0.6"] == "eval_temperature"


def test_without_them_their_settings_are_dropped(tmp_path: Path) -> None:
    _, found = migrated(tmp_path, f"{PPO_COLOCATED.rstrip()} --eval_steps -1 --eval_temperature 0.6\n")
    assert "there are no eval_prompts" in told(found, "dropped")["--eval_temperature 0.6"]
    assert "there are no eval_prompts" in told(found, "dropped")["--eval_steps -1"]
