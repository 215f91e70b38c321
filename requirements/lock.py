"""Writes lock files anew: the versions that they name, with the sha256 of their files. Usage: python
requirements/lock.py [NAME ...]

Needs uv on PATH; the package index is that of uv's settings. Hashes are of wheels for Linux; of the sdist
where a platform has no wheel. cpu, dev, docs, uv and vision keep the packages that they list. gpu and
orchestration follow pyproject.toml: versions stay as they are named, missing packages are added, unneeded
ones removed.
"""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
LINUX = [
    *(f"manylinux_2_{minor}" for minor in range(5, 40)),
    "manylinux2014",
    "manylinux2010",
    "manylinux1",
    "linux",
]


class Lock(NamedTuple):
    extra: str = ""
    builds: tuple[str, ...] = ()  # what the build of an sdist needs besides setuptools
    pythons: tuple[int, ...] = (11, 12)
    machines: tuple[str, ...] = ("x86_64", "aarch64")


LOCKS = {name: Lock() for name in ("cpu", "dev", "docs", "uv", "vision")}
LOCKS |= {
    "gpu": Lock("gpu", ("wheel",), (12,), ("x86_64",)),
    "orchestration": Lock("kubernetes", pythons=(11,)),
}


def resolve(file: Path, lock: Lock) -> list[dict[str, Any]]:
    """Returns the packages of a pylock.toml with the versions of `file`."""
    what = [file, "--no-deps", "--universal"]
    if lock.extra:
        what = [
            ROOT / "pyproject.toml",
            "-",
            "--extra",
            lock.extra,
            "--constraint",
            file,
            "--python-platform",
            "x86_64-manylinux_2_39",
        ]
    builds = [*lock.builds, *tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]]
    command = [
        "uv",
        "pip",
        "compile",
        "--format",
        "pylock.toml",
        "--python-version",
        f"3.{lock.pythons[0]}",
        *what,
    ]
    done = subprocess.run(command, input="\n".join(builds), check=False, text=True, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"{file} is as it was: see uv's message above")
    return tomllib.loads(done.stdout)["packages"]


def entry(package: dict[str, Any], platforms: list[set[Tag]]) -> str:
    """Returns the lines of a package: version, marker, and the hashes of the files that pip may choose on
    these platforms."""
    files = [
        (parse_wheel_filename(file["url"].rpartition("/")[2])[3], file["hashes"]["sha256"])
        for file in package.get("wheels", ())
    ]
    hashes = {digest for tags, digest in files if any(tags & platform for platform in platforms)}
    if "sdist" in package and not all(any(tags & platform for tags, _ in files) for platform in platforms):
        hashes.add(package["sdist"]["hashes"]["sha256"])
    marker = f" ; {package['marker']}" if "marker" in package else ""
    return " \\\n    ".join(
        [
            f"{package['name']}=={package['version']}{marker}",
            *(f"--hash=sha256:{digest}" for digest in sorted(hashes)),
        ]
    )


for name in sys.argv[1:] or LOCKS:
    path = ROOT / f"requirements/{name}.txt"
    lock = LOCKS[name]
    names = [
        (python, [f"{linux}_{machine}" for linux in LINUX])
        for python in lock.pythons
        for machine in lock.machines
    ]
    platforms = [
        {*cpython_tags((3, python), platforms=on), *compatible_tags((3, python), f"cp3{python}", on)}
        for python, on in names
    ]
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    path.write_text(
        "\n".join([*header, *(entry(package, platforms) for package in resolve(path, lock))]) + "\n"
    )
