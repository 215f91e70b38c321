"""Puts what `alignflow demo` runs, folders of deployments/, into the wheel as flows/shipped; all else of the
build: pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("demo", "recipes", "tasks")


class BuildWithDeployments(build_py):
    """Copies the folders, unless the install is editable: `alignflow` then reads deployments/ itself."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in SHIPPED:
                target = Path(self.build_lib, "flows", "shipped", name)
                shutil.copytree(
                    Path("deployments", name),
                    target,
                    dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("__pycache__"),
                )


setup(cmdclass={"build_py": BuildWithDeployments})
