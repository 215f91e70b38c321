"""A tiny judge whose taste is known: a Llama with weights set by hand that counts letters of what it reads."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.byte_tokenizer import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
RATINGS = (1, 4, 7, 10)  # for 0, 1, 2, and 3 or more of the letters
WIDTH = 64


def save_judge(folder: Path, letters: str, length: int, template: str | None = TEMPLATE) -> Path:
    """Writes a judge that replies [[R]], with R of RATINGS, by how often the `letters` (one byte each) are in a
    request of about `length` tokens. It has a token for each byte and for each verdict. Returns the folder.

    Attention with queries of 0 averages over the request, so that the count is the mean times the length; a
    verdict's logit, linear in the count, is the largest where it should be; a verdict is followed by the end.
    """
    tokenizer = byte_tokenizer(eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>"]})
    verdicts = [f"[[{rating}]]" for rating in RATINGS]
    tokenizer.add_tokens([AddedToken(verdict, normalized=False) for verdict in verdicts])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    one, counted, verdict, mean = range(4)  # what the first numbers of the hidden state hold
    numbers = tokenizer.convert_tokens_to_ids(verdicts)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        embedded = model.model.embed_tokens.weight
        embedded[:, one] = 1
        embedded[tokenizer(letters).input_ids, counted] = 1
        embedded[numbers, verdict] = 1
        attention = model.model.layers[0].self_attn
        attention.v_proj.weight[0, counted] = 1
        attention.o_proj.weight[mean, 0] = 1
        per_letter = (WIDTH / 2) ** 0.5 / length  # of the mean: such a token's norm is that of two ones
        head = model.lm_head.weight
        head[:, one] = -100
        head[tokenizer.eos_token_id, verdict] = 1000
        for level, number in enumerate(numbers):
            head[number, one] = -(level**2) / 2
            head[number, mean] = level / per_letter
    model.save_pretrained(folder)
    return folder


def rating_of(answer: str, letters: str) -> int:
    """Returns the judge's rating of an answer."""
    return RATINGS[min(sum(answer.count(letter) for letter in letters), len(RATINGS) - 1)]
