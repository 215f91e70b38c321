"""Uploads a published folder to the Hub: repository, branch, one commit on top of the branch's head, and
finally the tag.

Repeating an interrupted upload ends with the same commit and one tag. An existing repository is reused, and
the Hub's client (`create_commit`) sends no file that the Hub already has. A commit whose reply was lost is
recognised because nothing is left to change; an existing tag is checked and kept. `upload_folder` is not
used: with xet it splits a folder into several commits, and a reader could then find new weights under an old
card. `create_commit` also streams large files. A missing branch is first created at the head of main.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.hf_api import RepoFile

from rlhf_core.hub.api import RETRIES, Retries, with_retries, write_refusal
from rlhf_core.hub.model_files import MODEL_FILES
from rlhf_core.stages.publication.dataset import DATA_FILES
from rlhf_core.stages.publication.publication_folder import Published, read_marker
from rlhf_core.system.files import file_digest

MAIN = "main"
CARD = "README.md"
REPORT = "eval_results.json"
RESULTS = ".eval_results/alignflow.yaml"
RECEIPT = "hub.json"
Gated = Literal["auto", "manual"]  # whether the Hub accepts access requests automatically, or a person does

T = TypeVar("T")


class HubCommit(NamedTuple):
    """Describes a model's commit on the Hub. `url` shows the files at the tag."""

    repo_id: str
    commit: str
    tag: str
    url: str


def would_send(
    folder: Path,
    repo_id: str | None,
    branch: str,
    private: bool,
    tag: str,
    repo_type: str,
    gated: Gated | None = None,
) -> str:
    """Describes the files that an upload of a published folder would send, and the repository. Includes the
    size of every file in bytes and the text of the card."""
    files = _files(folder)
    sizes = {path: file.stat().st_size for path, file in files.items()}
    where = (
        f"{repo_id} ({repo_type}, {'private' if private else 'public if it is made now'})"
        if repo_id
        else "no repository: repo_id is not set"
    )
    lines = [
        "dry run: nothing was sent",
        f"repository: {where}",
        (
            f"access: on request ({gated})"
            if gated
            else "access: as the repository has it; a base model on the Hub is asked only before an upload"
        ),
        f"one commit on the branch {branch}: Publish {tag}",
        f"tag: {tag}",
        f"{len(files)} files, {sum(sizes.values()):,} bytes:",
        *(f"{size:>15,}  {path}" for path, size in sizes.items()),
        f"{CARD}:",
        files[CARD].read_text(),
    ]
    return "\n".join(lines)


def upload(
    api: HfApi,
    folder: Path,
    repo_id: str,
    private: bool,
    tag: str,
    retries: Retries = RETRIES,
    repo_type: str = "model",
    branch: str = MAIN,
    gated: Gated | None = None,
) -> HubCommit:
    """Uploads a published folder to the Hub: repository, branch, one commit, tag. The call can be repeated
    after any failure.

    With `gated`, a repository that everyone may read is changed to require access requests before any file is
    sent.

    Raises ValueError if the upload is not possible: the token is invalid, permissions or space are missing,
    the repository is public although `private` is set, someone else has committed in the meantime, or the tag
    already marks another model. Raises ConnectionError if the Hub stays unreachable.
    """
    published = read_marker(folder)
    if published is None:
        raise ValueError(f"{folder} was not published by alignflow: there is nothing to upload")

    hub = HubRepository(api, repo_id, repo_type, retries)
    hub.create(private, gated)
    refs = hub.call("read branches and tags", lambda: api.list_repo_refs(repo_id, repo_type=repo_type))
    tags = {ref.name: ref.target_commit for ref in refs.tags}
    if tag in tags:
        commit = tags[tag]
    else:
        heads = {ref.name: ref.target_commit for ref in refs.branches}
        commit = hub.send(folder, branch, heads, f"Publish {tag}")
    different = hub.call(
        "read the files back", lambda: _differences(api, folder, published, repo_id, commit, repo_type)
    )
    if different and tag in tags:
        raise ValueError(
            f"the tag {tag} of {repo_id} holds another model ({different[0]} differs): delete the tag and run"
            " again"
        )
    if different:
        raise ValueError(
            f"the commit {commit} of {repo_id} does not hold what was sent ({different[0]} differs): run"
            " again"
        )
    if tag not in tags:
        hub.call(
            "set the tag",
            lambda: api.create_tag(repo_id, tag=tag, revision=commit, exist_ok=True, repo_type=repo_type),
        )
    kind = "datasets/" if repo_type == "dataset" else ""
    return HubCommit(repo_id, commit, tag, f"{api.endpoint}/{kind}{repo_id}/tree/{tag}")


