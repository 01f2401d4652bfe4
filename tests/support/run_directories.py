"""Run directories without a run: the files that `report` reads."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxopt_llm.config import Config, fields


def write_run(directory: Path, records: Iterable[dict[str, Any]] = (), **settings: Any) -> Path:
    """Write config.json and metrics.jsonl. settings: by dotted name, those that differ from the defaults."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(fields.to_json(fields.replace_fields(Config(), settings)))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory
