"""docs/api.md, which is generated from the signatures and docstrings of the public names."""

import subprocess
import sys

from commands import ENVIRONMENT, ROOT

SCRIPT = ROOT / "scripts" / "api_page.py"


def test_the_page_is_up_to_date() -> None:
    command = [sys.executable, SCRIPT, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**ENVIRONMENT})
    assert (done.returncode, done.stderr) == (0, "")
