"""Names of classes: the texts in a column of labels, the names of a feature of `datasets`, or of a prepared corpus."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.pulse import UNWATCHED, Pulse
from jaxopt_llm.data.reading.files import File, find_corpus_files
from jaxopt_llm.data.reading.rows import Encoded, RowEncoder, parse_label
from jaxopt_llm.data.reading.skipped import Skipped
from jaxopt_llm.data.reading.source import FORMATS, READERS, split_into_parts
from jaxopt_llm.data.reading.storage import PLAN
from jaxopt_llm.data.reading.table_rows import read_schema

TABLES = ("parquet", "arrow")
Names = tuple[str, ...]


def find_label_names(config: DataConfig, setting: str = "data.paths", pulse: Pulse = UNWATCHED) -> Names:
    """Return the names of the classes in the order of their numbers; empty if the labels are numbers.

    They are `data.label_names`, those of a prepared corpus, or those of a feature ClassLabel of `datasets`. Without any
    of these, they are the different texts in the column of labels, sorted.

    Args:
        config: the settings.
        setting: what names the paths, for messages.
        pulse: notes the progress of downloads and of reading.

    Raises:
        InputError: a file cannot be read, or two files have different names or orders.
    """
    if not config.label_field or not config.paths:
        return config.label_names
    known: dict[Names, str] = {config.label_names: "data.label_names"} if config.label_names else {}
    others: list[File] = []
    for file in chain.from_iterable(find_corpus_files(config, setting, pulse)):
        if names := _read_declared(file, config):
            known.setdefault(names, str(file))
        elif file.format in FORMATS:
            others.append(file)
    if len(known) > 1:
        (first, one), (second, other), *_ = known.items()
        problem = f"{one} has the classes {', '.join(first)}, and {other} has {', '.join(second)}"
        raise InputError(f"{setting}: {problem}; give all of them the same names in the same order")
    return next(iter(known), None) or tuple(sorted(_collect_texts(others, config, pulse)))


def _read_declared(file: File, config: DataConfig) -> Names:
    """Return the names that a file declares with their order; empty if it declares none."""
    if file.format == "prepared":
        plan = file.path / PLAN
        stored = json_files.read_object(plan, f"remove {file.path} and prepare the corpus again")
        return tuple(stored.get("label_names", ()))
    if file.format not in TABLES:
        return ()
    features: Any = (read_schema(file).metadata or {}).get(b"huggingface", b"{}")
    for name in ("info", "features", config.label_field):
        features = json_files.parse(features) if isinstance(features, bytes) else features
        features = features.get(name, {}) if isinstance(features, dict) else {}
    return tuple(features.get("names", ())) if features.get("_type") == "ClassLabel" else ()


def _collect_texts(files: list[File], config: DataConfig, pulse: Pulse) -> set[str]:
    """Return the different labels of files that are texts and no numbers."""
    encoder = _LabelCollector(config, Skipped())
    for part in chain.from_iterable(split_into_parts(file, config) for file in files if file.format != "text"):
        for _ in READERS[part.file.format](part, encoder):
            if encoder.has_numbers and not encoder.texts:
                break
        pulse.beat()
    return encoder.texts


class _LabelCollector(RowEncoder):
    """Encoder that reads only the label of each row.

    Attributes:
        texts: the different labels that are texts and no numbers.
        has_numbers: whether there are other labels.
    """

    def __init__(self, config: DataConfig, skipped: Skipped) -> None:
        super().__init__(config, skipped)
        self.texts = set[str]()
        self.has_numbers = False

    def is_used(self, column: str, form: str) -> bool:
        return column == self.config.label_field

    def note_columns(self, rows_by_column: Mapping[str, int], form: str) -> None:
        """Note nothing."""

    def encode(self, row: Any, form: str, counts_columns: bool = True) -> Encoded:
        label = row.get(self.config.label_field) if isinstance(row, dict) else None
        if isinstance(label, str) and label and parse_label(label) is None:
            self.texts.add(label)
        elif label is not None:
            self.has_numbers = True
        return Encoded(b"")
