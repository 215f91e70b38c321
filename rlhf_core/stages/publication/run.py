"""Publishes a checkpoint with card and scores, or a data set that a stage made: to a folder and, given a repository id and a token, to the
Hub.

Uploads everything as one commit on the head that it read, and sets the tag, named like the stage's run directory, last: a tag marks a
complete model. If a publication is interrupted and run again, it ends with the same commit and one tag: it uses an existing repository,
the Hub's client (`create_commit`) sends no file that the Hub has, a commit whose reply was lost is recognised because nothing is left
to change, and an existing tag is checked and kept. `upload_folder` is not used: with xet it splits a folder into
several commits, and a reader could then see new weights under an old card. `create_commit` streams large files too.
A missing branch is created first, at the head of main; a loop's rounds have such branches (recipe/expand.py).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import logging as hub_logging

from rlhf_core.config import Publication
from rlhf_core.hub.api import RETRIES, TOKEN_ENV, Retries, client_options, with_retries, write_refusal
from rlhf_core.hub.model_files import ADAPTER_CONFIG, MODEL_FILES
from rlhf_core.records import EvalReport
from rlhf_core.runs.lineage import lineage, stage_of
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest
from rlhf_core.stages.publication.dataset import DATA_FILES, data_card, data_files, renamed
from rlhf_core.stages.publication.folder import AdapterBase, Published, adapter_base, assemble, put, read_marker
from rlhf_core.stages.publication.licenses import inherited, upstream_licenses
from rlhf_core.stages.publication.model_card import CardModel, card, eval_results, public_report
from rlhf_core.system.files import file_digest, read_json, write_text

MAIN = "main"
CARD, REPORT, RESULTS, RECEIPT = "README.md", "eval_results.json", ".eval_results/alignflow.yaml", "hub.json"

T = TypeVar("T")


class Commit(NamedTuple):
    """Where a model is on the Hub. `url` shows the tagged files."""

    repo_id: str
    commit: str
    tag: str
    url: str


def run(request: StageRequest, run: RunDir) -> Outcome:
    """The publication stage. Outputs: `published` (the folder) and, after an upload, `hub` (`hub.json`: repository, commit, tag).

    A dry run makes the same folder, always in the run directory, prints what would be sent and sends no request to the Hub.
    """
    config = request.config
    assert isinstance(config, Publication)
    token = read_token(config.repo_id, config.dry_run)
    output = Path(request.inputs[config.dataset or config.model or ""])
    if made := stage_of(output):
        RunDir(made[0]).remember_digests()
    api = HfApi(**client_options()) if token else None
    license = inherited(config.license, upstream_licenses(output, config.licenses, partial(_card, api) if api else None))
    folder = Path(config.folder).expanduser().resolve() if config.folder and not config.dry_run else run / "published"
    if config.dataset:
        files = data_files(output)
        readme = data_card(output, files, config.repo_id or config.dataset, license, config.branch, request.gates)
        published = put(files, folder, {CARD: readme} | renamed(files), request.name, request.digest, lambda partial: None)
    else:
        base = adapter_base(output, config.base_repo)
        texts = card_files(request, config, base, license)
        published = assemble(output, folder, texts, request.name, request.digest, request.trust_remote_code, base)
    print(f"published {len(published.files)} files to {folder}", flush=True)
    outputs = {"published": os.path.relpath(folder, run.path)}
    tag, repo_type = f"{request.name}-{request.digest}", "dataset" if config.dataset else "model"
    if config.dry_run:
        print(would_send(folder, config.repo_id, config.branch, config.private, tag, repo_type), flush=True)
    elif config.repo_id and api:
        hub_logging.set_verbosity_error()  # its warnings quote upload addresses, and those carry signatures
        commit = upload(api, folder, config.repo_id, config.private, tag, RETRIES, repo_type, config.branch)
        write_text(run / RECEIPT, json.dumps(commit._asdict(), indent=2) + "\n")
        outputs["hub"] = RECEIPT
        print(f"published to {commit.url} (commit {commit.commit})", flush=True)
    size = sum(info.size for info in published.files.values())
    return Outcome({"files": float(len(published.files)), "bytes": float(size)}, outputs)


def _card(api: HfApi, repo_id: str, repo_type: str) -> str | None:
    """README.md of a repository, for its licence; None when there is none that this token may read. Out of reach is ConnectionError: the
    card, and with it the commit, must not depend on the Hub's mood."""

    def fetch() -> str | None:
        try:
            return str(api.hf_hub_download(repo_id, "README.md", repo_type=repo_type))
        except LocalEntryNotFoundError:
            raise
        except (RepositoryNotFoundError, EntryNotFoundError):
            return None

    return with_retries("send the card", repo_id, fetch, RETRIES, write_refusal)