class HubRepository:
    """Represents the Hub repository to which an upload writes. Retries requests that fail temporarily."""

    def __init__(self, api: HfApi, repo_id: str, repo_type: str, retries: Retries):
        self._api = api
        self._repo_id = repo_id
        self._repo_type = repo_type
        self._retries = retries

    def call(self, what: str, request: Callable[[], T]) -> T:
        """Returns the result of a request. `what` is its purpose, for messages."""
        return with_retries(what, self._repo_id, request, self._retries, write_refusal)

    def create(self, private: bool, gated: Gated | None) -> None:
        """Creates the repository if it does not exist, and changes its access to `gated`. Raises ValueError
        if it is public although `private` is set."""
        api = self._api
        repo_id = self._repo_id
        repo_type = self._repo_type
        self.call(
            "create the repository",
            lambda: api.create_repo(repo_id, private=private, exist_ok=True, repo_type=repo_type),
        )
        if not private and not gated:
            return
        there = self.call("read the repository", lambda: api.repo_info(repo_id, repo_type=repo_type))
        if private and not there.private:
            raise ValueError(
                f"the repository {repo_id} is public: make it private, or set private: false to publish for"
                " everyone"
            )
        if gated and not there.gated:
            self.call(
                "set who may read it",
                lambda: api.update_repo_settings(repo_id, gated=gated, repo_type=repo_type),
            )

    def send(self, folder: Path, branch: str, heads: Mapping[str, str], message: str) -> str:
        """Sends a folder's files in one commit on a branch, which is created if needed. `heads` are the
        commits of the branches. Returns the new commit."""
        api = self._api
        repo_id = self._repo_id
        repo_type = self._repo_type
        head = heads.get(branch)
        if branch != MAIN and branch not in heads:
            self.call(
                "make the branch",
                lambda: api.create_branch(repo_id, branch=branch, exist_ok=True, repo_type=repo_type),
            )
            head = self.call(
                "read the branch",
                lambda: str(api.repo_info(repo_id, revision=branch, repo_type=repo_type).sha),
            )
        # reads every file, so it is done only once for all attempts
        adds = [CommitOperationAdd(path, file) for path, file in _files(folder).items()]
        return self.call(
            "send the files", lambda: _commit(api, adds, repo_id, branch, head, message, repo_type)
        )


def _commit(
    api: HfApi,
    adds: Sequence[CommitOperationAdd],
    repo_id: str,
    branch: str,
    head: str | None,
    message: str,
    repo_type: str,
) -> str:
    """Makes the branch contain the files of `adds` in one commit, and deletes any other files of an earlier
    publication.

    If the first commit went through, a second call with the same `head` finds nothing to change. Otherwise it
    commits on top of `head`.
    """
    patterns = (*MODEL_FILES, REPORT, RESULTS) if repo_type == "model" else DATA_FILES
    absent = _remote(api, repo_id, branch, repo_type).keys() - {add.path_in_repo for add in adds}
    old = [
        path for path in sorted(absent) if any(Path("/", path).match(f"/{pattern}") for pattern in patterns)
    ]
    # somebody may have added licence files in the repository
    stale = [path for path in old if not path.startswith(("LICENSE", "NOTICE"))]
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *(CommitOperationDelete(path) for path in stale),
        *map(copy, adds),  # the client stores in these objects what it found on the Hub
    ]
    commit = api.create_commit(
        repo_id, operations, commit_message=message, revision=branch, parent_commit=head, repo_type=repo_type
    )
    return commit.oid


def _differences(
    api: HfApi, folder: Path, published: Published, repo_id: str, commit: str, repo_type: str
) -> list[str]:
    """Returns the files of the folder that differ from a commit's files. Compares large files by SHA-256 and
    small files by their git hash."""
    there = _remote(api, repo_id, commit, repo_type)
    different = []
    for path, file in _files(folder).items():
        remote = there.get(path)
        if remote is None:
            different.append(path)
        elif remote.lfs is not None:
            known = published.files.get(path)
            different += [path] if remote.lfs.sha256 != (known.sha256 if known else file_digest(file)) else []
        else:
            content = file.read_bytes()
            blob_id = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
            different += [path] if remote.blob_id != blob_id else []
    return different


def _remote(api: HfApi, repo_id: str, revision: str, repo_type: str) -> dict[str, RepoFile]:
    tree = api.list_repo_tree(repo_id, recursive=True, revision=revision, repo_type=repo_type)
    return {file.path: file for file in tree if isinstance(file, RepoFile)}


def _files(folder: Path) -> dict[str, Path]:
    return {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
