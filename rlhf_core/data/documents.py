"""Defines data items: documents (tokens with a mask), pairs, labelled answers, prompts, and lazy sequences.
Torch-free.

Conditional SFT appends an answer's reward to its prompt, ` <rm_score>: 0.73`, standardised over the stage's
data, so that a prompt can request a reward. Sampling appends the suffix of the best answer, which the
checkpoint stores. A later stage that trains on prompts without rewards does not store the suffix with its
model.
"""

from __future__ import annotations

import json
import statistics
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import indexOf
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, overload

import numpy as np

from rlhf_core.data.pictures.message_parts import content_text
from rlhf_core.data.pictures.picture_source import EncodedPicture
from rlhf_core.system.files import write_text

Item = TypeVar("Item")
Other = TypeVar("Other")
Message = dict[str, Any]  # role, content; with tools also tool_calls, tool_call_id, name
# For conditional SFT: an answer's reward, appended to its prompt, and the checkpoint file that holds the
# suffix of the best answer.
SUFFIX = " <rm_score>: {:.2f}"
SUFFIX_FILE = "prompt_suffix.json"


Tokens: TypeAlias = "list[int] | array[int] | memoryview[int]"  # arrays and memoryviews have format i (int32)
Mask: TypeAlias = "list[bool] | array[int] | memoryview[int]"  # arrays and memoryviews have format b, 0 or 1


def to_send(values: Sequence[Any]) -> Any:
    """Converts an array or a memoryview to a form that pickle does not copy, so that the processes of a node
    read it in Ray's store."""
    return np.asarray(values) if isinstance(values, array | memoryview) else values


def received(values: Any) -> Any:
    """Reverses `to_send`. Arrays become memoryviews, which are read-only if several processes share them."""
    return values.data if isinstance(values, np.ndarray) else values


@dataclass(frozen=True)
class Document:
    """Holds one sequence. `mask[t]` is true if `tokens[t]` is in the loss, as for answers and their
    end-of-turn tokens.

    `starts` holds the indices at which further sequences begin, for an episode with several conversations.
    Each sequence attends only to itself, and its first token has no log-prob; losses count the document as
    one. `shared` is the number of leading tokens that are not repeated in the row, because they equal the
    first tokens of the last document before it with `shared` 0. `experts` (T - 1, layers, k) holds the
    experts that the sampler chose for each token except the last, if known. `pictures` holds the images in
    the order of their tokens; they stay encoded until a batch is collated.
    """

    tokens: Tokens
    mask: Mask
    shared: int = 0
    experts: np.ndarray | None = field(default=None, compare=False, repr=False)
    starts: tuple[int, ...] = ()
    pictures: tuple[EncodedPicture, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.mask), f"{len(self.tokens)} tokens but a mask of {len(self.mask)}"
        assert self.experts is None or len(self.experts) == len(self.tokens) - 1, (
            f"{len(self.tokens)} tokens but experts of {len(self.experts)}"
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Document) or (len(self), self.shared) != (len(other), other.shared):
            return False
        if self.starts != other.starts or self.pictures != other.pictures:
            return False
        return list(self.tokens) == list(other.tokens) and list(self.mask) == list(other.mask)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        pictures = tuple(
            picture._replace(source=picture.source._replace(data=bytes(picture.source.data)))
            for picture in self.pictures
        )
        content = (to_send(self.tokens), to_send(self.mask), self.shared, self.experts, self.starts, pictures)
        return _document, content

    @property
    def token_array(self) -> np.ndarray:
        """Returns the tokens, (T,)."""
        return np.asarray(self.tokens)

    @property
    def mask_array(self) -> np.ndarray:
        """Returns the mask, (T,) bool. Copies the mask only if it is a list."""
        mask = np.asarray(self.mask)
        return mask.view(bool) if mask.itemsize == 1 else mask.astype(bool)

    @property
    def answer_start(self) -> int:
        """Returns the index of the first token in the mask, or the number of tokens if the mask is empty."""
        return indexOf(self.mask, True) if True in self.mask else len(self)

    def after(self, trunk: Document) -> Document:
        """Returns the document with its prompt shared with `trunk`, if both have the same prompt and are
        single sequences without images, and the document has an answer. Otherwise returns it unchanged.

        The shared document starts at a position that `trunk` and the documents after it have already passed,
        so the positions show where it starts.
        """
        prompt = self.answer_start
        same = (
            prompt < len(self)
            and not self.starts
            and not trunk.starts
            and not self.pictures
            and not trunk.pictures
            and trunk.answer_start == prompt
            and trunk.tokens[:prompt] == self.tokens[:prompt]
        )
        return replace(self, shared=prompt) if same else self

    def cut(self, max_len: int) -> Document:
        """Returns the first `max_len` tokens without adding an end-of-turn token. An image that does not fit
        is left out completely, together with everything after it."""
        if len(self) <= max_len:
            return self
        max_len = min([max_len, *(image.start for image in self.pictures if image.stop > max_len)])
        starts = tuple(start for start in self.starts if start < max_len)
        kept = tuple(image for image in self.pictures if image.stop <= max_len)
        return Document(self.tokens[:max_len], self.mask[:max_len], starts=starts, pictures=kept)

    @property
    def positions(self) -> np.ndarray:
        """Returns the position of each token in its sequence, (T,) int64."""
        places = np.arange(len(self))
        if not self.starts:
            return places
        begins = [0, *self.starts]
        return places - np.repeat(begins, np.diff([*begins, len(self)]))


