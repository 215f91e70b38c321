"""Chooses a pad token for tokenizers that have no pad token of their own.

Many base models have no pad token, or use their end-of-sequence token as the pad token. This project does not
recognise padding by its token: masks and positions come from the lengths of documents. However, a reward
model's config names its pad token, and other tools read the score at the last token that is not padding. The
pad token must therefore not end a document.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from transformers import PreTrainedTokenizerBase

PADS = re.compile(r"pad", re.IGNORECASE)
UNUSED = re.compile(r"reserved|unused|extra_id|filler", re.IGNORECASE)
MEDIA = re.compile(r"image|video|audio|vision", re.IGNORECASE)  # multimodal models embed media in their place


def with_pad_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Returns the tokenizer. If it has no pad token, or uses its end-of-sequence token as the pad token, sets
    another token of the vocabulary as the pad token, if possible."""
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        found = _unused_token(tokenizer)
        if found is not None:
            tokenizer.pad_token = found
    return tokenizer


def _unused_token(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Returns a special token that ends no document and is not in the chat template. Prefers a padding token,
    then a reserved token, then the unknown token, then any other special token. Returns None if the model has
    no embedding for any of them."""
    ends = {tokenizer.eos_token, tokenizer.bos_token}
    rows = embedding_rows(str(tokenizer.name_or_path))
    written = str(tokenizer.chat_template or "")
    special = [
        token.content
        for number, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and token.content not in ends and (rows is None or number < rows)
    ]
    text_only = [token for token in special if not MEDIA.search(token) and token not in written]
    unknown = [token for token in text_only if token == tokenizer.unk_token]
    made_for_it = [token for token in text_only if PADS.search(token)]
    reserved = [token for token in text_only if UNUSED.search(token)]
    return next(iter([*made_for_it, *reserved, *unknown, *text_only]), None)


def embedding_rows(place: str) -> int | None:
    """Returns the number of embedding rows of the model in a tokenizer's folder, or None if config.json is
    missing or does not specify it."""
    file = Path(place) / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text())
    rows = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return rows if isinstance(rows, int) else None


def names_its_end(folder: str) -> bool:
    """Returns whether files in a tokenizer's folder name its end-of-sequence token; otherwise it is the
    default of the tokenizer's class. Returns True if there are no such files, as for Hub ids."""
    named = [Path(folder) / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
    files = [file for file in named if file.is_file()]
    return not files or any(json.loads(file.read_text()).get("eos_token") for file in files)
