"""Another value of a config field, and the probe in which it must show."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlhf_core.models.reward_scoring import STATISTICS

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "output_router_logits": True,
}
TEMPLATE = (
    "{{ note or '' }}"
    "{%- for message in messages -%}{%- if message['role'] == 'assistant' -%}<a>{% generation %}{{"
    " message['content'] }}<end>{% endgeneration %}{%- else -%}<u>{{ message['content'] }}<end>{%- endif"
    " -%}{%- endfor -%}{%- if add_generation_prompt -%}<a>{%- endif -%}"
)


class World(NamedTuple):
    """What probes work with: `models` has small random checkpoints (sft, other, moe, rm), `folder` is
    empty."""

    models: Path
    folder: Path
    patch: pytest.MonkeyPatch

    def place(self, name: str) -> str:
        return str(self.models / name)

    def rows(self, name: str, rows: list[dict[str, Any]]) -> str:
        """Writes a data set. Returns its path."""
        path = self.models / f"{name}.jsonl"
        if not path.exists():
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)


class Change(NamedTuple):
    """Another value of a field. `beside`: other fields of both configs; `instead`: of the changed one, which
    excludes them."""

    field: str
    value: Any
    probe: Callable[[World, Mapping[str, Any]], Any]
    beside: Mapping[str, Any] = MappingProxyType({})
    instead: Mapping[str, Any] = MappingProxyType({})

    @property
    def changed(self) -> dict[str, Any]:
        return {**self.beside, self.field: self.value, **self.instead}


def plain(value: Any) -> Any:
    """Returns a value as JSON has it, so that two can be compared."""
    if isinstance(value, torch.Tensor):
        return value.detach().double().tolist()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, list | tuple | set | range):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def save_models(folder: Path) -> None:
    """Saves the checkpoints of a World, all with one tokenizer of single letters."""
    words = {word: i for i, word in enumerate(("<pad>", "<end>", "<unk>", "<a>", "<u>", *string.printable))}
    letters = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"<end>|<a>|<u>|[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        extra_special_tokens=["<a>", "<u>"],
    )
    tokenizer.chat_template = TEMPLATE
    shape = {**SHAPE, "vocab_size": len(tokenizer)}
    made = {
        "sft": lambda: Qwen2ForCausalLM(Qwen2Config(**shape)),
        "other": lambda: Qwen2ForCausalLM(Qwen2Config(**shape)),
        "moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **EXPERTS)),
        "rm": lambda: Qwen2ForSequenceClassification(Qwen2Config(**shape, num_labels=1)),
        "rm2": lambda: Qwen2ForSequenceClassification(Qwen2Config(**shape, num_labels=1)),
    }
    for seed, (name, make) in enumerate(made.items()):
        torch.manual_seed(seed)
        model = make()
        if name.startswith("rm"):
            torch.nn.init.normal_(model.score.weight)
            folder.joinpath(name).mkdir()
            (folder / name / STATISTICS).write_text(json.dumps({"mean": float(seed), "std": 2.0}))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
