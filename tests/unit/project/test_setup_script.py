"""requirements/install.sh, with a stand-in for Python that makes the environment, pip and uv of stand-ins,
and logs each call."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import captured

ROOT = Path(__file__).resolve().parents[3]
STARTS = {
    "uv": "uv --quiet pip install --python .venv/bin/python ",
    "pip": "python -m pip --quiet --quiet install ",
    "with": "with ",
}
UNHASHED = ("torch==", "--editable .")
# Of Python: supports every check, makes .venv with itself as the interpreter, and as `-m pip` does what PIP
# says.
PYTHON = """#!/usr/bin/env bash
echo "python $*" >>"$LOG"
case "$*" in
    "-m venv --clear .venv") rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *-m\\ pip*--version) ;;
    *-m\\ pip*uv.txt) eval "$PIP" && cp "$UV_STAND_IN" .venv/bin/uv ;;
    *-m\\ pip*) eval "$PIP" ;;
    requirements/pip_settings.py) echo "export UV_FROM_PIP=1" ;;
    *importlib.metadata*) ;;
esac
"""
UV = """#!/usr/bin/env bash
echo "uv $*" >>"$LOG"
echo "with $UV_LINK_MODE $UV_FROM_PIP $UV_COMPILE_BYTECODE" >>"$LOG"
mkdir -p "$UV_CACHE_DIR" && touch "$UV_CACHE_DIR/file"
eval "$UV"
"""
NOT_HERE = "[[ $* != *uv.txt* ]]"  # of PIP: has all but uv
# has PyTorch's build at its own address alone
NO_TORCH_HERE = '[[ "$*" != *torch==* || "$*" == *--index-url* ]]'


class Checkout:
    """A copy of requirements/ whose Python, pip and uv are stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        shutil.copytree(ROOT / "requirements", folder / "requirements")
        shutil.copy(ROOT / "pyproject.toml", folder)
        for name, script in (("python-stand-in", PYTHON), ("uv-stand-in", UV)):
            (folder / name).write_text(script)
            (folder / name).chmod(0o755)

    def setup(
        self, *extra: str, pip: str = "true", uv: str = "true", **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs the script; `pip` and `uv` are what these do, as shell, and `more` are variables of the
        environment."""
        self.log.write_text("")
        variables = {
            "PYTHON": str(self.folder / "python-stand-in"),
            "UV_STAND_IN": str(self.folder / "uv-stand-in"),
        }
        variables |= {"PATH": os.environ["PATH"], "LOG": str(self.log), "PIP": pip, "UV": uv} | more
        command = ["bash", "requirements/install.sh", *extra]
        return captured(command, cwd=self.folder, env=variables, timeout=60)

    def calls(self, tool: str) -> list[str]:
        """Returns what `uv` or `pip` was asked to install, in order; of `with`, uv's link mode, pip's setting
        and compilation."""
        start = STARTS[tool]
        return [
            line.removeprefix(start) for line in self.log.read_text().splitlines() if line.startswith(start)
        ]

    def finished(self, name: str = "cpu") -> bool:
        return (self.folder / f".venv/.stamp-{name}").exists() and not (
            self.folder / ".venv/.unfinished"
        ).exists()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_uv_installs_everything_with_hashes_but_torch_and_alignflow(checkout: Checkout) -> None:
    done = checkout.setup("docs")
    assert done.returncode == 0, done.stderr
    assert checkout.calls("pip") == ["--require-hashes --no-deps -r requirements/uv.txt"]
    lines = checkout.calls("uv")
    files = [line.split()[-1] for line in lines if " -r " in line]
    assert files == [".venv/.setuptools.txt", "requirements/cpu.txt", "requirements/docs.txt"]
    assert all("--no-deps" in line for line in lines)
    loose = [line for line in lines if "--require-hashes" not in line]
    assert len(loose) == 2 and all(name in line for name, line in zip(UNHASHED, loose, strict=True))
    assert checkout.finished() and checkout.finished("docs")


def test_uv_links_to_no_cache_that_stays_and_knows_what_pip_is_told(checkout: Checkout) -> None:
    checkout.setup()
    assert checkout.calls("with") == ["hardlink 1 "] * 4
    assert not (checkout.folder / ".uv-cache").exists()


def test_a_cache_of_the_user_stays_and_is_copied_from(checkout: Checkout) -> None:
    checkout.setup(UV_CACHE_DIR=str(checkout.folder / "mine"))
    assert checkout.calls("with") == ["copy 1 "] * 4
    assert [path.name for path in (checkout.folder / "mine").iterdir()] == ["file"]


def test_everything_is_compiled_where_python_may_not_write_what_it_compiles(checkout: Checkout) -> None:
    checkout.setup(PYTHONDONTWRITEBYTECODE="1")
    assert checkout.calls("with") == ["hardlink 1 1"] * 4


def test_what_is_there_is_not_installed_again(checkout: Checkout) -> None:
    checkout.setup("docs")
    checkout.setup("docs")
    assert checkout.log.read_text() == ""


@pytest.mark.parametrize(
    ("pip", "uv", "said"),
    [(NOT_HERE, "true", "setup: uv cannot be installed: pip "), ("true", "exit 2", "setup: uv failed: pip ")],
)
def test_pip_installs_the_same_where_uv_does_not(checkout: Checkout, pip: str, uv: str, said: str) -> None:
    done = checkout.setup("docs", pip=pip, uv=uv)
    assert done.returncode == 0 and checkout.finished() and checkout.finished("docs")
    assert done.stdout.count("pip installs the packages instead") == 1 and said in done.stdout
    first, *lines = checkout.calls("pip")
    assert first.endswith("requirements/uv.txt")
    assert [line for line in lines if "--require-hashes" not in line] == [
        "--no-deps torch==2.13.0+cpu",
        "--no-deps --no-build-isolation --editable .",
    ]
    files = [
        line.split()[-1] for line in lines if "--require-hashes --no-deps --no-build-isolation -r" in line
    ]
    assert files == [".venv/.setuptools.txt", "requirements/cpu.txt", "requirements/docs.txt"]


def test_uv_that_fails_in_the_middle_is_not_asked_again(checkout: Checkout) -> None:
    done = checkout.setup(uv="[[ $* != *cpu.txt* ]]")
    assert done.returncode == 0 and checkout.finished()
    assert "cpu.txt" in checkout.calls("uv")[-1]
    assert [line.split()[-1] for line in checkout.calls("pip")] == [
        "requirements/uv.txt",
        "requirements/cpu.txt",
        ".",
    ]


@pytest.mark.parametrize(("uv", "times"), [(NO_TORCH_HERE, 2), ("[[ $* != *torch==* ]]", 4), ("exit 2", 2)])
def test_torch_comes_from_its_own_address_where_the_index_lacks_it(
    checkout: Checkout, uv: str, times: int
) -> None:
    done = checkout.setup(pip=NO_TORCH_HERE, uv=uv)
    assert done.returncode == 0, done.stderr
    asked = [line for line in checkout.calls("uv") + checkout.calls("pip") if "torch==" in line]
    assert ["--index-url https://download.pytorch.org/whl/cpu" in line for line in asked] == [False, True] * (
        times // 2
    )


def test_nothing_counts_as_installed_when_neither_can(checkout: Checkout) -> None:
    done = checkout.setup(pip="[[ $* != *cpu.txt* ]]", uv="exit 2")
    assert done.returncode != 0 and not checkout.finished()
    assert checkout.setup().returncode == 0 and checkout.finished()


@pytest.mark.parametrize("what", ["cpu.txt", "docs.txt"])
def test_a_setup_that_was_killed_is_begun_anew(checkout: Checkout, what: str) -> None:
    done = checkout.setup("docs", uv=f'[[ "$*" != *{what}* ]] || kill -9 $PPID')
    assert done.returncode == -9 and not checkout.finished() and not checkout.finished("docs")
    assert (checkout.folder / ".uv-cache/file").exists(), "what it has loaded is of use for the next"
    assert checkout.setup("docs").returncode == 0
    assert "python -m venv --clear .venv\n" in checkout.log.read_text()
    assert checkout.finished() and checkout.finished("docs")


@pytest.mark.parametrize("name", ["uv.txt", "cpu.txt", "docs.txt", "pip_settings.py"])
def test_a_changed_file_is_installed_anew(checkout: Checkout, name: str) -> None:
    checkout.setup()
    with (checkout.folder / "requirements" / name).open("a") as file:
        file.write("# another\n")
    checkout.setup()
    assert "requirements/cpu.txt" in checkout.log.read_text()


def test_torchvision_is_guarded_where_its_operators_are_missing(tmp_path: Path) -> None:
    file = tmp_path / "torchvision" / "_meta_registrations.py"
    file.parent.mkdir()
    described = '@torch.library.register_fake("torchvision::{}")\ndef meta_{}(): ...\n'
    file.write_text(described.format("nms", "nms") + described.format("qnms", "qnms"))
    (cached := tmp_path / "cached.py").hardlink_to(file)
    before = cached.read_text()
    script = [sys.executable, str(ROOT / "requirements/torchvision_without_operators.py"), str(tmp_path)]
    for _ in range(2):  # the second time changes nothing
        subprocess.run(script, check=True, timeout=60)
        changed = file.read_text()
        assert changed.count(" if torchvision.extension._has_ops() else ") == 2
        assert "def meta_qnms" in changed and "@torch.library" not in changed
    assert cached.read_text() == before, "a file of uv's cache has changed"