def _document(
    tokens: Any,
    mask: Any,
    shared: int,
    experts: np.ndarray | None,
    starts: tuple[int, ...],
    pictures: tuple[EncodedPicture, ...],
) -> Document:
    return Document(received(tokens), received(mask), shared, experts, starts, pictures)


@dataclass(frozen=True)
class Pair:
    """Holds two answers to the same prompt tokens. `margin` is 0.0 if the data has none."""

    chosen: Document
    rejected: Document
    margin: float

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)


@dataclass(frozen=True)
class Labelled:
    """Holds one answer of an unpaired data set. The mask is True from the answer's first token to the end."""

    document: Document
    desirable: bool


@dataclass(frozen=True)
class Prompt:
    """Holds a prompt for sampling. `messages` is the whole prompt from the data, as JSON with images only
    named. `tokens` are truncated to the limit. `row` holds all columns of its row. `pictures` holds the
    images, which any process on the machine can read."""

    messages: tuple[Message, ...]
    tokens: list[int]
    row: dict[str, Any]
    truncated: bool
    pictures: tuple[EncodedPicture, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """Returns a key that is equal for prompts with equal tokens and images."""
        return (*self.tokens, *(picture.source.identity for picture in self.pictures))


class Lazy(Sequence[Item]):
    """Represents a sequence of `count` items, each computed by `get(index)` on access; a slice is a list. Two
    sequences are equal if all their items are equal."""

    def __init__(self, count: int, get: Callable[[int], Item]):
        self._count = count
        self._get = get

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self._get(i) for i in range(*index.indices(self._count))]
        return self._get(range(self._count)[index])

    def __iter__(self) -> Iterator[Item]:
        return map(self._get, range(self._count))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Sequence)
            and len(self) == len(other)
            and all(a == b for a, b in zip(self, other, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]


def mapped(items: Sequence[Item], make: Callable[[Item], Other]) -> Sequence[Other]:
    """Returns the sequence of `make(item)`, computed on access."""
    return Lazy(len(items), lambda index: make(items[index]))


def joined(first: Sequence[Item], second: Sequence[Item]) -> Sequence[Item]:
    """Returns the concatenation of two sequences, without copying."""
    return Lazy(
        len(first) + len(second),
        lambda index: first[index] if index < len(first) else second[index - len(first)],
    )


def answered(prompt: list[int], response: list[int], pictures: tuple[EncodedPicture, ...] = ()) -> Document:
    """Returns prompt and response as a document, with the mask on the response. `pictures` are the prompt's
    images."""
    mask = [False] * len(prompt) + [True] * len(response)
    return Document(prompt + response, mask, pictures=pictures)


def compact(
    prompt: Sequence[int],
    response: Sequence[int],
    experts: np.ndarray | None = None,
    pictures: tuple[EncodedPicture, ...] = (),
) -> Document:
    """Works like `answered`, but stores 5 bytes per token, which are sent between processes without
    conversion. `pictures` are the prompt's images."""
    start = len(prompt)
    tokens = np.empty(start + len(response), np.int32)
    mask = np.zeros(start + len(response), np.int8)
    tokens[:start] = prompt
    tokens[start:] = response
    mask[start:] = 1
    return Document(tokens.data, mask.data, experts=experts, pictures=pictures)


def check_limit(limit: int, frame_len: int) -> None:
    """Raises ValueError unless `limit` is larger than `frame_len`, the number of the template's own
    tokens."""
    if limit <= frame_len:
        raise ValueError(
            f"a limit of {limit} tokens leaves none for text: the template alone takes {frame_len} tokens,"
            " raise the limit"
        )


def reward_suffix(rewards: Sequence[float]) -> Callable[[float], str]:
    """Returns a function that maps an answer's reward to the suffix of its prompt. The suffix contains the
    reward, standardised with the mean and standard deviation of `rewards`.

    Raises ValueError if all rewards are equal.
    """
    mean = statistics.fmean(rewards)
    std = statistics.pstdev(rewards)
    if std == 0:
        raise ValueError(
            f"all {len(rewards)} rewards are {mean:g}, so there is nothing to condition on: use condition"
            " none, or other data"
        )
    return lambda reward: SUFFIX.format(round((reward - mean) / std, 2) + 0.0)  # + 0.0: no "-0.00"


def as_text(messages: Sequence[Message]) -> str:
    """Returns messages as one string, for judges and digests. If there are several messages, each is prefixed
    with its role."""
    return (
        content_text(messages[0]["content"])
        if len(messages) == 1
        else "\n\n".join(f"{m['role']}: {content_text(m['content'])}" for m in messages)
    )


def with_suffix(prompt: Sequence[Message], suffix: str) -> list[Message]:
    """Returns the prompt with the suffix appended to its last message."""
    if not suffix:
        return list(prompt)
    content = prompt[-1]["content"]
    added = suffix if isinstance(content, str) else [{"type": "text", "text": suffix}]
    return [*prompt[:-1], {**prompt[-1], "content": content + added}]


def store_suffix(checkpoint: Path, suffix: str) -> None:
    """Writes the suffix into a checkpoint."""
    write_text(checkpoint / SUFFIX_FILE, json.dumps({"prompt_suffix": suffix}) + "\n")


def stored_suffix(model: str) -> str:
    """Returns the suffix that requests a model's best answers, or "" for a model trained without rewards and
    for a Hub id."""
    file = Path(model) / SUFFIX_FILE
    return str(json.loads(file.read_text())["prompt_suffix"]) if file.is_file() else ""
