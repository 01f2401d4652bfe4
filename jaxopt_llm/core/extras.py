"""The command that installs what an extra of this package names, such as `plan` or `report`."""

from pathlib import Path

_HOLDER = Path(__file__).parent.parent.parent  # the clone, or site-packages


def describe_install(extra: str) -> str:
    """Return the command that adds an extra to the installed package.

    The package is in no registry. pip finds the packages of an extra in the metadata of a wheel that is installed. A
    clone is named by its path, because Python may find it without an installation.
    """
    if not (_HOLDER / "pyproject.toml").is_file():
        return f"pip install 'jaxopt_llm[{extra}]'"
    clone = "." if Path.cwd() == _HOLDER else _HOLDER
    return f"pip install -e '{clone}[{extra}]'"
