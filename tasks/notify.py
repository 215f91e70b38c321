"""Webhooks: one POST for each state of a flow run, each finished stage and each gate. Nothing waits for the receiver.

A thread sends the messages in their order, with a few attempts each; when one is lost, that is said once, and later ones get one attempt.
The URL comes from the environment and goes nowhere else: neither its text nor an exception that could hold it is ever logged.
"""

from __future__ import annotations

import atexit
import http.client
import json
import logging
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from prefect import Flow, runtime
from prefect.client.schemas.objects import FlowRun, State, StateType

from rlhf_core.config import Recipe
from rlhf_core.config.gates import Verdict
from rlhf_core.config.notify import Event, Notify
from rlhf_core.plan import Node
from rlhf_core.recipe import given_recipe
from rlhf_core.stage import RunDir

ATTEMPTS, PAUSE = 3, 1.0  # of one message; seconds before the second attempt, doubled for the third
WAIT_AT_EXIT = 0.8  # seconds a process that ends gives messages under way
MAX_WAITING = 1000  # messages; a receiver that hangs for days must not fill the memory
MAX_TEXT = 500  # characters
EVENT_OF: dict[StateType, Event] = {
    StateType.RUNNING: "running",
    StateType.COMPLETED: "completed",
    StateType.FAILED: "failed",
    StateType.CRASHED: "crashed",
    StateType.CANCELLING: "cancelled",
    StateType.CANCELLED: "cancelled",
}
logger = logging.getLogger(__name__)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A followed POST becomes a GET, which would look like success."""

    def redirect_request(self, *_: Any) -> None:
        return None


OPENER = urllib.request.build_opener(_NoRedirect)


class Sender:
    """Sends messages to one URL from a thread of its own. `name` stands for the URL in what is said."""

    def __init__(self, url: str, name: str, timeout: float, pause: float = PAUSE):
        self._url, self._name, self._timeout, self._pause = url, name, timeout, pause
        self._waiting: queue.Queue[bytes] = queue.Queue(MAX_WAITING)
        self._idle = threading.Condition()
        self._open = 0  # messages not yet sent or given up
        self._attempts = ATTEMPTS
        threading.Thread(target=self._work, name=f"webhook of {name}", daemon=True).start()
        atexit.register(self._end)

    def put(self, message: dict[str, Any]) -> None:
        """Returns at once."""
        with self._idle:
            self._open += 1
        try:
            self._waiting.put_nowait(json.dumps(message).encode())
        except queue.Full:
            self._done()

    def flush(self, seconds: float) -> bool:
        """Waits until all messages are sent or given up, `seconds` at most. Whether they are."""
        with self._idle:
            return self._idle.wait_for(lambda: self._open == 0, seconds)

    def _end(self) -> None:
        if not self.flush(WAIT_AT_EXIT):
            logger.warning("the webhook in %s has not taken %d messages; they are lost", self._name, self._open)

    def _work(self) -> None:
        while True:
            body = self._waiting.get()
            lost = self._send(body)
            if lost and self._attempts > 1:
                logger.warning("the webhook in %s does not take messages (%s); the run goes on without it", self._name, lost)
            self._attempts = 1 if lost else ATTEMPTS
            self._done()

    def _done(self) -> None:
        with self._idle:
            self._open -= 1
            self._idle.notify_all()

    def _send(self, body: bytes) -> str:
        """Empty when the receiver took it, else why not, in words without the URL."""
        reason = ""
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(self._pause * 2 ** (attempt - 1))
            headers = {"Content-Type": "application/json", "User-Agent": "alignflow"}
            request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
            try:
                with OPENER.open(request, timeout=self._timeout):
                    return ""
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}"
                error.close()
                if error.code < 500 and error.code not in (408, 429):
                    return reason
            except urllib.error.URLError as error:
                reason = type(error.reason).__name__ if isinstance(error.reason, Exception) else "no connection"
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = type(error).__name__
        return reason


_senders: dict[str, Sender] = {}
_said: set[str] = set()


def sender_of(notify: Notify) -> Sender | None:
    """The sender of a webhook; None, said once, when its variable holds no address."""
    url = os.environ.get(notify.url_env, "")
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        if notify.url_env not in _said:
            _said.add(notify.url_env)
            logger.warning("notify: the variable %s holds no http(s) address: nobody is told about this run", notify.url_env)
        return None
    if url not in _senders:
        _senders[url] = Sender(url, notify.url_env, notify.timeout)
    return _senders[url]


def tell(recipe: Recipe, event: Event, text: str, more: dict[str, Any], at: datetime | None = None) -> None:
    """Sends one message of a recipe's run, if the recipe asks for such. `more` is added to the body."""
    notify = recipe.notify
    if notify is None or event not in notify.events:
        return
    if sender := sender_of(notify):
        moment = (at or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="seconds")
        run = {"run_id": str(runtime.flow_run.id or "")}
        sender.put({"event": event, "recipe": recipe.name, "at": moment, "text": f"{recipe.name}: {text}"[:MAX_TEXT], **run, **more})


def tell_stage(recipe: Recipe, node: Node) -> None:
    """A stage is done."""
    result = RunDir(node.run_dir).result()
    seconds = round(result.seconds, 1) if result else None
    tell(recipe, "stage", f"stage {node.name} is done", {"stage": node.name, "kind": node.kind, "seconds": seconds})


def tell_gates(recipe: Recipe, verdicts: Sequence[Verdict]) -> None:
    """The gates of a stage were looked at."""
    for verdict in verdicts:
        word = "passed" if verdict.passed else f"failed ({verdict.gate.on_fail})"
        record = verdict.record() | {"stage": verdict.stage}
        tell(recipe, "gate", f"gate {word}: {verdict.told}", record)


def tell_state(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Prefect's hook: a flow run entered a state. Before `running`, a run that was scheduled tells that too, with its time."""
    recipe = recipe_of_run(flow_run.parameters)
    event = EVENT_OF.get(state.type)
    if recipe is None or event is None:
        return
    about = {"run_id": str(flow_run.id), "run": flow_run.name, "flow": flow.name}
    if event == "running" and flow_run.deployment_id and flow_run.run_count <= 1:
        tell(recipe, "scheduled", "scheduled", about, flow_run.expected_start_time)
    message = f": {state.message.splitlines()[0]}" if state.message and event in ("failed", "crashed") else ""
    tell(recipe, event, f"{event}{message}", about)


def recipe_of_run(parameters: dict[str, Any]) -> Recipe | None:
    """The recipe of a flow run, by its parameters; None when it cannot be read, which the flow itself then says."""
    try:
        return given_recipe(parameters.get("recipe"), parameters.get("overrides") or ())
    except ValueError:
        return None
