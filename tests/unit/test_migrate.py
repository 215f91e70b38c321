"""Launch scripts in both flag dialects become recipes that validate, and every flag is accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import flows.cli
from rlhf_core.config import PPO
from rlhf_core.migrate.flags import DOTTED, DROPPED, FIELDS, flat
from rlhf_core.migrate.launches import launches_in
from rlhf_core.migrate.script import Migrated, migrate
from rlhf_core.migrate.shell import read_script
from rlhf_core.migrate.variables import Variables
from rlhf_core.recipe import load_recipe

PPO_GROUPS = r"""#!/usr/bin/env bash
set -euxo pipefail
export NCCL_DEBUG=WARN
POLICY=${POLICY:-acme/base-8b-sft}
LR=5e-7
RUN=ppo-$(date +%m%d)
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "."}' --no-wait \
  -- python3 -m openrlhf.cli.train_ppo_ray \
  --actor_num_nodes 1 --actor_num_gpus_per_node 4 --critic_num_nodes 1 --critic_num_gpus_per_node 4 \
  --ref_num_nodes 1 --ref_num_gpus_per_node 2 --reward_num_nodes 2 --reward_num_gpus_per_node 1 \
  --vllm_num_engines 4 --vllm_tensor_parallel_size 1 --vllm_gpu_memory_utilization 0.85 \
  --pretrain "$POLICY" --reward_pretrain acme/rm-8b,acme/safety-8b --save_path ./out/$RUN \
  --micro_train_batch_size 4 --train_batch_size 128 --micro_rollout_batch_size 16 --rollout_batch_size=1024 \
  --prompt_max_len 512 --generate_max_len 768 --zero_stage 3 --bf16 --flash_attn --gradient_checkpointing --adam_offload \
  --actor_learning_rate $LR --critic_learning_rate 9e-6 --init_kl_coef 0.01 --lambd 1 --gamma 1 --freezing_actor_steps -1 \
  --prompt_data acme/chat@helpful,data/math.jsonl --prompt_data_probs 0.75,0.25 --input_key context --apply_chat_template \
  --max_samples 1e5 --normalize_reward --save_steps 20 --max_ckpt_num 2 --seed 7 --warp_speed 9 \
  --use_wandb 0123456789abcdef --lr_scheduler constant 2>&1 | tee logs/$RUN.log
"""

PPO_COLOCATED = r"""
ACTOR=acme/base-8b
TP=1
NGPU=8
ARGS=(
   --actor.model_name_or_path $ACTOR
   --reward.model_name_or_path acme/rm-8b   # scores
   --ref.num_nodes 1 --ref.num_gpus_per_node $NGPU
   --reward.num_nodes 1 --reward.num_gpus_per_node $NGPU
   --critic.num_nodes 1 --critic.num_gpus_per_node $NGPU
   --actor.num_nodes 1 --actor.num_gpus_per_node $NGPU
   --vllm.num_engines $((NGPU / TP)) --vllm.tensor_parallel_size $TP --vllm.gpu_memory_utilization 0.5 --vllm.enable_sleep
   --train.colocate_all --ds.enable_sleep --ds.adam_offload --ref.offload --reward.offload
   --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 --actor.adam.betas 0.9 0.98 --critic.max_norm 0.5
   --algo.kl.init_coef 0.01 --algo.kl.use_loss --algo.advantage.lambd 0.95
   --algo.advantage.is_correction_enable --algo.advantage.is_correction_threshold 0.4 4.0
   --actor.eps_clip_low_high 0.2 0.28 --reward.clip_range -5 5
   --train.batch_size 128 --rollout.batch_size 1024 --rollout.n_samples_per_prompt 2
   --data.max_len 3072 --rollout.max_new_tokens 1024 --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384
   --data.prompt_dataset acme/prompts --data.input_key messages --data.apply_chat_template
   --ds.zero_stage 3 --ds.packing_samples --actor.gradient_checkpointing_enable --ckpt.output_dir /ckpt/ppo
)
python -m openrlhf.cli.train_ppo_ray "${ARGS[@]}"
"""

REWARD_MODEL = r"""
read -r -d '' training_commands <<EOF
openrlhf.cli.train_rm \
   --save_path ./checkpoint/rm --pretrain acme/base-8b-sft --bf16 --zero_stage 3 \
   --train_batch_size 256 --micro_train_batch_size 1 --max_len 8192 --learning_rate 9e-6 --max_epochs 1 \
   --dataset acme/pairs --chosen_key better --rejected_key worse --apply_chat_template --margin_loss --loss sigmoid \
   --save_steps -1 --eval_steps -1 --load_checkpoint --packing_samples
