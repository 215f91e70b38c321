"""Renders messages to tokens with the tokenizer's chat template or a plain one, and masks the assistant's
answers.

The rendered string is split where an answer begins and ends, and the parts are encoded separately, so that no
token crosses a border: the tokens of `prompt(messages[:i])`, which a sampler continues, are exactly the
beginning of `conversation(messages)`, which is trained on. An answer that other messages
follow may be written without the end of its prompt (an empty thought); it is masked as it is written.

A control token typed inside a message (`<|im_end|>`) stays text: a placeholder replaces it in the template,
and it is encoded with `split_special_tokens`. This covers all added tokens marked special, in all roles. The
tokenizer encodes other added tokens (such as `<think>`) as usual. `tools` are JSON schemas of functions,
which the template describes at the beginning; messages may have `tool_calls`. The images of a conversation
are placeholders in the template, expanded once by the model's processor (`picture_rendering`); prompts for
sampling have none.
"""

from rlhf_core.data.chat.renderer import Renderer as Renderer
from rlhf_core.data.chat.tokenizer_loading import load_tokenizer as load_tokenizer