def would_send(folder: Path, repo_id: str | None, branch: str, private: bool, tag: str, repo_type: str) -> str:
    """What an upload of a published folder would send and where: every file with its size in bytes, and the card's text."""
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
        f"one commit on the branch {branch}: Publish {tag}",
        f"tag: {tag}",
        f"{len(files)} files, {sum(sizes.values()):,} bytes:",
        *(f"{size:>15,}  {path}" for path, size in sizes.items()),
        f"{CARD}:",
        files[CARD].read_text(),
    ]
    return "\n".join(lines)


def read_token(repo_id: str | None, dry_run: bool = False) -> str | None:
    """Returns the token when something goes to the Hub. Raises ValueError, before any work, when it is missing."""
    if repo_id is None or dry_run:
        return None
    token = os.environ.get(TOKEN_ENV, "").strip()
    if not token:
        raise ValueError(f"repo_id is {repo_id} and the environment variable {TOKEN_ENV} is empty: set it, or leave repo_id out")
    if constants.is_offline_mode():
        raise ValueError(f"repo_id is {repo_id} and HF_HUB_OFFLINE keeps everything off the Hub: unset it, or leave repo_id out")
    return token


def card_files(request: StageRequest, config: Publication, base: AdapterBase | None, license: str) -> dict[str, str]:
    """The card and the evaluation's results, as relative path -> content."""
    assert config.model
    checkpoint = Path(request.inputs[config.model])
    report, questions, name = None, "", config.model
    if config.evaluation:
        folder = Path(request.inputs[config.evaluation])
        report = EvalReport.model_validate_json((folder / "eval.json").read_text())
        stage = stage_of(folder)
        questions = stage[1]["config"].get("questions", {}).get("path", "") if stage else ""
        judged = stage[1]["inputs"] if stage else {}  # it may know the model by another name: the last round of a loop
        if name not in judged:
            name = next((other for other, place in judged.items() if Path(place) == checkpoint), name)
        report, public = public_report(report)
        name = public.get(name, name)
    architectures = read_json(checkpoint / "config.json").get("architectures") or [""]
    chat = any(checkpoint.glob("chat_template.*")) or "chat_template" in read_json(checkpoint / "tokenizer_config.json")
    ancestor = lineage(checkpoint)
    is_reward_model = str(architectures[0]).endswith("ForSequenceClassification")
    import transformers  # slow to import

    is_reward_model |= read_json(checkpoint / ADAPTER_CONFIG).get("task_type") == "SEQ_CLS"
    model = CardModel(
        lineage=ancestor,
        name=name,
        title=config.repo_id or f"{ancestor.name}-{ancestor.digest}".rstrip("-"),
        license=license,
        is_reward_model=is_reward_model,
        needs_score_class=is_reward_model and bool(architectures[0]) and architectures[0] not in dir(transformers),
        has_chat_template=chat,
        adapts=base.repo_id if base else None,
        branch=config.branch,
    )
    files = {CARD: card(model, report, request.gates)}
    if report:
        files[REPORT] = report.model_dump_json(indent=2) + "\n"
        results = eval_results(report, name, questions)
        if results:
            files[RESULTS] = results
    return files


