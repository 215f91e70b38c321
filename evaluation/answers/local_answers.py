"""Generates the answers of local models with an engine. Reads and writes answers in Arena-Hard's format.

One line: {uid, model, messages, metadata{token_len, header_count, list_count, bold_count}}; the last
message's content is {"answer": text}, as in published files. `token_len` counts the model's own tokens
without the end token (arena-hard-auto counts with tiktoken's gpt-4o encoding, a download); markdown is
counted outside code blocks. Our two flags, `prompt_truncated` and `answer_truncated`, are outside the
metadata because arena-hard-auto counts its columns. Files are written atomically; a file that has all
questions is not generated again.
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

from evaluation.answers.question_pictures import stored_messages
from evaluation.scores.style import markdown
from rlhf_core.config import Evaluation
from rlhf_core.data.chat import Renderer
from rlhf_core.data.questions import Question
from rlhf_core.data.sources import at
from rlhf_core.hub.positions import require_positions
from rlhf_core.models.lora import base_of
from rlhf_core.system.files import digest, write_text

if TYPE_CHECKING:
    from rlhf_core.rollout.engine_contract import RolloutEngine


@dataclass(frozen=True)
class ModelAnswer:
    """One answer. `tokens`: the number of its tokens, without the stop token. The flags say whether the
    prompt or the answer was truncated at a limit."""

    uid: str
    text: str
    tokens: int
    prompt_truncated: bool
    answer_truncated: bool

    @property
    def metadata(self) -> dict[str, Any]:
        """Returns the length of the answer and its markdown counts, under arena-hard-auto's names."""
        return {"token_len": self.tokens, **markdown(self.text)}


def generate(
    sampler: RolloutEngine, renderer: Renderer, questions: Sequence[Question], config: Evaluation, seed: int
) -> list[ModelAnswer]:
    """Returns one generated answer to each question, in order. Each answer's seed is derived from `seed` and
    the question's uid, so the order has no effect."""
    from rlhf_core.rollout.engine_contract import Sampling

    prompts = [
        at(question.where, renderer.document_within, question.messages, config.prompt_max_len)
        for question in questions
    ]
    pictures = [document.pictures for document, _ in prompts]
    samples = sampler.generate(
        [list(document.tokens) for document, _ in prompts],
        [int(digest([seed, question.uid])[:8], 16) for question in questions],
        Sampling(1, config.temperature, config.generate_max_len, renderer.stop_token_ids, logprobs=False),
        pictures if any(pictures) else (),
    )
    answers = []
    for question, (_, cut), (sample,) in zip(questions, prompts, samples, strict=True):
        tokens = (
            sample.tokens[:-1]
            if sample.tokens and sample.tokens[-1] in renderer.stop_token_ids
            else sample.tokens
        )
        text = str(
            renderer.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )
        answers.append(ModelAnswer(question.uid, text, len(tokens), cut, not sample.finished))
    return answers


class EngineKeeper:
    """Keeps one engine. Loads the weights of checkpoint folders of the same kind into it, and starts a
    new engine for other models.

    `open_sampler(path)` starts an engine.
    """

    def __init__(self, open_sampler: Callable[[str], RolloutEngine]):
        self._open = open_sampler
        self._sampler: RolloutEngine | None = None
        self._kind = ""

    def with_model(self, path: str, kind: str) -> RolloutEngine:
        """Returns the engine with the weights of `path` loaded. Checkpoints of the same `kind` (see
        `model_kind`) share an engine."""
        if self._sampler is not None and kind == self._kind and Path(path).is_dir():
            self._sampler.load(path)
            return self._sampler
        self.close()
        self._sampler = self._open(path)
        self._kind = kind
        return self._sampler

    def close(self) -> None:
        """Ends the engine if one is running."""
        if self._sampler is not None:
            self._sampler.close()
        self._sampler = None


def model_config(path: str, max_len: int, trust_remote_code: bool) -> PretrainedConfig:
    """Returns the model's config (for an adapter, its base's). Raises ValueError when the model has fewer
    than `max_len` positions."""
    config = AutoConfig.from_pretrained(base_of(path) or path, trust_remote_code=trust_remote_code)
    require_positions(path, config.to_dict(), max_len)
    return config


def model_kind(config: PretrainedConfig, renderer: Renderer) -> str:
    """Returns a digest of the architecture and the vocabulary. Checkpoints with the same digest can share
    an engine."""
    settings = {
        name: value
        for name, value in config.to_dict().items()
        if name not in ("_name_or_path", "transformers_version")
    }
    return digest(
        [json.dumps(settings, sort_keys=True, default=str), sorted(renderer.tokenizer.get_vocab().items())]
    )


def write_answers(
    path: Path, model: str, questions: Sequence[Question], answers: Sequence[ModelAnswer]
) -> None:
    """Writes one model's file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [_row(model, question, answer) for question, answer in zip(questions, answers, strict=True)]
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def _row(model: str, question: Question, answer: ModelAnswer) -> dict[str, Any]:
    return {
        "uid": answer.uid,
        "model": model,
        "messages": [*stored_messages(question), {"role": "assistant", "content": {"answer": answer.text}}],
        "metadata": answer.metadata,
        "prompt_truncated": answer.prompt_truncated,
        "answer_truncated": answer.answer_truncated,
    }


def read_answers(path: Path, questions: Sequence[Question]) -> list[ModelAnswer] | None:
    """Returns a file's answers to these questions, in the questions' order; None when the file does not exist
    or an answer is missing."""
    if not path.is_file():
        return None
    found = {answer.uid: answer for answer in map(_answer, path.read_text(encoding="utf-8").split("\n")[:-1])}
    if any(question.uid not in found for question in questions):
        return None
    return [found[question.uid] for question in questions]


def _answer(line: str) -> ModelAnswer:
    row = json.loads(line)
    content = row["messages"][-1]["content"]
    metadata = row["metadata"]
    text = content["answer"] if isinstance(content, dict) else content
    return ModelAnswer(
        row["uid"],
        text,
        metadata["token_len"],
        row.get("prompt_truncated", False),
        row.get("answer_truncated", False),
    )


def file_name(name: str) -> str:
    """Returns a file stem for the name of a model or judge, which may be a path or Hub id. Different names
    get different stems."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip(".")
    return safe if safe == name else f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
