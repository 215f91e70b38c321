"""Rows and data files for tests of data."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow

from rlhf_core.config import Data


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def compressed(path: str, suffix: str) -> str:
    """Compresses a file beside it, in two members, as programs do that append to one."""
    content = Path(path).read_bytes()
    halves = content[: len(content) // 2], content[len(content) // 2 :]
    packed = Path(path + suffix)
    if suffix == ".gz":
        packed.write_bytes(b"".join(gzip.compress(half) for half in halves))
    else:
        packed.write_bytes(b"".join(pyarrow.Codec("zstd").compress(half, asbytes=True) for half in halves))
    return str(packed)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def data(*sources: Any, **more: Any) -> Data:
    return Data.model_validate({"sources": sources, **more})