def upload(
    api: HfApi,
    folder: Path,
    repo_id: str,
    private: bool,
    tag: str,
    retries: Retries = RETRIES,
    repo_type: str = "model",
    branch: str = MAIN,
) -> Commit:
    """Puts a published folder on the Hub: repository, branch, one commit, tag. Safe to repeat after any failure.

    Raises ValueError when the Hub refuses (token, rights, space, a public repository where a private one is required, a commit by
    someone else meanwhile, a tag that holds another model), ConnectionError when it stays out of reach.
    """
    published = read_marker(folder)
    if published is None:
        raise ValueError(f"{folder} was not published by alignflow: there is nothing to upload")

    def call_hub(what: str, call: Callable[[], T]) -> T:
        return with_retries(what, repo_id, call, retries, write_refusal)

    call_hub("create the repository", lambda: api.create_repo(repo_id, private=private, exist_ok=True, repo_type=repo_type))
    if private and not call_hub("read the repository", lambda: api.repo_info(repo_id, repo_type=repo_type)).private:
        raise ValueError(f"the repository {repo_id} is public: make it private, or set private: false to publish for everyone")
    refs = call_hub("read branches and tags", lambda: api.list_repo_refs(repo_id, repo_type=repo_type))
    tags = {ref.name: ref.target_commit for ref in refs.tags}
    if tag in tags:
        commit = tags[tag]
    else:
        heads = {ref.name: ref.target_commit for ref in refs.branches}
        if branch != MAIN and branch not in heads:
            call_hub("make the branch", lambda: api.create_branch(repo_id, branch=branch, exist_ok=True, repo_type=repo_type))
            heads[branch] = call_hub("read the branch", lambda: str(api.repo_info(repo_id, revision=branch, repo_type=repo_type).sha))
        head = heads.get(branch)
        adds = [CommitOperationAdd(path, file) for path, file in _files(folder).items()]  # reads every file: once for all attempts
        commit = call_hub("send the files", lambda: _commit(api, adds, repo_id, branch, head, f"Publish {tag}", repo_type))
    different = call_hub("read the files back", lambda: _differences(api, folder, published, repo_id, commit, repo_type))
    if different and tag in tags:
        raise ValueError(f"the tag {tag} of {repo_id} holds another model ({different[0]} differs): delete the tag and run again")
    if different:
        raise ValueError(f"the commit {commit} of {repo_id} does not hold what was sent ({different[0]} differs): run again")
    if tag not in tags:
        call_hub("set the tag", lambda: api.create_tag(repo_id, tag=tag, revision=commit, exist_ok=True, repo_type=repo_type))
    return Commit(repo_id, commit, tag, f"{api.endpoint}/{'datasets/' if repo_type == 'dataset' else ''}{repo_id}/tree/{tag}")


def _commit(
    api: HfApi, adds: Sequence[CommitOperationAdd], repo_id: str, branch: str, head: str | None, message: str, repo_type: str
) -> str:
    """One commit that makes the branch hold the files of `adds`; others of the kind of an earlier publication go.

    Called a second time with the same `head`, it finds nothing to change if the first commit went through, else commits on `head`.
    """
    patterns = (*MODEL_FILES, REPORT, RESULTS) if repo_type == "model" else DATA_FILES
    absent = _remote(api, repo_id, branch, repo_type).keys() - {add.path_in_repo for add in adds}
    old = [path for path in sorted(absent) if any(Path("/", path).match(f"/{pattern}") for pattern in patterns)]
    stale = [path for path in old if not path.startswith(("LICENSE", "NOTICE"))]  # somebody may have put them there
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *(CommitOperationDelete(path) for path in stale),
        *map(copy, adds),  # the client writes into them what it found on the Hub
    ]
    commit = api.create_commit(repo_id, operations, commit_message=message, revision=branch, parent_commit=head, repo_type=repo_type)
    return commit.oid


def _differences(api: HfApi, folder: Path, published: Published, repo_id: str, commit: str, repo_type: str) -> list[str]:
    """Files of the folder that a commit does not hold exactly: large ones by SHA-256, small ones by their git hash."""
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
