"""Documents to learn from, split into training and held-out."""

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from jaxopt_llm.errors import InputError

# Installed packages, tests, and pydoc's help text: one generated file that would outweigh the rest of a held-out split.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"})
# Written by the build or the administrator: these differ between two machines with the same Python.
_LOCAL_FOLDER_PREFIX = "config-"
_LOCAL_FILE_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class DataConfig:
    """What is read."""

    held_out: float = 0.05
    """share of the files kept out of training for evaluation, above 0 and below 1"""

    def problems(self) -> list[str]:
        return [] if 0 < self.held_out < 1 else [f"data.held_out={self.held_out}: must lie above 0 and below 1"]


@dataclass(frozen=True)
class Document:
    """One text: a name that is stable across machines (a relative path with `/`) and its bytes, never empty."""

    name: str
    content: bytes


@dataclass(frozen=True)
class Corpus:
    """Two disjoint splits, each sorted by name.

    `sha256` is the hex digest of every name and content of both splits, whichever way they are split: a run stores
    it, and compares it on resume.
    """

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]
    sha256: str


def standard_library_corpus(config: DataConfig) -> Corpus:
    """Python's standard library, about 11 MB of source code that every interpreter carries: nothing is downloaded.

    Takes the `.py` files of the running interpreter, without installed packages, tests, generated files and empty
    ones. The text belongs to the Python version, so another version has another `sha256`.

    A file is held out by the hash of its relative path alone: adding a file moves no other, and raising
    `config.held_out` only moves files from training to held-out.

    Raises:
        InputError: the interpreter carries no source files (some embedded builds).
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents = _python_files(root)
    if not documents:
        raise InputError(f"no .py files of the standard library under {root}: use a Python that carries its sources")
    return Corpus(
        training=tuple(d for d in documents if not _is_held_out(d.name, config.held_out)),
        held_out=tuple(d for d in documents if _is_held_out(d.name, config.held_out)),
        sha256=_sha256(documents),
    )


def _python_files(root: Path) -> list[Document]:
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # In place, so that os.walk does not descend: site-packages can be a hundred times the library.
        subfolders[:] = [s for s in subfolders if s not in _SKIPPED_FOLDERS and not s.startswith(_LOCAL_FOLDER_PREFIX)]
        paths += [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith(_LOCAL_FILE_PREFIXES)]
    documents = (Document(path.relative_to(root).as_posix(), path.read_bytes()) for path in paths)
    return sorted((d for d in documents if d.content), key=lambda d: d.name)


def _is_held_out(name: str, share: float) -> bool:
    # Not hash(): Python salts it anew in every process.
    uniform = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    return uniform < share


def _sha256(documents: list[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        # The length keeps a byte from moving between a name, its content and the next name unseen.
        digest.update(f"{document.name}\0{len(document.content)}\0".encode())
        digest.update(document.content)
    return digest.hexdigest()
