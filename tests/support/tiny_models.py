"""Trains tiny models on given answers in seconds, for tests that need a good and a bad model, or a judge with
a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

LEARNING_RATE = 3e-3


def save_weights(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Writes a safetensors file of ones of these shapes."""
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, file)


def reward_model(base: Path, out: Path) -> Path:
    """The checkpoint `base` with a random head for one score (seed 0), and its tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(base).save_pretrained(out)
    return out


def fit(base: Path, out: Path, texts: Sequence[tuple[str, str]], steps: int, **config: Any) -> Path:
    """The checkpoint `base` after `steps` of AdamW (seed 0) on (prompt, answer) texts, the loss on the
    answers and their end alone.

    With `config` the weights are new ones, of `base`'s shape with these changes. Raises RuntimeError unless
    every token is learned.
    """
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    if config:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base, **config))
    pairs = [[tokenizer(text, add_special_tokens=False).input_ids for text in pair] for pair in texts]
    width = max(len(prompt) + len(answer) + 1 for prompt, answer in pairs)
    tokens = torch.full((len(pairs), width), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), width), -100)
    for row, (prompt, answer) in enumerate(pairs):
        whole = [*prompt, *answer, tokenizer.eos_token_id]
        tokens[row, : len(whole)] = torch.tensor(whole)
        labels[row, len(prompt) : len(whole)] = tokens[row, len(prompt) : len(whole)]
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    mask = (tokens != tokenizer.pad_token_id).long()
    for _ in range(steps):
        output = model(input_ids=tokens, attention_mask=mask, labels=labels)
        optimiser.zero_grad()
        output.loss.backward()
        optimiser.step()
    asked = labels[:, 1:] != -100
    with torch.no_grad():
        guessed = model(input_ids=tokens, attention_mask=mask).logits[:, :-1].argmax(-1)
    if not bool((guessed == labels[:, 1:])[asked].all()):
        raise RuntimeError(f"{steps} steps did not teach {base.name} its {len(pairs)} answers")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out
