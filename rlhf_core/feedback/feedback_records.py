"""Defines a row of feedback: one person's judgement of a model's answers. Torch-free."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from rlhf_core.records import Frozen
from rlhf_core.system.files import digest

Kind = Literal["thumb", "edit", "ranking"]


class Feedback(Frozen):
    """One row of feedback. `answers`: for a thumb, the answer; for an edit, the answer and then the person's
    text; for a ranking, the answers, best first.

    `ranks`: for a thumb, (1,) means up and (0,) down; for an edit, (1, 0); for a ranking, one rank per
    answer, where 0 is the best and equal ranks are ties. `model`: digest or name of the model that answered.
    `annotator`: the person who gave the feedback, for detecting duplicates and for deletion.
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
        """Returns a digest of the judged content, without the judgement. Rows with equal digests may
        contradict each other."""
        judged = self.answers[:1] if self.kind == "edit" else sorted(self.answers)
        return digest([self.kind, self.prompt, judged])

    def opinion(self) -> str:
        """Returns a digest of the judgement, which is equal for rows that agree."""
        if self.kind == "edit":
            return digest(self.answers[1])
        return digest(sorted(zip(self.answers, self.ranks, strict=True)))

    def identity(self) -> str:
        """Returns a digest of the content and the annotator, or the time if there is no annotator. Rows with
        equal digests are duplicates."""
        given = self.annotator if self.annotator is not None or self.at is None else self.at.isoformat()
        return digest([self.about(), self.opinion(), given])
