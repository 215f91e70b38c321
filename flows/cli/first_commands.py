"""Commands for new users: `alignflow demo` and `alignflow init`."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args

from flows.cli.show import OK, Whole, console
from rlhf_core.config import KINDS
from rlhf_core.hub.ids import is_remote
from rlhf_core.hub.positions import positions_of, stored_config
from rlhf_core.recipe.load_recipe import recipe_of
from rlhf_core.recipe.yaml_text import parse
from rlhf_core.runs.prepared import prepared
from rlhf_core.system import orphan_watcher
from rlhf_core.system.files import write_text
from rlhf_core.system.machine import MachineLacks, num_cpus, num_gpus
from rlhf_core.system.processes import WRONG_INPUT, child_environment

Kind = Literal["sft", "dpo", "ppo", "loop"]
# Required and optional data of each kind of recipe.
NEEDED: dict[str, tuple[str, ...]] = {
    "sft": ("sft_data",),
    "dpo": ("preference_data",),
    "ppo": ("preference_data", "prompts"),
    "loop": ("preference_data", "prompts"),
}
OPTIONAL: dict[str, tuple[str, ...]] = {"sft": ("questions",)} | dict.fromkeys(
    ("dpo", "ppo", "loop"), ("sft_data", "questions")
)
MEANING = {
    "kind": (
        "What to train: sft; dpo on preference pairs; ppo with a reward model; loop, rounds of DPO on sampled"
        " answers"
    ),
    "base_model": "Base model, a local folder or a Hub id",
    "sft_data": "Chats to imitate, a file or a Hub data set",
    "preference_data": "Preference pairs, a file or a Hub data set",
    "prompts": "Prompts to answer, a file or a Hub data set",
    "questions": "Held-out questions to evaluate on, a file or a Hub data set",
    "gpus": "GPUs",
    "name": "Name of the recipe",
}
FINAL = {"loop": "iterative_dpo"}  # stage that makes the final model, where it is not named like the kind
MATERIAL = "demo/material"
# enough for the material script to find that there is nothing to do, or that other files are in the way
AT_ONCE_SECONDS = 1.0
BATCH = 128  # documents of an optimiser step
LENGTH = 1024  # token limit of a prompt, and of an answer
PLAIN = re.compile(r"[A-Za-z./~_][\w./@~-]*")


def demo(*, folder: Path = Path("."), plain: bool = False) -> int:
    """Run the whole lifecycle on a tiny model: generate its material with a seeded script, train, evaluate,
    and write one page.

    Args:
        folder: where demo/ (the material) and artifacts/ are created.
        plain: print the log instead of live lines, as when the output is not a terminal.
    """
    missing = [
        name for name in ("torch", "transformers", "tokenizers") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise MachineLacks(
            f"the demo trains models, and {', '.join(missing)} cannot be imported: install the engines"
            " (README, Try it)"
        )
    from flows.cli.run_commands import run
    from flows.cli.terminal.live import working

    shipped = _shipped()
    _make_folder(folder)
    os.chdir(folder)  # artifacts go there
    if not Path(MATERIAL).exists():
        orphan_watcher.start()
        prepared.plan(KINDS["sft"].package, "sft")
        prepared.start()
    try:
        with working("making the demo's model and data", plain):
            made = _make_material(shipped / "demo" / "make_material.py")
        print(made, end="", flush=True)  # after the spinner, not on its line
        # next to the material: paths in a recipe are relative to its file
        recipe = Path("demo/tiny-cpu.yaml")
        text = (shipped / "recipes" / "tiny-cpu.yaml").read_text()
        write_text(recipe, text.replace("../../demo/material", "material"))
        return run(str(recipe), plain=plain)
    finally:
        prepared.end()


def _shipped() -> Path:
    """Returns the folder that contains demo/, recipes/ and tasks/: flows/shipped/ in a wheel (setup.py),
    deployments/ in a checkout."""
    flows = Path(__file__).resolve().parents[1]
    return flows / "shipped" if (flows / "shipped").is_dir() else flows.parent / "deployments"


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be created ({error.strerror}): give another folder") from None


def _make_material(script: Path) -> str:
    """Creates the demo's base model and data if they are missing, and returns the script's output. Raises
    ValueError when the folder holds other files."""
    command = [sys.executable, "-P", str(script), "--out", MATERIAL]
    with subprocess.Popen(
        command,
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            printed, told = _outputs_of(process)
        except BaseException:
            process.kill()
            raise
    if process.returncode == WRONG_INPUT:
        raise ValueError(told.strip().splitlines()[-1])
    if process.returncode:
        raise RuntimeError(f"the demo's material could not be created:\n{told.strip()[-3000:]}")
    return printed


def _outputs_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Waits for a process and returns its stdout and stderr. Unless the process ends immediately, uses the
    time to import the flow, which takes seconds."""
    try:
        return process.communicate(timeout=AT_ONCE_SECONDS)
    except subprocess.TimeoutExpired:
        import flows.alignment  # noqa: F401

        return process.communicate()


