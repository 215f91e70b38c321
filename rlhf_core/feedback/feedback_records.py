"""Defines a row of feedback: one person's judgement of a model's answers. Torch-free."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from rlhf_core.records import Frozen
from rlhf_core.system.files import digest

Kind = Literal["thumb", "edit", "ranking"]


class Feedback(Frozen):
    """Holds one row. `answers`: thumb: the answer; edit: the answer, then the person's text; ranking: best
    first.

    `ranks`: thumb: (1,) for up and (0,) for down; edit: (1, 0); ranking: one rank per answer, 0 is the best,
    equal ranks are ties. `model`: digest or name of the model that answered. `annotator`: who gave the
    feedback, for detecting duplicates and for deletion.
    """

    kind: Kind
    prompt: tuple[dict[str, Any], ...]
    answers: tuple[str, ...]
    ranks: tuple[int, ...]
    model: str | None = None
    at: datetime | None = None
    source: str = ""
    annotator: str | None = None

    @property
    def texts(self) -> list[str]:
        """Returns all texts of the row: messages, then answers."""
        return [str(message["content"]) for message in self.prompt] + list(self.answers)

    def about(self) -> str:
        """Returns a digest of what the row judges, without the judgement. Rows with equal digests may
        contradict each other."""
        judged = self.answers[:1] if self.kind == "edit" else sorted(self.answers)
        return digest([self.kind, self.prompt, judged])

    def opinion(self) -> str:
        """Returns a digest of the judgement, equal for rows that agree."""
        if self.kind == "edit":
            return digest(self.answers[1])
        return digest(sorted(zip(self.answers, self.ranks, strict=True)))

    def identity(self) -> str:
        """Returns a digest of content and annotator (without one: time). Rows with equal digests are
        duplicates."""
        given = self.annotator if self.annotator is not None or self.at is None else self.at.isoformat()
        return digest([self.about(), self.opinion(), given])
