"""The tokens that chat templates take by themselves."""

from __future__ import annotations

from collections.abc import Iterable

from rlhf_core.preflight.rows.template_length import Pair, measured


def frame_lengths(pairs: Iterable[Pair], trust_remote_code: bool = False) -> dict[Pair, int | str]:
    """Like `measured`, without rows."""
    found = measured(dict.fromkeys(pairs, ()), trust_remote_code)
    return {pair: each if isinstance(each, str) else each.length for pair, each in found.items()}
