"""What corpora on this machine hold of a reference or a teacher, for plans, which read nothing else of the data."""

from jaxopt_llm.config import Config, fields
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.data.tokens.prepared import read_stored
from jaxopt_llm.step.program import StoredTeacher


def resolve_reference(config: Config) -> Config:
    """Return the configuration with `preference.reference` stored, if `auto` means that for the corpora."""
    if not config.training.has_reference or config.preference.reference != AUTO:
        return config
    found = [has_reference for has_reference, _ in read_stored(config.data.paths)]
    resolved: Config = fields.replace_fields(config, {"preference.reference": "stored"})
    return resolved if found and all(found) else config


def find_teacher(config: Config) -> StoredTeacher | None:
    """Return the sizes of what the corpora hold of a teacher; None: the objective reads none, or they hold none."""
    if not config.training.distills or config.runs_teacher:
        return None
    return next((StoredTeacher(*sizes) for _, sizes in read_stored(config.data.paths) if sizes), None)
