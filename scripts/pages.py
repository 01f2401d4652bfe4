"""Pages of docs/ that scripts generate."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def write_or_check(page: Path, text: str) -> int:
    """Write a page, or with --check compare it. Return the exit code: 1 if it is out of date."""
    if "--check" not in sys.argv[1:]:
        page.write_text(text)
        return 0
    if page.is_file() and page.read_text() == text:
        return 0
    script = Path(sys.argv[0]).name
    command = f".venv/bin/python scripts/{script}"
    print(f"{page.relative_to(ROOT)} is out of date; write it again: {command}", file=sys.stderr)
    return 1
