"""Launch scripts in both flag dialects, as people have them, and the recipes they become."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import yaml

from rlhf_core.migrate.script import Migrated, migrate
from rlhf_core.recipe.load_recipe import load_recipe

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
   --vllm.num_engines $NGPU --vllm.tensor_parallel_size $TP --vllm.gpu_memory_utilization 0.5 --vllm.enable_sleep
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
REQUIRED = {
    "train_sft": "--pretrain a/b --dataset c",
    "train_rm": "--model.model_name_or_path a/b --data.dataset c",
    "train_dpo": "--pretrain a/b --dataset c",
    "train_kto": "--pretrain a/b --dataset c",
    "train_ppo_ray": "--pretrain a/b --reward_pretrain a/rm --prompt_data c",
}


def migrated(tmp_path: Path, text: str, name: str = "launch.sh") -> tuple[dict[str, Any], Migrated]:
    """The recipe as its YAML has it, after that was loaded and compared."""
    (tmp_path / name).write_text(text)
    found = migrate(tmp_path / name)
    (tmp_path / "recipe.yaml").write_text(found.text)
    with contextlib.chdir(tmp_path):
        assert load_recipe("recipe.yaml") == found.recipe
    raw: dict[str, Any] = yaml.safe_load(found.text)
    return raw, found


def told(found: Migrated, what: str) -> dict[str, str]:
    return {note.flag: note.text for note in found.notes if note.what == what}
