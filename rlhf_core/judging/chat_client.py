"""Sends many requests to one OpenAI-compatible chat endpoint, for judges and for remote models that answer
questions.

Requests to a busy, failing or silent endpoint are retried with growing pauses. If an endpoint rejects
`max_tokens` or a temperature, as endpoints of reasoning models do, requests use `max_completion_tokens`, or
no temperature. The API key is passed only to the client; the endpoint's error messages about rejected keys
are not shown.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

from openai import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    AsyncOpenAI,
    DefaultAsyncHttpxClient,
)
from pydantic import ValidationError
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_random_exponential,
)

from rlhf_core.config.rewarding.remote_models import Remote, RequestLimits
from rlhf_core.records import Frozen
from rlhf_core.system.proxies import proxy_of

LONGEST_PAUSE = 60.0  # seconds between two attempts
PROGRESS = 200  # items between two progress lines
REFUSED = (401, 403, 404)  # statuses after which no request can succeed
WRONG_KEY = (401, 403)
SET_KEY = (
    "set api_key_env to the name of the environment variable that holds the endpoint's key, such as"
    " OPENAI_API_KEY"
)
WRONG_REQUEST = (400, 422)

Item = TypeVar("Item")
Found = TypeVar("Found")


class Unreadable(Exception):
    """Raised for a reply with status 200 that is not a chat completion."""


class Unanswerable(Exception):
    """Raised for a request that the model cannot read."""


# raised by `ask` once retries are exhausted
NO_REPLY = (
    APIConnectionError,
    APIStatusError,
    APIResponseValidationError,
    Unreadable,
    Unanswerable,
    TimeoutError,
)


class Connection(NamedTuple):
    """An endpoint. `hint`: a text added to error messages that says what to check when the endpoint rejects a
    request; `check`: raises an error if the endpoint's server is known to have ended. `without_key`: whether
    no key is sent to an endpoint that may require one.

    Requests to a server on this machine (`local`) use no proxy.
    """

    url: str
    key: str
    hint: str
    check: Callable[[], None] = lambda: None
    local: bool = False
    without_key: bool = False


class ChatReply(Frozen):
    """A reply. Token counts come from the endpoint. `reasoning_tokens`: number of output tokens that are not
    in `text`; `cut`: whether a length limit ended the reply."""

    text: str
    input_tokens: int
    output_tokens: int
    reasoning_tokens: int = 0
    cut: bool = False


class Chat(Protocol):
    """Sends many chat requests to one model, which is behind an endpoint (see `ChatClient`) or on engines of
    this run."""

    requests: int

    @property
    def asked(self) -> Mapping[str, Any]: ...

    def each(
        self,
        items: Mapping[str, Item],
        work: Callable[[Item], Awaitable[Found]],
        done: Callable[[str, Found], None],
    ) -> None: ...

    async def ask(self, messages: Sequence[Mapping[str, Any]]) -> ChatReply: ...

    def reason(self, error: Exception) -> str: ...

    def stop(self) -> None: ...


class Pace:
    """Limits callers to `per_minute` evenly spaced requests per minute (None: no limit). Callers do not catch
    up after a pause."""

    def __init__(self, per_minute: float | None):
        self.gap = 60 / per_minute if per_minute else 0.0
        self.free = 0.0  # when the next caller may send, on the monotonic clock

    async def turn(self) -> None:
        """Waits until the caller may send."""
        while (wait := self.free - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        self.free = time.monotonic() + self.gap


class ChatClient:
    """Sends requests to `model` at an endpoint, within the config's limits.

    `who`: the client's name in messages (`judge gpt`). `connect`: called before the first request; may start
    a server. `settings`: the other fields of a request; `asked`: the same fields before the endpoint rejected
    any of them. `pause`: scale of the first pause, in seconds. `requests`: number of requests sent.
    """

    def __init__(
        self,
        who: str,
        model: str,
        connect: Callable[[], Connection],
        settings: Mapping[str, Any],
        limits: RequestLimits,
        pause: float = 1.0,
    ):
        self.who = who
        self.model = model
        self.connect = connect
        self.limits = limits
        self.settings = self.asked = dict(settings)
        self.backoff = wait_random_exponential(multiplier=pause, max=LONGEST_PAUSE)
        self.pace = Pace(limits.requests_per_minute if isinstance(limits, Remote) else None)
        self.requests = 0
        self._stopped = False
        self._running: tuple[asyncio.Task[Any], asyncio.AbstractEventLoop] | None = None

    def each(
        self,
        items: Mapping[str, Item],
        work: Callable[[Item], Awaitable[Found]],
        done: Callable[[str, Found], None],
    ) -> None:
        """Calls `work` for every item, and `done` with the key and result of each item as it completes. An
        exception in either stops everything. Raises CancelledError after `stop`."""
        if items:
            self.connection = self.connect()
            asyncio.run(self._each(items, work, done))

    def stop(self) -> None:
        """Ends open requests and prevents new requests. May be called from any thread."""
        self._stopped = True
        if self._running is not None:
            task, loop = self._running
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(task.cancel)

    async def _each(
        self,
        items: Mapping[str, Item],
        work: Callable[[Item], Awaitable[Found]],
        done: Callable[[str, Found], None],
    ) -> None:
        own = asyncio.current_task()
        assert own is not None
        self._running = own, asyncio.get_running_loop()
        if self._stopped:  # checked after `stop` can see the task
            raise asyncio.CancelledError
        http = DefaultAsyncHttpxClient(trust_env=False) if self.connection.local else None
        self.api = AsyncOpenAI(
            base_url=self.connection.url, api_key=self.connection.key, max_retries=0, http_client=http
        )
        waiting = iter(items.items())
        finished = 0  # all workers share one queue

        async def worker() -> None:
            nonlocal finished
            for key, item in waiting:
                done(key, await work(item))
                finished += 1
                if finished % PROGRESS == 0:
                    print(f"{self.who}: {finished} of {len(items)} done", flush=True)

        tasks = [asyncio.ensure_future(worker()) for _ in range(min(self.limits.concurrency, len(items)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.api.close()
            self._running = None

    async def ask(self, messages: Sequence[Mapping[str, Any]]) -> ChatReply:
        """Sends messages and returns the reply, with retries. Must be called inside `each`.

        Raises one of NO_REPLY, or ValueError when no attempt can succeed.
        """
        stop = stop_after_attempt(self.limits.max_attempts)
        attempts = AsyncRetrying(
            retry=retry_if_exception(_passing), stop=stop, wait=self._pause, reraise=True
        )
        try:
            return await attempts(self._once, list(messages))
        except APIStatusError as error:
            if error.status_code in REFUSED:
                answer = f"{self.who}: {self.connection.url} answers {error.status_code}{self._proxy}"
                if error.status_code in WRONG_KEY and self.connection.without_key:
                    raise ValueError(f"{answer} to a request without a key: {SET_KEY}") from None
                raise ValueError(
                    f"{answer} for model {self.model!r}: check the model's name{self.connection.hint}"
                ) from None
            raise

    def reason(self, error: Exception) -> str:
        """Returns the reason for a missing reply, in parentheses."""
        # a remote endpoint's message may contain the key, so only a local one's is shown
        if isinstance(error, APIStatusError):
            return (
                "(no reply: HTTP"
                f" {error.status_code}{f', {error.message[:300]}' if self.connection.local else self._proxy})"
            )
        if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
            return f"(no reply within {self.limits.timeout:g} s{self._proxy})"
        return f"(no reply: {type(error).__name__}{self._proxy})"

    @property
    def _proxy(self) -> str:
        """Returns a phrase for the end of a sentence that names the proxy used for the endpoint."""
        return "" if self.connection.local else proxy_of(self.connection.url)

    async def _once(self, messages: Any) -> ChatReply:
        await self.pace.turn()
        self.requests += 1
        settings = self.settings
        try:
            # the library's own timeout restarts with every byte received
            async with asyncio.timeout(self.limits.timeout):
                completion = await self.api.chat.completions.create(
                    model=self.model,
                    messages=messages,
                    timeout=self.limits.timeout,
                    **_as_arguments(settings),
                )
        except APIStatusError as error:
            if error.status_code not in WRONG_REQUEST or not self._adapt(settings, str(error)):
                raise
            return await self._once(messages)
        except (APIConnectionError, TimeoutError):
            self.connection.check()
            raise
        except ValueError:
            raise Unreadable("the reply is not JSON") from None
        try:
            choice = completion.choices[0]
            usage = completion.usage
            details = usage.completion_tokens_details if usage else None
            return ChatReply(
                text=choice.message.content or "",
                input_tokens=usage.prompt_tokens if usage else 0,
                output_tokens=usage.completion_tokens if usage else 0,
                reasoning_tokens=(details.reasoning_tokens or 0) if details else 0,
                cut=choice.finish_reason == "length",
            )
        except (AttributeError, IndexError, TypeError, ValidationError):
            raise Unreadable("the reply is no chat completion") from None

    def _adapt(self, sent: dict[str, Any], complaint: str) -> bool:
        """Changes the settings if the endpoint's error names one of the settings sent. Returns whether to
        send the request again."""
        if self.settings is not sent:
            return True  # another request has already changed the settings
        if "max_tokens" in sent and "max_tokens" in complaint and not self.connection.local:
            self.settings = {
                "max_completion_tokens" if name == "max_tokens" else name: value
                for name, value in sent.items()
            }
        elif "temperature" in sent and "temperature" in complaint:
            self.settings = {name: value for name, value in sent.items() if name != "temperature"}
        else:
            return False
        print(
            f"{self.who}: the endpoint refused a parameter, requests now have {', '.join(self.settings)}",
            flush=True,
        )
        return True

    def _pause(self, state: RetryCallState) -> float:
        """Returns the seconds until the next attempt: the endpoint's `retry-after`, or else a random time
        that grows exponentially."""
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, APIStatusError):
            try:
                return min(float(error.response.headers["retry-after"]), LONGEST_PAUSE)
            except (KeyError, ValueError):
                pass  # no such header, or a date
        return self.backoff(state)


def remote(config: Remote) -> Connection:
    """Returns the connection to an endpoint. The key comes from an environment variable; without the variable
    it is "none", which servers accept if they need no key."""
    variable = config.key_variable
    if variable is None:
        return Connection(config.base_url, "none", " and base_url", without_key=True)
    hint = f", base_url and the key in the environment variable {variable}"
    return Connection(config.base_url, os.environ.get(variable) or "none", hint)


def _as_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings as arguments for the OpenAI client. Fields that the client does not support (a
    vLLM server's `top_k`) go into `extra_body`."""
    known = {
        name: value
        for name, value in settings.items()
        if name in ("max_tokens", "max_completion_tokens", "temperature")
    }
    extra = {name: value for name, value in settings.items() if name not in known}
    return known | ({"extra_body": extra} if extra else {})


def _passing(error: BaseException) -> bool:
    """Returns whether another attempt may succeed."""
    if isinstance(error, APIStatusError):
        return error.status_code in (408, 409, 429) or error.status_code >= 500
    return isinstance(error, (APIConnectionError, APIResponseValidationError, Unreadable, TimeoutError))


def cost_of(remote: Remote, input_tokens: int, output_tokens: int) -> float | None:
    """Returns the cost in US dollars, or None when the prices are not known."""
    if remote.input_price is None or remote.output_price is None:
        return None
    return (input_tokens * remote.input_price + output_tokens * remote.output_price) / 1e6
