"""Chat templates in the formats of known families, written for tests: headers, ends of turn, calls of tools
and results as theirs."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config

CALL = "{{ c.function.name }}"
HERMES_CALL = (
    '<tool_call>\n{"name": "' + CALL + '", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
)
XML_CALL = (
    "<tool_call>\n<function="
    + CALL
    + ">\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>"
)


def _chatml(call: str, thought: str = "") -> str:
    tools = "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    calls = "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}"
    result = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    said = (
        "<|im_start|>{{ m.role }}\n"
        + thought
        + "{{ m.content }}{% if m.tool_calls %}"
        + calls
        + "{% endif %}<|im_end|>\n"
    )
    each = "{% if m.role == 'tool' %}" + result + "{% else %}" + said + "{% endif %}"
    return (
        tools
        + "{% for m in messages %}"
        + each
        + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


LLAMA = (
    "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n{{ tools | tojson"
    " }}<|eot_id|>{% endif %}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else"
    ' m.role }}<|end_header_id|>\n\n{% if m.tool_calls %}{% set c = m.tool_calls[0] %}{"name": "'
    + CALL
    + '", "parameters": {{ c.function.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Results only after calls, as Mistral's templates ask for.
MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m"
    " in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}{% if not"
    " messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role != 'tool' %}{{"
    " raise_exception('results follow calls') }}{% endif %}{% if (m.tool_call_id | default('')) | length != 9"
    " %}{{ raise_exception('ids have nine letters') }}{% endif %}[TOOL_RESULTS]{\"content\": {{ m.content |"
    ' tojson }}}[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{"name": "'
    + CALL
    + '", "arguments": {{ c.function.arguments | tojson }}}{% if not loop.last %}, {% endif %}'
    "{% endfor %}]</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
MISTRAL_NAMES = MISTRAL.replace(
    '{"name": "'
    + CALL
    + '", "arguments": {{ c.function.arguments | tojson }}}{% if not loop.last %}, {% endif %}{% endfor %}]',
    CALL + "[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
).replace("[TOOL_CALLS][", "[TOOL_CALLS]")
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role"
    " }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt"
    " %}<start_of_turn>model\n{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{{ tools | tojson if tools else '' }}{% for m in messages %}{% if m.role == 'user'"
    " %}<|User|>{{ m.content }}{% elif m.role == 'tool' %}<|tool_output|>{{ m.content }}<|tool_output_end|>{%"
    " else %}<|Assistant|>{{ m.content }}{% for c in m.tool_calls or [] %}<|tool_call|>function<|tool_sep|>"
    + CALL
    + "\n```json\n{{ c.function.arguments | tojson }}\n```<|tool_call_end|>{% endfor %}</s>{% endif %}{%"
    " endfor %}{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
# Thoughts of earlier turns are left out, as Qwen3 and DeepSeek-R1 do.
QWEN3 = _chatml(HERMES_CALL).replace(
    "{{ m.content }}{% if m.tool_calls", "{{ m.content.split('</think>')[-1] }}{% if m.tool_calls"
)

TEMPLATES = {
    "hermes": _chatml(HERMES_CALL),
    "qwen3": QWEN3,
    "qwen3-coder": _chatml(XML_CALL),
    "llama3": LLAMA,
    "mistral": MISTRAL,
    "mistral-names": MISTRAL_NAMES,
    "gemma": GEMMA,
    "deepseek": DEEPSEEK,
}
WITHOUT_TOOLS = ("gemma",)
SPECIAL = {
    "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "gemma": ["<start_of_turn>", "<end_of_turn>"],
    **{
        name: ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[ARGS]"]
        for name in ("mistral", "mistral-names")
    },
    "deepseek": ["<|User|>", "<|Assistant|>", "<|tool_call|>", "<|tool_sep|>", "<|tool_call_end|>"],
    **{name: ["<|im_start|>", "<|im_end|>"] for name in ("hermes", "qwen3", "qwen3-coder")},
}


def save_tokenizer(name: str, folder: Path) -> Path:
    """Saves a byte-level BPE tokenizer with the template of a family, beside a config, as a model's
    folder."""
    special = ["<s>", "</s>", "<pad>", *SPECIAL[name]]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator(["user assistant tool call result name arguments { } higher lower"] * 5, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(token, special=True) for token in SPECIAL[name]]}
    )
    if name.startswith(("hermes", "qwen")):  # not marked special, as in Qwen's vocabularies
        tokenizer.add_tokens(
            [
                AddedToken(token, special=False)
                for token in ("<tool_call>", "</tool_call>", "<think>", "</think>")
            ]
        )
    tokenizer.chat_template = TEMPLATES[name]
    tokenizer.save_pretrained(folder)
    Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=1
    ).save_pretrained(folder)
    return folder
