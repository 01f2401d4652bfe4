"""Pages that are generated: of the settings from their descriptions, of the families from their table."""

import subprocess
import sys

import pytest
from commands import ROOT

from jaxopt_llm.config import fields


@pytest.mark.parametrize("name", ["settings_page.py", "families_page.py"])
def test_the_page_is_up_to_date(name: str) -> None:
    script = ROOT / "scripts" / name
    done = subprocess.run([sys.executable, script, "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_has_every_setting() -> None:
    lines = (ROOT / "docs" / "configuration.md").read_text().splitlines()
    section, found = "", []
    for line in lines:
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| `"):
            found.append(f"{section}.{line.split('`')[1]}")
    assert sorted(found) == sorted(fields.FIELDS)
    assert not any(line.rstrip().endswith("|  |") for line in lines), "a setting without a description"
