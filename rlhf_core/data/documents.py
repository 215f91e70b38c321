"""What the data becomes: tokens with a mask, pairs of them, prompts, and a count of what happened on the way. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload

import numpy as np

if TYPE_CHECKING:
    from rlhf_core.data.survey import Surveyed

Item = TypeVar("Item")
Other = TypeVar("Other")
Message = dict[str, str]


@dataclass(frozen=True)
class Document:
    """One sequence. `mask[t]` is True where the loss speaks of `tokens[t]`: answers and their end-of-turn token.

    In a row it may go on from the last whole document before it, whose first `shared` tokens are its own and are not laid again.
    `experts` (T - 1, layers, k): those that a sampler sent each token but the last to, where it told.
    """

    tokens: list[int]
    mask: list[bool]
    shared: int = 0
    experts: np.ndarray | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.mask), f"{len(self.tokens)} tokens but a mask of {len(self.mask)}"
        assert self.experts is None or len(self.experts) == len(self.tokens) - 1, (
            f"{len(self.tokens)} tokens but experts of {len(self.experts)}"
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def answer_start(self) -> int:
        """Index of the first token under the mask; the length where there is none."""
        return self.mask.index(True) if True in self.mask else len(self)

    def after(self, trunk: Document) -> Document:
        """The same, going on from the prompt of `trunk` where its own is that one, whole. What has no answer, or no prompt, stays whole.

        It begins at a position that `trunk`, and all that went on from it, have passed: that tells it from them in a row.
        """
        prompt = self.answer_start
        same = prompt < len(self) and trunk.answer_start == prompt and trunk.tokens[:prompt] == self.tokens[:prompt]
        return replace(self, shared=prompt) if same else self

    def cut(self, max_len: int) -> Document:
        """The first `max_len` tokens; nothing is put in the place of what is lost."""
        return self if len(self) <= max_len else Document(self.tokens[:max_len], self.mask[:max_len])


@dataclass(frozen=True)
class Pair:
    """Two answers to the same prompt tokens. `margin` is 0.0 when the data has none."""

    chosen: Document
    rejected: Document
    margin: float

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)


@dataclass(frozen=True)
class Labelled:
    """One answer of unpaired data; the mask is True from the answer's first token to the end."""

    document: Document
    desirable: bool


@dataclass(frozen=True)
class Prompt:
    """A prompt ready for sampling. `messages` is the whole prompt as in the data, `tokens` what fits, `row` all columns."""

    messages: tuple[Message, ...]
    tokens: list[int]
    row: dict[str, Any]
    truncated: bool


class Lazy(Sequence[Item]):
    """`count` items, each made by `get(index)` when it is asked for; a slice is a list. Two are equal when their items are."""

    def __init__(self, count: int, get: Callable[[int], Item]):
        self._count, self._get = count, get

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
        return isinstance(other, Sequence) and len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


def mapped(items: Sequence[Item], make: Callable[[Item], Other]) -> Sequence[Other]:
    """What `make` gives for each item, made when it is asked for."""
    return Lazy(len(items), lambda index: make(items[index]))


def joined(first: Sequence[Item], second: Sequence[Item]) -> Sequence[Item]:
    """One sequence after the other."""
    return Lazy(len(first) + len(second), lambda index: first[index] if index < len(first) else second[index - len(first)])


@dataclass(frozen=True)
class DataReport:
    """Rows read, items kept, kept items that were cut, rows dropped, tokens of the kept items (of both documents of a pair).

    `survey` is what else is to be known about the rows.
    """

    rows: int
    kept: int
    truncated: int
    dropped: int
    tokens: int
    survey: Surveyed | None = field(default=None, compare=False, repr=False)

    def metrics(self, prefix: str) -> dict[str, float]:
        """`{prefix}/rows`, `{prefix}/kept`, ..."""
        return {f"{prefix}/{name}": float(getattr(self, name)) for name in ("rows", "kept", "truncated", "dropped", "tokens")}


class Loaded(NamedTuple, Generic[Item]):
    """Items in the order of the data, and the report about them."""

    items: Sequence[Item]
    report: DataReport


def answered(prompt: list[int], said: list[int]) -> Document:
    """A prompt and what is said after it, with the mask on that."""
    return Document(prompt + said, [False] * len(prompt) + [True] * len(said))