EOF
if [[ ${1} != "slurm" ]]; then
    deepspeed --include localhost:0,1,2,3 --module $training_commands
fi
"""

SFT = r"""
torchrun --nnodes 2 --nproc-per-node 4 -m openrlhf.cli.train_sft \
  --model.model_name_or_path acme/base-8b --data.dataset data/chats.jsonl --data.input_key question --data.output_key answer \
  --data.input_template $'User: {}\nAssistant: ' --data.max_len 4096 --train.batch_size 256 --train.micro_batch_size 2 \
  --adam.lr 5e-6 --adam.weight_decay 0.01 --lr_warmup_ratio 0.05 --ds.zero_stage 2 --ds.packing_samples --train.max_epochs 2 \
  --ds.lora.rank 64 --ds.lora.alpha 32 --ds.lora.target_modules q_proj v_proj --eval.dataset data/held.jsonl --eval.steps 50 \
  --ckpt.output_dir ./out/sft
"""

DPO = r"""
python -m torch.distributed.launch --nproc_per_node=8 train_dpo.py \
  --pretrain acme/sft --ref_pretrain acme/sft --dataset acme/pairs --prompt_key prompt --chosen_key chosen --rejected_key rejected \
  --beta 0.2 --label_smoothing 0.1 --nll_loss_coef 0.05 --ref_offload --bf16 --train_batch_size 128 --micro_train_batch_size 2
"""

KTO = r"""
deepspeed --num_gpus 2 ./train_kto.py --pretrain acme/sft --dataset acme/labelled --input_key instruction --output_key response \
  --label_key score --desirable_loss_weight 1.5 --undesirable_loss_weight 1.0 --unpaired_preference --vanilla_loss --bf16 \
  --train_batch_size 64 --micro_train_batch_size 8 --input_template 'Q: {} A: '
"""

CHAIN = r"""
OUT=./out
deepspeed --module openrlhf.cli.train_sft --pretrain acme/base --dataset a.jsonl --input_key q --output_key a --save_path $OUT/sft --bf16
deepspeed --module openrlhf.cli.train_rm --pretrain $OUT/sft/ --dataset pairs.jsonl --save_path $OUT/rm --bf16
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --pretrain out/sft --reward_pretrain $OUT/rm --critic_pretrain $OUT/rm \
  --prompt_data p.jsonl --save_path $OUT/ppo --bf16
deepspeed --module openrlhf.cli.train_dpo --pretrain $OUT/ppo --ref_pretrain $OUT/sft --dataset pairs.jsonl --bf16 --ipo
deepspeed --module openrlhf.cli.train_dpo --pretrain acme/other --dataset pairs.jsonl --bf16
"""

LOOP = r"""
GEN=./work/generate.jsonl
SCORED=./work/scored.jsonl
POLICY=acme/sft
iter=0
while (($iter < 5)); do
   if ((iter > 0)); then
      POLICY=./work/model
   fi
   read -r -d '' generate <<EOF
../batch_inference.py
   --eval_task generate_vllm --pretrain $POLICY --best_of_n 16 --rollout_batch_size 10240 --iter $iter
   --max_new_tokens 2048 --prompt_max_len 1024 --dataset acme/prompts --input_key messages --apply_chat_template --tp_size 4
   --output_path $GEN
EOF
   python $generate
   deepspeed ../batch_inference.py --eval_task rm --pretrain acme/rm --dataset $GEN --post_processor iter_dpo --output_path $SCORED \
      --micro_batch_size 4 --bf16
   deepspeed ../train_dpo.py --pretrain $POLICY --dataset $SCORED --save_path ./work/model --bf16 --learning_rate 5e-7 --zero_stage 3 \
      --apply_chat_template
   iter=$((iter + 1))
done
"""

CONFIG_MAP = """
apiVersion: v1
kind: ConfigMap
metadata: {name: scripts}
data:
  notes.txt: hello
  train.sh: |
    #!/bin/bash
    deepspeed --num_gpus $GPUS --module openrlhf.cli.train_rm --pretrain $MODEL \\
      --dataset acme/pairs --apply_chat_template --bf16
---
apiVersion: batch/v1
kind: Job
metadata: {name: rm}
spec:
  template:
    spec:
      containers:
        - name: trainer
          image: example/trainer:1
          env:
            - {name: MODEL, value: acme/base}
            - {name: GPUS, value: "4"}
            - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token}}}
          command: [bash, /scripts/train.sh]
