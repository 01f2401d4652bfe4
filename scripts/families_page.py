"""Write the table of families in docs/pretrained.md.

    .venv/bin/python scripts/families_page.py          write the table
    .venv/bin/python scripts/families_page.py --check  exit with 1 if it is out of date

The rest of the page is written by hand.
"""

import json
import sys
from collections.abc import Iterator

from pages import ROOT, write_or_check

sys.path.insert(0, str(ROOT / "tests" / "support"))  # the configurations that the tests read and count

from published import PUBLISHED

from jaxopt_llm.checkpoint.huggingface.family import Family
from jaxopt_llm.checkpoint.huggingface.find_family import FAMILIES

PAGE = ROOT / "docs" / "pretrained.md"
BEGIN, END = "<!-- table of scripts/families_page.py -->", "<!-- end of the table -->"


def format_count(parameters: int) -> str:
    """Return a number of parameters with its unit."""
    return f"{parameters / 1e9:,.1f}B" if parameters > 0.95e9 else f"{parameters / 1e6:.0f}M"


def list_sizes(family: Family) -> list[str]:
    """Return the sizes of published models whose config.json the tests read, smallest first."""
    counts = [count for name, (_, count, _) in PUBLISHED.items() if name.split()[0] in family.model_types]
    return list(dict.fromkeys(map(format_count, sorted(counts))))


def list_required(family: Family) -> list[str]:
    """Return the fields of config.json that support one value only, with this value."""
    required = {name: value for codec in family.codecs for name, value in codec.required.items()}
    return [f"`{name}` {json.dumps(value)}" for name, value in required.items()]


def format_table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| models | `model_type` | sizes in the tests | fields with one value |"
    yield "|---|---|---|---|"
    for family in FAMILIES:
        types = ", ".join(f"`{each}`" for each in family.model_types)
        yield f"| {family.models} | {types} | {', '.join(list_sizes(family))} | {', '.join(list_required(family))} |"


def main() -> int:
    before, rest = PAGE.read_text().split(f"{BEGIN}\n")
    table = "\n".join(format_table())
    return write_or_check(PAGE, f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    sys.exit(main())
