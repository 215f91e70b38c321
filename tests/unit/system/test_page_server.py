"""Requests that the pages' protection lets through, and those that it refuses."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from rlhf_core.system.pages.page_server import Protected

TOKEN = "a-token-of-thirty-two-characters"
BEARER = {"authorization": f"Bearer {TOKEN}"}


def client_of(command: str = "") -> TestClient:
    async def page(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(request.url.query))

    app = Starlette(routes=[Route("/{path:path}", page, methods=["GET", "POST"])])
    return TestClient(
        Protected(app, TOKEN, ["box.lan"], command), base_url="http://127.0.0.1:8000", follow_redirects=False
    )


@pytest.fixture
def client() -> TestClient:
    return client_of()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"headers": {"authorization": f"Bearer {TOKEN}x"}},
        {"headers": {"authorization": "Bearer "}},
        {"params": {"token": "ü"}},
    ],
    ids=["nothing", "wrong", "empty", "in-the-address"],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_nothing_answers_without_the_token(client: TestClient, method: str, given: dict[str, Any]) -> None:
    assert client.request(method, "/x", **given).status_code == 401


def test_a_program_sends_it_as_a_bearer_token(client: TestClient) -> None:
    answer = client.post("/x", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    assert "set-cookie" not in answer.headers


def test_a_browser_gives_it_once_and_its_address_keeps_the_rest(client: TestClient) -> None:
    answer = client.get("/runs", params={"a": "1 2", "token": TOKEN})
    assert answer.status_code == 303 and answer.headers["location"] == "/runs?a=1+2"
    assert "httponly" in answer.headers["set-cookie"].lower()
    assert "samesite=strict" in answer.headers["set-cookie"].lower()
    assert client.get("/runs").status_code == 200  # by the cookie
    assert client.post("/runs", headers={"origin": "http://127.0.0.1:8000"}).status_code == 200


def test_the_token_in_the_address_writes_nothing(client: TestClient) -> None:
    assert client.post("/x", params={"token": TOKEN}).status_code == 401


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "http://127.0.0.1:9999", "null", "http://[", "", "127.0.0.1:8000"]
)
def test_another_servers_page_writes_nothing(client: TestClient, origin: str) -> None:
    client.get("/", params={"token": TOKEN})
    assert client.post("/x", headers={"origin": origin}).status_code == 403


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("box.lan:8000", 200),
        ("BOX.lan.:8000", 200),
        ("LocalHost", 200),
        *((host, 421) for host in ("evil.example:8000", "", "127.0.0.1.evil.example", "evil.com@localhost")),
        *(
            (host, 421)
            for host in ("[", "[::1", "localhost:", "localhost/x", "localhost:8000:1", "localhost..")
        ),
    ],
)
def test_only_names_of_this_machine_are_answered(client: TestClient, host: str, status: int) -> None:
    assert client.get("/", headers={"authorization": f"Bearer {TOKEN}", "host": host}).status_code == status


def test_names_that_were_allowed_are_compared_without_case_and_last_dot() -> None:
    async def page(request: Request) -> PlainTextResponse:
        return PlainTextResponse("")

    app = Protected(Starlette(routes=[Route("/", page)]), TOKEN, ["Box.LAN."])
    for host in ("box.lan", "BOX.lan.", "box.lan:80"):
        assert (
            TestClient(app, base_url="http://127.0.0.1").get("/", headers=BEARER | {"host": host}).status_code
            == 200
        )


@pytest.mark.parametrize(
    "path", ["//evil.example/x", "///evil.example/x", "/%5Cevil.example/x", "/%2F/evil.example/x"]
)
def test_the_address_without_the_token_is_of_this_server(client: TestClient, path: str) -> None:
    answer = client.get(f"http://127.0.0.1:8000{path}", params={"token": TOKEN})
    assert (answer.status_code, answer.headers["location"]) == (303, "/evil.example/x")


def test_the_cookie_does_not_tell_the_token_and_survives_a_restart(client: TestClient) -> None:
    client.get("/", params={"token": TOKEN})
    (cookie,) = client.cookies.jar
    assert cookie.value is not None and len(cookie.value) >= 32 and TOKEN not in cookie.value
    assert client.get("/x").status_code == 200
    assert (
        client.get("/x", headers={"authorization": f"Bearer {cookie.value}", "cookie": ""}).status_code == 401
    )
    assert client.get("/x", params={"token": cookie.value}, headers={"cookie": ""}).status_code == 401
    assert client.get("/x", headers={"cookie": f"{cookie.name}={TOKEN}"}).status_code == 401
    for token, status in ((TOKEN, 404), ("another-token", 401)):
        other = TestClient(Protected(Starlette(), token), base_url="http://127.0.0.1:8000")
        assert other.get("/x", headers={"cookie": f"{cookie.name}={cookie.value}"}).status_code == status


BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
OWN = {"origin": "http://127.0.0.1:8000"}


@pytest.fixture
def pages() -> TestClient:
    """The same application, of a command that serves pages."""
    return client_of("alignflow dashboard")


def test_a_browser_without_the_token_is_asked_for_it(pages: TestClient) -> None:
    asked = pages.get("/runs/<i>", params={"a": '1"><b>'}, headers=BROWSER)
    assert asked.status_code == 401
    assert "<code>alignflow dashboard</code>" in asked.text
    assert 'name="token"' in asked.text
    assert "<b>" not in asked.text and "<i>" not in asked.text and TOKEN not in asked.text
    assert "frame-ancestors 'none'" in asked.headers["content-security-policy"]
    assert "set-cookie" not in asked.headers
    assert asked.headers["cache-control"] == "no-store"
    then = html.unescape(re.search(r'name="next" value="(.*?)"', asked.text)[1])  # type: ignore[index]
    assert then == "/runs/%3Ci%3E?a=1%22%3E%3Cb%3E"
    given = pages.post("/token", data={"token": TOKEN, "next": then}, headers=OWN)
    assert given.status_code == 303 and given.headers["location"] == then and TOKEN not in given.text
    cookie = given.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and TOKEN not in cookie
    assert pages.get("/runs", headers=BROWSER).status_code == 200  # by the cookie


def test_a_wrong_token_is_told_and_is_in_no_address(pages: TestClient) -> None:
    for wrong in (
        pages.get("/runs", params={"token": "guessed", "a": "1"}, headers=BROWSER),
        pages.post("/token", data={"token": "guessed", "next": "/runs?a=1&token=guessed"}, headers=OWN),
    ):
        assert wrong.status_code == 401
        assert "That is not the token." in wrong.text
        assert "set-cookie" not in wrong.headers
        assert 'value="/runs?a=1"' in wrong.text and "guessed" not in wrong.text
    given = pages.post("/token", data={"token": TOKEN, "next": f"/runs?a=1&token={TOKEN}"}, headers=OWN)
    assert given.headers["location"] == "/runs?a=1"
    assert 'value="/"' in pages.get("/token", headers=BROWSER | {"cookie": ""}).text


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/runs", {"accept": "*/*"}),
        ("/runs", {"accept": "text/event-stream"}),
        ("/api/next", BROWSER),
        ("/api", BROWSER),
    ],
)
def test_programs_without_the_token_get_no_page(
    pages: TestClient, path: str, headers: dict[str, str]
) -> None:
    answer = pages.get(path, headers=headers)
    assert answer.status_code == 401 and answer.json()["error"].startswith("give the token")


def test_an_endpoint_for_programs_has_no_form(client: TestClient) -> None:
    assert client.get("/runs", headers=BROWSER).json()["error"].startswith("give the token")
    answer = client.post("/token", data={"token": TOKEN, "next": "/"}, headers=OWN)
    assert answer.status_code == 401 and "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    ("then", "place"),
    [
        *(
            (then, "/evil.example/x")
            for then in ("//evil.example/x", "/\\evil.example/x", "/%2F/evil.example/x", "/%5Cevil.example/x")
        ),
        ("https://evil.example", "/https%3A//evil.example"),
        ("/x\r\nset-cookie: a=b", "/x%0D%0Aset-cookie%3A%20a%3Db"),
        ("", "/"),
    ],
)
def test_the_form_leads_to_no_other_server(pages: TestClient, then: str, place: str) -> None:
    answer = pages.post("/token", data={"token": TOKEN, "next": then}, headers=OWN)
    assert (answer.status_code, answer.headers["location"]) == (303, place)


def test_the_form_of_another_servers_page_or_a_long_one_is_refused(pages: TestClient) -> None:
    form = {"token": TOKEN, "next": "/"}
    assert pages.post("/token", data=form, headers={"origin": "http://evil.example"}).status_code == 403
    assert pages.post("/token", data=form, headers={"origin": "null"}).status_code == 403
    assert pages.post("/token", data=form, headers=OWN | {"host": "evil.example"}).status_code == 421
    for more in ({"next": "/" + "x" * 9000}, {f"field{number}": "" for number in range(30)}):
        refused = pages.post("/token", data=form | more, headers=OWN)
        assert refused.status_code == 401 and "set-cookie" not in refused.headers
    assert pages.post("/token", json=form, headers=OWN).status_code == 401
    assert pages.post("/token", params={"token": TOKEN}, headers=OWN).status_code == 401
