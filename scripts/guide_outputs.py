"""Write the outputs in docs/guides: run the blocks of each page, and put what they print into the page.

    .venv/bin/python scripts/guide_outputs.py [PAGE ...]

A page keeps the lines that it leaves out (`...`), and blocks of another JAX than the installed one. Read the result: a
block that shows other lines than before needs a hand. tests/test_guides.py compares the pages with the outputs. Times
are those of the machine that runs this script.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests/support"))

import guides  # noqa: E402


def write_outputs(page: str) -> None:
    path = ROOT / f"docs/guides/{page}.md"
    shown = guides.shown_outputs(page)
    with tempfile.TemporaryDirectory() as folder:
        for index, (code, printed, told) in enumerate(guides.follow(page, Path(folder, "reader"))):
            if code not in shown or not guides.is_of_this_jax(shown[code]):
                continue
            if guides.plans_the_model(code):
                printed = guides.plan_of_the_model(code, Path(folder, f"model{index}"))
            text = guides.rewrite(shown[code], guides.choose_output(shown[code], printed, told))
            before, block, after = path.read_text().partition(code)
            path.write_text(before + block + after.replace(f"```text\n{shown[code]}```", f"```text\n{text}```", 1))


if __name__ == "__main__":
    for page in sys.argv[1:] or sorted(path.stem for path in (ROOT / "docs/guides").glob("*.md")):
        print(page)
        write_outputs(page)