def init(
    folder: Path = Path("."),
    *,
    kind: Kind | None = None,
    base_model: str | None = None,
    sft_data: str | None = None,
    preference_data: str | None = None,
    prompts: str | None = None,
    questions: str | None = None,
    gpus: Whole | None = None,
    name: str | None = None,
) -> int:
    """Write a commented recipe to start from, recipe.yaml. Asks for values that no flag gives; without a
    terminal, the needed flags are required.

    Args:
        folder: where the recipe is written; an existing recipe.yaml is an error and is kept.
        kind: what to train. sft; dpo: on preference pairs; ppo: with a reward model; loop: rounds of DPO on
            sampled answers.
        base_model: local folder or Hub id of the model to start from.
        sft_data: chats to imitate, a file or a Hub data set; optional for dpo, ppo and loop, which then start
            from the base model.
        preference_data: rows with prompt, chosen and rejected; for dpo, ppo and loop.
        prompts: rows with prompt; for ppo and loop.
        questions: held-out rows with prompt and answer; optional, they add an evaluation.
        gpus: GPUs of one machine, 0 for none; default: the GPUs of this machine.
        name: name of the recipe; default: the folder's name.
    """
    path = folder / "recipe.yaml"
    if path.exists():
        raise ValueError(f"{path} exists already: give another folder, or remove it")
    flags = {
        "sft_data": sft_data,
        "preference_data": preference_data,
        "prompts": prompts,
        "questions": questions,
    }
    given: dict[str, str | None] = {"kind": kind, "base_model": base_model, **flags}
    if kind is not None and (
        unread := [field for field in flags if flags[field] and field not in NEEDED[kind] + OPTIONAL[kind]]
    ):
        raise ValueError(
            f"a recipe of kind {kind} does not read {_flags(unread)}: leave it out, or give another --kind"
        )
    if gpus is not None and gpus < 0:
        raise ValueError(f"--gpus {gpus}: give the number of GPUs of one machine, or 0")
    default_name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.absolute().name).strip("-._") or "my-model"
    if sys.stdin.isatty():
        given = _answered(given)
        gpus = gpus if gpus is not None else int(_ask("gpus", str(num_gpus()), r"\d+"))
        name = name or _ask("name", default_name)
    elif missing := [
        field for field in ("kind", "base_model", *NEEDED.get(kind or "", ())) if not given[field]
    ]:
        raise ValueError(
            f"give {_flags(missing)}: standard input is not a terminal, so the values cannot be asked for"
        )
    text = recipe_text(given, num_gpus() if gpus is None else gpus, name or default_name, path)
    _make_folder(folder)
    write_text(path, text)
    console.print(f"wrote {path}. Next: alignflow validate {path} --here", markup=False, highlight=False)
    return OK


def recipe_text(given: dict[str, str | None], gpus: int, name: str, path: Path) -> str:
    """Returns a commented recipe as YAML. `given`: values of `init`'s flags; `path`: the recipe's path, for
    its comments.

    Raises ValueError for a name or value that a recipe does not accept.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    kind = given["kind"] or ""
    start = "sft" if given["sft_data"] else "base"
    known = {
        "path": path.as_posix(),
        "gpus": gpus,
        "name": name,
        "batch": BATCH,
        "share": max(1, min(10, num_cpus() * 10 // 5)) / 10,  # CPUs for each of PPO's five groups
        "length": min(LENGTH, (positions_of(stored_config(given["base_model"] or "")) or 2 * LENGTH) // 2),
        "start": start,
        "final": FINAL.get(kind, kind),
        "baseline": "base" if kind == "sft" else start,
    }
    environment = Environment(
        loader=PackageLoader("flows.cli"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["quoted"] = _quoted
    text = environment.get_template("recipe.yaml.j2").render(
        {**{name: _beside(name, text, path) for name, text in given.items()}, **known}
    )
    recipe_of(parse(text, "recipe.yaml.j2"))
    return text


def _beside(name: str, value: str | None, recipe: Path) -> str | None:
    """Returns a value from the command line as the recipe must contain it: a relative path becomes relative
    to the recipe's folder."""
    local = (
        name != "kind"
        and value
        and not is_remote(value)
        and not os.path.isabs(value)
        and not value.startswith("~")
    )
    return os.path.relpath(value, recipe.parent) if value and local and recipe.parent != Path() else value


def _answered(given: dict[str, str | None]) -> dict[str, str | None]:
    """Returns the given values, completed with the user's answers."""
    kind = given["kind"] or _ask("kind", "sft", "|".join(get_args(Kind)))
    answers = {**given, "kind": kind, "base_model": given["base_model"] or _ask("base_model")}
    for field in NEEDED[kind]:
        answers[field] = given[field] or _ask(field)
    for field in OPTIONAL[kind]:
        answers[field] = given[field] or _ask(field, "") or None
    return answers


def _ask(field: str, default: str | None = None, pattern: str = ".*") -> str:
    """Asks until the answer matches `pattern`, and returns it. Raises ValueError at the end of the input."""
    shown = "" if default is None else f" [{default or 'none'}]"
    while True:
        try:
            answer = input(f"{MEANING[field]}{shown}: ").strip() or default
        except EOFError:
            raise ValueError(f"no answer was given: give {_flags([field])}") from None
        if answer is not None and re.fullmatch(pattern, answer):
            return answer


def _flags(fields: list[str]) -> str:
    flags = ["--" + field.replace("_", "-") for field in fields]
    return " and ".join([", ".join(flags[:-1]), flags[-1]] if len(flags) > 1 else flags)


def _quoted(value: str) -> str:
    """Returns a string as YAML, quoted if YAML would otherwise read it as another value."""
    plain = PLAIN.fullmatch(value) and parse(f"[{value}]", "value") == [value]
    return value if plain else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
