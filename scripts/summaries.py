"""Make conversations from Python's standard library: the signature of a function and the first line of its docstring.

    python scripts/summaries.py FOLDER

Write FOLDER/train.jsonl and FOLDER/held_out.jsonl, rows of prompt and completion. The two files come from different
modules, and no completion is in both.
"""

import ast
import hashlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from jaxopt_llm.data.reading.source import read_standard_library

HELD_OUT = 10  # one in 10 modules is held out
MOST = 100  # maximum characters of a prompt, and of a completion


def summaries(source: bytes) -> Iterator[tuple[str, str]]:
    """Yield (first line of the docstring, signature) of each function of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
            signature, summary = f"def {node.name}({ast.unparse(node.args)})", docstring.splitlines()[0]
            if summary.endswith(".") and max(len(signature), len(summary)) <= MOST:
                yield summary, signature


def main() -> None:
    folder = Path(sys.argv[1])
    warnings.simplefilter("ignore")  # some modules have invalid escapes
    found: dict[str, dict[str, str]] = {"train": {}, "held_out": {}}
    for module in read_standard_library():
        held_out = hashlib.sha256(module.key).digest()[0] % HELD_OUT == 0
        found["held_out" if held_out else "train"] |= summaries(module.content)
    folder.mkdir(parents=True, exist_ok=True)
    for split, told in found.items():
        rows = [
            {"prompt": signature, "completion": summary}
            for summary, signature in told.items()
            if split == "train" or summary not in found["train"]
        ]
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        print(f"{len(rows):,} functions and their summaries in {folder / split}.jsonl")


if __name__ == "__main__":
    main()
