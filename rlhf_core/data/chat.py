"""Renders messages to tokens with the tokenizer's chat template or a plain one, and masks the assistant's
answers.

The rendered string is split where an answer begins and ends, and the parts are encoded separately, so that no
token crosses a border: the tokens of `prompt(messages[:i])`, which a sampler continues, are exactly the
beginning of `conversation(messages)`, which is trained on.

A control token typed inside a message (`<|im_end|>`) stays text: a placeholder replaces it in the template,
and it is encoded with `split_special_tokens`. This covers all added tokens marked special, in all roles. The
tokenizer encodes other added tokens (such as `<think>`) as usual. `tools` are JSON schemas of functions,
which the template describes at the beginning; messages may have `tool_calls`. Not supported: images, and
content that is not a string.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from rlhf_core.data.documents import Document, Message, answered, check_limit, with_suffix
from rlhf_core.data.pad_token import embedding_rows, names_its_end, with_pad_token
from rlhf_core.data.rows.columns import without_weights
from rlhf_core.hub.ids import is_remote
from rlhf_core.hub.model_files import VOCABULARIES
from rlhf_core.hub.vocabulary import tokenizer_place

# Unicode noncharacters, which text should not contain. OPEN in a text is itself replaced by a placeholder.
OPEN = "\ufdd0"
CLOSE = "\ufdd1"
PLACEHOLDER = re.compile(f"{OPEN}([0-9]+){CLOSE}")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]
Tools = Sequence[dict[str, Any]]
MARK = "\ufdd2"  # replaces an answer to find where it ends


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model folder or Hub id, optionally at a commit (`owner/name@COMMIT`). For an
    adapter without one, loads its base's.

    A tokenizer without its own pad token gets one of its special tokens (`with_pad_token`). Raises ValueError
    when the tokenizer cannot be loaded, encodes text to nothing, or lacks an end-of-sequence token or a
    possible pad token.
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
    ) as error:  # the last two: for JSON that is not an object
        lacks = Path(folder).is_dir() and not any(
            True for pattern in VOCABULARIES for _ in Path(folder).glob(pattern)
        )
        why = (
            f"there is no {', '.join(VOCABULARIES)}: save the model's tokenizer into this folder"
            if lacks
            else _first_line(error)
        )
        raise ValueError(f"{path}: no tokenizer can be loaded from here ({why})") from error
    except StrictDataclassError as error:
        raise ValueError(
            f"{path}: its config.json contradicts itself ({_first_line(error.__cause__ or error)})"
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


class Renderer:
    """Renders messages `{"role": ..., "content": ...}` with one tokenizer and one template ("chat", or a
    plain one with one {}).

    `stop_token_ids` are the tokens that end an answer: end-of-sequence, and the template's end-of-turn token
    if it differs. `end_token_id` is the token that training puts after an answer. `frame_len` is the
    template's own length in tokens. A plain template puts system messages before the next user message, and
    the end-of-sequence token after each answer. `prompt_suffix` is appended to the last message of every
    prompt (`rlhf_core.data.documents`), not to conversations. `verbatim`: the data's answers were sampled, so
    they already contain the template's prefix of an answer (a space, an empty thought), and `response_tokens`
    does not add it. The constructor raises ValueError when the template cannot be used with this tokenizer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        prompt_suffix: str = "",
        verbatim: bool = False,
    ):
        self.tokenizer = tokenizer
        self.template = template
        self.prompt_suffix = prompt_suffix
        self.verbatim = verbatim
        special = sorted(
            (token.content for token in tokenizer.added_tokens_decoder.values() if token.special),
            key=len,
            reverse=True,
        )
        # control tokens as plain text
        self.control_tokens = re.compile("|".join(re.escape(text) for text in special) or "(?!)")
        self._hidden = [OPEN, MARK, *special]
        self._hidden_pattern = re.compile("|".join(re.escape(text) for text in self._hidden))
        self._eos = str(tokenizer.eos_token)
        # Some tokenizers put a space before the start of a text. Parts after the first are encoded after an
        # eos token to avoid it.
        self._anchored = self._ids(self._eos) == [tokenizer.eos_token_id]
        first = tokenizer("a").input_ids[0]
        self._bos = (
            str(tokenizer.bos_token)
            if tokenizer.bos_token is not None and first == tokenizer.bos_token_id
            else ""
        )
        self._writes_calls: bool | None = None  # tool calls; determined at the first message with some
        self._chat_template = self._find_chat_template() if template == "chat" else ""
        end_of_turn = self._find_end_of_turn() if template == "chat" else tokenizer.eos_token_id
        self._end_of_turn = None if end_of_turn is None else str(tokenizer.convert_ids_to_tokens(end_of_turn))
        self.end_token_id: int = tokenizer.eos_token_id if end_of_turn is None else end_of_turn
        self.stop_token_ids: list[int] = list(dict.fromkeys([tokenizer.eos_token_id, self.end_token_id]))
        frame = self.prompt([{"role": "user", "content": ""}])
        self.frame_len = len(frame)
        self._check_rows([*frame, *self.stop_token_ids, tokenizer.pad_token_id or 0])

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Returns the tokens of the messages and of the generation prompt. Raises ValueError when the last
        message is the assistant's."""
        if not messages or messages[-1]["role"] == "assistant":
            raise ValueError(
                "a prompt needs at least one message, and its last one must not be the assistant's"
            )
        text, spans = self._text(with_suffix(messages, self.prompt_suffix), True, tools)
        return list(self._encode(text, spans).tokens)

    def text(self, messages: Sequence[Message], generation_prompt: bool, tools: Tools = ()) -> str:
        """Returns the rendered template, with placeholders for control tokens typed in messages."""
        return self._text(messages, generation_prompt, tools)[0]

    def follow(
        self, messages: Sequence[Message], new: Sequence[Message], ended: bool, tools: Tools = ()
    ) -> list[int]:
        """Returns the tokens between the last answer in `messages` and the answer to the `new` messages.
        `ended`: the tokens of the last answer already include its end-of-turn token. The answers themselves
        are not rendered: sampled tokens stay unchanged.

        Raises ValueError when the template rejects the messages or does not show where the answer ends.
        """
        if messages[-1]["role"] != "assistant" or not new or new[-1]["role"] == "assistant":
            raise ValueError(
                "new messages follow an answer, and the last of them must not be the assistant's"
            )
        before = self._hidden_messages(messages[:-1])
        after = self._after_answer(
            before, {"role": "assistant", "content": MARK}, self._hidden_messages(new), tools
        )
        if after is None and messages[-1].get("tool_calls"):
            after = self._after_answer(
                before, self._hidden_messages(messages[-1:])[0], self._hidden_messages(new), tools
            )
        if after is None:
            raise ValueError(
                "the chat template does not show where an answer ends once messages follow it: take another"
                " template"
            )
        if ended and self._end_of_turn:
            after = after.removeprefix(self._end_of_turn)
        return self._encode_part(after, first=False)

    def _after_answer(
        self, before: list[Message], answer: Message, new: list[Message], tools: Tools
    ) -> str | None:
        """Returns the template's text between an answer and the next one; None if it does not show where the
        answer ends."""
        if self.template != "chat":
            text = self._plain([*before, answer, *new])[0]
        else:
            try:
                text = self._render([*before, answer, *new], True, tools)[0]
            except ValueError:
                if answer["content"] == MARK and any(message["role"] == "tool" for message in new):
                    return None  # the template may require results to follow calls
                raise
        if answer["content"] == MARK:
            _, found, after = text.rpartition(MARK)
            return after if found else None
        through = self._render([*before, answer], False, tools)[0].rstrip()  # ends with the end-of-turn token
        return (self._end_of_turn or "") + text[len(through) :] if text.startswith(through) else None

    def frame_of(self, tools: Tools) -> int:
        """Returns the template's own length in tokens, including its description of the tools."""
        return len(self.prompt([{"role": "user", "content": ""}], tools)) if tools else self.frame_len

    def prompt_within(
        self, messages: Sequence[Message], limit: int, tools: Tools = ()
    ) -> tuple[list[int], bool]:
        """Returns at most `limit` tokens of a prompt, and whether the prompt was cut.

        Keeps the template's own tokens and the end of the prompt. Drops the oldest turns first, then the
        beginning of the last message, and system messages only if they and the template fill the limit.
        Raises ValueError like `check_limit`.
        """
        frame_len = self.frame_of(tools)
        check_limit(limit, frame_len)
        tokens = self.prompt(messages, tools)
        if len(tokens) <= limit:
            return tokens, False
        turns = list(messages)
        system: list[Message] = []
        while len(turns) > 1 and turns[0]["role"] == "system":
            system.append(turns.pop(0))
        for start in range(1, len(turns)):
            if turns[start]["role"] == "user":
                tokens = self.prompt(system + turns[start:], tools)
                if len(tokens) <= limit:
                    return tokens, True
        last = turns[-1]
        shell = len(self.prompt([*system, {**last, "content": ""}], tools))
        if shell >= limit:
            system = []
            shell = frame_len
        words = self._encode(self._hide(last["content"]), []).tokens
        cut = max(len(words) - (limit - shell), 0)
        while True:
            # A cut inside a character leaves replacement characters at the beginning.
            content = str(self.tokenizer.decode(words[cut:], clean_up_tokenization_spaces=False)).lstrip(
                "\ufffd"
            )
            tokens = self.prompt([*system, {**last, "content": content}], tools)
            if len(tokens) <= limit:
                return tokens, True
            if not content:  # check_limit only ensures that an empty user message fits
                raise ValueError(
                    f"the role {last['role'][:40]!r} and the template take {len(tokens)} tokens, and the"
                    f" limit is {limit}"
                )
            cut += len(tokens) - limit

    def conversation(self, messages: Sequence[Message], tools: Tools = ()) -> Document:
        """Returns the messages as a document, with the mask on all answers and their end-of-turn tokens,
        except answers of weight 0.

        Tokens after the last trained answer are left out. Without such an answer the mask is all False.
        """
        text, spans = self._text(without_weights(messages), False, tools)
        document = self._encode(text, spans, untrained=_untrained(messages, spans))
        if not any(document.mask):
            return document
        end = len(document) - list(document.mask)[::-1].index(True)
        document = document.cut(end)
        last = messages[-1]
        if (
            last["role"] == "assistant"
            and "weight" not in last
            and document.tokens[-1] not in self.stop_token_ids
        ):
            return Document([*document.tokens, self.end_token_id], [*document.mask, True])
        return document

    def answer(self, prompt_messages: Sequence[Message], response: str) -> Document:
        """Returns the prompt's tokens, the response and the end-of-turn token, with the mask on the last two,
        as a sampler produces them."""
        return self.answer_tokens(self.prompt(prompt_messages), response)

    def answer_tokens(self, prompt_tokens: list[int], response: str) -> Document:
        """Like `answer`, but for given prompt tokens, which may be cut."""
        return answered(prompt_tokens, self._sampled(response))

    def response_tokens(
        self, prompt_messages: Sequence[Message], response: str | Message, tools: Tools = ()
    ) -> list[int]:
        """Returns the tokens of an answer (a string or a message that calls tools) as in `conversation`, with
        the template's prefix and the end-of-turn token.

        For `verbatim` answers, and for answers that cannot be found in the rendered template, returns only
        the response and the end-of-turn token. Raises ValueError when an answer with tool calls cannot be
        found.
        """
        message = {"role": "assistant", "content": response} if isinstance(response, str) else response
        calls = bool(message.get("tool_calls"))
        if not calls and (self.verbatim or self.template != "chat"):
            return self._sampled(message["content"])
        self._require_calls([message])
        hidden = self._hidden_messages([*prompt_messages, message])
        text, marked = self._render(hidden, False, tools)
        span = marked[-1] if marked else self._answer_in(text, hidden, len(hidden) - 1, tools)
        if span is None or (marked and text[: span[0]] != self._render(hidden[:-1], True, tools)[0]):
            if calls:
                raise ValueError(
                    "the chat template does not show where an answer with calls of tools begins: leave such"
                    " rows out"
                )
            return self._sampled(message["content"])
        part = self._encode_part(text[slice(*span)], first=False)
        stop = next((i for i, token in enumerate(part) if token in self.stop_token_ids), None)
        return [*part, self.end_token_id] if stop is None else part[: stop + 1]

    def _sampled(self, response: str) -> list[int]:
        return [*self._encode(self._hide(response), [], first=False).tokens, self.end_token_id]

    def _text(
        self, messages: Sequence[Message], generation_prompt: bool, tools: Tools = ()
    ) -> tuple[str, list[Span]]:
        """Returns the rendered text with placeholders, and the character spans of its answers."""
        self._require_calls(messages)
        hidden = self._hidden_messages(messages)
        if self.template != "chat":
            return self._plain(hidden)
        text, spans = self._render(hidden, generation_prompt, tools)
        if GENERATION.search(self._chat_template):
            return text, spans
        for index, message in enumerate(hidden):
            if message["role"] == "assistant":
                span = self._answer_in(text, hidden, index, tools)
                if span is None:
                    raise ValueError(
                        f"the chat template writes the messages before message {index + 1} differently once"
                        " it is there, so the tokens of this answer cannot be found: put {% generation %}"
                        " and {% endgeneration %} around the answers in the template"
                    )
                spans.append(span)
        return text, spans

    def _require_calls(self, messages: Sequence[Message]) -> None:
        """Raises ValueError when messages call tools and the template leaves the calls out or is a plain
        one."""
        if not any(message.get("tool_calls") for message in messages):
            return
        if self._writes_calls is None:
            call = {"type": "function", "id": "call00000", "function": {"name": MARK, "arguments": {}}}
            called: list[Message] = [
                {"role": "user", "content": ""},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
            self._writes_calls = self.template == "chat" and MARK in self._render(called, False)[0]
        if not self._writes_calls:
            kind = "chat" if self.template == "chat" else "plain"
            raise ValueError(
                f"the {kind} template leaves out calls of tools: take a model whose chat template writes"
                " them, or other rows"
            )

    def _answer_in(self, text: str, hidden: list[Message], index: int, tools: Tools = ()) -> Span | None:
        """Returns the span of the answer `hidden[index]` in `text`; None if the template renders the messages
        before it differently."""
        before, _ = self._render(hidden[:index], True, tools)
        if not text.startswith(before):
            return None
        if self._end_of_turn is None:
            through, _ = self._render(hidden[: index + 1], False, tools)
            return (len(before), len(through)) if text.startswith(through) else None
        # No answer contains this text: control tokens in messages are replaced by placeholders.
        found = text.find(self._end_of_turn, len(before))
        return len(before), found + len(self._end_of_turn) if found >= 0 else len(text)

    def _render(
        self, messages: list[Message], generation_prompt: bool, tools: Tools = ()
    ) -> tuple[str, list[Span]]:
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=self._hidden_values(list(tools)) or None,
                chat_template=self._chat_template,
                return_assistant_tokens_mask=bool(GENERATION.search(self._chat_template)),
                add_generation_prompt=generation_prompt,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # a template is a program and can raise anything
            roles = ", ".join(message["role"] for message in messages)
            what = (
                _first_line(error)
                if isinstance(error, TemplateError)
                else f"{type(error).__name__}: {_first_line(error)}"
            )
            raise ValueError(
                f"the chat template refuses messages with the roles ({roles}): {what}"
            ) from error
        return texts[0], list(spans[0]) if spans else []

    def _plain(self, messages: list[Message]) -> tuple[str, list[Span]]:
        text = self._bos
        system = ""
        spans = []
        for message in messages:
            if message["role"] == "system":
                system += message["content"] + "\n\n"
            elif message["role"] == "user":
                text += self.template.replace("{}", system + message["content"])
                system = ""
            elif message["role"] == "assistant":
                spans.append((len(text), len(text) + len(message["content"]) + len(self._eos)))
                text += message["content"] + self._eos
            else:
                raise ValueError(
                    f"a plain template knows the roles system, user and assistant, not {message['role']!r}:"
                    " use 'chat'"
                )
        return text, spans

    def _encode(
        self, text: str, spans: list[Span], first: bool = True, untrained: Collection[int] = ()
    ) -> Document:
        """Encodes a text part by part. In each span the mask ends with the first stop token, which is in the
        span or right after it. `untrained`: indices of the spans that the mask leaves out."""
        tokens: list[int] = []
        mask: list[bool] = []
        unended = False
        borders = [0, *(border for span in spans for border in span), len(text)]
        for number, (start, end) in enumerate(pairwise(borders)):
            in_span = number % 2 == 1
            part = self._encode_part(text[start:end], first and not tokens)
            stop = (
                next((i for i, token in enumerate(part) if token in self.stop_token_ids), None)
                if spans
                else None
            )
            counted = [False] * len(part)
            if in_span and number // 2 in untrained:
                unended = False
            elif in_span:
                length = len(part) if stop is None else stop + 1
                counted[:length] = [True] * length
                unended = stop is None
            elif stop == 0 and unended:
                counted[0] = True
            tokens += part
            mask += counted
        return Document(tokens, mask)

    def _encode_part(self, text: str, first: bool) -> list[int]:
        tokens: list[int] = []
        for number, piece in enumerate(PLACEHOLDER.split(text)):
            if number % 2:
                tokens += self._ids(self._hidden[int(piece)], split_special_tokens=True)
            elif piece and self._anchored and (tokens or not first):
                tokens += self._ids(self._eos + piece)[1:]
            elif piece:
                tokens += self._ids(piece)
        return tokens

    def decoded(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def _ids(self, text: str, split_special_tokens: bool = False) -> list[int]:
        # verbose=False: no warning about texts over the model's maximum length, which are cut later.
        encoded = self.tokenizer(
            text, add_special_tokens=False, split_special_tokens=split_special_tokens, verbose=False
        )
        return list(encoded.input_ids)

    def _hide(self, content: str) -> str:
        return self._hidden_pattern.sub(
            lambda match: f"{OPEN}{self._hidden.index(match.group())}{CLOSE}", content
        )

    def _hidden_messages(self, messages: Sequence[Message]) -> list[Message]:
        return [self._hidden_values(message) for message in messages]

    def _hidden_values(self, value: Any) -> Any:
        """Hides the control tokens in all strings of a message or a tool."""
        if isinstance(value, dict):
            return {name: self._hidden_values(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._hidden_values(inner) for inner in value]
        return self._hide(value) if isinstance(value, str) else value

    def _check_rows(self, tokens: Sequence[int]) -> None:
        """Raises ValueError when the model in the tokenizer's folder has no embedding for one of these
        tokens."""
        place = str(self.tokenizer.name_or_path)
        rows = embedding_rows(place)
        if rows is not None and max(tokens) >= rows:
            named = self.tokenizer.convert_ids_to_tokens(max(tokens))
            raise ValueError(
                f"{place}: the token {named!r} has the number {max(tokens)}, and the model has embeddings for"
                f" {rows} tokens: call resize_token_embeddings(len(tokenizer)) on the model and save it, or"
                " use a template with tokens that the model knows"
            )

    def _find_chat_template(self) -> str:
        try:
            return str(self.tokenizer.get_chat_template())
        except ValueError as error:
            raise ValueError(
                f"{self.tokenizer.name_or_path}: the model has no chat template: set the template of the data"
                " to a plain one, with one {} for the prompt"
            ) from error

    def _find_end_of_turn(self) -> int | None:
        """Returns the first special token that the template puts after an answer; None if there is none."""
        word = "answer-to-find"
        text, _ = self._render(
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": word}], False
        )
        if word not in text:
            raise ValueError(
                f"{self.tokenizer.name_or_path}: the chat template leaves out what the assistant says: use"
                " another template"
            )
        special = {index for index, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return next((token for token in self._ids(text.rpartition(word)[2]) if token in special), None)


def _untrained(messages: Sequence[Message], spans: Sequence[Span]) -> set[int]:
    """Returns the indices of the spans whose answers have weight 0. Raises ValueError if there are such
    answers and the number of spans differs from the number of answers."""
    answers = [message for message in messages if message["role"] == "assistant"]
    found = {number for number, message in enumerate(answers) if "weight" in message}
    if found and len(spans) != len(answers):
        raise ValueError(
            f"{len(found)} of {len(answers)} answers have weight 0, and the chat template marks {len(spans)}"
            " parts as answers: put one {% generation %} block around each answer in the template"
        )
    return found


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
