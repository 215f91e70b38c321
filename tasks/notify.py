"""Sends a webhook message (POST) for each state of a flow run, each finished stage and each gate. The run
does not wait for the receiver.

A thread sends the messages in order, with a few attempts each. The first lost message is logged, and later
messages get a single attempt. The URL comes from the environment. Neither the URL nor any exception that
could contain it is logged.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import queue
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from prefect import Flow, runtime
from prefect.client.schemas.objects import FlowRun, State, StateType
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from rlhf_core.config import Event, Notify, Recipe
from rlhf_core.config.gates import Verdict
from rlhf_core.recipe.load_recipe import given_recipe
from rlhf_core.recipe.plan import Node
from rlhf_core.runs.approval_record import Approval
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.system.proxies import proxy_of
from tasks.served import recipe_of_run

ATTEMPTS = 3  # for each message
PAUSE = 1.0  # seconds before the second attempt at a message, doubled for the third
WAIT_AT_EXIT = 0.8  # seconds that an ending process waits for unsent messages
MAX_WAITING = 1000  # messages; bounds memory use when a receiver hangs for days
MAX_TEXT = 500  # characters of a message's text
EVENT_OF: dict[StateType, Event] = {
    StateType.RUNNING: "running",
    StateType.COMPLETED: "completed",
    StateType.FAILED: "failed",
    StateType.CRASHED: "crashed",
    StateType.CANCELLING: "cancelled",
    StateType.CANCELLED: "cancelled",
}
logger = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)  # its INFO lines contain the URL


class Sender:
    """Sends messages to one URL from its own thread. `name` replaces the URL in log messages."""

    def __init__(self, url: str, name: str, timeout: float, pause: float = PAUSE):
        self._url = url
        self._name = name
        self._pause = pause
        self._client = httpx.Client(
            timeout=timeout, headers={"Content-Type": "application/json", "User-Agent": "alignflow"}
        )
        self._waiting: queue.Queue[bytes] = queue.Queue(MAX_WAITING)
        self._attempts = ATTEMPTS
        threading.Thread(target=self._work, name=f"webhook of {name}", daemon=True).start()
        atexit.register(self._end)

    def put(self, message: dict[str, Any]) -> None:
        """Queues a message and returns immediately. Drops it if MAX_WAITING are queued."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(json.dumps(message).encode())

    def flush(self, seconds: float) -> bool:
        """Waits at most `seconds` until all messages have been sent or given up, and returns whether they
        have."""
        with self._waiting.all_tasks_done:
            return self._waiting.all_tasks_done.wait_for(lambda: self._waiting.unfinished_tasks == 0, seconds)

    def _end(self) -> None:
        if not self.flush(WAIT_AT_EXIT):
            logger.warning(
                "the webhook in %s did not accept %d messages; they are lost",
                self._name,
                self._waiting.unfinished_tasks,
            )

    def _work(self) -> None:
        while True:
            body = self._waiting.get()
            lost = self._send(body)
            if lost and self._attempts > 1:
                logger.warning(
                    "the webhook in %s does not accept messages (%s); the run continues without it",
                    self._name,
                    lost,
                )
            self._attempts = 1 if lost else ATTEMPTS
            self._waiting.task_done()

    def _send(self, body: bytes) -> str:
        """Sends one message. Returns '' on success, otherwise the reason for the failure without the URL."""
        pauses = wait_exponential(multiplier=self._pause)
        try:
            Retrying(
                stop=stop_after_attempt(self._attempts),
                wait=pauses,
                retry=retry_if_exception(_may_pass),
                reraise=True,
            )(self._post, body)
        except httpx.HTTPStatusError as error:
            return f"HTTP {error.response.status_code}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"{type(error).__name__}{proxy_of(self._url)}"
        return ""

    def _post(self, body: bytes) -> None:
        self._client.post(self._url, content=body).raise_for_status()  # a redirect is an error too


