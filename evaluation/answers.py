"""Answers of models to questions, by vLLM, in Arena-Hard's answer format.

One line: {uid, model, messages, metadata{token_len, header_count, list_count, bold_count}}; the last message's content is
{"answer": text}, as published files have it. `token_len` counts the model's own tokens without the one that ends the answer
(arena-hard-auto counts with tiktoken's gpt-4o encoding, a download); markdown is counted outside code blocks. Two flags of ours
stand beside the metadata, whose columns arena-hard-auto counts: `prompt_truncated`, `answer_truncated`. A file is written whole or not
at all, so one that speaks of every question is not generated again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, PretrainedConfig

from evaluation.questions import Question
from evaluation.style import markdown
from rlhf_core.data.chat import Renderer
from rlhf_core.models.lora import base_of
from rlhf_core.stage import digest, write_text

if TYPE_CHECKING:
    from rlhf_core.rollout.engine import Sampler


@dataclass(frozen=True)
class ModelAnswer:
    """One answer. `tokens` counts the answer's tokens without its end; the flags say what was cut at a limit."""

    uid: str
    text: str
    tokens: int
    prompt_truncated: bool
    answer_truncated: bool


def generate(
    sampler: Sampler,
    renderer: Renderer,
    questions: Sequence[Question],
    *,
    seed: int,
    temperature: float,
    prompt_max_len: int,
    generate_max_len: int,
) -> list[ModelAnswer]:
    """One answer to each question, in order. The seed of each is made of `seed` and its uid, so the order changes nothing."""
    prompts = [renderer.prompt_within(question.messages, prompt_max_len) for question in questions]
    samples = sampler.generate(
        [tokens for tokens, _ in prompts],
        seeds=[int(digest([seed, question.uid])[:8], 16) for question in questions],
        n=1,
        temperature=temperature,
        max_new_tokens=generate_max_len,
        stop_token_ids=renderer.stop_token_ids,
        logprobs=False,
    )
    answers = []
    for question, (_, cut), (sample,) in zip(questions, prompts, samples, strict=True):
        tokens = sample.tokens[:-1] if sample.tokens and sample.tokens[-1] in renderer.stop_token_ids else sample.tokens
        text = str(renderer.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        answers.append(ModelAnswer(question.uid, text, len(tokens), cut, not sample.finished))
    return answers


class Engine:
    """One vLLM engine at a time: checkpoint folders of the same kind are swapped in, other models get a new one.

    `open_sampler(path)` starts an engine.
    """

    def __init__(self, open_sampler: Callable[[str], Sampler]):
        self._open = open_sampler
        self._sampler: Sampler | None = None
        self._kind = ""

    def with_model(self, path: str, kind: str) -> Sampler:
        """The engine with the weights of `path`. `kind` (see `model_kind`) tells which checkpoints may share an engine."""
        if self._sampler is not None and kind == self._kind and Path(path).is_dir():
            self._sampler.load(path)
            return self._sampler
        self.close()
        self._sampler, self._kind = self._open(path), kind
        return self._sampler

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
        self._sampler = None


def model_config(path: str, max_len: int, trust_remote_code: bool) -> PretrainedConfig:
    """The model's config, an adapter's is that of its base. Raises ValueError when the model cannot hold `max_len` positions."""
    config = AutoConfig.from_pretrained(base_of(path) or path, trust_remote_code=trust_remote_code)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < max_len:
        raise ValueError(
            f"{path}: the model has {positions} positions, prompt_max_len + generate_max_len = {max_len} need more: lower one of the two"
        )
    return config


def model_kind(config: PretrainedConfig, renderer: Renderer) -> str:
    """A digest of the architecture and the vocabulary: checkpoints with the same one can share an engine."""
    settings = {name: value for name, value in config.to_dict().items() if name not in ("_name_or_path", "transformers_version")}
    return digest([json.dumps(settings, sort_keys=True, default=str), sorted(renderer.tokenizer.get_vocab().items())])


def write_answers(path: Path, model: str, questions: Sequence[Question], answers: Sequence[ModelAnswer]) -> None:
    """Writes one model's file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [_row(model, question, answer) for question, answer in zip(questions, answers, strict=True)]
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def _row(model: str, question: Question, answer: ModelAnswer) -> dict[str, Any]:
    return {
        "uid": answer.uid,
        "model": model,
        "messages": [*question.messages, {"role": "assistant", "content": {"answer": answer.text}}],
        "metadata": {
            "token_len": answer.tokens,
            **markdown(answer.text),
        },
        "prompt_truncated": answer.prompt_truncated,
        "answer_truncated": answer.answer_truncated,
    }


def read_answers(path: Path, questions: Sequence[Question]) -> list[ModelAnswer] | None:
    """The answers of a file to just these questions, in their order; None when the file is not there or misses one."""
    if not path.is_file():
        return None
    found = {answer.uid: answer for answer in map(_answer, path.read_text(encoding="utf-8").split("\n")[:-1])}
    if any(question.uid not in found for question in questions):
        return None
    return [found[question.uid] for question in questions]


def _answer(line: str) -> ModelAnswer:
    row = json.loads(line)
    content, metadata = row["messages"][-1]["content"], row["metadata"]
    text = content["answer"] if isinstance(content, dict) else content
    return ModelAnswer(row["uid"], text, metadata["token_len"], row.get("prompt_truncated", False), row.get("answer_truncated", False))


def file_name(name: str) -> str:
    """A file's stem for a model's or judge's name, which may be a path or Hub id; different names never share one."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip(".")
    return safe if safe == name else f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
