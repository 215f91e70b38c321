"""Notifies a Prefect server of new feedback with the event `alignflow.feedback.new`, which can start a
deployment.

Delivery is best effort: an event that cannot be sent causes one warning and never stops an import.
PREFECT_API_URL names the server.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from httpx import HTTPError
from prefect.client.orchestration import get_client
from prefect.events.schemas.events import Event, Resource
from prefect.exceptions import PrefectException

from flows.triggers.inbox_watch import LOOK_SECONDS, InboxWatch
from rlhf_core.feedback.inbox import SUFFIX
from rlhf_core.recipe.inboxes import inboxes_of
from tasks.served import SERVED_ENV

NEW = "alignflow.feedback.new"
ANSWER_SECONDS = 10.0
logger = logging.getLogger(__name__)


def names_a_server() -> bool:
    """Returns whether to notify a server. This is the case if the environment names a server other than the
    server of `alignflow serve`, which checks inboxes itself."""
    return bool(os.environ.get("PREFECT_API_URL")) and SERVED_ENV not in os.environ


def tell(inboxes: Sequence[Path]) -> bool:
    """Sends the event for each inbox, with `alignflow.inbox.NAME` as the resource. Returns whether the server
    accepted it."""
    events = [
        Event(
            event=NEW,
            resource=Resource({"prefect.resource.id": f"alignflow.inbox.{inbox.name.removesuffix(SUFFIX)}"}),
        )
        for inbox in inboxes
    ]
    try:
        with get_client(sync_client=True, httpx_settings={"timeout": ANSWER_SECONDS}) as client:
            client.request(
                "POST", "/events", json=[event.model_dump(mode="json") for event in events]
            ).raise_for_status()
    except (PrefectException, HTTPError, RuntimeError, OSError) as error:
        logger.debug("the event was not accepted", exc_info=error)
        return False
    return True


class Teller:
    """Notifies the server when a loop has enough rows for a round. Sends an event again if it was not
    accepted."""

    def __init__(self, watches: Sequence[InboxWatch]):
        self._watches = watches
        self._warned = set[str]()

    def start(self) -> None:
        """Checks every few seconds, in a thread that ends with the process."""
        threading.Thread(target=self._keep_looking, name="feedback events", daemon=True).start()

    def look(self) -> None:
        for watch in self._watches:
            try:
                if watch.due():
                    if tell(inboxes_of(watch.recipe)):
                        watch.started()
                    else:
                        self._warn(
                            "Prefect's server (PREFECT_API_URL) did not accept the event about new feedback:"
                            " it will be sent again later"
                        )
            except (ValueError, OSError) as error:
                self._warn(f"recipe {watch.recipe.name}: {error}")

    def _keep_looking(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            self.look()

    def _warn(self, sentence: str) -> None:
        """Logs a sentence once."""
        if sentence not in self._warned:
            logger.warning("%s", sentence)
            self._warned.add(sentence)
