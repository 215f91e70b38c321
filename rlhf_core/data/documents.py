"""What the data becomes: tokens with a mask, pairs of them, prompts, and a count of what happened on the way. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
Message = dict[str, str]


@dataclass(frozen=True)
class Document:
    """One sequence. `mask[t]` is True where the loss speaks of `tokens[t]`: answers and their end-of-turn token."""

    tokens: list[int]
    mask: list[bool]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.mask), f"{len(self.tokens)} tokens but a mask of {len(self.mask)}"

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, max_len: int) -> Document:
        """The first `max_len` tokens; nothing is put in the place of what is lost."""
        return self if len(self) <= max_len else Document(self.tokens[:max_len], self.mask[:max_len])


@dataclass(frozen=True)
class Pair:
    """Two answers to the same prompt tokens. `margin` is 0.0 when the data has none."""

    chosen: Document
    rejected: Document
    margin: float


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


@dataclass(frozen=True)
class DataReport:
    """Rows read, items kept, kept items that were cut, rows dropped, tokens of the kept items (of both documents of a pair)."""

    rows: int
    kept: int
    truncated: int
    dropped: int
    tokens: int

    def metrics(self, prefix: str) -> dict[str, float]:
        """`{prefix}/rows`, `{prefix}/kept`, ..."""
        return {f"{prefix}/{name}": float(value) for name, value in asdict(self).items()}


class Loaded(NamedTuple, Generic[Item]):
    """Items in the order of the data, and the report about them."""

    items: list[Item]
    report: DataReport
