"""Write docs/guides/finetune.ipynb, the notebook of a guide, from its page.

    .venv/bin/python scripts/notebook.py          write the notebook
    .venv/bin/python scripts/notebook.py --check  exit with 1 if the notebook is out of date

Blocks of bash and of Python become cells of code; everything between them becomes cells of Markdown. There are no
outputs.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs/guides/finetune.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def cells(page: str) -> list[dict[str, Any]]:
    """Return the cells of a page in nbformat 4.5."""
    found: list[dict[str, Any]] = []

    def add(kind: str, source: str, **more: Any) -> None:
        if source := source.strip("\n"):
            lines = source.splitlines(keepends=True)
            found.append({"cell_type": kind, "id": f"cell-{len(found)}", "metadata": {}, "source": lines} | more)

    # The text before the first block; then language, code and following text of each block.
    before, *rest = BLOCK.split(page)
    add("markdown", before)
    for language, code, text in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        add("code", "%%bash\n" * (language == "bash") + code, execution_count=None, outputs=[])
        add("markdown", text)
    return found


def notebook(page: str) -> str:
    """Return the notebook of a page as JSON."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": cells(page), "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    text = notebook(PAGE.read_text())
    if "--check" in sys.argv[1:]:
        if not NOTEBOOK.is_file() or NOTEBOOK.read_text() != text:
            command = "python scripts/notebook.py"
            print(f"docs/guides/{NOTEBOOK.name} is out of date; write it again: {command}", file=sys.stderr)
            return 1
        return 0
    NOTEBOOK.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
