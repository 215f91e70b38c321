"""The renderer of the tests in this folder."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config

from rlhf_core.data.chat import Renderer, load_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """One token a byte, and ChatML."""
    names = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    letters = [*names, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bpe = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(names)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|pad|>")
    tokenizer.chat_template = CHATML
    path = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(path)
    Qwen2Config(
        vocab_size=len(letters), hidden_size=8, num_hidden_layers=1, num_attention_heads=1
    ).save_pretrained(path)
    return Renderer(load_tokenizer(str(path)), "chat")
