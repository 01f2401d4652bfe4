"""Commands that a user can type after a run has ended."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.checkpoint.huggingface import model_folder
from jaxopt_llm.checkpoint.native import step_directories
from jaxopt_llm.config import Config
from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import InputError


def list_next_commands(config: Config) -> Iterator[str]:
    """Yield lines with the commands that read the last checkpoint of a run, or the best one if another is better."""
    run = f"--checkpoint {shlex.quote(config.run.directory)}"
    best = _find_better_step(Path(config.run.directory))
    if best is not None:
        run += " --step best"
        yield f"next, with the checkpoint of step {best}, whose held-out loss is the lowest:"
    else:
        yield "next:"
    has_documents = config.evaluation.every or config.evaluation.paths
    yield f"  {errors.program_name('evaluate')} {run}" + ("" if has_documents else " --data.paths FILE")
    question = "--chat" if config.data.content != "text" else "--prompt TEXT"
    yield f"  {errors.program_name('generate')} {run} {question}"
    if not _has_family(config):
        return
    convert, folder = errors.program_name("convert"), config.run.directory.rstrip("/")
    if config.lora.rank:
        yield f"  {convert} merge {run} --to {shlex.quote(f'{folder}-merged')}"
    yield f"  {convert} export {run} --to {shlex.quote(f'{folder}-exported')}"


def _find_better_step(directory: Path) -> int | None:
    """Return the step with the lowest held-out loss; None if it is the last one, or if no step was evaluated."""
    paths = step_directories.find_checkpoints(directory / "checkpoints")
    ranked = step_directories.rank_by_loss(step_directories.read_losses(paths))
    return ranked[0] if ranked and ranked[0] != max(paths) else None


def _has_family(config: Config) -> bool:
    """Return whether `convert` can write the model: Hugging Face has a class for it."""
    try:
        model_folder.choose_family(config.model, pretrained.find_source_folder(config))
    except InputError:
        return False
    return True
