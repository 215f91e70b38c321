"""requirements/pip_settings.py: what pip is told about indexes and certificates, as uv's variables."""

from __future__ import annotations

import os
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.programs import captured
from tests.support.text_rows import rows_of_text

SCRIPT = Path(__file__).resolve().parents[3] / "requirements/pip_settings.py"
CONFIG = """
[global]
index-url = https://user:p%40ss@index.example/simple
extra-index-url =
    https://one.example/simple
    https://two.example/simple
find-links = /wheels /more wheels
trusted-host = index.example
proxy = http://proxy.example:3128
cert = /ca.pem
[install]
find-links = /wheels
"""
TLS = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "ALL_PROXY")


def settings(folder: Path, config: str, **variables: str) -> dict[str, str]:
    """Returns what the script prints where pip's configuration is `config` alone."""
    (folder / "pip.conf").write_text(config)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "UV_")) and name not in TLS
    }
    # This machine's own file counts where this one is silent, so CONFIG sets each option that is compared.
    environment = (
        kept
        | {"PIP_CONFIG_FILE": str(folder / "pip.conf"), "XDG_CONFIG_HOME": str(folder), "HOME": str(folder)}
        | variables
    )
    done = captured([sys.executable, str(SCRIPT)], env=environment, check=True, timeout=60)
    words = [shlex.split(line) for line in done.stdout.splitlines()]
    return dict(word.split("=", 1) for export, word in words if export == "export")


def test_uv_uses_what_files_tell_pip(tmp_path: Path) -> None:
    found = settings(tmp_path, CONFIG)
    assert found == {
        "UV_DEFAULT_INDEX": "https://user:p%40ss@index.example/simple",
        "UV_INDEX": "https://one.example/simple https://two.example/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels",
        "UV_INSECURE_HOST": "index.example",
        "ALL_PROXY": "http://proxy.example:3128",
        "UV_HTTP_TIMEOUT": "60",
        "SSL_CERT_FILE": "/ca.pem",
    }


def test_variables_of_pip_go_before_files_and_those_of_uv_before_all(tmp_path: Path) -> None:
    more = dict(
        PIP_INDEX_URL="https://other.example/simple", PIP_DEFAULT_TIMEOUT="7", UV_INDEX="https://mine.example"
    )
    found = settings(tmp_path, CONFIG, **more)
    assert found["UV_DEFAULT_INDEX"] == "https://other.example/simple" and found["UV_HTTP_TIMEOUT"] == "7"
    assert not found.keys() & {"UV_INDEX", "UV_INDEX_STRATEGY"}


@pytest.mark.parametrize(
    ("pip", "environment", "has", "expected"),
    rows_of_text(
        """
    {cert: /ca.pem} | {REQUESTS_CA_BUNDLE: /other.pem} | true | {SSL_CERT_FILE: /ca.pem}
    {} | {REQUESTS_CA_BUNDLE: /other.pem} | true | {SSL_CERT_FILE: /other.pem}
    {} | {} | true | {UV_SYSTEM_CERTS: '1'}
    {} | {UV_SYSTEM_CERTS: '0'} | true | {}
    {} | {} | false | {}
    {no-index: 'true', find-links: /wheels} | {} | false | {UV_OFFLINE: '1', UV_FIND_LINKS: /wheels}
    {no-index: 'false'} | {} | false | {}
    {index-url: 'https://a'} | {UV_INDEX_URL: 'https://b'} | false | {}
    """,
        yaml_columns={2},
    ),
)
def test_certificates_and_indexes(
    pip: dict[str, str], environment: dict[str, str], has: bool, expected: dict[str, str]
) -> None:
    module = runpy.run_path(str(SCRIPT))
    module["for_uv"].__globals__["system_has_certificates"] = lambda: has
    assert module["for_uv"](pip, environment) == expected | {"UV_HTTP_TIMEOUT": "60"}
