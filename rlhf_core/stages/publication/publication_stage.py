"""Publishes a checkpoint with a card and scores, or a stage's data set, to a folder. With a repository ID and
a token, also publishes it to the Hub (see `upload.py`).

The tag, named after the stage's run directory, is set last and marks the upload as complete. The rounds of a
loop have their own branches (see `recipe/expand.py`).
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import logging as hub_logging

from rlhf_core.config import Publication
from rlhf_core.hub.api import RETRIES, TOKEN_ENV, client_options, with_retries, write_refusal
from rlhf_core.hub.model_config import PICTURE_FAMILIES
from rlhf_core.hub.model_files import ADAPTER_CONFIG
from rlhf_core.records import EvalReport
from rlhf_core.runs.lineage import lineage, stage_of
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest
from rlhf_core.stages.publication.dataset import data_card, data_files, renamed
from rlhf_core.stages.publication.licenses import inherited, upstream_licenses
from rlhf_core.stages.publication.model_card import CardModel, card, eval_results, public_report
from rlhf_core.stages.publication.publication_folder import AdapterBase, adapter_base, assemble, put
from rlhf_core.stages.publication.terms import Terms, base_terms, gated_like
from rlhf_core.stages.publication.upload import CARD, RECEIPT, REPORT, RESULTS, upload, would_send
from rlhf_core.stages.publication.upstream_cards import upstream_cards
from rlhf_core.system.files import read_json, write_text


def run(request: StageRequest, run: RunDir) -> Outcome:
    """Runs the publication stage. Its outputs are `published` (the folder) and, after an upload, `hub`
    (`hub.json`, with repository, commit and tag).

    A dry run creates the same folder, always in the run directory, prints what it would send, and sends no
    request to the Hub.
    """
    config = request.config
    assert isinstance(config, Publication)
    token = read_token(config.repo_id, config.dry_run)
    output = Path(request.inputs[config.dataset or config.model or ""])
    made = stage_of(output)
    if made:
        RunDir(made[0]).remember_digests()
    api = HfApi(**client_options()) if token else None
    read_card = partial(_card, api) if api else None
    license = inherited(config.license, upstream_licenses(upstream_cards(output, read_card), config.licenses))
    gated = config.gated if config.gated in ("auto", "manual") else None
    folder = (
        Path(config.folder).expanduser().resolve()
        if config.folder and not config.dry_run
        else run / "published"
    )
    if config.dataset:
        files = data_files(output)
        readme = data_card(
            output, files, config.repo_id or config.dataset, license, config.branch, request.gates
        )
        published = put(
            files, folder, {CARD: readme} | renamed(files), request.name, request.digest, lambda partial: None
        )
    else:
        base = adapter_base(output, config.base_repo)
        terms = base_terms(output, config.base_repo, read_card)
        gated = gated_like(config.gated, terms, config.private, api)
        texts = card_files(request, config, base, license, terms)
        published = assemble(
            output, folder, texts, request.name, request.digest, request.trust_remote_code, base
        )
    print(f"published {len(published.files)} files to {folder}", flush=True)
    outputs = {"published": os.path.relpath(folder, run.path)}
    tag = f"{request.name}-{request.digest}"
    repo_type = "dataset" if config.dataset else "model"
    if config.dry_run:
        print(
            would_send(folder, config.repo_id, config.branch, config.private, tag, repo_type, gated),
            flush=True,
        )
    elif config.repo_id and api:
        hub_logging.set_verbosity_error()  # its warnings quote upload addresses, which contain signatures
        commit = upload(
            api, folder, config.repo_id, config.private, tag, RETRIES, repo_type, config.branch, gated
        )
        write_text(run / RECEIPT, json.dumps(commit._asdict(), indent=2) + "\n")
        outputs["hub"] = RECEIPT
        print(f"published to {commit.url} (commit {commit.commit})", flush=True)
    size = sum(info.size for info in published.files.values())
    return Outcome({"files": float(len(published.files)), "bytes": float(size)}, outputs)


def _card(api: HfApi, repo_id: str, repo_type: str) -> str | None:
    """Returns the path of a repository's README.md, which names its licence, or None if there is none that
    this token may read. Raises ConnectionError if the Hub is unreachable, because the card, and therefore the
    commit, must be the same at every attempt."""

    def fetch() -> str | None:
        try:
            return str(api.hf_hub_download(repo_id, "README.md", repo_type=repo_type))
        except LocalEntryNotFoundError:
            raise
        except (RepositoryNotFoundError, EntryNotFoundError):
            return None

    return with_retries("send the card", repo_id, fetch, RETRIES, write_refusal)


def read_token(repo_id: str | None, dry_run: bool = False) -> str | None:
    """Returns the token if anything is to be sent to the Hub, otherwise None. Raises ValueError, before any
    work, if the token is missing or HF_HUB_OFFLINE is set."""
    if repo_id is None or dry_run:
        return None
    token = os.environ.get(TOKEN_ENV, "").strip()
    if not token:
        raise ValueError(
            f"repo_id is {repo_id} and the environment variable {TOKEN_ENV} is empty: set it, or leave"
            " repo_id out"
        )
    if constants.is_offline_mode():
        raise ValueError(
            f"repo_id is {repo_id} and HF_HUB_OFFLINE keeps everything off the Hub: unset it, or leave"
            " repo_id out"
        )
    return token


def card_files(
    request: StageRequest, config: Publication, base: AdapterBase | None, license: str, terms: Terms
) -> dict[str, str]:
    """Returns the card and the evaluation's results, as relative path -> content."""
    assert config.model
    checkpoint = Path(request.inputs[config.model])
    report = None
    questions = ""
    name = config.model
    if config.evaluation:
        folder = Path(request.inputs[config.evaluation])
        report = EvalReport.model_validate_json((folder / "eval.json").read_text())
        stage = stage_of(folder)
        questions = stage[1]["config"].get("questions", {}).get("path", "") if stage else ""
        # the evaluation may use another name for the model, such as the last round of a loop
        judged = stage[1]["inputs"] if stage else {}
        if name not in judged:
            name = next((other for other, place in judged.items() if Path(place) == checkpoint), name)
        report, public = public_report(report)
        name = public.get(name, name)
    stored = read_json(checkpoint / "config.json")
    architectures = stored.get("architectures") or [""]
    chat = any(checkpoint.glob("chat_template.*")) or "chat_template" in read_json(
        checkpoint / "tokenizer_config.json"
    )
    ancestor = lineage(checkpoint)
    is_reward_model = str(architectures[0]).endswith("ForSequenceClassification")
    import transformers  # slow to import

    is_reward_model |= read_json(checkpoint / ADAPTER_CONFIG).get("task_type") == "SEQ_CLS"
    model = CardModel(
        lineage=ancestor,
        name=name,
        title=config.repo_id or f"{ancestor.name}-{ancestor.digest}".rstrip("-"),
        license=license,
        terms=terms,
        is_reward_model=is_reward_model,
        needs_score_class=is_reward_model
        and bool(architectures[0])
        and architectures[0] not in dir(transformers),
        has_chat_template=chat,
        adapts=base.repo_id if base else None,
        branch=config.branch,
        reads_images=not is_reward_model
        and stored.get("model_type") in PICTURE_FAMILIES
        and any(checkpoint.glob("*processor_config.json")),
    )
    files = {CARD: card(model, report, request.gates)}
    if report:
        files[REPORT] = report.model_dump_json(indent=2) + "\n"
        results = eval_results(report, name, questions)
        if results:
            files[RESULTS] = results
    return files
