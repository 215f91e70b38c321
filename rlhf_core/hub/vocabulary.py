"""Reads and compares vocabularies, since a model that gets another model's token ids needs the same
vocabulary. Torch-free for local folders."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from rlhf_core.hub.ids import is_hub_id, is_remote
from rlhf_core.hub.model_files import ADAPTER_CONFIG, TOKENIZER
from rlhf_core.system.files import read_json

Vocabulary = dict[str, int]


def tokenizer_place(path: str, of: tuple[str, ...] = ()) -> str:
    """Returns the location of a model's tokenizer, which is fetched if the path names a commit on the Hub.

    `of`: the adapters that led to this base model. Raises ValueError when the path is one of them.
    """
    if path in of:
        raise ValueError(
            f"{path}: is an adapter of itself: correct base_model_name_or_path in its adapter_config.json"
        )
    if is_hub_id(path) and "@" in path:
        from rlhf_core.hub.snapshots import described

        path = str(described(path))
    folder = Path(path)
    if not (folder / ADAPTER_CONFIG).is_file() or (folder / "tokenizer_config.json").is_file():
        return path
    base = read_json(folder / ADAPTER_CONFIG)
    name = str(base.get("base_model_name_or_path") or "")
    revision = base.get("revision")
    return (
        tokenizer_place(f"{name}@{revision}" if revision and is_hub_id(name) else name, (*of, path))
        if name
        else path
    )


def stored_vocabulary(path: str) -> Vocabulary | None:
    """Returns the vocabulary in a model folder's tokenizer.json, without transformers; None if it is missing
    or unreadable."""
    try:
        file = Path(tokenizer_place(path)) / "tokenizer.json"
        return _read(file, file.stat().st_mtime_ns)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def known_rows(path: str, rows: int) -> int | None:
    """Returns how many of a model's `rows` embedding rows belong to the tokenizer, up to its last token; None
    if all rows do, and for Hub ids.

    The other rows pad the vocabulary and are not tokens. If one of them were sampled, no tokenizer could
    decode the answer.
    """
    tokens = None if is_remote(path) else stored_vocabulary(path)
    known = max(tokens.values(), default=-1) + 1 if tokens else rows
    return known if known < rows else None


def require_same_vocabulary(own: str, others: Iterable[str], trust_remote_code: bool = False) -> None:
    """Raises ValueError when one of the models `others` maps the token ids of the model `own` to other
    tokens."""
    for other in dict.fromkeys(others):
        told = compared(own, other, trust_remote_code)
        if told:
            raise ValueError(told)


def compared(own: str, other: str, trust_remote_code: bool = False) -> str | None:
    """Returns why the model `other` cannot use token ids of the model `own`; None if it can. If a folder has
    no tokenizer to compare, prints a note and returns None. Raises ValueError for an unreadable tokenizer."""
    if other == own:
        return None
    if (
        not is_remote(other)
        and not is_remote(place := tokenizer_place(other))
        and not any(map(any, map(Path(place).glob, TOKENIZER)))
    ):
        print(f"{other} has no tokenizer: that it knows the tokens of {own} is taken for granted", flush=True)
        return None
    return difference(own, _vocabulary(own, trust_remote_code), other, _vocabulary(other, trust_remote_code))


def difference(own: str, tokens: Vocabulary, other: str, known: Vocabulary) -> str | None:
    """Returns why the model `other`, with vocabulary `known`, cannot use token ids of the model `own`, naming
    the first id that differs; None if all agree. Additional tokens of `other` do not matter, since they are
    never sent."""
    unlike = [token for token, number in tokens.items() if known.get(token) != number]
    if not unlike:
        return None
    first = min(unlike, key=tokens.__getitem__)
    number = tokens[first]
    theirs = next((repr(token) for token, there in known.items() if there == number), "no token")
    return (
        f"{other} is given the token ids of {own} and has another vocabulary: number {number} is {first!r} in"
        f" {own} and {theirs} in {other}; name a model with the same tokenizer"
    )


def _vocabulary(path: str, trust_remote_code: bool) -> Vocabulary:
    stored = None if is_remote(path) else stored_vocabulary(path)
    if stored is not None:
        return stored
    from transformers import AutoTokenizer

    place = tokenizer_place(path)
    try:
        found: Vocabulary = AutoTokenizer.from_pretrained(
            place, trust_remote_code=trust_remote_code
        ).get_vocab()
    except Exception as error:  # damaged files raise many types of errors
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path}: no tokenizer can be loaded from here ({reason})") from error
    return found


@lru_cache(maxsize=8)
def _read(file: Path, _changed: int) -> Vocabulary:
    whole = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = whole["model"]["vocab"]
    found = (
        {token: i for i, (token, _) in enumerate(vocabulary)}
        if isinstance(vocabulary, list)
        else dict(vocabulary)
    )
    config = file.with_name("tokenizer_config.json")
    declared = (
        json.loads(config.read_text(encoding="utf-8")).get("added_tokens_decoder") or {}
        if config.is_file()
        else {}
    )
    found |= {token["content"]: int(number) for number, token in declared.items()}
    return found | {token["content"]: token["id"] for token in whole.get("added_tokens") or ()}
