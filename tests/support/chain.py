"""Run directories of a small chain, as a recipe would leave them: base -> sft -> reward model -> PPO -> a DPO
round, and an evaluation.

The model is a real one, tiny and untrained, with a real tokenizer; the records are the real ones of
`rlhf_core`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from rlhf_core.config import DPO, PPO, SFT, Data, Evaluation, Preferences, RewardModel, Source, StageConfig
from rlhf_core.records import EvalReport, WinRate
from rlhf_core.runs.run_dir import Outcome, RunDir
from tests.support.stage_request import stage_request

BASE = "stand-in/base-1m"
CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


class Chain(NamedTuple):
    root: Path
    stages: dict[str, Path]  # run directories
    checkpoint: Path  # of the last DPO round
    report: Path


def win_rate(model: str, judge: str, value: float) -> WinRate:
    return WinRate(
        model=model,
        baseline="sft",
        judge=judge,
        win_rate=value,
        ci_low=value - 0.04,
        ci_high=value + 0.05,
        num_questions=300,
        num_failed=1,
        num_won=round(300 * value) - 18,
        num_tied=36,
        num_lost=300 - round(300 * value) - 18,
        swap_consistency=0.97,
        by_category={"reverse": value + 0.1, "sort": value - 0.1},
    )


REPORT = EvalReport(
    baseline="sft",
    judge="rule",
    win_rates=(
        win_rate("ppo", "rule", 0.61),
        win_rate("dpo-1", "rule", 0.72),
        win_rate("dpo-1", "reward", 0.7),
    ),
    right={"sft": 0.41, "ppo": 0.58, "dpo-1": 0.69},
    mean_tokens={"sft": 12.5, "ppo": 11.0, "dpo-1": 10.25},
    truncated={"sft": 0.01, "ppo": 0.0, "dpo-1": 0.0},
)


def save_model(folder: Path) -> None:
    """A one-layer Llama of about 3,000 parameters (seed 0) and a word-level tokenizer with a chat
    template."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(
        models.WordLevel(
            {word: i for i, word in enumerate(["<unk>", "<eos>", "<pad>", "one", "two"])}, unk_token="<unk>"
        )
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)


def build(root: Path) -> Chain:
    data = root / "data"
    data.mkdir(parents=True)
    questions = Source(path="stand-in/questions", split="test")
    prompts = Data(sources=(Source(path=str(data / "prompts.jsonl")),))
    mixture = Data(
        sources=(
            Source(path=str(data / "sloppy.jsonl"), probability=0.5),
            Source(path="stand-in/chats", probability=0.5),
        )
    )
    pairs = Data(sources=(Source(path=str(data / "pairs.jsonl")),))
    plan: dict[str, StageConfig] = {
        "sft": SFT(data=mixture, train_batch_size=8),
        "reward_model": RewardModel(data=pairs, train_batch_size=8),
        "ppo": PPO(prompts=prompts),
        "pairs-1": Preferences(policy="ppo", prompts=prompts),
        "dpo-1": DPO(policy="ppo", pairs="pairs-1", train_batch_size=8),
        "evaluation": Evaluation(models=("ppo", "dpo-1"), questions=questions),
    }
    uses = {
        "sft": ("base",),
        "reward_model": ("sft",),
        "ppo": ("sft", "reward_model"),
        "pairs-1": ("ppo", "reward_model"),
        "dpo-1": ("ppo", "pairs-1"),
        "evaluation": ("sft", "ppo", "dpo-1"),
    }
    places = {"base": BASE}
    stages: dict[str, Path] = {}
    for number, (name, config) in enumerate(plan.items()):
        request = stage_request(
            config, {used: places[used] for used in uses[name]}, name=name, digest=f"{number:016x}", seed=7
        )
        run = RunDir(root / "stages" / f"{name}-{request.digest}")
        run.prepare(request)
        output = {"preferences": "pairs", "evaluation": "report"}.get(config.stage, "checkpoint")
        (run / output).mkdir()
        (run / output / "made-by.txt").write_text(name)
        run.finish(request, Outcome({"loss": 0.1234567891}, {output: output}), 1.5)
        stages[name] = run.path
        places[name] = str(run / output)
    (Path(places["evaluation"]) / "eval.json").write_text(REPORT.model_dump_json())
    return Chain(root, stages, Path(places["dpo-1"]), Path(places["evaluation"]))


def remember_place(checkpoint: Path, place: str) -> None:
    """Writes into the model's config the folder it was loaded from, as older versions of transformers do."""
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"_name_or_path": place}))
