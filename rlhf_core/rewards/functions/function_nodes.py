"""Runs a user's reward function on all nodes of a stage. Each node runs a share of the function's processes;
see `function.py`."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlhf_core.cluster.helper import Helper, HelperDied
from rlhf_core.cluster.ray_cluster import RayNode
from rlhf_core.rewards.functions.function import Function
from rlhf_core.rewards.reward_contract import Reply, RewardError, Sample


class SpreadFunction:
    """Calls a function in up to `processes` processes, distributed in turn over this node and `others`. Error
    messages name the node, because the cause may be the node itself (a missing file, for example)."""

    def __init__(
        self,
        file: Path,
        name: str,
        timeout: float,
        processes: int,
        others: Sequence[RayNode],
        options: Mapping[str, Any] = MappingProxyType({}),
    ):
        self._here = Function(file, name, timeout, -(-processes // (1 + len(others))), options)
        self.wanted = self._here.wanted
        self._helpers: list[Helper] = []
        self._free: queue.Queue[Helper | None] = queue.Queue()  # None: this node
        for number, node in enumerate(others, 1):
            share = len(range(number, processes, 1 + len(others)))
            if share:
                made = Helper(
                    node,
                    share,
                    Function,
                    file=file,
                    name=name,
                    timeout=timeout,
                    processes=share,
                    options=dict(options),
                )
                self._helpers.append(made)
                for _ in range(share):
                    self._free.put(made)
        for _ in range(len(range(0, processes, 1 + len(others)))):
            self._free.put(None)
        if self._helpers:
            addresses = ", ".join(helper.node.address for helper in self._helpers)
            print(f"the reward function {name} runs here and on {addresses}", flush=True)

    def score(self, samples: Sequence[Sample]) -> Reply:
        """Like `Function.score`, but may also raise NodeLost."""
        helper = self._free.get()
        try:
            if helper is None:
                return self._here.score(samples)
            reply: Reply = helper.call("score", samples)
            return reply
        except HelperDied as died:
            helper = None  # from now on this node does the lost node's share
            raise RewardError(str(died)) from None
        except ValueError as error:
            raise ValueError(
                str(error) if helper is None else f"{error} (on the Ray node {helper.node.address})"
            ) from None
        finally:
            self._free.put(helper)

    def close(self) -> None:
        """Ends all processes, on all nodes."""
        self._here.close()
        for helper in self._helpers:
            helper.close("close")
