"""Checks rollouts with images through vLLM on this machine, and prints what differs from the trainer.

python tests/benchmarks/pictured_rollouts.py --out FOLDER [--shape 2b] [--families qwen3_vl gemma3 ...]

Small float32 models, each in a process of its own: the largest difference of a log-prob between trainer and
engine, before and after a sync, in nats; whether another image with the same tokens changes log-probs. Then
two iterations of GRPO on a Qwen3-VL with random weights (`--shape`: tiny, or about 2 billion parameters in
bf16): the sampler's gap, the probe of the sync, seconds. Exits with 1 where a difference is too large.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from rlhf_core.config import PPO, Data, EngineConfig, Ranks
from rlhf_core.data.documents import compact
from rlhf_core.data.pictures.picture_source import PictureSource
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights
from rlhf_core.models.policy import masked_logprobs
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.engine_contract import SampledAnswer
from rlhf_core.rollout.engine_kinds import open_engine
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.support import pictured_models
from tests.support.pictured_models import PICTURED, PicturedFamily, make_pictured, square, write_rows
from tests.support.stage_request import stage_request
from tests.unit.rollout.test_pictured_sampling import HOW, Asked

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
FAMILIES = ("qwen3_vl", "mistral3", "gemma4", "gemma3") if ON_GPU else ("qwen3_vl", "mistral3")
LARGEST = 1e-4  # nats, in float32
REWARD = "def even(responses, rows):\n    return [float(len(response) % 2) for response in responses]\n"
# vLLM's processor of Gemma 3 looks for these tokens, which releases have.
LINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")
PROCESSOR = {
    **pictured_models.QWEN_PROCESSOR,
    "size": {"shortest_edge": 65536, "longest_edge": 1048576},
    "patch_size": 16,
}
TEXT_2B = {
    **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "head_dim": 128},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936},
    **{"max_position_embeddings": 4096, "initializer_range": 0.02},
}
VISION_2B = {
    **{"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16},
    **{"out_hidden_size": 2048, "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17]},
}


def make_2b(text: dict[str, Any], number: dict[str, int]) -> Any:
    """A model of the shape of Qwen3-VL-2B, in bf16."""
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
    config = transformers.Qwen3VLConfig(
        text_config=text | {"rope_parameters": rope, "tie_word_embeddings": True},
        vision_config=VISION_2B,
        image_token_id=number["<|image_pad|>"],
        video_token_id=number["<|video_pad|>"],
        vision_start_token_id=number["<|vision_start|>"],
        vision_end_token_id=number["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    with torch.device(DEVICE):
        return transformers.Qwen3VLForConditionalGeneration(config).to(torch.bfloat16)


def compare(family: str, folder: Path) -> dict[str, Any]:
    """Returns the largest differences between engine and trainer for a small model of the family."""
    if family == "gemma3":
        PICTURED[family] = PICTURED[family]._replace(tokens=(*PICTURED[family].tokens, *LINES))
    asked = Asked(make_pictured(family, folder))
    trained, reader = asked.policy()
    trained.to(DEVICE)
    torch.backends.cudnn.allow_tf32 = False  # of the trainer's patches

    @torch.no_grad()
    def expected(i: int, answer: SampledAnswer) -> torch.Tensor:
        document = compact(asked.prompts[i], answer.tokens, pictures=asked.pictures[i])
        batch = collate([[document]], 0, reader=reader).to(DEVICE)
        return masked_logprobs(trained, batch).logprobs[batch.mask].cpu()

    def gap(groups: list[list[SampledAnswer]]) -> float:
        differences = [
            torch.tensor(answer.logprobs) - expected(i, answer)
            for i, group in enumerate(groups)
            for answer in group
        ]
        return float(torch.cat(differences).abs().max())

    config = EngineConfig(gpu_memory_utilization=0.2, kv_cache_gib=0.5, options={"max_num_seqs": 8})
    with closing(open_engine(str(asked.folder), config, seed=0, max_model_len=256, pictures=True)) as engine:
        seeds = [3, 5, 7]
        found: dict[str, Any] = {"family": family}
        found["before"] = gap(engine.generate(asked.prompts, seeds, HOW, asked.pictures))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator).to(DEVICE)
        weights = checkpoint_weights(trained.model, lambda parameters: nullcontext())
        engine.update(weights)  # type: ignore[attr-defined]
        found["after"] = gap(engine.generate(asked.prompts, seeds, HOW, asked.pictures))
        probed = []
        for colour in ("red", "blue", "red"):
            own = [
                picture._replace(source=PictureSource(data=square(colour))) for picture in asked.pictures[0]
            ]
            probed.append(engine.prompt_logprobs([asked.prompts[0]], [tuple(own)])[0])
    same = max(abs(a - b) for a, b in zip(probed[0], probed[2], strict=True))
    other = max(abs(a - b) for a, b in zip(probed[0], probed[1], strict=True))
    found |= {"same_image": same, "other_image": other}
    found["ok"] = max(found["before"], found["after"], same) < LARGEST < other
    return found


def train(shape: str, folder: Path, max_staleness: int) -> dict[str, Any]:
    """Runs two iterations of GRPO, and returns their metrics."""
    side = 448 if shape == "2b" else 16
    if shape == "2b":
        qwen = PICTURED["qwen3_vl"]
        PICTURED["2b"] = PicturedFamily(qwen.tokens, qwen.template, PROCESSOR, make_2b)
        base = make_pictured("2b", folder / "base", **TEXT_2B)
        torch.cuda.empty_cache()
    else:
        base = make_pictured("qwen3_vl", folder / "base")
    dice = random.Random(0)
    rows = []
    for number in range(64):
        colour = tuple(dice.randrange(256) for _ in range(3))
        Image.new("RGB", (side, side + 32 * (number % 2)), colour).save(folder / f"{number}.png")  # type: ignore[arg-type]
        content = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": f"What? {number}"}]
        rows.append({"prompt": [{"role": "user", "content": content}]})
    (folder / "reward.py").write_text(REWARD)
    share = Ranks(gpus=0.4) if ON_GPU else Ranks(cpus=0.25)
    engine: dict[str, Any] = {"gpus": 0.4, "gpu_memory_utilization": 0.4} if ON_GPU else {"cpus": 0.25}
    config = PPO.model_validate(
        {
            "actor": "base",
            "prompts": Data(sources=str(write_rows(folder / "asks.jsonl", rows))),
            "reward": {"function": f"{folder / 'reward.py'}:even"},
            "advantage_estimator": "grpo",
            "init_kl_coef": 0.0,
            "rollout_batch_size": 32 if shape == "2b" else 8,
            "n_samples_per_prompt": 8 if shape == "2b" else 2,
            "train_batch_size": 256 if shape == "2b" else 16,
            "micro_train_batch_size": 16,
            "micro_rollout_batch_size": 16,
            "max_steps": 2,
            "max_staleness": max_staleness,
            "prompt_max_len": 512 if shape == "2b" else 64,
            "generate_max_len": 256 if shape == "2b" else 8,
            "actor_learning_rate": 1e-5,
            "dtype": "bfloat16" if shape == "2b" else "float32",
            "actor_ranks": share,
            "engine": EngineConfig.model_validate({"kind": "vllm", "kv_cache_gib": 0.5, **engine}),
        }
    )
    run = RunDir(folder / "run")
    run.prepare(stage_request(config, base, seed=7))
    command = [sys.executable, "-m", "rlhf_core", str(run.path)]
    done = subprocess.run(command, env=dict(os.environ), check=False)
    if done.returncode:
        return {"shape": shape, "ok": False}
    lines = read_metrics(run)
    names = ("sampler/gap", "sync/probe_gap")
    shown = [
        {name: line[name] for name in line if name in names or name.startswith("phase/")} for line in lines
    ]
    return {"shape": shape, "iterations": shown, "ok": len(lines) == 2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=("tiny", "2b", "none"), default="2b" if ON_GPU else "tiny")
    parser.add_argument("--max-staleness", type=int, default=0)
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    parser.add_argument("--family", help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.family:
        found = compare(arguments.family, arguments.out / arguments.family)
        print(json.dumps(found), flush=True)
        return 0 if found["ok"] else 1
    failed = False
    for family in arguments.families:
        command = [sys.executable, __file__, "--out", str(arguments.out), "--family", family]
        failed |= subprocess.run(command, env=dict(os.environ), check=False).returncode != 0
    if arguments.shape != "none":
        (arguments.out / "grpo").mkdir()
        trained = train(arguments.shape, arguments.out / "grpo", arguments.max_staleness)
        print(json.dumps(trained, indent=1), flush=True)
        failed |= not trained["ok"]
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
