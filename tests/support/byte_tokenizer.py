"""A tokenizer with a token for each byte."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(special: Sequence[str] = (), **named: str | None) -> PreTrainedTokenizerFast:
    """`special`: tokens with the first numbers. `named`: those of a role, such as `eos_token`; new ones come
    last."""
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bpe = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **named)
