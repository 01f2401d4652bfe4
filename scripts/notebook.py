"""Write the notebooks: docs/guides/finetune.ipynb from the guide's page, docs/examples/vit.ipynb from the program.

    .venv/bin/python scripts/notebook.py          write the notebooks
    .venv/bin/python scripts/notebook.py --check  exit with 1 if a notebook is out of date

In a page, blocks of bash and of Python become cells of code; everything between them becomes cells of Markdown. In a
program, the docstring becomes a cell of Markdown, and each class and function a cell of code. There are no outputs.
"""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
SOURCES = (DOCS / "guides/finetune.md", DOCS / "examples/vit.py")
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


Part = tuple[str, str]  # language and text of a cell


def split_page(page: str) -> list[Part]:
    # The text before the first block; then language, code and following text of each block.
    before, *rest = BLOCK.split(page)
    parts = [("markdown", before)]
    for language, code, text in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        parts += [(language, code), ("markdown", text)]
    return parts


def split_program(program: str) -> list[Part]:
    """Return the parts of a program; two empty lines separate its classes and functions."""
    docstring = ast.get_docstring(ast.parse(program))
    assert docstring
    _, _, code = program.partition('"""\n\n')
    title, _, rest = docstring.partition("\n")
    return [("markdown", f"# {title}\n{rest}"), *(("python", part) for part in code.split("\n\n\n"))]


def make_cell(index: int, language: str, source: str) -> dict[str, Any]:
    """Return a cell in nbformat 4.5."""
    cell = {"id": f"cell-{index}", "metadata": {}}
    if language == "markdown":
        return {"cell_type": "markdown"} | cell | {"source": source.splitlines(keepends=True)}
    code = ("%%bash\n" * (language == "bash") + source).splitlines(keepends=True)
    return {"cell_type": "code"} | cell | {"source": code, "execution_count": None, "outputs": []}


def notebook(parts: list[Part]) -> str:
    """Return a notebook as JSON."""
    kept = [(language, text.strip("\n")) for language, text in parts if text.strip("\n")]
    cells = [make_cell(index, *part) for index, part in enumerate(kept)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    for source in SOURCES:
        split = split_page if source.suffix == ".md" else split_program
        text, path = notebook(split(source.read_text())), source.with_suffix(".ipynb")
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            command = "python scripts/notebook.py"
            print(f"{path.relative_to(DOCS.parent)} is out of date; write it again: {command}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
