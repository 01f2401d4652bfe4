"""Write the tables of docs/guides/deepspeed.md: every key of DeepSpeed, and what it is here.

    .venv/bin/python scripts/deepspeed_page.py          write the tables
    .venv/bin/python scripts/deepspeed_page.py --check  exit with 1 if they are out of date

The rest of the page is written by hand.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from pages import write_or_check

from jaxopt_llm.engine.deepspeed_keys import FP16, KEYS, OPTIMIZERS, SCHEDULERS, TRAINER, Ignored, Keys, Maps, Refused

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "deepspeed.md"
BEGIN, END = "<!-- tables of scripts/deepspeed_page.py -->", "<!-- end of the tables -->"


def collect_keys() -> Keys:
    """Return all keys. Those of an optimizer or a scheduler name the types that share them."""
    keys = KEYS | FP16
    for section, kinds in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        each = [(name, entry, kind) for kind, found in kinds.items() for name, entry in found.items()]
        for name, entry, _ in each:
            types = ", ".join(kind for other, same, kind in each if (other, same) == (name, entry))
            keys[f"{section}.params.{name} ({types})"] = entry
    return keys


def escape(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def rows(keys: Keys) -> Iterator[str]:
    """Yield the lines of the three tables."""
    yield from ("### Mapped", "", "| DeepSpeed | here | absent | auto | note |", "|---|---|---|---|---|")
    for key, entry in keys.items():
        if isinstance(entry, Maps):
            settings = ", ".join(f"`{setting}`" for setting in entry.settings)
            absent = "" if entry.default is None else f"`{entry.default}`"
            auto = TRAINER.get(key.split(" ")[0])
            filled = "" if auto is None else f"`{json.dumps(auto)}`"
            yield f"| `{key}` | {settings} | {absent} | {filled} | {escape(entry.default_note or entry.note)} |"
    yield from ("", "### Ignored", "", "| DeepSpeed | because |", "|---|---|")
    reasons: dict[str, list[str]] = {}
    for key, entry in keys.items():
        if isinstance(entry, Ignored):
            reasons.setdefault(entry.reason, []).append(f"`{key}`")
    for reason, names in reasons.items():
        yield f"| {', '.join(names)} | {escape(reason)} |"
    yield from ("", "### Refused", "", "| DeepSpeed | unless it is | instead |", "|---|---|---|")
    for key, entry in keys.items():
        if isinstance(entry, Refused):
            harmless = ", ".join(f"`{json.dumps(value)}`" for value in entry.harmless)
            yield f"| `{key}` | {harmless} | {escape(entry.remedy)} |"


def main() -> int:
    before, found, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert found and end, "the page has lost the comments around the tables"
    text = "\n".join([f"{before}{BEGIN}", "", *rows(collect_keys()), "", f"{END}{after}"])
    return write_or_check(PAGE, text)


if __name__ == "__main__":
    sys.exit(main())
