"""Asks the town's endpoints over HTTP: sends feedback and reads the live page as text."""

from __future__ import annotations

import html
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START_SECONDS = 90.0
READ_SECONDS = 60.0


class Endpoint:
    """An endpoint on this machine and the file with its token."""

    def __init__(self, url: str, token: Path):
        self.url = url
        self._token = token

    def wait(self) -> None:
        """Waits until it answers. Raises TimeoutError."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.get("/feedback" if self._token.name.startswith("feedback") else "/")
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.url} did not answer in {START_SECONDS:g} s") from None
                time.sleep(0.3)

    def get(self, path: str) -> str:
        return self._send(path, None)

    def post(self, path: str, rows: Sequence[Any]) -> dict[str, Any]:
        """Sends rows as lines of JSON, and returns what became of them."""
        return dict(json.loads(self._send(path, "\n".join(map(json.dumps, rows)).encode())))

    def _send(self, path: str, body: bytes | None) -> str:
        headers = {"Authorization": f"Bearer {self._token.read_text().strip()}"}
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, data=body, headers=headers), timeout=READ_SECONDS
        ) as answer:
            return str(answer.read().decode())


def text_of(page: str) -> str:
    """The words of an HTML page, without tags, styles and scripts."""
    page = re.sub(r"<(style|script)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def links(page: str, prefix: str) -> list[str]:
    """The local addresses of a page that begin so, each once."""
    found = re.findall(rf'href="({re.escape(prefix)}[^"#]*)"', page)
    return list(dict.fromkeys(html.unescape(address) for address in found))


def pages_of(dashboard: Endpoint, report: Path) -> dict[str, str]:
    """The texts of the live page of the newest run (start page, run, its stages' pages) and of the report, by
    their places."""
    start = dashboard.get("/")
    found = {"start page": text_of(start)}
    for run in links(start, "/run/")[:1]:
        page = dashboard.get(run)
        found["run page"] = text_of(page)
        found |= {
            f"stage page {address.rpartition('/')[2]}": text_of(dashboard.get(address))
            for address in links(page, "/stage/")
        }
    return found | ({"report": text_of(report.read_text())} if report.exists() else {})
