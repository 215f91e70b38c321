"""Defines the size of a forward pass, in documents or in tokens, and its default."""

from __future__ import annotations

from typing import NamedTuple

ROWS = 8
# A pass of this many tokens keeps a GPU busy, so that a longer one saves no time.
FULL_PASS = 16384


class PassSize(NamedTuple):
    """The most that a pass on one rank, or on the ranks that share it, has: `tokens`, or without them `rows`
    documents (pairs count as one)."""

    rows: int
    tokens: int | None

    def most_tokens(self, longest: int) -> int:
        """Returns the tokens of a pass of documents that all have `longest` tokens."""
        return self.rows * longest if self.tokens is None else self.tokens

    def most_documents(self, longest: int) -> int:
        """Returns how many documents of `longest` tokens a pass has, at least one."""
        return self.rows if self.tokens is None else max(1, self.tokens // longest)


def pass_size(rows: int | None, tokens: int | None, longest: int, sharing: int = 1) -> PassSize:
    """Returns the size of the passes for a recipe's two fields, where `tokens` come before `rows`.

    A recipe without both gets the tokens of `ROWS` documents of `longest` tokens, but no more than
    `FULL_PASS` on each of the `sharing` ranks of a pass, or one document where that is longer. Documents
    shorter than `longest` are then packed into fewer passes. These need no more memory than a full pass,
    except where attention has a mask: its rows are as long as the longest document, and padding comes on top.
    """
    if tokens is not None or rows is not None:
        return PassSize(rows or ROWS, tokens)
    return PassSize(ROWS, max(longest, min(ROWS * longest, FULL_PASS * sharing)))
