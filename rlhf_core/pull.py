"""A model from the Hub to a folder, pinned to one commit, so that a stage that starts from it can say from exactly what.

Safetensors, configuration and tokenizer are fetched, never pickles or code. `pulled.json`, written last with every file's size and
SHA-256, names repository and commit; the lineage reads it. A pull that was cut off goes on where it was when it is run again. The base
that an adapter names with a revision is fetched to the client's cache. Not here: data sets. A recipe names them by Hub id or file.
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

from rlhf_core.hub_requests import PATIENCE, TOKEN_ENV, Patience, patiently, read_refusal
from rlhf_core.lineage import HUB_ID, PULLED, pulled
from rlhf_core.published import MODEL_FILES, check_loads
from rlhf_core.snapshots import pinned_base, snapshot
from rlhf_core.stage import file_digest, write_text
from rlhf_core.types import FileInfo

FILES = (*MODEL_FILES, "README.md")


def pull(model: str, folder: Path, patience: Patience = PATIENCE) -> str:
    """Downloads `owner/name` or `owner/name@REVISION` (branch, tag or commit; default: main) to `folder`. Returns the commit.

    A folder that holds that commit already is left alone. Raises ValueError when the Hub has no such model, when it has no safetensors, or
    when `folder` holds something else; ConnectionError when the Hub stays out of reach.
    """
    repo_id, _, revision = model.partition("@")
    if not HUB_ID.fullmatch(repo_id) or (not revision and "@" in model):
        raise ValueError(f"{model!r} is no model of the Hub: write owner/name or owner/name@REVISION")
    revision, folder = revision or "main", folder.expanduser().absolute()
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=os.environ.get(TOKEN_ENV, "").strip() or False, library_name="alignflow")
    refusal = read_refusal(revision)
    info = patiently("find the model", repo_id, lambda: api.model_info(repo_id, revision=revision), patience, refusal)
    commit = str(info.sha)
    here = pulled(folder)
    if here == (repo_id, commit):
        return commit
    if here is None and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} holds files that were not pulled, or were changed since: name another folder, or move them away")
    files = patiently("list the files", repo_id, lambda: _files(api, repo_id, commit), patience, refusal)
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
        patiently(f"send {file.path}", repo_id, functools.partial(_fetch, api, repo_id, commit, file, partial), patience, refusal)
        manifest[file.path] = FileInfo(size=file.size, sha256=file_digest(partial / file.path)).model_dump()
    check_loads(partial)
    if base := pinned_base(partial):
        print(f"{repo_id} is an adapter of {base}, which goes to the Hub's cache of this machine", flush=True)
        snapshot(base)
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the client's notes on downloads
    write_text(partial / PULLED, json.dumps({"repo_id": repo_id, "commit": commit, "files": manifest}, indent=2) + "\n")
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    return commit


def _files(api: HfApi, repo_id: str, commit: str) -> list[RepoFile]:
    tree = [file for file in api.list_repo_tree(repo_id, recursive=True, revision=commit) if isinstance(file, RepoFile)]
    return [file for file in tree if any(Path("/", file.path).match(f"/{pattern}") for pattern in FILES)]


def _fetch(api: HfApi, repo_id: str, commit: str, file: RepoFile, folder: Path) -> None:
    """One file, and the proof that it is the one of the commit; a wrong one is removed and asked for again."""
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
