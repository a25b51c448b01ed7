"""Builds put conf/ and search_spaces/ inside the package; everything else is in pyproject.toml."""

import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py


class WithData(build_py):
    """Copies the data folders of the checkout into the built package."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder in ("conf", "search_spaces"):
            target = pathlib.Path(self.build_lib) / "autotune" / folder
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(folder, target)


setup(cmdclass={"build_py": WithData})
