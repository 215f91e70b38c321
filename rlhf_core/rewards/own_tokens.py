"""Tokenises answers for a reward model whose tokenizer differs from the policy's, using the reward model's
chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document, Message
from rlhf_core.data.rows.columns import written
from rlhf_core.hub.positions import positions_of, stored_config
from rlhf_core.hub.vocabulary import compared


class Answered(Protocol):
    """A prompt and its answer. `finished`: whether the answer was not truncated by the length limit."""

    @property
    def prompt(self) -> Sequence[Message]: ...
    @property
    def response(self) -> str: ...
    @property
    def finished(self) -> bool: ...


def document(renderer: Renderer, answer: Answered) -> Document:
    """Returns a prompt and answer as a sampler would have produced them, so that a truncated answer has no
    end token. Tool calls and their results become plain text, which every template can render."""
    plain = [
        {"role": "user" if m["role"] == "tool" else m["role"], "content": written(m)} for m in answer.prompt
    ]
    whole = renderer.answer(plain, answer.response)
    return whole if answer.finished else whole.cut(len(whole) - 1)


class OwnTokens(NamedTuple):
    """Tokenises answers for the reward model at `path`, keeping the last `longest` tokens."""

    path: str
    renderer: Renderer
    longest: int | None

    def documents(self, answers: Iterable[Answered]) -> list[Document]:
        found = [document(self.renderer, answer) for answer in answers]
        return [
            Document(d.tokens[-self.longest :], d.mask[-self.longest :]) if self.longest else d for d in found
        ]

    @property
    def pad_token_id(self) -> int:
        pad: Any = self.renderer.tokenizer.pad_token_id
        return int(pad)


def writers(
    policy: str, reward_models: Mapping[str, str], trust_remote_code: bool = False
) -> dict[str, OwnTokens]:
    """Returns an `OwnTokens` for each reward model whose token IDs differ from the policy's, keyed as in
    `reward_models`.

    Raises ValueError if such a model has no chat template.
    """
    found = {}
    for title, path in reward_models.items():
        if not compared(policy, path, trust_remote_code):
            continue
        try:
            renderer = Renderer(load_tokenizer(path, trust_remote_code), "chat")
        except ValueError as error:
            raise ValueError(
                f"{path} has another tokenizer than {policy}, and answers cannot be written for it: {error}"
            ) from error
        found[title] = OwnTokens(path, renderer, positions_of(stored_config(path)))
        print(f"{path} has another tokenizer: it scores answers in its own chat template", flush=True)
    return found
