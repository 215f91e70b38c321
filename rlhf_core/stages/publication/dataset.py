"""Publishes data sets that stages created as Hub repositories: the rows of a preferences stage, or the
judgments and answers of an evaluation.

The files are the stages' own JSONL. A card describes the columns and how the rows were created. Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlhf_core.config.gates import Verdict
from rlhf_core.data.pictures.picture_files import PICTURES
from rlhf_core.hub.ids import is_hub_id, parted
from rlhf_core.runs.lineage import Ancestor, lineage, sources, tree
from rlhf_core.stages.publication.card_sections import configuration, data_sets, gate_section, public_names
from rlhf_core.system.markdown_table import table

DATA_FILES = ("data/*.jsonl", "judgments/*.jsonl", "answers/*.jsonl", f"{PICTURES}/*", f"data/{PICTURES}/*")
NAMED = ("model", "baseline", "judge")  # fields of judgments and answers that may contain a path
KINDS = {"pairs": "preference pairs", "answers": "scored answers", "judgments": "judgments"}
MEANING = {
    "prompt": "chat messages before the answer",
    "chosen": "the answer with the higher reward",
    "rejected": "the answer with the lower reward",
    "chosen_score": "its reward",
    "rejected_score": "its reward",
    "chosen_cut": "whether the length limit ended it",
    "rejected_cut": "whether the length limit ended it",
    "response": "the answer",
    "reward": "reward of the answer, in the units of what gave it",
    "label": "whether the answer is desirable",
    "uid": "id of the question",
    "category": "category of the question",
    "judge": "who decided",
    "model": "model that answered",
    "baseline": "model it was compared with",
    "games": "two verdicts, the second with the answers swapped: label, the judge's words, the prompt",
    "messages": "the question and the answer, with the answer's text",
    "metadata": "length and markdown of the answer, which style control uses",
}
MADE = {
    "pairs": (
        "A policy answered each prompt several times; rewards scored the answers; the best and the worst of a"
        " prompt make a pair."
    ),
    "answers": "A policy answered each prompt several times, and rewards scored the answers.",
    "judgments": (
        "Every model answered every question; each answer was compared with the baseline's twice, with the"
        " two swapped."
    ),
}


def data_files(output: Path) -> dict[str, Path]:
    """Returns the files to publish, keyed by their path in the repository. These are a preferences stage's
    `pairs.jsonl` or `answers.jsonl`, or files from an evaluation's report folder, together with the images
    that they name.

    Raises ValueError if there is nothing to publish.
    """
    if output.is_file():
        return {f"data/{output.name}": output} | _images(output.parent, f"data/{PICTURES}")
    files = {
        f"{part}/{file.name}": file
        for part in ("judgments", "answers")
        for file in sorted((output / part).glob("*.jsonl"))
    }
    if not any(path.startswith("judgments/") for path in files):
        raise ValueError(
            f"{output} has no judgments: name a finished preferences stage or an evaluation with judges"
        )
    return files | _images(output, PICTURES)


def _images(folder: Path, place: str) -> dict[str, Path]:
    return {f"{place}/{file.name}": file for file in sorted((folder / PICTURES).glob("*"))}


def renamed(files: Mapping[str, Path]) -> dict[str, str]:
    """Returns the text of files in which paths of models or judges on this machine are replaced, keyed by
    file path. Such paths are not published."""
    rows = {
        path: [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        for path, file in files.items()
        if path.startswith(("judgments/", "answers/"))
    }

    def named(row: dict[str, Any]) -> dict[str, str]:
        return {key: row[key] for key in NAMED if isinstance(row.get(key), str)}

    public = public_names(name for part in rows.values() for row in part for name in named(row).values())
    changed = {
        path: [row | {key: public[name] for key, name in named(row).items()} for row in part]
        for path, part in rows.items()
    }
    return {
        path: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        for path, part in changed.items()
        if part != rows[path]
    }


def data_card(
    output: Path,
    files: Mapping[str, Path],
    title: str,
    license: str,
    branch: str = "main",
    gates: Sequence[Verdict] = (),
) -> str:
    """Returns the README.md of a data set. `title` is the Hub ID or a name. `branch` and `gates` are as for
    `card`. The same inputs give the same card: it contains no dates and no paths on this machine."""
    made_by = lineage(output)
    files = {path: file for path, file in files.items() if path.endswith(".jsonl")}
    parts = list(dict.fromkeys(path.split("/")[0] for path in files))
    kind = output.stem if output.is_file() else "judgments"
    splits = {part: "train" if part == "data" else part for part in parts}
    configs = [
        {
            "config_name": "default" if part == "data" else part,
            "data_files": [{"split": splits[part], "path": f"{part}/*.jsonl"}],
        }
        for part in parts
    ]
    header: dict[str, Any] = {"license": license, "tags": ["alignflow", kind], "configs": configs}
    origin = list(
        dict.fromkeys(
            parted(source["path"])[0] for _, _, source in sources(made_by) if is_hub_id(source["path"])
        )
    )
    if origin:
        header["source_datasets"] = origin
    counts = {
        path: sum(1 for line in file.open(encoding="utf-8") if line.strip()) for path, file in files.items()
    }
    place = title if is_hub_id(title) else "path/to/this/folder"
    name = "" if parts == ["data"] else f', "{parts[0]}"'
    name += f', revision="{branch}"' if is_hub_id(title) and branch != "main" else ""
    return "\n".join(
        [
            f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---\n",
            f"# {title}\n",
            f"{KINDS[kind].capitalize()} made with alignflow by the stage {made_by.name}. {MADE[kind]}\n",
            "## Use\n",
            (
                f'```python\nfrom datasets import load_dataset\n\nrows = load_dataset("{place}"{name},'
                f' split="{splits[parts[0]]}")\n```\n'
            ),
            "## Files\n",
            table(("file", "rows"), counts.items()),
            "## Columns\n",
            table(
                ("files", "column", "type", "what it is"),
                [row for part in parts for row in _columns(part, files)],
            ),
            "## Lineage\n",
            f"```\n{tree(made_by)}\n```\n",
            "## Data\n",
            data_sets(made_by),
            *gate_section(gates),
            "## Configuration\n",
            configuration(made_by),
            "## Intended use and limits\n",
            _limits(made_by, kind),
        ]
    )


def _columns(part: str, files: Mapping[str, Path]) -> list[tuple[str, str, str, str]]:
    """Returns the columns in the first row of each file of a part; each column is listed once."""
    columns: dict[str, str] = {}
    for path, file in files.items():
        if path.startswith(f"{part}/"):
            with file.open(encoding="utf-8") as lines:
                for column, value in json.loads(lines.readline() or "{}").items():
                    columns.setdefault(column, _type(value))
    return [(part, column, kind, MEANING.get(column, "")) for column, kind in columns.items()]


def _type(value: Any) -> str:
    names = {
        str: "string",
        bool: "true or false",
        int: "number",
        float: "number",
        list: "list",
        dict: "record",
    }
    return names.get(type(value), "")


def _limits(made_by: Ancestor, kind: str) -> str:
    if kind == "judgments":
        return (
            "Verdicts are a judge's, not people's; they compare these models on these questions and say"
            " nothing of others.\n"
        )
    return (
        "Answers are a model's, right or wrong; rewards are a program's or model's opinion, not people's."
        " Respect the licences of the prompts, of the policy and of the reward model named above.\n"
    )
