"""Renders the manifests of `templates/` for a cluster of a given size.

    python deployments/k8s/render.py --nodes 4 --gpus-per-node 8 --out build/k8s

Values come from `values.yaml` (or --values FILE), then from the flags. Nothing is applied: look at the
files, then run `kubectl apply -f`.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import jinja2
import yaml
from pods import numbered_pod, ray_cluster, work_pool
from pydantic import ValidationError
from values import Values

HERE = Path(__file__).parent


def read_values(path: Path, **flags: object) -> Values:
    """Reads the values from a file; flags override them. Raises ValueError with one sentence (a line) for
    each mistake."""
    try:
        raw = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"values {path}: {error}; give a YAML file with values") from None
    try:
        return Values.model_validate(
            {**raw, **{name: value for name, value in flags.items() if value is not None}}
        )
    except ValidationError as error:
        problems = [
            f"values {path}: {'.'.join(map(str, item['loc']))}: {item['msg']}; correct it"
            for item in error.errors()
        ]
        raise ValueError("\n".join(problems)) from None


def render(values: Values) -> dict[str, str]:
    """Returns the text of every manifest by file name."""
    loader = jinja2.FileSystemLoader(HERE / "templates")
    environment = jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.filters["block"] = block
    shared = {
        "v": values,
        "numbered_pod": numbered_pod,
        "ray_cluster": ray_cluster,
        "work_pool": json.dumps(work_pool(values), indent=2),
    }
    return {
        name.removesuffix(".j2"): environment.get_template(name).render(**shared) + "\n"
        for name in sorted(environment.list_templates())
    }


def block(value: Any, indent: int) -> str:
    """Returns a value as YAML lines to follow a key, indented by `indent` spaces."""
    text = yaml.safe_dump(value, sort_keys=False, default_flow_style=False, width=140)
    return "\n" + textwrap.indent(text.rstrip("\n"), " " * indent)


def main() -> int:
    parser = argparse.ArgumentParser(description="Renders the Kubernetes manifests; applies nothing.")
    parser.add_argument("--values", type=Path, default=HERE / "values.yaml", help="YAML file with values")
    parser.add_argument("--nodes", type=int, help="nodes with GPUs")
    parser.add_argument("--gpus-per-node", type=int, help="GPUs of one node")
    parser.add_argument("--out", type=Path, default=Path("build/k8s"), help="folder for the manifests")
    arguments = parser.parse_args()
    try:
        values = read_values(arguments.values, nodes=arguments.nodes, gpus_per_node=arguments.gpus_per_node)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, text in render(values).items():
        (arguments.out / name).write_text(text)
        print(arguments.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
