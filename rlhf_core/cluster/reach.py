"""Checks that the nodes of a stage and the head of its cluster are reachable by connecting to each every few
seconds.

Ray needs more than a minute to notice a node whose cable is cut, and when its head is gone it ends the
waiting process without giving a reason. The kernel accepts connections even for a stopped or busy process, so
no answer means that the node, its network or its raylet is gone. An endpoint that has never answered is not
watched, because from outside a cluster behind `ray://` exposes only one port.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from threading import Thread
from typing import Any, NamedTuple

import ray

from rlhf_core.system.machine import NodeLost

CHECK_SECONDS = 2.0
ANSWER_SECONDS = 2.0  # timeout of one check
NOTICE_SECONDS = 3.0  # without an answer before the log reports it
# without an answer before the stage ends: long enough to replug a cable, but less than a minute
LOST_SECONDS = 30.0
# after that, this process ends itself, because it is still waiting for a Ray call that never returns
EXIT_SECONDS = 10.0
# without an answer from the head or the raylet before a rank ends itself, since nothing else may report that
# its stage has ended
ALONE_SECONDS = 45.0


class TcpEndpoint(NamedTuple):
    """A process that listens on a port. Its name is, for example, `the Ray node 10.0.0.2`."""

    name: str
    host: str
    port: int


def head() -> TcpEndpoint:
    """Returns the head of the cluster that this process has joined."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return TcpEndpoint(f"the head of the Ray cluster ({host})", host.strip("[]"), int(port))


class Reach:
    """Watches endpoints of the one cluster that this process uses. `watch` starts the thread."""

    def __init__(self) -> None:
        self._places: Sequence[TcpEndpoint] = ()
        self._since: dict[TcpEndpoint, float] = {}  # time of the first check without an answer
        self._noticed: set[TcpEndpoint] = set()
        self._lost = ""
        self._thread: Thread | None = None

    def watch(self, places: Sequence[TcpEndpoint]) -> None:
        """Watches the endpoints that answer now, instead of the endpoints watched before."""
        self._places = answering(places)
        self._since = {}
        self._noticed = set()
        self._lost = ""
        if self._thread is None:
            self._thread = Thread(target=self._watch, name="reach", daemon=True)
            self._thread.start()

    def require(self) -> None:
        """Raises NodeLost when an endpoint has not answered for LOST_SECONDS."""
        if self._lost:
            raise NodeLost(self._lost)

    def gone(self) -> str:
        """Returns the names of the endpoints that do not answer at this moment; "" when all answer."""
        answer = answering(self._places)
        return " and ".join(place.name for place in self._places if place not in answer)

    def _watch(self) -> None:
        while True:
            time.sleep(CHECK_SECONDS)
            # empty once this process has left the cluster
            places = self._places if ray.is_initialized() else ()
            self.note(places, answering(places), time.monotonic())

    def note(self, places: Sequence[TcpEndpoint], answer: Collection[TcpEndpoint], now: float) -> None:
        """Records which of the endpoints answer at `now`, a time in seconds. Ends this process when an
        endpoint has not answered for LOST_SECONDS + EXIT_SECONDS."""
        for place in places:
            if place in answer:
                since = self._since.pop(place, now)
                if place in self._noticed:
                    print(f"{place.name} answers again after {now - since:.0f} s", flush=True)
                    self._noticed.discard(place)
                continue
            without = now - self._since.setdefault(place, now)
            if without >= NOTICE_SECONDS and place not in self._noticed:
                self._noticed.add(place)
                print(
                    f"{place.name} gives no answer; the stage waits {LOST_SECONDS:.0f} s for it", flush=True
                )
            if without >= LOST_SECONDS and not self._lost:
                self._lost = lost(place.name, f"for {without:.0f} s")
            if without >= LOST_SECONDS + EXIT_SECONDS:
                print(self._lost, flush=True)
                os._exit(1)


def own_node() -> TcpEndpoint:
    """Returns the endpoint of the Ray process (raylet) on this process's node."""
    own = ray.get_runtime_context().get_node_id()
    (node,) = [node for node in ray.nodes() if node["NodeID"] == own]
    return place_of(node)


def place_of(node: Mapping[str, Any]) -> TcpEndpoint:
    """Returns the endpoint of the Ray process described by an entry of `ray.nodes()`."""
    return TcpEndpoint(
        f"the Ray node {node['NodeManagerAddress']}", node["NodeManagerAddress"], node["NodeManagerPort"]
    )


def end_when_alone(places: Sequence[TcpEndpoint]) -> None:
    """Starts a thread that ends this process once one of the endpoints has not answered for ALONE_SECONDS.
    For a rank these are the head, which would report the stage's end, and the raylet, whose death does not
    always end its processes."""
    since: dict[TcpEndpoint, float] = {}

    def watch() -> None:
        while True:
            time.sleep(CHECK_SECONDS)
            answer = answering(places)
            now = time.monotonic()
            for place in places:
                if place in answer:
                    since.pop(place, None)
                elif now - since.setdefault(place, now) >= ALONE_SECONDS:
                    print(
                        f"{place.name} gave no answer for {ALONE_SECONDS:.0f} s: this process ends",
                        flush=True,
                    )
                    os._exit(1)

    if len(answering(places)) == len(places):
        Thread(target=watch, name="alone", daemon=True).start()


def lost(names: str, when: str) -> str:
    """Returns the error message for lost nodes."""
    return (
        f"{names} gave no answer {when}: power, network or the Ray process is gone; run again when it is"
        " back, or on the nodes that are left: a stage resumes from its last checkpoint"
    )


def fetched(ref: Any) -> Any:
    """Waits for the small value behind a reference and returns it. Raises NodeLost when a node is lost
    meanwhile, and any error that the work raised. Not suitable for large values, because Ray may restart
    their transfer after each time limit."""
    while True:
        try:
            return ray.get(ref, timeout=CHECK_SECONDS)
        except ray.exceptions.GetTimeoutError:
            reach.require()


def answering(places: Sequence[TcpEndpoint]) -> list[TcpEndpoint]:
    """Returns the endpoints that accept a connection within ANSWER_SECONDS. All are tried in parallel."""
    deadline = time.monotonic() + ANSWER_SECONDS
    found = set[TcpEndpoint]()
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for place in places:
            probe = stack.enter_context(
                socket.socket(socket.AF_INET6 if ":" in place.host else socket.AF_INET)
            )
            probe.setblocking(False)
            try:
                probe.connect_ex((place.host, place.port))
            except OSError:  # a name that cannot be resolved
                continue
            selector.register(probe, selectors.EVENT_WRITE, place)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                probe = key.fileobj  # type: ignore[assignment]
                selector.unregister(probe)
                if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    found.add(key.data)
    return [place for place in places if place in found]


reach = Reach()
