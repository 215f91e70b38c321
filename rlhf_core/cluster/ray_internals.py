"""Uses private parts of Ray 2.60. If a release lacks one of these parts, Ray stays unpatched and a log line
says so.

- `SafePathJob` keeps the working directory off the workers' module path, unless it is on this process's own
  module path. Ray puts the working directory first, so that a `tasks.py` in it would hide our package;
  `ray._private.worker.connect` leaves
  it out when the job's method returns False.
- `put` and `get` access the cluster's key-value store. Without the store, every check reports progress, so no
  rank is ever considered silent.
"""

from __future__ import annotations

import os
import sys
import time

import ray
from ray.job_config import JobConfig

try:
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put, internal_kv_get_gcs_client
except ImportError:
    _internal_kv_get = _internal_kv_put = None

NAMESPACE = "alignflow-progress"
STORE_SECONDS = 5  # timeout of one access: the cluster's head may be gone


class SafePathJob(JobConfig):
    def _runtime_env_has_working_dir(self) -> bool:
        return bool(super()._runtime_env_has_working_dir()) or os.getcwd() not in map(
            os.path.abspath, sys.path
        )


def report_missing() -> None:
    """Prints which of these parts the installed Ray lacks."""
    if not hasattr(JobConfig, "_runtime_env_has_working_dir"):
        print(
            f"Ray {ray.__version__} may import modules of the working directory in place of ours: install Ray"
            " 2.60",
            flush=True,
        )
    if _internal_kv_get is None:
        print(
            f"Ray {ray.__version__} shows no progress of ranks, so a wait for one that hangs does not end:"
            " install Ray 2.60",
            flush=True,
        )


def put(key: str, value: str) -> None:
    """Stores a progress report. Raises ray.exceptions.RpcError when the store cannot be reached."""
    if _internal_kv_put is not None:
        _internal_kv_put(key, value, namespace=NAMESPACE)


def get(key: str) -> bytes | None:
    """Returns the stored report, or None. Raises ray.exceptions.RpcError when the store cannot be reached."""
    if _internal_kv_get is None:
        return str(time.monotonic_ns()).encode()
    client = internal_kv_get_gcs_client()
    if client is None:  # connected through ray://
        found: bytes | None = _internal_kv_get(key, namespace=NAMESPACE)
    else:
        found = client.internal_kv_get(key.encode(), NAMESPACE.encode(), timeout=STORE_SECONDS)
    return found
