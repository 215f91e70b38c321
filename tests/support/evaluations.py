"""A small evaluation to run: three models and questions in a folder, with vLLM played by a double that knows
its answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from evaluation.evaluation_stage import run
from rlhf_core.config import EngineConfig, Evaluation, Source
from rlhf_core.config.kinds import has_metric
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.records import EvalReport
from rlhf_core.rollout.engine_contract import Pictures, SampledAnswer, Sampling
from rlhf_core.runs.run_dir import RunDir, StageRequest
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.stage_request import stage_request

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SKILL = "skill.txt"  # in a model's folder: what share of the questions the double answers rightly
COUNT = 20


def make_tokenizer(folder: Path) -> None:
    """Bytes as tokens, and four special ones."""
    fast = byte_tokenizer(eos_token="<|endoftext|>", pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def make_model(folder: Path, skill: float, hidden: int = 16) -> str:
    folder.mkdir()
    make_tokenizer(folder)
    Qwen2Config(
        vocab_size=260, hidden_size=hidden, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=256, dtype="float32",
    ).save_pretrained(folder)  # fmt: skip
    (folder / SKILL).write_text(str(skill))
    return str(folder)


def make_reward_model(setting: Setting, name: str, seed: int) -> Path:
    folder = setting.folder / name
    make_model(folder, 0)
    torch.manual_seed(seed)
    config = Qwen2Config.from_pretrained(folder, num_labels=1, pad_token_id=257)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    setting.inputs[name] = str(folder)
    return folder


class Double:
    """Stands for `VllmEngine`: knows the answers, gives as many as its folder says, and cuts at the limit."""

    log: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, model: str, config: EngineConfig, **settings: Any):
        assert settings["dtype"] == "float32" and settings["max_model_len"] == 128 + 24
        self.model = model
        self.log.append(("open", Path(model).name))

    def load(self, model: str) -> None:
        self.model = model
        self.log.append(("load", Path(model).name))

    def close(self) -> None:
        self.log.append(("close", Path(self.model).name))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        pictures: Sequence[Pictures] = (),
    ) -> list[list[SampledAnswer]]:
        assert not pictures and not sampling.logprobs and sampling.n == 1 and len(set(seeds)) == len(prompts)
        self.log.append(("generate", Path(self.model).name))
        tokenizer = load_tokenizer(self.model)
        skill = float((Path(self.model) / SKILL).read_text())
        answers = []
        for prompt in prompts:
            word = tokenizer.decode(prompt).split("<|im_end|>")[0].split()[-1]
            right = int(word[1:]) < skill * COUNT
            text = word[::-1] if right else "no idea"
            tokens = [*tokenizer.encode(text, add_special_tokens=False), sampling.stop_token_ids[-1]]
            kept = tokens[: sampling.max_new_tokens]
            answers.append([SampledAnswer(kept, [0.0] * len(kept), len(tokens) <= sampling.max_new_tokens)])
        return answers


@dataclass(frozen=True)
class Setting:
    folder: Path
    inputs: dict[str, str]
    questions: str


def make_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setattr("rlhf_core.rollout.vllm.vllm_engine.VllmEngine", Double)
    Double.log.clear()
    skills = {"sft": 0.5, "dpo": 0.7, "ppo": 0.9}
    inputs = {name: make_model(tmp_path / name, skill) for name, skill in skills.items()}
    questions = tmp_path / "questions.jsonl"
    rows = [
        {
            "uid": f"q{n}",
            "category": "even" if n % 2 == 0 else "odd",
            "prompt": f"Reverse w{n:02d}",
            "answer": f"w{n:02d}"[::-1],
        }
        for n in range(COUNT)
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Setting(tmp_path, inputs, str(questions))


def request(setting: Setting, **changes: Any) -> StageRequest:
    fields = {
        "models": ("dpo", "ppo"),
        "questions": Source(path=setting.questions),
        "prompt_max_len": 128,
        "generate_max_len": 24,
    }
    config = Evaluation(**{**fields, "bootstrap_rounds": 200, **changes})
    return stage_request(config, setting.inputs, seed=1)


def evaluate(
    setting: Setting, name: str = "run", **changes: Any
) -> tuple[RunDir, EvalReport, dict[str, float]]:
    directory = RunDir(setting.folder / name)
    directory.prepare(request(setting, **changes))
    outcome = run(directory.request(), directory)
    assert outcome.outputs == {"report": "report"}
    config = request(setting, **changes).config
    assert [name for name in outcome.metrics if not has_metric(config, name)] == []
    return (
        directory,
        EvalReport.model_validate_json((directory / "report/eval.json").read_text()),
        outcome.metrics,
    )
