"""A real S3 server on this machine (moto's), with one bucket, and the environment that points every client at it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import httpx
import pytest

BUCKET, SECRET = "alignflow-tests", "a-secret-key-that-nobody-may-see"


@contextmanager
def s3() -> Iterator[str]:
    """Yields the URL of a place in an empty bucket; the server ends with the block."""
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "HTTP_PROXY", "http_proxy"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "a-key-id")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        S3FileSystem.clear_instance_cache()  # clients keep the address and the keys they began with
        try:
            httpx.post(
                f"http://{host}:{port}/moto-api/reset", trust_env=False
            ).raise_for_status()  # servers of one process share what they hold
            fsspec.filesystem("s3").mkdir(BUCKET)
            yield f"s3://{BUCKET}/team"
        finally:
            S3FileSystem.clear_instance_cache()
            server.stop()
