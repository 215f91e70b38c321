"""A real S3 server on this machine (moto's), with one bucket, and the environment that points every client at
it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import fsspec
import httpx
import pytest

from rlhf_core.cluster.rank_environment import free_port

BUCKET = "alignflow-tests"
SECRET = "a-secret-key-that-nobody-may-see"


SECONDS = 200  # until the server answers


@contextmanager
def s3() -> Iterator[str]:
    """Yields the URL of a place in an empty bucket; the server, a process of its own, ends with the block.
    (What it imports, Flask, is in the way of vLLM, which looks at every module of its process.)"""
    from s3fs import S3FileSystem

    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "HTTP_PROXY", "http_proxy"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "a-key-id")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        S3FileSystem.clear_instance_cache()  # clients keep the address and the keys they began with
        try:
            _wait(server, f"http://127.0.0.1:{port}/moto-api/")
            fsspec.filesystem("s3").mkdir(BUCKET)
            yield f"s3://{BUCKET}/team"
        finally:
            S3FileSystem.clear_instance_cache()
            server.kill()
            server.wait()


def _wait(server: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + SECONDS
    while server.poll() is None and time.monotonic() < until:
        with suppress(httpx.TransportError):
            httpx.get(url, trust_env=False)
            return
        time.sleep(0.05)
    raise RuntimeError(f"moto's S3 server gave no answer within {SECONDS} s")
