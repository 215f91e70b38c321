"""The renderer of the tests in this folder."""

from __future__ import annotations

import pytest
from transformers import Qwen2Config

from rlhf_core.data.chat import Renderer, load_tokenizer
from tests.support.byte_tokenizer import byte_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """One token a byte, and ChatML."""
    names = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = byte_tokenizer(names, eos_token="<|endoftext|>", pad_token="<|pad|>")
    tokenizer.chat_template = CHATML
    path = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(path)
    Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=1
    ).save_pretrained(path)
    return Renderer(load_tokenizer(str(path)), "chat")
