"""Times PPO iterations on random weights and fixed lengths: every model and vLLM on the GPUs of this machine.

    python tests/benchmarks/ppo_step.py --model FOLDER --prompts 128 --prompt-len 256 --generate-len 512 --steps 3 --out FOLDER

FOLDER of --model holds a transformers checkpoint with a tokenizer (random weights do). Prints the seconds of each phase of each step.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

from rlhf_core.config import PPO, Data, Ranks, Vllm
from rlhf_core.stage import RunDir, StageRequest
from rlhf_core.tracking import read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--generate-len", type=int, default=512)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--micro-tokens", type=int, help="tokens of a pass, in place of --micro")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--zero-stage", type=int, default=2)
    parser.add_argument("--keep-activations", action="store_true", help="no gradient checkpointing")
    parser.add_argument("--sleep", action="store_true", help="vLLM sleeps while the models work")
    parser.add_argument("--vllm-memory", type=float, default=0.3)
    arguments = parser.parse_args()

    arguments.out.mkdir(parents=True)
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    prompts = ["".join(rng.choice(letters) for _ in range(arguments.prompt_len)) for _ in range(arguments.prompts * arguments.steps)]
    (arguments.out / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    share = Ranks(gpus=0.15)
    config = PPO(
        actor="base",
        reward="base",
        prompts=Data(sources=str(arguments.out / "prompts.jsonl"), template="{}"),
        dtype="bfloat16",
        zero_stage=arguments.zero_stage,
        rollout_batch_size=arguments.prompts,
        train_batch_size=arguments.prompts,
        micro_train_batch_size=arguments.micro,
        micro_rollout_batch_size=arguments.micro,
        micro_train_tokens=arguments.micro_tokens,
        micro_rollout_tokens=arguments.micro_tokens,
        max_steps=arguments.steps,
        prompt_max_len=arguments.prompt_len,
        generate_max_len=arguments.generate_len,
        gradient_checkpointing=not arguments.keep_activations,
        actor_ranks=share,
        critic_ranks=share,
        reference_ranks=share,
        reward_ranks=share,
        vllm=Vllm(gpus=0.3, gpu_memory_utilization=arguments.vllm_memory, sleep=arguments.sleep),
    )
    run = RunDir(arguments.out / "run")
    run.prepare(StageRequest(name="ppo", digest="0", config=config, inputs={"base": str(arguments.model)}, seed=0))
    start = time.time()
    code = subprocess.run([sys.executable, "-m", "rlhf_core", str(run.path)], stdin=subprocess.DEVNULL).returncode
    lines = read_metrics(run.path)
    for line in lines:
        phases = {name.removeprefix("phase/"): round(value, 2) for name, value in line.items() if name.startswith("phase/")}
        shown = {
            name: round(line[name], 5)
            for name in ("response/length", "sampler/gap", "policy/first_ratio", "sync/probe_gap")
            if name in line
        }
        print(f"step {line['step']}  {sum(phases.values()):.1f} s  {phases}  {shown}")
    if lines:
        first = lines[0]["time"] - sum(value for name, value in lines[0].items() if name.startswith("phase/"))
        print(f"command to first rollout: {first - start:.0f} s; exit code {code}")


if __name__ == "__main__":
    main()
