"""Gets answers of remote models from an OpenAI-compatible endpoint. Saves each answer as soon as it arrives,
so that no answer is requested twice.

Prompts are not truncated. A model's settings, tokens and cost become an `Answering` record in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evaluation.answers.local_answers import ModelAnswer
from evaluation.answers.question_pictures import chat_messages, stored_messages
from rlhf_core.config import Evaluation
from rlhf_core.data.questions import Question
from rlhf_core.judging.chat_client import NO_REPLY, ChatClient, ChatReply, cost_of, remote
from rlhf_core.judging.record_lines import appending, records_of
from rlhf_core.records import Answering, Frozen
from rlhf_core.system.files import digest

Messages = list[dict[str, Any]]


class StoredReply(Frozen):
    """One line of the file of answers. `key` is a digest of the request."""

    key: str
    reply: ChatReply


def answer_remotely(
    name: str,
    config: Evaluation,
    questions: Sequence[Question],
    file: Path,
    count: Callable[[str], int] | None,
    pause: float = 1.0,
) -> tuple[list[ModelAnswer], Answering]:
    """Returns one answer from the endpoint `name` to each question, in order (empty for failed requests),
    and a record of settings, tokens and cost.

    `file` keeps replies, keyed by a digest of the request. `count` counts the tokens of an answer; None uses
    the endpoint's count, without reasoning. Raises ValueError when the endpoint rejects the model, or when
    the fraction of questions without an answer exceeds `max_failed`.
    """
    endpoint = config.endpoints[name]
    temperature = config.temperature if endpoint.temperature is None else endpoint.temperature
    settings = {
        "max_tokens": endpoint.max_tokens or config.generate_max_len,
        "temperature": temperature,
        **endpoint.more,
    }
    messages = [_with_system(stored_messages(question), endpoint.system) for question in questions]
    keys = [digest([asked, endpoint.model, endpoint.base_url, settings]) for asked in messages]
    known = {given.key: given.reply for given in records_of(file, StoredReply)}
    missing = {key: question for key, question in zip(keys, questions, strict=True) if key not in known}
    print(f"{name}: {len(questions)} questions, {len(missing)} to ask", flush=True)
    client = ChatClient(name, endpoint.model, lambda: remote(endpoint), settings, endpoint, pause)
    failed = 0

    async def answer(question: Question) -> ChatReply | str:
        try:
            return await client.ask(_with_system(chat_messages(question.messages), endpoint.system))
        except NO_REPLY as error:
            return client.reason(error)

    with appending(file) as out:

        def done(key: str, found: ChatReply | str) -> None:
            nonlocal failed
            if isinstance(found, ChatReply):
                known[key] = found
                out.write(StoredReply(key=key, reply=found).model_dump_json() + "\n")
                out.flush()
                return
            failed += keys.count(key)
            if failed > endpoint.max_failed * len(questions):
                raise ValueError(
                    f"{name}: {failed} of {len(questions)} questions have no answer, more than"
                    f" max_failed={endpoint.max_failed:g} allows (the last: {found}): check the endpoint,"
                    " then run again; the answers so far are kept"
                )

        client.each(missing, answer, done)
    used = [known[key] for key in dict.fromkeys(keys) if key in known]
    tokens = sum(reply.input_tokens for reply in used), sum(reply.output_tokens for reply in used)
    answering = Answering(
        model=endpoint.model,
        url=endpoint.base_url,
        settings=settings | {"system": endpoint.system} if endpoint.system else settings,
        questions=len(questions),
        failed=failed,
        requests=client.requests,
        input_tokens=tokens[0],
        output_tokens=tokens[1],
        cost=cost_of(endpoint, *tokens),
    )
    empty = ChatReply(text="", input_tokens=0, output_tokens=0)
    return [
        _model_answer(q, known.get(key, empty), count) for q, key in zip(questions, keys, strict=True)
    ], answering


def answering_metrics(answering: dict[str, Answering]) -> dict[str, float]:
    """Returns `answer_requests/<model>`, `answer_failed/<model>`, the tokens, and the cost if prices are
    known."""
    found: dict[str, float] = {}
    for name, use in answering.items():
        values = {
            what: getattr(use, what)
            for what in ("requests", "failed", "input_tokens", "output_tokens", "cost")
        }
        found |= {
            f"answer_{what}/{name}": float(value) for what, value in values.items() if value is not None
        }
    return found


def _with_system(messages: Messages, system: str | None) -> Messages:
    own = messages[0]["role"] == "system"
    return [{"role": "system", "content": system}, *messages] if system and not own else messages


def _model_answer(question: Question, reply: ChatReply, count: Callable[[str], int] | None) -> ModelAnswer:
    tokens = count(reply.text) if count else max(0, reply.output_tokens - reply.reasoning_tokens)
    return ModelAnswer(question.uid, reply.text, tokens, False, reply.cut)
