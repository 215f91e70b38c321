"""Tokenizers: which can be trained with, their end and pad tokens, tokens without an embedding, and how texts
are encoded."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast, Qwen2Config

from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.chat.text_encoder import TextEncoder
from rlhf_core.models.checkpoint.save import save_tokenizer
from tests.support.byte_tokenizer import byte_tokenizer
from tests.unit.data.test_chat import CHATML, Make, make

__all__ = ["make"]


def test_tokenizers_that_cannot_be_trained_with_are_refused(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer can be loaded"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="nowhere: there is no model folder here; correct the path"):
        load_tokenizer(str(tmp_path / "nowhere"))
    path = make()
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    with pytest.raises(ValueError, match="no end-of-sequence token: set eos_token"):
        load_tokenizer(str(path))


def changed(folder: Path, **values: str | None) -> Path:
    """Changes values of tokenizer_config.json; None removes one."""
    config = json.loads((folder / "tokenizer_config.json").read_text()) | values
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    return folder


def test_a_tokenizer_whose_class_has_an_end_that_it_pads_with_is_told_to_name_its_own(make: Make) -> None:
    """The class of Qwen2's tokenizers ends with <|endoftext|> where no file says so."""
    path = changed(make(pad_token="<|endoftext|>"), eos_token=None, tokenizer_class="Qwen2Tokenizer")
    with pytest.raises(ValueError, match="no end-of-sequence token: set eos_token"):
        load_tokenizer(str(path))


@pytest.mark.parametrize("pad_token", [None, "<|endoftext|>"], ids=["none", "the end"])
@pytest.mark.parametrize(
    ("special", "chosen"),
    [
        (["<|im_start|>", "<|reserved_0|>", "<|image_pad|>", "<|pad_id|>"], "<|pad_id|>"),
        (["<|im_start|>", "<|other|>", "<|reserved_0|>"], "<|reserved_0|>"),
        (["<|im_start|>", "<|image_pad|>", "<|other|>"], "<|other|>"),
        (["<|im_start|>", "<|image_pad|>"], None),
    ],
)
def test_a_tokenizer_without_a_pad_token_of_its_own_gets_a_special_one(
    tmp_path: Path, pad_token: str | None, special: list[str], chosen: str | None
) -> None:
    fast = byte_tokenizer(eos_token="<|endoftext|>", pad_token=pad_token)
    fast.add_special_tokens({"additional_special_tokens": special})
    fast.chat_template = CHATML
    fast.save_pretrained(tmp_path)
    Qwen2Config(vocab_size=len(fast)).save_pretrained(tmp_path)
    if chosen is None:
        with pytest.raises(ValueError, match="has no special token that could be one: set pad_token in its"):
            load_tokenizer(str(tmp_path))
        return
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.pad_token, tokenizer.eos_token, len(tokenizer)) == (chosen, "<|endoftext|>", len(fast))
    save_tokenizer(str(tmp_path), tmp_path / "export")
    exported = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    assert exported["pad_token"] == chosen, "as the trained model's config names it"


def test_a_pad_token_without_an_embedding_is_not_chosen(make: Make) -> None:
    path = changed(make(), pad_token=None)
    before = load_tokenizer(str(path)).pad_token_id
    assert before is not None
    Qwen2Config(vocab_size=before).save_pretrained(path)
    with pytest.raises(ValueError, match="has no special token that could be one"):
        load_tokenizer(str(path))


def test_a_token_that_the_model_has_no_embedding_for_is_told_before_training(make: Make) -> None:
    folder = make()
    # of the special tokens the last is the one that ends a turn
    Qwen2Config(vocab_size=3).save_pretrained(folder)
    with pytest.raises(
        ValueError,
        match=r"has the number \d+, and the model has embeddings for 3 tokens: call resize_token_embeddings",
    ):
        Renderer(load_tokenizer(str(folder)), "chat")


@pytest.mark.parametrize("split", [False, True], ids=["control tokens", "control tokens as text"])
def test_a_text_has_the_tokens_that_a_call_of_the_tokenizer_gives_it(make: Make, split: bool) -> None:
    tokenizer = load_tokenizer(str(make()))
    encoder = TextEncoder(tokenizer)
    texts = ["", "a", " a café 🙂\n", "one<|im_end|>two", "word " * 2000]
    expected = [
        tokenizer(text, add_special_tokens=False, split_special_tokens=split).input_ids for text in texts
    ]
    assert [encoder.ids(text, split) for text in texts] == expected
    # other code may have called the tokenizer with these
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    assert [encoder.ids(text, split) for text in texts] == expected


def test_a_tokenizer_with_a_call_of_its_own_encodes_by_it(make: Make) -> None:
    class Lower(PreTrainedTokenizerFast):
        def __call__(self, text: str, **options: bool) -> Any:
            return super().__call__(text.lower(), **options)

    tokenizer = Lower.from_pretrained(make())
    assert TextEncoder(tokenizer).ids("ABC") == TextEncoder(load_tokenizer(str(make()))).ids("abc")
