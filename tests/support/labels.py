"""Lines of a file of people's labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def label(number: int, verdict: str | None = "A>B", uid: str = "q1", **changes: Any) -> dict[str, Any]:
    """A line as the labelling page writes it, with keys that a calibration does not read."""
    prompt = [{"role": "user", "content": f"Question {uid}?"}]
    row = {
        "id": f"l{number}",
        "uid": uid,
        "prompt": prompt,
        "answer_a": f"a of {uid}",
        "answer_b": f"b of {uid}",
        "verdict": verdict,
    }
    shown = {
        "model_a": "sft",
        "model_b": "dpo",
        "shown_first": "b",
        "annotator": "ann",
        "at": "2026-01-01T00:00:00Z",
        "note": "",
        "source": "",
    }
    return row | shown | {"repeat_of": None, "undone": None} | changes


def write_labels(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