def _may_pass(error: BaseException) -> bool:
    """Returns whether another attempt may succeed."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500 or error.response.status_code in (408, 429)
    return isinstance(error, httpx.TransportError)


_senders: dict[str, Sender] = {}
_warned: set[str] = set()


def sender_of(notify: Notify) -> Sender | None:
    """Returns the sender for a webhook. If its environment variable holds no address, warns once and returns
    None."""
    url = notify.url
    if url is None:
        if notify.url_env not in _warned:
            _warned.add(notify.url_env)
            logger.warning(
                "notify: the variable %s does not hold an http(s) address: no messages are sent about this"
                " run",
                notify.url_env,
            )
        return None
    if url not in _senders:
        _senders[url] = Sender(url, notify.url_env, notify.timeout)
    return _senders[url]


def send(recipe: Recipe, event: Event, text: str, more: dict[str, Any], at: datetime | None = None) -> None:
    """Sends one message about a recipe's run if the recipe's `notify` includes the event. `more` is added
    to the body."""
    notify = recipe.notify
    if notify is None or event not in notify.events:
        return
    sender = sender_of(notify)
    if sender:
        moment = (at or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="seconds")
        run = {"run_id": str(runtime.flow_run.id or "")}
        sender.put(
            {
                "event": event,
                "recipe": recipe.name,
                "at": moment,
                "text": f"{recipe.name}: {text}"[:MAX_TEXT],
                **run,
                **more,
            }
        )


def notify_stage(recipe: Recipe, node: Node) -> None:
    """Sends the message that a stage is done."""
    result = RunDir(node.run_dir).result()
    seconds = round(result.seconds, 1) if result else None
    send(
        recipe,
        "stage",
        f"stage {node.name} is done",
        {"stage": node.name, "kind": node.kind, "seconds": seconds},
    )


def notify_gates(recipe: Recipe, verdicts: Sequence[Verdict]) -> None:
    """Sends a message for each verdict on a stage."""
    for verdict in verdicts:
        word = verdict.word if verdict.word != "failed" else f"failed ({verdict.gate.on_fail})"
        record = verdict.record() | {"stage": verdict.stage}
        send(recipe, "gate", f"gate {word}: {verdict.summary}", record)


def notify_approval(recipe: Recipe, question: Approval, page: Path) -> None:
    """Sends the message that a stage waits for a person's approval, with the path of the report."""
    about = {
        "stage": question.stage,
        "until": question.until.isoformat(timespec="seconds"),
        "page": page.as_uri(),
        "approve": str(page.parent),
    }
    send(recipe, "approval", f"stage {question.stage} {question.told()}", about)


def notify_champion(recipe: Recipe, model: str, run: str, why: str) -> None:
    """Sends the message that another published model has become the champion."""
    send(
        recipe,
        "champion",
        f"{model} is the champion: {why}",
        {"model": model, "publication": run, "why": why},
    )


def notify_state(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Sends a message with the state of a flow run. This is a Prefect hook. Before `running`, a scheduled run
    also sends `scheduled`, with its time."""
    recipe = _notifying(flow_run)
    event = EVENT_OF.get(state.type)
    if recipe is None or event is None:
        return
    about = {"run_id": str(flow_run.id), "run": flow_run.name, "flow": flow.name}
    if event == "running" and flow_run.deployment_id and flow_run.run_count <= 1:
        send(recipe, "scheduled", "scheduled", about, flow_run.expected_start_time)
    message = f": {state.message.splitlines()[0]}" if state.message and event in ("failed", "crashed") else ""
    send(recipe, event, f"{event}{message}", about)


def _notifying(flow_run: FlowRun) -> Recipe | None:
    """Returns the recipe in a flow run's parameters; None when the recipe has no `notify`, or when it cannot
    be read or is invalid, which the flow reports."""
    given = flow_run.parameters.get("recipe")
    overrides = flow_run.parameters.get("overrides") or ()
    if isinstance(given, dict) and not given.get("notify") and "notify" not in str(overrides):
        return None
    try:
        if flow_run.deployment_id is None and isinstance(given, dict):
            return given_recipe(given, overrides, stored=True)
        return recipe_of_run(given, overrides, flow_run.id, flow_run.deployment_id)
    except ValueError:
        return None
