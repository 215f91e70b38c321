"""Downloads a model of the Hub at one commit to a folder, and records repository and commit for the lineage.

Fetches safetensors, configuration and tokenizer, never pickles or code. `pulled.json`, written last, has repository, commit, and every
file's size and SHA-256. An interrupted pull resumes when it is run again. The base that an adapter names with a revision is fetched to
the Hub client's cache. Left out: data sets; a recipe names them by Hub id or file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoFile

from rlhf_core.hub.api import RETRIES, TOKEN_ENV, Retries, read_refusal, with_retries
from rlhf_core.hub.ids import HUB_ID, PULLED, pulled
from rlhf_core.hub.model_files import MODEL_FILES, check_loads
from rlhf_core.hub.snapshots import pinned_base, snapshot
from rlhf_core.records import FileInfo
from rlhf_core.system.files import file_digest, write_text

FILES = (*MODEL_FILES, "README.md")


def pull(model: str, folder: Path, retries: Retries = RETRIES) -> str:
    """Downloads `owner/name` or `owner/name@REVISION` (branch, tag or commit; default: main) to `folder`. Returns the commit.

    Does nothing when the folder already has that commit. Raises ValueError when the Hub has no such model, the model has no safetensors,
    `folder` has other files, or the disk is too small; ConnectionError when the Hub cannot be reached.
    """
    repo_id, _, revision = model.partition("@")
    if not HUB_ID.fullmatch(repo_id) or (not revision and "@" in model):
        raise ValueError(f"{model!r} is no model of the Hub: write owner/name or owner/name@REVISION")
    revision, folder = revision or "main", folder.expanduser().absolute()
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=os.environ.get(TOKEN_ENV, "").strip() or False, library_name="alignflow")
    refusal = read_refusal(revision)
    info = with_retries("find the model", repo_id, lambda: api.model_info(repo_id, revision=revision), retries, refusal)
    commit = str(info.sha)
    here = pulled(folder)
    if here == (repo_id, commit):
        return commit
    if here is None and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} holds files that were not pulled, or were changed since: name another folder, or move them away")
    files = with_retries("list the files", repo_id, lambda: _files(api, repo_id, commit), retries, refusal)
    if not any(file.path.endswith(".safetensors") for file in files):
        raise ValueError(f"{repo_id} has no safetensors weights at {commit}: alignflow loads no pickles; choose a revision that has them")
    partial = folder.with_name(f".{folder.name}.{commit[:12]}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    size = sum(file.size for file in files)
    print(f"pulling {len(files)} files, {size / 1e6:,.1f} MB, of {repo_id} at {commit}", flush=True)
    if size > (free := shutil.disk_usage(partial).free):
        raise ValueError(
            f"{repo_id} needs {size / 1e9:.1f} GB and {folder.parent} has {free / 1e9:.1f} GB left: make space, or name a folder elsewhere"
        )
    manifest = {}
    for file in files:
        with_retries(f"send {file.path}", repo_id, functools.partial(_fetch, api, repo_id, commit, file, partial), retries, refusal)
        manifest[file.path] = FileInfo(size=file.size, sha256=file_digest(partial / file.path)).model_dump()
    check_loads(partial)
    if base := pinned_base(partial):
        print(f"{repo_id} is an adapter of {base}, which goes to the Hub's cache of this machine", flush=True)
        snapshot(base)
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the client's metadata of downloads
    write_text(partial / PULLED, json.dumps({"repo_id": repo_id, "commit": commit, "files": manifest}, indent=2) + "\n")
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    return commit


def _files(api: HfApi, repo_id: str, commit: str) -> list[RepoFile]:
    tree = [file for file in api.list_repo_tree(repo_id, recursive=True, revision=commit) if isinstance(file, RepoFile)]
    return [file for file in tree if any(Path("/", file.path).match(f"/{pattern}") for pattern in FILES)]


def _fetch(api: HfApi, repo_id: str, commit: str, file: RepoFile, folder: Path) -> None:
    """Downloads one file and checks its hash; removes a wrong one and raises ConnectionError, so that it is fetched again."""
    path = folder / file.path
    api.hf_hub_download(repo_id, file.path, revision=commit, local_dir=folder)
    if file.lfs is not None:
        same = file_digest(path) == file.lfs.sha256
    else:
        content = path.read_bytes()
        same = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == file.blob_id
    if not same:
        path.unlink()
        raise ConnectionError(f"{file.path} arrived damaged")
