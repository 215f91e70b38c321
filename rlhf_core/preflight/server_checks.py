"""Checks the servers that stages send requests to: judges, models behind endpoints, and reward servers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rlhf_core.config.rewarding.remote_models import OPENAI_KEY
from rlhf_core.recipe.plan import Node, Plan
from rlhf_core.runs.awaited_servers import no_answer, why_unreachable

SET_KEY = (
    "set api_key_env to the environment variable that holds it; without api_key_env, the key in"
    f" {OPENAI_KEY} goes to OpenAI alone: api_key_env: {OPENAI_KEY} sends it here"
)


class SilentServers(NamedTuple):
    """Holds sentences about servers that cannot be reached. `needed` is for stages that a run would start
    first. `later` is for stages that wait for others, so their servers may still be started in time."""

    needed: list[str]
    later: list[str]


def missing_keys(node: Node) -> list[str]:
    """Returns a sentence for each of a stage's chat endpoints that is known to require a key, but for which
    no key is set."""
    return [
        f"stages.{node.name}: {server.reader} sends no key to {server.address}, which answers none without"
        f" one: {SET_KEY}"
        for server in node.config.servers
        if server.chat is not None and server.chat.needs_key and server.key_variable is None
    ]


def key_warnings(nodes: Sequence[Node]) -> list[str]:
    """Returns a sentence for each chat endpoint for which no key is set and that may reject requests without
    a key."""
    found = []
    for node in nodes:
        if node.done or missing_keys(node):
            continue
        for server in node.config.servers:
            if server.chat is not None and server.chat.may_need_key and server.key_variable is None:
                found.append(
                    f"stages.{node.name}: {server.reader} sends no key to {server.address}; if it needs one,"
                    f" {SET_KEY}"
                )
    return list(dict.fromkeys(found))


def silent_servers(plan: Plan) -> SilentServers:
    """Tries to reach the servers of all stages that are not done, all at once, for at most 5 seconds. Returns
    sentences about the servers that cannot be reached."""
    todo = [node for node in plan.nodes if not node.done]
    addresses = list({server.address for node in todo for server in node.config.servers})
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        reasons = dict(zip(addresses, pool.map(why_unreachable, addresses), strict=True))
    found = SilentServers([], [])
    for node in todo:
        is_first = all(plan[parent].done for parent in node.parents)
        for server in node.config.servers:
            why = reasons[server.address]
            if why:
                told = found.needed if is_first else found.later
                told.append(f"stages.{node.name}: {no_answer(server, why)}")
    return found
