"""A stand-in for the Hub's write API, standard library only, for tests with the real huggingface_hub client
over real HTTP.

It keeps repositories of models and data sets (`datasets/owner/name`) in memory as commits (path -> blob) with
branches and tags, speaks LFS in its basic and multipart forms, and can fail on purpose: `break_at(n, how)`
makes the n-th request from now (from 0) go wrong.

    refuse   503 with a proxy's HTML page, nothing done        cut   the connection closes, nothing done
    lost     the request is carried out, its answer is lost    busy  429 with Retry-After: 0
    full     403 that speaks of a quota, nothing done          disk  507, nothing done
    expired  401, nothing done
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

TOKEN = "hf_StandInTokenForTestsOnly0123456789"
REFUSALS = {
    "full": (
        403,
        (
            "Private repository storage limit reached, please upgrade your plan to increase your private"
            " storage limit."
        ),
    ),
    "disk": (507, "Insufficient Storage"),
    "expired": (401, "Invalid username or password."),
}
LFS_SUFFIXES = (".safetensors", ".bin")


class Blob(NamedTuple):
    content: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        content = self.content
        if self.lfs:
            content = (
                f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize"
                f" {len(self.content)}\n".encode()
            )
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Commit(NamedTuple):
    parent: str | None
    message: str
    files: dict[str, Blob]

    @property
    def sha(self) -> str:
        tree = sorted((path, blob.oid) for path, blob in self.files.items())
        return hashlib.sha1(json.dumps([self.parent, self.message, tree]).encode()).hexdigest()


@dataclass
class Repository:
    private: bool
    gated: Any = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.commit("main", "initial commit", {".gitattributes": Blob(b"*.safetensors filter=lfs\n", False)})

    def commit(self, branch: str, message: str, files: dict[str, Blob]) -> str:
        commit = Commit(self.branches.get(branch), message, files)
        self.commits[commit.sha] = commit
        self.branches[branch] = commit.sha
        return commit.sha

    def resolve(self, revision: str) -> str | None:
        found = self.branches.get(revision) or self.tags.get(revision) or revision
        return found if found in self.commits else None

    def history(self, branch: str = "main") -> list[str]:
        """Messages, the newest first."""
        messages = []
        at = self.branches.get(branch)
        while at is not None:
            messages.append(self.commits[at].message)
            at = self.commits[at].parent
        return messages


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, part_size: int | None = None, may_write: bool = True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.part_size = part_size
        self.may_write = may_write
        self.repositories: dict[str, Repository] = {}
        self.store: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.requests: list[str] = []
        self.lock = threading.Lock()
        self.fault: tuple[range, str] | None = None

    def break_at(self, request: int, how: str, times: int = 1) -> None:
        self.requests.clear()
        self.fault = (range(request, request + times), how)

    def heal(self) -> None:
        self.requests.clear()
        self.fault = None


@contextmanager
def serve(part_size: int | None = None, may_write: bool = True) -> Iterator[Hub]:
    hub = Hub(part_size, may_write)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any = b""
    headers: dict[str, str] = field(default_factory=dict)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # header and body are two writes: without it every answer waits 40 ms
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle_any(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self._chunk, b""))
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            number = len(self.server.requests)
            self.server.requests.append(f"{self.command} {path}")
            how = self.server.fault[1] if self.server.fault and number in self.server.fault[0] else ""
            if how == "refuse":
                return self._send(Answer(503, b"<html>unavailable</html>", {"Content-Type": "text/html"}))
            if how == "busy":
                return self._send(Answer(429, {"error": "slow down"}, {"Retry-After": "0"}))
            if how in REFUSALS:
                return self._send(Answer(REFUSALS[how][0], {"error": REFUSALS[how][1]}))
            answer = self._route(path, body) if how != "cut" else Answer(200)
        if how in ("cut", "lost"):
            self.close_connection = True
            return None
        return self._send(answer)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def _chunk(self) -> bytes:
        size = int(self.rfile.readline(), 16)
        data = self.rfile.read(size)
        self.rfile.readline()
        return data

    def _send(self, answer: Answer) -> None:
        body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        for name, value in (
            {"Content-Type": "application/json", "Content-Length": str(len(body))} | answer.headers
        ).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _route(self, path: str, body: bytes) -> Answer:
        match = re.fullmatch(r"/storage/(\w+)(?:/(\d+))?", path)
        if match:  # behind signed addresses: no token
            return self._storage(match[1], match[2], body)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return Answer(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            good = json.loads(body)["content"].startswith("---\n")
            return Answer(
                200 if good else 400, {"errors": [] if good else [{"message": "no metadata"}], "warnings": []}
            )
        match = re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)\.git/info/lfs/objects/batch", path)
        if match:
            return self._batch(json.loads(body)) if match[1] in self.server.repositories else Answer(404)
        match = re.fullmatch(
            r"/api/(?:models/|(?=datasets/))((?:datasets/)?[^/]+/[^/]+)(?:/(revision|tree|refs|preupload|commit|tag|branch|settings)(?:/([^/]+))?)?",
            path,
        )
        if match:
            repository = self.server.repositories.get(match[1])
            if repository is None:
                return Answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return self._repository(repository, match[1], match[2] or "revision", match[3] or "main", body)
        match = re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if match:
            if match[1] not in self.server.repositories:
                return Answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            return self._resolve(self.server.repositories[match[1]], match[2], match[3])
        return Answer(404, {"error": f"the stand-in has no {self.command} {path}"})

    def _create(self, wanted: dict[str, Any]) -> Answer:
        name = f"{'datasets/' if wanted.get('type') == 'dataset' else ''}{wanted['organization']}/{wanted['name']}"
        if not self.server.may_write:
            return Answer(403, {"error": "You don't have the rights to create a model under this namespace"})
        if name in self.server.repositories:
            return Answer(
                409, {"error": "You already created this model repo", "url": f"{self.server.url}/{name}"}
            )
        self.server.repositories[name] = Repository(private=wanted.get("visibility") == "private")
        return Answer(200, {"url": f"{self.server.url}/{name}", "name": name, "id": "0"})

    def _batch(self, wanted: dict[str, Any]) -> Answer:
        objects = []
        for item in wanted["objects"]:
            oid = item["oid"]
            size = item["size"]
            target = f"{self.server.url}/storage/{oid}"
            found: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self.server.store:
                upload: dict[str, Any] = {"href": f"{target}?X-Signature=SignedAddress"}
                if self.server.part_size:
                    count = -(-size // self.server.part_size)
                    parts = {
                        str(part): f"{target}/{part}?X-Signature=SignedAddress"
                        for part in range(1, count + 1)
                    }
                    upload["header"] = {"chunk_size": str(self.server.part_size), **parts}
                found["actions"] = {"upload": upload, "verify": {"href": f"{target}?verify=1"}}
            objects.append(found)
        return Answer(
            200, {"transfer": "multipart" if self.server.part_size else "basic", "objects": objects}
        )

    def _storage(self, oid: str, part: str | None, body: bytes) -> Answer:
        if self.command == "PUT" and part:
            self.server.parts[oid, int(part)] = body
            return Answer(200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        if self.command == "PUT":
            return self._keep(oid, body)
        asked = json.loads(body)
        if "parts" in asked:
            return self._keep(
                oid, b"".join(self.server.parts[oid, item["partNumber"]] for item in asked["parts"])
            )
        return Answer(200 if len(self.server.store.get(oid, b"")) == asked["size"] else 404, {})

    def _keep(self, oid: str, content: bytes) -> Answer:
        if hashlib.sha256(content).hexdigest() != oid:
            return Answer(400, {"error": "the content does not have this digest"})
        self.server.store[oid] = content
        return Answer(200, {})

    def _repository(self, repository: Repository, name: str, verb: str, revision: str, body: bytes) -> Answer:
        sha = repository.branches["main"] if verb == "branch" else repository.resolve(revision)
        if sha is None:
            return Answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        files = repository.commits[sha].files
        match verb:
            case "revision":
                siblings = [{"rfilename": path} for path in files]
                return Answer(
                    200,
                    {
                        "id": name,
                        "modelId": name,
                        "private": repository.private,
                        "gated": repository.gated,
                        "sha": sha,
                        "siblings": siblings,
                        "tags": [],
                    },
                )
            case "settings":
                repository.gated = json.loads(body)["gated"]
                return Answer(200, {})
            case "refs":
                kinds = {
                    "branches": ("heads", repository.branches),
                    "tags": ("tags", repository.tags),
                    "converts": ("converts", {}),
                }
                return Answer(
                    200,
                    {
                        kind: [
                            {"name": ref, "ref": f"refs/{where}/{ref}", "targetCommit": target}
                            for ref, target in refs.items()
                        ]
                        for kind, (where, refs) in kinds.items()
                    },
                )
            case "tree":
                return Answer(200, [_entry(path, blob) for path, blob in sorted(files.items())])
            case "preupload":
                return Answer(
                    200, {"files": [_upload_mode(item["path"], files) for item in json.loads(body)["files"]]}
                )
            case "commit":
                return self._commit(
                    repository, name, revision, [json.loads(line) for line in body.splitlines()]
                )
            case _:
                refs = repository.tags if verb == "tag" else repository.branches
                asked = json.loads(body)
                ref = asked["tag"] if verb == "tag" else revision
                start = repository.resolve(asked["startingPoint"]) if asked.get("startingPoint") else sha
                if start is None:
                    return Answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
                if verb == "branch" and asked.get("overwrite"):
                    refs[ref] = start
                    return Answer(200, {})
                sha = start
                if ref in refs:
                    return Answer(409, {"error": f"{verb} {ref} already exists"})
                refs[ref] = sha
                return Answer(200, {})

    def _commit(self, repository: Repository, name: str, branch: str, lines: list[dict[str, Any]]) -> Answer:
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit") not in (None, repository.branches[branch]):
            return Answer(412, {"error": "A commit has happened since. Please refresh and try again."})
        files = dict(repository.commits[repository.branches[branch]].files)
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "file":
                    files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
                case "lfsFile":
                    if value["oid"] not in self.server.store:
                        return Answer(400, {"error": f"{value['path']}: the large file was never uploaded"})
                    files[value["path"]] = Blob(self.server.store[value["oid"]], True)
                case "deletedFile":
                    if files.pop(value["path"], None) is None:
                        return Answer(
                            404,
                            {"error": "A file with this name doesn't exist"},
                            {"X-Error-Code": "EntryNotFound"},
                        )
                case "deletedFolder":
                    files = {path: blob for path, blob in files.items() if not path.startswith(value["path"])}
        sha = repository.commit(branch, header["summary"], files)
        return Answer(
            200, {"success": True, "commitOid": sha, "commitUrl": f"{self.server.url}/{name}/commit/{sha}"}
        )

    def _resolve(self, repository: Repository, revision: str, path: str) -> Answer:
        sha = repository.resolve(revision)
        if sha is None:
            return Answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        blob = repository.commits[sha].files.get(path)
        if blob is None:
            return Answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        etag = blob.sha256 if blob.lfs else blob.oid
        return Answer(
            200,
            blob.content,
            {"X-Repo-Commit": sha, "ETag": f'"{etag}"', "X-Linked-Size": str(len(blob.content))},
        )


def _entry(path: str, blob: Blob) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(blob.content), "oid": blob.oid}
    return entry | (
        {"lfs": {"oid": blob.sha256, "size": len(blob.content), "pointerSize": 130}} if blob.lfs else {}
    )


def _upload_mode(path: str, files: dict[str, Blob]) -> dict[str, Any]:
    blob = files.get(path)
    lfs = path.endswith(LFS_SUFFIXES)
    oid = None if blob is None else blob.sha256 if blob.lfs else blob.oid
    return {"path": path, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid}
