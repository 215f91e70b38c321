"""Retries requests to the Hub on temporary errors, and turns permanent errors into one sentence. Torch-free.

The token is read from HF_TOKEN and passed to the client. It never appears in a command-line argument, file or
message.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from huggingface_hub.constants import ENDPOINT
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is its client library's, whichever that is
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt

from rlhf_core.system.machine import Unreachable
from rlhf_core.system.proxies import proxy_of

TOKEN_ENV = "HF_TOKEN"
# words in the Hub's 403 message when an account is full
QUOTA = re.compile(r"quota|storage|space left|too large", re.I)
LONGEST_WAIT = 300.0  # seconds; the Hub's rate limits are per five minutes

T = TypeVar("T")
# (error, name of the request, repository) -> sentence
Refusal = Callable[[HfHubHTTPError, str, str], str]


class Retries(NamedTuple):
    """The maximum number of attempts, and the seconds before the second attempt; the wait doubles each
    time."""

    attempts: int = 6
    wait: float = 1.0


RETRIES = Retries()


def client_options() -> dict[str, Any]:
    """Returns the common arguments of all calls to the Hub's client. Without HF_TOKEN no token is sent, not
    even one stored by `hf auth login`."""
    token = os.environ.get(TOKEN_ENV, "").strip() or False
    return {"endpoint": os.environ.get("HF_ENDPOINT"), "token": token, "library_name": "alignflow"}


def with_retries(what: str, repo_id: str, call: Callable[[], T], retries: Retries, refusal: Refusal) -> T:
    """Calls the Hub until the call succeeds or fails with a permanent error. Returns the call's result.

    `what` names the request in messages ("find the model"). Raises Unreachable when temporary errors outlast
    the retries, and ValueError with the sentence from `refusal` when the Hub rejects the request. The
    original error is dropped on purpose, because it quotes URLs, and upload URLs contain signatures.
    """

    def wait(state: RetryCallState) -> float:
        required = _retry_after(state.outcome.exception() if state.outcome else None)
        return min(max(retries.wait * 2 ** (state.attempt_number - 1), required), LONGEST_WAIT)

    def say(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        again = f"again in {state.upcoming_sleep:.0f} s ({state.attempt_number} of {retries.attempts})"
        print(f"the Hub could not {what}: {_status(error)}; {again}", flush=True)

    retrying = Retrying(
        stop=stop_after_attempt(retries.attempts),
        wait=wait,
        retry=retry_if_exception(_passes),
        before_sleep=say,
        reraise=True,
    )
    try:
        return retrying(call)
    except (HTTPError, OSError, RuntimeError, json.JSONDecodeError) as error:
        if _passes(error):
            proxy = proxy_of(client_options()["endpoint"] or ENDPOINT)
            raise Unreachable(
                f"the Hub could not {what} of {repo_id} in {retries.attempts} attempts"
                f" ({_status(error)}{proxy}): run this again later, nothing is lost or doubled"
            ) from None
        cause = _http_error(error)
        if not isinstance(cause, HfHubHTTPError):
            raise
        raise ValueError(refusal(cause, what, repo_id)) from None


def write_refusal(error: HfHubHTTPError, what: str, repo_id: str) -> str:
    """Returns the sentence for a rejected write request. `what` names the request, as in `with_retries`."""
    said = f" ({error.server_message})" if error.server_message else ""
    full = f"the Hub has no space left to {what} of {repo_id}{said}"
    match error.response.status_code:
        case 401:
            return (
                f"the Hub does not accept the token in {TOKEN_ENV}: set it to a valid token with write access"
                f" to {repo_id}"
            )
        case 402 | 413 | 507:
            return f"{full}: make space or get more, then run this again, nothing is lost or doubled"
        case 403 if QUOTA.search(said):
            return f"{full}: make space or get more, then run this again, nothing is lost or doubled"
        case 403:
            return f"the Hub does not let this token {what} of {repo_id}{said}: give it write access there"
        case 404:
            return f"the token in {TOKEN_ENV} does not see {repo_id}: check repo_id and the token's access"
        case 412:
            return (
                f"someone else changed {repo_id} while this was being published: look at what changed there,"
                " then run the stage again"
            )
        case status:
            return f"the Hub refused to {what} of {repo_id}: HTTP {status}{said}"


def read_refusal(revision: str, kind: str = "model") -> Refusal:
    """Returns a function that builds the sentence for a rejected read of a repository (`kind`: model or data
    set) at a revision."""

    def sentence(error: HfHubHTTPError, what: str, repo_id: str) -> str:
        match error.response.status_code, error:
            case _, RevisionNotFoundError():
                return f"{repo_id} has no revision {revision}: name a branch, a tag or a commit of it"
            case 401 | 403 | 404, _:
                return (
                    f"the Hub has no {kind} {repo_id} for you: correct it, or set {TOKEN_ENV} to a token that"
                    " may read it"
                )
            case status, _:
                return f"the Hub refused to {what} of {repo_id}: HTTP {status}"

    return sentence


def _passes(error: BaseException) -> bool:
    """Returns whether a later attempt may succeed. This is the case for HTTP 408, 429 and 5xx except 507, for
    a lost connection (xet raises Python's own classes), and for a proxy's page instead of JSON."""
    if isinstance(error, OfflineModeIsEnabled):
        return False
    cause = _http_error(error)
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        return status in (408, 429) or (500 <= status < 600 and status != 507)
    return cause is not None or isinstance(error, (ConnectionError, TimeoutError, json.JSONDecodeError))


def _http_error(error: BaseException | None) -> HTTPError | None:
    """Returns the HTTP error in a chain of causes, or None; an upload wraps it in a RuntimeError."""
    while error is not None and not isinstance(error, HTTPError):
        error = error.__cause__
    return error


def _status(error: BaseException | None) -> str:
    cause = _http_error(error)
    return (
        f"HTTP {cause.response.status_code}"
        if isinstance(cause, HfHubHTTPError)
        else type(cause or error).__name__
    )


def _retry_after(error: BaseException | None) -> float:
    cause = _http_error(error)
    value = cause.response.headers.get("Retry-After", "") if isinstance(cause, HfHubHTTPError) else ""
    return float(value) if value.isdigit() else 0.0
