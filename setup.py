"""Build of the wheel: the recipes of configs/ go into the package, as jaxopt_llm/configs/."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

RECIPES = Path(__file__).parent / "configs"


class BuildWithRecipes(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable installation reads configs/ itself
            shutil.copytree(
                RECIPES,
                Path(self.build_lib) / "jaxopt_llm" / "configs",
                ignore=shutil.ignore_patterns("__pycache__"),
                dirs_exist_ok=True,
            )


setup(cmdclass={"build_py": BuildWithRecipes})
