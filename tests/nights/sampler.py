"""Samples answers of a model and measures the share of right ones, with plain transformers on one thread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 256
MAX_NEW_TOKENS = 24


class Model:
    """A model in a folder."""

    def __init__(self, folder: Path):
        # faster for a model of a million parameters, and the night's processes use the other cores
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def answers(self, prompts: Sequence[str], count: int, seed: int) -> list[list[str]]:
        """Returns `count` answers to each prompt, at temperature 1."""
        torch.manual_seed(seed)
        texts = [text for prompt in prompts for text in [self._text(prompt)] * count]
        found: list[str] = []
        for start in range(0, len(texts), BATCH):
            batch = self._tokenizer(
                texts[start : start + BATCH], return_tensors="pt", padding=True, padding_side="left"
            )
            with torch.inference_mode():
                out = self._model.generate(
                    **batch,
                    max_new_tokens=MAX_NEW_TOKENS,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                )
            found += self._tokenizer.batch_decode(
                out[:, batch.input_ids.shape[1] :], skip_special_tokens=True
            )
        return [found[start : start + count] for start in range(0, len(found), count)]

    def right(self, questions: Sequence[tuple[str, str]]) -> list[float]:
        """Returns the probability, at temperature 1, that the model gives exactly the right answer to each
        (prompt, right answer)."""
        shares: list[float] = []
        for start in range(0, len(questions), BATCH):
            part = questions[start : start + BATCH]
            texts = [self._text(prompt) for prompt, _ in part]
            whole = [
                f"{text}{answer}{self._tokenizer.eos_token}"
                for text, (_, answer) in zip(texts, part, strict=True)
            ]
            batch = self._tokenizer(whole, return_tensors="pt", padding=True, padding_side="right")
            # (B, 1), position of the answer
            first = torch.tensor([len(ids) for ids in self._tokenizer(texts).input_ids])[:, None]
            with torch.inference_mode():
                logits = self._model(**batch).logits[:, :-1]  # (B, T - 1, V)
            taken = logits.log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]  # (B, T - 1)
            position = torch.arange(1, taken.shape[1] + 1)[None]
            answered = (position >= first) & batch.attention_mask[:, 1:].bool()
            shares += (taken * answered).sum(-1).exp().tolist()
        return shares

    def _text(self, prompt: str) -> str:
        message = [{"role": "user", "content": prompt}]
        return str(self._tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
