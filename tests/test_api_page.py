"""docs/api.md, which is generated from the signatures and docstrings of the public names."""

import subprocess
import sys

import pytest
from commands import ENVIRONMENT, ROOT

import jaxopt_llm

SCRIPT = ROOT / "scripts" / "api_page.py"
LINES = (ROOT / "docs" / "api.md").read_text().splitlines()


def test_the_page_is_up_to_date() -> None:
    command = [sys.executable, SCRIPT, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**ENVIRONMENT})
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", jaxopt_llm.__all__)
def test_it_describes_every_public_name(name: str) -> None:
    start = LINES.index(f"## {name}")
    below = LINES[start + 1 :]
    body = below[: next((index for index, line in enumerate(below) if line.startswith("## ")), len(below))]
    assert any(line and line[0].isupper() for line in body), "no docstring"
