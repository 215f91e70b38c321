"""Renders messages to tokens with the tokenizer's chat template or a plain template, and masks the
assistant's answers.

The rendered string is split where an answer begins and ends, and the parts are encoded separately, so that no
token crosses a border. The tokens of `prompt(messages[:i])`, which a sampler continues, are therefore exactly
the beginning of `conversation(messages)`, which training reads. If other messages follow an answer, a
template may omit the end of the answer's prompt (an empty reasoning block); the mask matches the text that
the template writes.

A control token typed inside a message (`<|im_end|>`) stays text: a placeholder replaces it in the template,
and it is encoded with `split_special_tokens`. This applies to all added tokens marked special, in all roles.
The tokenizer encodes other added tokens (such as `<think>`) as usual. `tools` are JSON schemas of functions,
which the template describes at the beginning; messages may have `tool_calls`. In the template, the images of
a conversation are placeholders, which the model's processor expands once; see `picture_rendering`. Prompts
for sampling are not expanded.
"""

from rlhf_core.data.chat.renderer import Renderer as Renderer
from rlhf_core.data.chat.tokenizer_loading import load_tokenizer as load_tokenizer