"""

JOBS = """
apiVersion: batch/v1
kind: Job
metadata: {name: sft}
spec:
  template:
    spec:
      containers:
        - name: trainer
          image: example/trainer:1
          env: [{name: BASE, value: acme/base}]
          command: [torchrun, --nproc_per_node, "2", -m, openrlhf.cli.train_sft]
          args: [--pretrain, $(BASE), --dataset, a.jsonl, --input_key, q, --output_key, a, --bf16, --save_path, /ckpt/sft]
---
apiVersion: batch/v1
kind: CronJob
metadata: {name: dpo}
spec:
  jobTemplate:
    spec:
      template:
        spec:
          containers:
            - name: trainer
              image: example/trainer:1
              command: ["/bin/bash", "-c"]
              args:
                - |
                  set -e
                  deepspeed --module openrlhf.cli.train_dpo --pretrain /ckpt/sft --dataset pairs.jsonl --bf16
---
apiVersion: ray.io/v1
kind: RayJob
metadata: {name: ppo}
spec:
  entrypoint: |
    python3 -m openrlhf.cli.train_ppo_ray
    --pretrain /ckpt/sft
    --reward_pretrain acme/rm
    --prompt_data p.jsonl --bf16
"""


def migrated(tmp_path: Path, text: str, name: str = "launch.sh") -> tuple[dict[str, Any], Migrated]:
    """The recipe as its YAML has it, after that was loaded and compared."""
    (tmp_path / name).write_text(text)
    found = migrate(tmp_path / name)
    (tmp_path / "recipe.yaml").write_text(found.text)
    assert load_recipe(tmp_path / "recipe.yaml") == found.recipe
    raw: dict[str, Any] = yaml.safe_load(found.text)
    return raw, found


def told(found: Migrated, what: str) -> dict[str, str]:
    return {note.flag: note.told for note in found.notes if note.what == what}


def test_ppo_with_four_groups(tmp_path: Path) -> None:
    raw, found = migrated(tmp_path, PPO_GROUPS, "ppo groups.sh")
    assert (raw["name"], raw["base_model"], raw["seed"], list(raw["stages"])) == ("ppo-groups", "acme/base-8b-sft", 7, ["ppo"])
    ppo = found.recipe.stages["ppo"]
    assert isinstance(ppo, PPO)
    sizes = {name: (ranks.num_nodes, ranks.num_ranks_per_node, ranks.gpus) for name, ranks in ppo.groups.items()}
    assert sizes == {
        "actor": (1, 4, 1),
        "critic": (1, 4, 1),
        "reference": (1, 2, 1),
        "reward:rm-8b": (2, 1, 1),
        "reward:safety-8b": (2, 1, 1),
    }
    assert (ppo.vllm.num_engines, ppo.vllm.gpus, ppo.vllm.gpu_memory_utilization) == (4, 1, 0.85)
    assert (ppo.actor, [source.title for source in ppo.reward], ppo.critic) == ("base", ["rm-8b", "safety-8b"], None)
    assert (ppo.train_batch_size, ppo.micro_train_batch_size, ppo.rollout_batch_size, ppo.micro_rollout_batch_size) == (128, 4, 1024, 16)
    assert (ppo.prompt_max_len, ppo.generate_max_len, ppo.zero_stage, ppo.dtype) == (512, 768, 3, "bfloat16")
    assert (ppo.actor_learning_rate, ppo.critic_learning_rate, ppo.init_kl_coef, ppo.lambd) == (5e-7, 9e-6, 0.01, 1)
    assert (ppo.min_lr_ratio, ppo.freezing_actor_steps, ppo.save_steps, ppo.keep_checkpoints, ppo.sampler_is) == (1, 0, 20, 2, "off")
    assert ppo.normalize_reward and ppo.gradient_checkpointing
    first, second = ppo.prompts.sources
    assert (first.path, first.probability, first.prompt_key, first.format) == ("acme/chat", 0.75, "context", "columns")
    assert (second.path, second.probability) == ("data/math.jsonl", 0.25)
    assert (ppo.prompts.template, ppo.prompts.max_samples) == ("chat", 100000)

    dropped, alike = told(found, "dropped"), told(found, "approximated")
    assert dropped["--warp_speed 9"].startswith("unknown flag")
    assert "chooses this itself" in dropped["--flash_attn"]
    assert ("--adam_offload" in dropped) != ("adam_offload" in PPO.model_fields)
    assert "the folder helpful of acme/chat is not selected" in alike["--prompt_data acme/chat@helpful,data/math.jsonl"]
    assert "run directory of stage ppo" in alike["--save_path ./out/ppo-$(date +%m%d)"]
    assert "0123456789abcdef" not in found.text and "--use_wandb ***" in dropped
    assert all(f"# {line}" in found.text for line in ("Translated, flag -> field:", "Only alike; look at these:", "Dropped, and why:"))


def test_every_flag_of_a_script_is_accounted_for(tmp_path: Path) -> None:
    for text in (PPO_GROUPS, PPO_COLOCATED, REWARD_MODEL, SFT, DPO, KTO):
        _, found = migrated(tmp_path, text)
        variables = Variables()
        (launch,) = launches_in(read_script(text, variables), variables).launches
        named = {note.flag.split()[0] for note in found.notes}
        # Lengths, groups and switches that only make sense with others are told together.
        together = {"--data.max_len", "--prompt_data", "--dataset"}
        assert {f"--{name}" for name in launch.flags} - named <= together


def test_ppo_with_everything_colocated(tmp_path: Path) -> None:
    _, found = migrated(tmp_path, PPO_COLOCATED)
    ppo = found.recipe.stages["ppo"]
    assert isinstance(ppo, PPO)
    assert {ranks.world_size for ranks in ppo.groups.values()} == {8}
    assert (ppo.vllm.num_engines, ppo.vllm.sleep, ppo.vllm.gpu_memory_utilization) == (8, True, 0.5)
    assert (ppo.betas, ppo.max_norm, ppo.lambd, ppo.value_clip, ppo.dtype) == ((0.9, 0.98), 1.0, 0.95, 0.5, "bfloat16")
    assert (ppo.kl_in, ppo.kl_estimator, ppo.sampler_is, ppo.sampler_is_clamp) == ("loss", "k2", "clamp", (0.4, 4.0))
    assert (ppo.eps_clip_low, ppo.eps_clip_high, ppo.reward_clip) == (0.2, 0.28, 5)
    assert (ppo.prompt_max_len, ppo.generate_max_len, ppo.micro_train_tokens) == (2048, 1024, 16384)
    assert (ppo.rollout_batch_size, ppo.n_samples_per_prompt, ppo.prompts.sources[0].prompt_key) == (1024, 2, "messages")
    alike, dropped = told(found, "approximated"), told(found, "dropped")
    assert "k1 has no gradient" in alike["--algo.kl.use_loss"] and "shares this setting" in dropped["--critic.max_norm 0.5"]
    names = {"--train.colocate_all": "colocate_all", "--ref.offload": "ref_reward_offload", "--reward.offload": "ref_reward_offload"}
    for flag, name in names.items():  # as soon as a ppo stage has such a field
        if name in PPO.model_fields:
            assert getattr(ppo, name) is True
        else:
            assert dropped[flag] == f"a ppo stage has no {name}"


def test_asynchronous_training(tmp_path: Path) -> None:
    def read(flags: str) -> tuple[PPO, Migrated]:
        _, found = migrated(tmp_path, f"python train_ppo_ray.py {REQUIRED['train_ppo_ray']} {flags}")
        ppo = found.recipe.stages["ppo"]
        assert isinstance(ppo, PPO)
        return ppo, found

    ppo, found = read("--async_train")
    assert (ppo.one_step_off_policy, ppo.sampler_is) == (True, "truncate")
    assert told(found, "approximated")["--async_train"] == "one_step_off_policy: answers one update old, with sampler_is: truncate"
    ppo, found = read("--train.async_enable --enable_vllm_is_correction")
    assert ppo.one_step_off_policy and "--train.async_enable" in told(found, "translated")
    ppo, found = read("--async_train --colocate_all_models --vllm_enable_sleep")
    assert ppo.colocate_all and not ppo.one_step_off_policy
    assert told(found, "dropped")["--async_train"] == "one_step_off_policy does not go with colocate_all and vllm.sleep"
    assert not read("--async_train False")[0].one_step_off_policy


def test_colocation_is_translated_when_the_config_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import rlhf_core.migrate.draft as draft

    monkeypatch.setattr(draft, "config_class", lambda kind: PPO)
    found = draft.draft_of(
        launches_in(read_script("python -m x.train_ppo_ray --colocate_all_models --shared"), Variables()).launches[0], "ppo"
    )
    real = draft.find_field
    monkeypatch.setattr(draft, "find_field", lambda model, name: False if name == "colocate_all" else real(model, name))
    found.read_fields()
    assert found.fields == {"colocate_all": True} and list(found.left) == ["shared"]


def test_one_group_for_everything(tmp_path: Path) -> None:
    text = (
        "python -m openrlhf.cli.train_ppo_ray --num_nodes 2 --num_gpus_per_node 4 --colocate_all --pretrain a/b --reward_pretrain a/rm "
        "--prompt_data p.jsonl --bf16 --apply_chat_template"
    )
    _, found = migrated(tmp_path, text)
    ppo = found.recipe.stages["ppo"]
    assert isinstance(ppo, PPO)
    assert {(ranks.num_nodes, ranks.num_ranks_per_node) for ranks in ppo.groups.values()} == {(2, 4)} and ppo.vllm.num_engines == 8
    assert (ppo.init_kl_coef, ppo.zero_stage) == (0.02, 2)  # the dialect's defaults


def test_models_that_share_cards_get_equal_groups(tmp_path: Path) -> None:
    flags = "--pretrain a/b --reward_pretrain a/rm --prompt_data p --bf16 --actor_num_gpus_per_node 4 --critic_num_gpus_per_node 2"
    shared = "--colocate_actor_ref --colocate_critic_reward --reward_num_gpus_per_node 8 --vllm_num_engines 2 --vllm_tensor_parallel_size 2"
    _, found = migrated(tmp_path, f"python train_ppo_ray.py {flags} {shared}")
    ppo = found.recipe.stages["ppo"]
    assert isinstance(ppo, PPO) and ppo.vllm.num_engines == 2 and ppo.vllm.gpus == 1
    sizes = {name: ranks.world_size for name, ranks in ppo.groups.items()}
    if "colocate_actor_ref" in PPO.model_fields:
        assert sizes == {"actor": 4, "critic": 2, "reference": 4, "reward:rm": 2}
        assert "whose cards it shares" in told(found, "approximated")["--reward_num_nodes, --reward_num_gpus_per_node"]
    else:
        assert sizes == {"actor": 4, "critic": 2, "reference": 8, "reward:rm": 8}
    _, found = migrated(tmp_path, f"python train_ppo_ray.py {flags} --colocate_all_models --vllm_num_engines 3")
    ppo = found.recipe.stages["ppo"]
    assert isinstance(ppo, PPO)
    if "colocate_all" in PPO.model_fields:
        assert {ranks.world_size for ranks in ppo.groups.values()} == {4} and ppo.vllm.num_engines == 4
    else:
        assert ppo.vllm.num_engines == 3


def test_a_reward_model(tmp_path: Path) -> None:
    raw, found = migrated(tmp_path, REWARD_MODEL)
    stage = raw["stages"]["reward_model"]
    source = {"path": "acme/pairs", "format": "columns", "margin_key": "margin", "chosen_key": "better", "rejected_key": "worse"}
    assert stage["data"]["sources"] == [source] and "template" not in stage["data"]
    assert (stage["model"], stage["ranks"]["num_ranks_per_node"], stage["train_batch_size"], stage["micro_train_batch_size"]) == (
        "base",
        4,
        256,
        1,
    )
    assert (stage["max_len"], stage["learning_rate"], stage["zero_stage"], stage["save_steps"], stage["loss"]) == (
        8192,
        9e-6,
        3,
        0,
        "sigmoid",
    )
    assert "always does this" in told(found, "dropped")["--load_checkpoint"]


def test_sft(tmp_path: Path) -> None:
    raw, _ = migrated(tmp_path, SFT)
    stage = raw["stages"]["sft"]
    assert stage["data"]["template"] == "User: {}\nAssistant: "
    assert stage["data"]["sources"] == [
        {"path": "data/chats.jsonl", "format": "columns", "prompt_key": "question", "response_key": "answer"}
    ]
    assert stage["eval_data"]["sources"][0]["path"] == "data/held.jsonl" and stage["eval_steps"] == 50
    assert stage["ranks"] == {"num_nodes": 2, "num_ranks_per_node": 4, "gpus": 1.0}
    assert stage["lora"] == {"rank": 64, "alpha": 32, "targets": ["q_proj", "v_proj"]}
    assert (stage["learning_rate"], stage["weight_decay"], stage["warmup_ratio"], stage["max_epochs"]) == (5e-6, 0.01, 0.05, 2)


def test_sft_on_conversations(tmp_path: Path) -> None:
    text = "python train_sft.py --pretrain a/b --dataset c --input_key messages --apply_chat_template --packing_samples --bf16"
    raw, found = migrated(tmp_path, text)
    assert raw["stages"]["sft"]["data"]["sources"] == [{"path": "c", "format": "columns", "messages_key": "messages"}]
    assert "not only the last" in told(found, "approximated")["--input_key messages"]


def test_dpo_and_kto(tmp_path: Path) -> None:
    raw, found = migrated(tmp_path, DPO)
    stage = raw["stages"]["dpo"]
    assert (stage["beta"], stage["label_smoothing"], stage["nll_coef"], stage["learning_rate"], stage["zero_stage"]) == (
        0.2,
        0.1,
        0.05,
        1e-5,
        2,
    )
    assert stage["ranks"]["num_ranks_per_node"] == 8 and "reference" not in stage
    assert stage["data"]["template"] == "Human: {}\nAssistant: " and "(no --apply_chat_template)" in told(found, "approximated")

    raw, found = migrated(tmp_path, KTO)
    stage = raw["stages"]["kto"]
    assert (stage["w_desirable"], stage["w_undesirable"], stage["beta"], stage["train_batch_size"]) == (1.5, 1, 0.01, 64)
    keys = {"prompt_key": "instruction", "response_key": "response", "label_key": "score"}
    assert stage["data"] == {"sources": [{"path": "acme/labelled", "format": "columns", **keys}], "template": "Q: {} A: "}


def test_several_commands_are_chained_by_their_outputs(tmp_path: Path) -> None:
    raw, found = migrated(tmp_path, CHAIN)
    stages = raw["stages"]
    assert raw["base_model"] == "acme/base" and list(stages) == ["sft", "reward_model", "ppo", "dpo", "dpo-2"]
    assert (stages["sft"]["model"], stages["reward_model"]["model"]) == ("base", "sft")
    assert (stages["ppo"]["actor"], stages["ppo"]["reward"], "critic" in stages["ppo"]) == ("sft", "reward_model", False)
    assert (stages["dpo"]["policy"], stages["dpo"]["reference"], stages["dpo"]["loss"]) == ("ppo", "sft", "ipo")
    assert (stages["dpo-2"]["stage"], stages["dpo-2"]["policy"]) == ("dpo", "acme/other")
    assert {note.told for note in found.notes if note.flag == "(all GPUs of the machine)"} == {
        "ranks: 8 GPUs on a machine, from --gpus of alignflow migrate"
    }


def test_the_old_batch_inference_loop(tmp_path: Path) -> None:
    raw, found = migrated(tmp_path, LOOP)
    sampled, dpo = raw["stages"]["preferences"], raw["stages"]["dpo"]
    assert (sampled["policy"], sampled["reward"], sampled["post_processor"]) == ("base", "acme/rm", "dpo")
    assert (sampled["n_samples_per_prompt"], sampled["num_prompts"], sampled["micro_rollout_batch_size"]) == (16, 10240, 4)
    assert (sampled["generate_max_len"], sampled["prompt_max_len"]) == (2048, 1024)
    assert (dpo["policy"], dpo["pairs"], dpo["template"], "data" in dpo) == ("base", "preferences", "chat", False)
    assert any("POLICY is set again in a condition or a loop" in remark.text for remark in found.remarks)
    assert "iterative_dpo" in told(found, "approximated")["(the loop around it)"]


def test_a_config_map_and_its_job(tmp_path: Path) -> None:
    raw, found = migrated(tmp_path, CONFIG_MAP, "rm.yaml")
    assert raw["base_model"] == "acme/base" and raw["stages"]["reward_model"]["ranks"]["num_ranks_per_node"] == 4
    (line,) = {note.line for note in found.notes}
    assert "openrlhf.cli.train_rm" in CONFIG_MAP.splitlines()[line - 1]


def test_jobs_of_several_kinds(tmp_path: Path) -> None:
    raw, _ = migrated(tmp_path, JOBS, "jobs.yaml")
    assert raw["base_model"] == "acme/base" and set(raw["stages"]) == {"sft", "dpo", "ppo"}
    assert raw["stages"]["sft"]["ranks"]["num_ranks_per_node"] == 2 and raw["stages"]["sft"]["model"] == "base"


@pytest.mark.parametrize(
    ("flags", "expected", "what"),
    [
        ("--train_batch_size 100 --micro_train_batch_size 8", {"train_batch_size": 104, "micro_train_batch_size": 1}, "approximated"),
        ("--train_batch_size 128 --micro_train_batch_size 12", {"train_batch_size": 128, "micro_train_batch_size": 8}, "approximated"),
        ("--zero_stage 0", {"zero_stage": 1}, "approximated"),
        ("--learning_rate $UNSET", {"learning_rate": 1e-5}, "dropped"),
        ("--max_len many", {"max_len": 512}, "dropped"),
        ("--train_batch_size 0 --max_epochs -1", {"train_batch_size": 128, "max_epochs": 1}, "dropped"),
        ("--gamma 0.9 --lora_rank 4 --lora_alpha x", {"gamma": 1.0, "lora": {"rank": 4, "alpha": 16.0}}, "dropped"),
        ("--label_smoothing 0.7", {"label_smoothing": 0.0}, "dropped"),
        (
            "--load_in_4bit --lora_rank 8 --zero_stage 3",
            {"zero_stage": 2, "lora": {"rank": 8, "alpha": 16.0, "quantize": "nf4"}},
            "approximated",
        ),
    ],
)
def test_values_that_do_not_fit(tmp_path: Path, flags: str, expected: dict[str, Any], what: str) -> None:
    text = f"deepspeed --num_gpus 8 train_dpo.py --pretrain a/b --dataset c --bf16 --apply_chat_template {flags}"
    raw, found = migrated(tmp_path, text)
    stage = found.recipe.stages["dpo"].model_dump(mode="json")
    lora = expected.pop("lora", None)
    assert {name: stage[name] for name in expected} == expected
    assert lora is None or raw["stages"]["dpo"]["lora"] == lora
    assert told(found, what)


def test_rollouts_are_whole_optimiser_steps(tmp_path: Path) -> None:
    flags = "--pretrain a/b --reward_pretrain a/rm --prompt_data p --bf16 --rollout_batch_size 48 --train_batch_size 128"
    _, found = migrated(tmp_path, f"python train_ppo_ray.py {flags} --actor_num_gpus_per_node 2 --critic_num_gpus_per_node 4")
    ppo = found.recipe.stages["ppo"]
    assert isinstance(ppo, PPO) and (ppo.rollout_batch_size, ppo.train_batch_size, ppo.micro_train_batch_size) == (48, 48, 6)


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
    assert isinstance(ppo, PPO) and [source.kind for source in ppo.reward] == expected and ppo.critic == "base"


def test_a_password_in_an_address_is_not_copied(tmp_path: Path) -> None:
    reward = "--remote_rm_url http://me:hidden@rewards:5000/score,http://other:5000/score"
    _, found = migrated(tmp_path, f"python train_ppo_ray.py --pretrain a/b --prompt_data p --bf16 {reward}")
    assert "hidden" not in found.text and any("***@rewards" in note.flag and "api_key_env" in note.told for note in found.notes)


def test_folders_without_a_slash_and_a_reward_model_named_as_the_base(tmp_path: Path) -> None:
    raw, _ = migrated(tmp_path, "python train_ppo_ray.py --pretrain llama --reward_pretrain llama,rm --prompt_data p --bf16")
    assert (raw["base_model"], raw["stages"]["ppo"]["actor"], raw["stages"]["ppo"]["reward"]) == ("llama", "base", ["./llama", "./rm"])


def test_a_folder_inside_an_earlier_output(tmp_path: Path) -> None:
    text = (
        "python train_sft.py --pretrain a/b --dataset c --save_path out/sft --bf16\n"
        "python train_rm.py --pretrain out/sft/step_100 --dataset d --bf16"
    )
    raw, found = migrated(tmp_path, text)
    assert raw["stages"]["reward_model"]["model"] == "sft"
    assert "taken as its final model" in told(found, "approximated")["--pretrain out/sft/step_100"]


def test_an_estimator_without_a_critic(tmp_path: Path) -> None:
    text = (
        "python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path a/b --reward.remote_url r.py --data.prompt_dataset p "
        "--algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8 --critic.model_name_or_path a/c "
        "--critic.freezing_steps 5 --rollout.top_p 0.9"
    )
    _, found = migrated(tmp_path, text)
    ppo = found.recipe.stages["ppo"]
    assert isinstance(ppo, PPO) and (ppo.advantage_estimator, ppo.critic, ppo.freezing_actor_steps) == ("grpo", None, 0)
    dropped = told(found, "dropped")
    assert dropped["--critic.model_name_or_path a/c"] == "grpo has no critic" and "--rollout.top_p 0.9" in dropped


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.sh", "echo train_sft.py\nls train_rm.py --pretrain x\n", "there is no training command in it"),
        ("a.sh", "", "there is no training command in it"),
        ("a.sh", "kubectl apply -f - <<EOF\napiVersion: v1\nkind: Pod\nEOF\n", "there is no training command in it"),
        ("a.sh", "python train_sft.py --dataset x", "line 1 of the script: the command names no model"),
        ("a.sh", "\n\npython train_sft.py --pretrain x", r"line 3 of the script: the command names no data \(--dataset\)"),
        ("a.sh", "python train_ppo_ray.py --pretrain x --prompt_data y", "the command names no reward"),
        ("a.sh", "python train_sft.py --pretrain 'x", "the quote ' is never closed"),
        ("a.yaml", "apiVersion: v1\nkind: ConfigMap\ndata: {a: {{ .Values.x }}}\n---\n: :", "the manifest is not plain YAML"),
        ("a.sh", "python batch_inference.py --eval_task generate_vllm --pretrain a --dataset b", "no command scores them"),
    ],
)
def test_a_wrong_script_is_one_sentence(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=sentence) as error:
        migrate(tmp_path / name)
    assert str(error.value).startswith(f"script {tmp_path / name}: ") and "\n" not in str(error.value)


def test_a_missing_or_binary_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give the path of a shell script"):
        migrate(tmp_path / "none.sh")
    (tmp_path / "x.sh").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a text file"):
        migrate(tmp_path / "x.sh")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chain.sh").write_text(CHAIN)
    assert flows.cli.main(["migrate", "chain.sh", "--out", "mine.yaml", "--gpus", "4"]) == 0
    shown = capsys.readouterr().out
    assert "mine.yaml: 5 stages, flags: " in shown and "approximated: the model lies in" in shown
    assert load_recipe("mine.yaml").stages["sft"].ranks.num_ranks_per_node == 4  # type: ignore[union-attr]
    assert flows.cli.main(["validate", "mine.yaml"]) == 0
    assert flows.cli.main(["migrate", "chain.sh", "--out", "mine.yaml"]) == 2
    assert "mine.yaml exists already" in capsys.readouterr().err
    assert flows.cli.main(["migrate", "chain.sh", "--gpus", "0"]) == 2


def test_the_tables_name_real_fields() -> None:
    from rlhf_core.config import STAGE_KINDS
    from rlhf_core.migrate.draft import find_field
    from rlhf_core.recipe import config_class

    planned = {"adam_offload", "ref_offload", "ref_reward_offload", "colocate_all", "colocate_actor_ref", "colocate_critic_reward"}
    planned |= {"vllm.tensor_parallel_size", "deepspeed_enable_sleep", "compute_fp32_loss"}
    missing = {rule.name for rule in FIELDS.values() if all(find_field(config_class(kind), rule.name) is None for kind in STAGE_KINDS)}
    assert missing <= planned
    assert all(DROPPED.values())


@pytest.mark.parametrize(
    ("dotted", "name"),
    [
        ("actor.adam.lr", "actor_learning_rate"),
        ("rollout.batch_size", "rollout_batch_size"),
        ("train.colocate_all", "colocate_all"),
        ("data.max_len", "max_len"),
        ("fsdp.zero_stage", "zero_stage"),
        ("fsdp.lora.rank", "lora_rank"),
        ("critic.max_norm", "critic.max_norm"),
        ("model.beta", "beta"),
    ],
)
def test_dotted_names(dotted: str, name: str) -> None:
    assert flat(dotted) == (name, "dotted")


REQUIRED = {
    "train_sft": "--pretrain a/b --dataset c",
    "train_rm": "--model.model_name_or_path a/b --data.dataset c",
    "train_dpo": "--pretrain a/b --dataset c",
    "train_kto": "--pretrain a/b --dataset c",
    "train_ppo_ray": "--pretrain a/b --reward_pretrain a/rm --prompt_data c",
}
OTHERS = (
    "bf16 param_dtype lora_rank lora_alpha target_modules load_in_4bit lr_scheduler use_dynamic_batch train_max_tokens_per_gpu ipo seed "
    "eps_clip_low_high reward_clip_range use_kl_loss enable_vllm_is_correction is_correction_type vllm_is_truncated_threshold max_samples "
    "remote_rm_url critic_pretrain ref_pretrain dataset_probs prompt_data_probs prompt_split input_key output_key apply_chat_template "
    "input_template margin_loss eval_dataset eval_split num_nodes num_gpus_per_node actor_num_nodes critic_num_gpus_per_node save_path"
).split()
FLAGS = st.sampled_from(sorted({*FIELDS, *DROPPED, *OTHERS, *DOTTED}))
VALUES = st.sampled_from(
    ["", "0", "1", "2", "7", "-1", "0.5", "1e-5", "1e9", "nan", "abc", "$X", "a,b", "0.2 0.3", "1 2", "none", "True", "{}", "'x {}'"]
)


@given(st.sampled_from(sorted(REQUIRED)), st.dictionaries(FLAGS, VALUES, max_size=12))
def test_any_flags_give_a_valid_recipe_or_a_sentence(tmp_path_factory: pytest.TempPathFactory, program: str, flags: dict[str, str]) -> None:
    script = tmp_path_factory.getbasetemp() / "any.sh"
    script.write_text(f"python {program}.py {REQUIRED[program]} " + " ".join(f"--{name} {value}" for name, value in flags.items()))
    try:
        found = migrate(script)
    except ValueError as error:
        assert str(error).startswith(f"script {script}: ")
    else:
        assert len(found.recipe.stages) == 1
