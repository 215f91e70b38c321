"""Loads a model's tokenizer, and checks that it can encode text and end answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_core.data.pad_token import embedding_rows, names_its_end, with_pad_token
from rlhf_core.hub.ids import is_remote
from rlhf_core.hub.model_files import VOCABULARIES
from rlhf_core.hub.vocabulary import tokenizer_place


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model folder or Hub id, optionally at a commit (`owner/name@COMMIT`). For an
    adapter without a tokenizer, loads the tokenizer of its base.

    A tokenizer without its own pad token gets one of its special tokens (see `with_pad_token`). Raises
    ValueError if the tokenizer cannot be loaded, encodes text to nothing, or lacks an end-of-sequence token
    or a possible pad token.
    """
    folder = tokenizer_place(path)
    if not is_remote(folder) and not Path(folder).is_dir():
        raise ValueError(f"{path}: there is no model folder here; correct the path, or make the model first")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:  # the last two are raised for JSON that is not an object
        why = first_line(error)
        if Path(folder).is_dir() and not any(any(Path(folder).glob(pattern)) for pattern in VOCABULARIES):
            why = f"there is no {', '.join(VOCABULARIES)}: save the model's tokenizer into this folder"
        raise ValueError(f"{path}: no tokenizer can be loaded from here ({why})") from error
    except StrictDataclassError as error:
        raise ValueError(
            f"{path}: its config.json contradicts itself ({first_line(error.__cause__ or error)})"
        ) from error
    shares_pad = tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id
    if tokenizer.eos_token_id is None or (shares_pad and not names_its_end(folder)):
        raise ValueError(
            f"{path}: the tokenizer has no end-of-sequence token: set eos_token in its tokenizer_config.json"
        )
    tokenizer = with_pad_token(tokenizer)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        state = "uses its end-of-sequence token as pad token" if shares_pad else "has no pad token"
        raise ValueError(
            f"{path}: the tokenizer {state}, and has no special token that could be one: set pad_token in its"
            " tokenizer_config.json to another token of the vocabulary"
        )
    if not tokenizer("a word", add_special_tokens=False).input_ids:
        raise ValueError(
            f"{path}: the tokenizer encodes text to nothing: its files do not fit the model_type in"
            " config.json"
        )
    return tokenizer


def check_embedding_rows(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> None:
    """Raises ValueError if the model in the tokenizer's folder has no embedding for one of these tokens."""
    place = str(tokenizer.name_or_path)
    rows = embedding_rows(place)
    if rows is not None and max(tokens) >= rows:
        named = tokenizer.convert_ids_to_tokens(max(tokens))
        raise ValueError(
            f"{place}: the token {named!r} has the number {max(tokens)}, and the model has embeddings for"
            f" {rows} tokens: call resize_token_embeddings(len(tokenizer)) on the model and save it, or"
            " use a template with tokens that the model knows"
        )


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message."""
    return str(error).strip().split("\n")[0]
