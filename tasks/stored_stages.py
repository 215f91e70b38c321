"""Fetches stages from the store before they run, and copies results and resume states to it.

If copying a result fails, the run ends with an error message of one sentence; the local result is kept, and
the next run copies it.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rlhf_core.recipe.plan import Node, Plan
from rlhf_core.runs.remote.remote_files import StoreFault
from rlhf_core.runs.remote.store import COPYING, Store, store_of
from rlhf_core.runs.resume_state import Resume, latest
from rlhf_core.runs.run_dir import STATE, RunDir, StageRequest

EVERY_SECONDS = 15.0  # between checks for a new resume state
WAIT_SECONDS = 20.0  # for a copy in progress when the stage ends or is cancelled


def fetch_stage(store: Store, run: RunDir, request: StageRequest, log: Callable[..., None]) -> None:
    """Fetches the result of a stage that is not done here. If the store has no result and there is no local
    resume state, fetches the newest resume state.

    Does nothing while another process holds the run directory's lock; the stage's own process waits for the
    lock. Raises StoreFault if the store cannot be used.
    """
    try:
        with run.locked(wait_seconds=1):  # a process that only checks the lock holds it for a moment
            if run.result() is not None:
                return
            if store.fetch(run, request):
                log("%s was fetched from %s", request.name, store.files.url)
            elif store.checkpoints and latest(run) is None and (step := store.fetch_state(run)):
                log("%s resumes from %s of %s", request.name, step, store.files.url)
    except TimeoutError:
        return


def fetch_parents(planned: Plan, nodes: Sequence[Node]) -> None:
    """Fetches the missing results of the direct and indirect parents of `nodes`. Raises StoreFault if the
    store cannot be used."""
    store = store_of(planned.recipe)
    for node in planned.ancestors(nodes) if store else ():
        if store and not node.done:
            fetch_stage(store, RunDir(node.run_dir), planned.request(node), logging.getLogger(__name__).info)


def upload_stage(store: Store, run: RunDir, log: Callable[..., None]) -> None:
    """Copies a finished stage to the store, unless it is already there, and removes the stage's resume states
    from the store. Raises StoreFault if the store cannot be used."""
    if store.put(run):
        log("%s was copied to %s", run.path.name, store.files.url)
    store.put_approval(run)
    if store.checkpoints:
        store.drop_states(run)


@contextmanager
def states_uploaded(
    store: Store | None, run: RunDir, warn: Callable[..., None], every: float = EVERY_SECONDS
) -> Iterator[None]:
    """Copies new resume states while the block runs, and the last one when the stage crashes.

    A failed copy only causes a warning. The first failed copy causes no warning if the stage already has a
    newer state.
    """
    for left in (run / STATE).glob(f"{COPYING}*"):  # left by a killed run
        shutil.rmtree(left, ignore_errors=True)
    if store is None or not store.checkpoints:
        yield
        return
    copied = ""
    failed = 0
    ended = threading.Event()

    def copy_newest() -> None:
        nonlocal copied, failed
        state = None
        try:
            state = latest(run)
            if state is not None and state.folder.name != copied:
                store.put_state(run, state.folder.name)
                copied = state.folder.name
                failed = 0
        except (StoreFault, OSError) as error:
            failed += 1
            if state and (_is_needed(run, state) or (failed > 1 and run.result() is None)):
                warn("the resume state %s of %s was not copied: %s", state.folder.name, run.path.name, error)

    def work() -> None:
        while not ended.wait(every):
            copy_newest()

    thread = threading.Thread(target=work, name=f"states of {run.path.name}", daemon=True)
    thread.start()
    try:
        yield
    except Exception:  # the stage crashed; a cancelled run does not wait for copies
        ended.set()
        thread.join()
        copy_newest()
        raise
    finally:
        ended.set()
        thread.join(WAIT_SECONDS)


def _is_needed(run: RunDir, state: Resume) -> bool:
    """Returns whether a state is the newest one of a stage that has no result. A finished stage removes its
    states."""
    if run.result() is not None:
        return False
    try:
        newest = latest(run)
    except OSError:  # removed while being read
        return False
    return newest is not None and newest.folder == state.folder
