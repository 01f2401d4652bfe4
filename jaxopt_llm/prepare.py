"""Command `prepare`: tokenisation of a corpus for training.

python -m jaxopt_llm.prepare --input PATH [PATH ...] --output DIR [--tokenizer FILE] [...]
python -m jaxopt_llm.prepare --input PATH [PATH ...] --content chat --tokenizer DIR --preview N
python -m jaxopt_llm.prepare --input PATH [PATH ...] --content preference --tokenizer MODEL --output DIR \
                             --reference MODEL
python -m jaxopt_llm.prepare --input PATH [PATH ...] --tokenizer MODEL --output DIR --teacher MODEL --top-k 64
python -m jaxopt_llm.prepare --verify DIR

Tokenise a corpus once, on all cores, into files that training reads with --data.paths DIR. If the command is killed,
run it again: it keeps the finished shards and produces the same bytes. --verify reads a prepared corpus completely and
prints which parts are damaged. --preview prints conversations and marks the tokens that training learns;
it writes no files. --reference also computes the log-probability of each answer by a model, with which
training.objective dpo, ipo, hinge and kto compare. --teacher also keeps the tokens that a model finds most likely in
the place of each token that is learned, with their log-probabilities, for training.objective distill.
"""

import argparse
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.text import Text

from jaxopt_llm.config import DataConfig
from jaxopt_llm.config.data import PREFERENCE, PROMPT, UNPAIRED, Content
from jaxopt_llm.core import errors, hub, json_files
from jaxopt_llm.core.errors import CommandError, InputError
from jaxopt_llm.core.files import lock_directory
from jaxopt_llm.data.reading import source
from jaxopt_llm.data.reading.conversation import JUDGED, SIDES
from jaxopt_llm.data.reading.files import find_corpus_files
from jaxopt_llm.data.reading.labels import find_label_names
from jaxopt_llm.data.reading.rows import Part
from jaxopt_llm.data.reading.skipped import Skipped
from jaxopt_llm.data.reading.storage import PLAN, is_url
from jaxopt_llm.data.tokens import prepared
from jaxopt_llm.data.tokens.pieces import in_spans
from jaxopt_llm.data.tokens.template import make_reader
from jaxopt_llm.data.tokens.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from jaxopt_llm.inference.reference import Reference


@dataclass(frozen=True)
class Scoring:
    """Request for the log-probabilities that a corpus keeps of a model.

    Attributes:
        kind: reference or teacher, also the flag that names the model.
        name: path or hub id of the model.
        top_k: of a teacher, number of tokens in each place.
    """

    kind: str
    name: str
    top_k: int = 0

    @property
    def flag(self) -> str:
        return f"--{self.kind}"


def prepare(config: DataConfig, directory: Path, workers: int, scoring: Scoring | None = None) -> None:
    """Write the corpus of `config.paths` into a directory, or complete one that was started there.

    scoring: what a model says of its documents, which it also holds.

    Raises:
        InputError: a source cannot be read, or the directory holds another prepared corpus, a damaged one or other
            files. Or the reference model cannot be used.
    """
    if config.content not in (PREFERENCE, UNPAIRED):  # labels of pairs are margins
        config = replace(config, label_names=find_label_names(config, "--input"))
    tokenizer = load_tokenizer(config)
    model = _open_model(scoring, config, tokenizer) if scoring else None
    files = list(chain.from_iterable(find_corpus_files(config, "--input")))
    for file in files:
        if file.format not in source.FORMATS:
            raise InputError(f"--input {file} holds tokens, not text: train on it as it is")
    console = Console(highlight=False, soft_wrap=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("inspecting files", total=len(files))
        inspected = prepared.inspect_files(files, config, lambda: progress.advance(task))
    shards = prepared.group_into_shards(files, [parts for _, parts in inspected])
    fingerprints = [fingerprint for fingerprint, _ in inspected]
    scored_by = {}
    if scoring is not None and model is not None:
        scored_by = {scoring.kind: model.to_plan() | ({"top_k": scoring.top_k} if scoring.top_k else {})}
    plan = prepared.make_plan(files, fingerprints, config, tokenizer, scored_by)
    _check_output(directory, plan)
    with lock_directory(directory, "--output"):
        if _check_output(directory, plan):  # again, because from here on no other process writes there
            console.print(f"{directory}: the input or an option has changed: starting over", markup=False)
            prepared.delete_unfinished(directory)
        for leftover in directory.glob("*.tmp"):  # of a process that died
            leftover.unlink()
        prepared.write_json(directory / PLAN, plan)
        if (directory / prepared.MANIFEST).exists():
            prepared.check_sizes(directory)
            console.print(f"{directory} is already finished", markup=False)
        else:
            merger = prepared.ShardMerger(directory, prepared.describe_arrays(config, plan["dtype"]))
            _write_shards(shards, merger, config, directory, workers, console)
            skipped = prepared.add_skipped(merger.shards, shards)
            skipped.check_columns(config)
            skipped.check_texts(skipped.read["texts"] < sum(record["documents"] for record in merger.shards))
            if not sum(record["tokens"] for record in merger.shards):
                paths, reasons = " ".join(config.paths), "; ".join(skipped.describe()) or "empty"
                raise InputError(f"--input {paths}: no tokens to train on ({reasons}); give other files")
            scores = {}
            if scoring is not None and model is not None:
                scores = {scoring.kind: _write_scores(scoring, model, config, directory, plan["dtype"], console)}
            merger.finish(plan, scores)
    records = prepared.read_shard_records(directory)
    documents, tokens = (sum(record[name] for record in records) for name in ("documents", "tokens"))
    skipped = prepared.add_skipped(records, shards)
    reasons = "; ".join(skipped.describe()) or "nothing"
    console.print(f"{documents:,} documents, {tokens:,} tokens in {directory}; skipped: {reasons}", markup=False)
    _print_notes(skipped, config, console)
    console.print(f"train on it with --data.paths {directory} --data.tokenizer {config.tokenizer}", markup=False)


def preview(config: DataConfig, count: int) -> None:
    """Print the first conversations, or pairs of them.

    The tokens that training learns are in colour, or in ⟦⟧ without a colour terminal.

    Raises:
        InputError: a source cannot be read.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    console = Console(highlight=False, soft_wrap=True)
    tokenizer = load_tokenizer(config)
    skipped = Skipped()
    files = chain.from_iterable(find_corpus_files(config, "--input"))
    parts = chain.from_iterable(source.split_into_parts(file, config) for file in files)
    read = make_reader(config, tokenizer)
    documents = chain.from_iterable(read(part, skipped) for part in parts)
    shown = 0
    for document in documents:
        ((ids, starts),) = tokenizer.encode_with_offsets([document.content])
        learned = np.ones(ids.size, bool) if document.spans is None else in_spans(starts, document.spans)
        name = f"{document.name}, {document.side}" if document.side else document.name
        console.print(f"--- {name}: {ids.size:,} tokens, {learned.sum():,} learned", markup=False)
        console.print(_mark_learned(document.content.decode(), starts, learned, console.color_system is not None))
        shown += document.side not in (SIDES[0], *JUDGED)  # a pair counts once
        if shown == count:
            break
    if reasons := skipped.describe():
        console.print(f"skipped: {'; '.join(reasons)}", markup=False)
    _print_notes(skipped, config, console)


def _print_notes(skipped: Skipped, config: DataConfig, console: Console) -> None:
    for note in skipped.describe_notes():
        console.print(note, markup=False)
    if endless := skipped.describe_endless(config):
        print(f"warning: {endless}", file=sys.stderr)


def _mark_learned(text: str, starts: NDArray[np.int64], learned: NDArray[np.bool_], coloured: bool) -> Text:
    """Return a text whose learned tokens are marked. Terminal control characters are escaped.

    starts: first character of each token. learned: whether training learns each token.
    """
    changes = np.flatnonzero(np.diff(learned)) + 1
    marked = Text()
    for first, last in pairwise([0, *changes.tolist(), learned.size]):
        end = int(starts[last]) if last < learned.size else len(text)
        piece = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text[int(starts[first]) : end])
        if not learned[first]:
            marked.append(piece)
        elif coloured:
            marked.append(piece, style="bold green")
        else:
            marked.append(f"⟦{piece}⟧")
    return marked


# What the entries of a plan are called in messages, where their names do not say it.
_DIFFERENCES = {
    "files": "the content of the files",
    "tokenizer_sha256": "the content of the tokenizer",
    "template_sha256": "the chat template, with its variables and its date",
}


def _check_output(directory: Path, plan: dict[str, Any]) -> bool:
    """Return whether the directory holds an unfinished corpus that must start over.

    This is the case after a malformed row was repaired, or is now skipped. While no document has been written, it is
    the case after any change of the command.

    Raises:
        InputError: the directory holds anything other than a corpus prepared by the same command.
    """
    if not directory.exists() or not any(path.name != "lock" for path in directory.iterdir()):
        return False
    try:
        old = dict(json_files.parse(json_files.read_bytes(directory / PLAN)))
    except (OSError, ValueError, TypeError) as error:
        problem = "is not empty and holds no prepared corpus"
        raise InputError(f"--output {directory} {problem}; choose another directory") from error
    differences = [name for name in sorted({*plan, *old}) if old.get(name) != plan.get(name)]
    if not differences:
        return False
    may_start_over = prepared.have_same_command(old, plan) or prepared.holds_no_documents(directory)
    if may_start_over and prepared.is_unfinished(directory):
        return True
    named = ", ".join(_DIFFERENCES.get(name, name) for name in differences)
    problem = f"holds another prepared corpus, which differs in {named}"
    raise InputError(f"--output {directory} {problem}; choose another directory")


def _write_shards(
    shards: list[list[Part]],
    merger: prepared.ShardMerger,
    config: DataConfig,
    directory: Path,
    workers: int,
    console: Console,
) -> None:
    missing = [i for i in range(len(shards)) if i not in merger]
    # With fewer shards than workers, such as one compressed file, the tokenizer's own threads use the other cores.
    uses_threads = len(missing) < workers
    if not config.uses_bytes:  # so that all workers read the same revision of a model of the hub
        config = replace(config, tokenizer=str(hub.find_folder(config.tokenizer, "--tokenizer ", weights=False)))
    # Spawn, because a fork would copy the locks of this process's threads.
    pool = ProcessPoolExecutor(
        min(workers, len(missing)) or 1, multiprocessing.get_context("spawn"), _start_worker, (config, uses_threads)
    )
    with pool, Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("shards", total=len(shards), completed=len(shards) - len(missing))
        futures = [pool.submit(_write_shard, directory, index, shards[index]) for index in missing]
        try:
            merger.merge_ready()
            for future in as_completed(futures):
                future.result()
                merger.merge_ready()
                progress.advance(task)
        except BrokenProcessPool as error:
            problem = "a worker process was killed, perhaps for lack of memory"
            raise InputError(f"{problem}; run again with fewer --workers to continue") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _open_model(scoring: Scoring, config: DataConfig, tokenizer: Tokenizer) -> "Reference":
    from jaxopt_llm.inference.reference import open_reference  # imports JAX, which the workers do not need

    with _name_flag(scoring.flag):
        model = open_reference(scoring.name, scoring.flag, config, tokenizer)
    if scoring.top_k > model.vocabulary_size:
        raise InputError(f"--top-k {scoring.top_k}: {scoring.name} has {model.vocabulary_size} tokens; name fewer")
    return model


def _write_scores(
    scoring: Scoring, model: "Reference", config: DataConfig, directory: Path, dtype: str, console: Console
) -> dict[str, Any]:
    """Write what a model says of the corpus, or complete it. Return what the manifest says of it."""
    from jaxopt_llm.data.tokens import scored
    from jaxopt_llm.inference import reference
    from jaxopt_llm.planning import oom

    writer = (
        scored.TeacherWriter(directory, dtype, scoring.top_k, model.vocabulary_size)
        if scoring.top_k
        else scored.LogProbabilityWriter(directory, dtype)
    )
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    explain_oom = oom.explain_oom("reading documents", "use GPUs with more memory, or more of them")
    with (
        _name_flag(scoring.flag),
        explain_oom,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task(f"tokens read by the {scoring.kind}", total=sum(writer.tokens))
        written = reference.complete_corpus(model, config, writer, lambda tokens: progress.advance(task, tokens))
    if limit := written["limit"]:
        note = f"have no log-probability by {model.name}: they exceed its context"
        if scoring.top_k:
            note = f"exceed the context of {model.name}: it read them in parts of that length"
        console.print(f"documents of more than {limit + 1:,} tokens {note}", markup=False)
    return written


@contextmanager
def _name_flag(flag: str) -> Iterator[None]:
    """Name the flag of this command in errors about its model."""
    try:
        yield
    except CommandError as error:
        error.args = (str(error).replace("--checkpoint ", f"{flag} "), *error.args[1:])
        raise


def verify(directory: Path, workers: int) -> None:
    """Read a prepared corpus completely and print its size. Raise InputError if it is damaged."""
    clock = time.perf_counter()
    shards, size = prepared.verify_corpus(directory, workers)
    rate = size / 1e6 / (time.perf_counter() - clock)
    print(f"{directory} is intact: {shards:,} shards, {size / 1e6:,.1f} MB read at {rate:,.0f} MB/s")


_worker: tuple[DataConfig, Tokenizer]


def _start_worker(config: DataConfig, uses_threads: bool) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = str(uses_threads).lower()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the workers too; the parent ends them
    _worker = config, load_tokenizer(config)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)  # without this, a worker would wait for a killed parent forever

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _write_shard(directory: Path, index: int, parts: list[Part]) -> None:
    prepared.write_shard(directory, index, parts, *_worker)


def make_parser() -> argparse.ArgumentParser:
    default = DataConfig()
    parser = errors.ArgumentParser(
        prog=errors.program_name("prepare"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    paths = "files, folders, globs or URLs of text, JSONL, JSON, CSV, Parquet or Arrow"
    add("--input", nargs="+", metavar="PATH", help=paths)
    add("--output", type=Path, metavar="DIR", help="new directory, or one with an unfinished prepared corpus")
    add("--verify", type=Path, metavar="DIR", help="instead, read a prepared corpus and print which parts are damaged")
    marked = "instead, print the first N conversations, or pairs of answers, with learned tokens marked"
    add("--preview", type=int, metavar="N", help=marked)
    add(
        "--tokenizer",
        default="bytes",
        metavar="FILE",
        help="a tokenizer.json, the folder that has one, a hub id, or bytes (default: bytes)",
    )
    add("--bos", default=default.bos, metavar="TOKEN", help="token before each document (default: as transformers)")
    add("--eos", default=default.eos, metavar="TOKEN", help="token after each document (default: the tokenizer's EOS)")
    formats, contents = ("auto", *source.FORMATS), [each for each in get_args(Content) if each != PROMPT]
    add("--format", default=default.format, choices=formats, help="format of the files (default: auto, by suffix)")
    separator = "text between the documents of a text file (default: none, the file is one document)"
    add("--separator", default=default.separator, metavar="TEXT", help=separator)
    content = "content of a row; chat: conversations, in the format that their fields show (default: text)"
    add("--content", default=default.content, choices=contents, help=content)
    turns = "turns of the assistant that are learned in a conversation (default: all)"
    add("--learn-turns", default=default.learn_turns, choices=("all", "last"), help=turns)
    template = "file with a Jinja chat template, or name of one of the tokenizer's (default: the tokenizer's)"
    add("--chat-template", default=default.chat_template, metavar="FILE", help=template)
    variables = "variables of the chat template, with values in JSON or as text: enable_thinking=false"
    add("--template-arguments", nargs="+", default=(), metavar="NAME=VALUE", help=variables)
    add("--date", default=default.date, metavar="DAY", help="date for chat templates that write it, as 2026-01-31")
    add("--text-field", default=default.text_field, metavar="NAME", help="column with the text (default: text)")
    label = "column with the label of a row (default: none)"
    add("--label-field", default=default.label_field, metavar="NAME", help=label)
    names = "names of the classes in the order of their numbers (default: the texts of the column, sorted)"
    add("--label-names", nargs="+", default=(), metavar="NAME", help=names)
    columns = "columns of conversations that have other names (messages=dialog), or that are not read (images=)"
    add("--columns", default=default.columns, nargs="+", metavar="FIELD=COLUMN", help=columns)
    malformed = "action for text that is not UTF-8 or is cut off (default: error)"
    add("--malformed", default=default.malformed, choices=("error", "skip", "replace"), help=malformed)
    reference = "run, or folder or hub id of a Hugging Face model, with which dpo, ipo, hinge and kto compare"
    add("--reference", default="", metavar="MODEL", help=reference)
    teacher = "run, or folder or hub id of a Hugging Face model, from which training.objective distill learns"
    add("--teacher", default="", metavar="MODEL", help=teacher)
    most_likely = f"with --teacher, number of most likely tokens that are kept of each (default: {prepared.TOP_K})"
    add("--top-k", type=int, metavar="K", help=most_likely)
    add("--workers", type=int, default=os.cpu_count(), metavar="N", help="number of processes (default: one per core)")
    return parser


def _check_local(flag: str, folder: Path | None) -> None:
    url = str(folder).replace(":/", "://", 1)  # a path has no two slashes in a row
    if is_url(url):
        raise InputError(f"{flag} {url}: must be a local folder; write one, and copy it with the tools of that storage")


def _list_flags() -> dict[str, str]:
    """Return the flags of this command by the setting that they set."""
    settings = {field.name for field in fields(DataConfig)} & vars(make_parser().parse_args([])).keys()
    return {"data.paths": "--input"} | {f"data.{name}": f"--{name.replace('_', '-')}" for name in settings}


def _choose_scoring(content: Content, models: dict[str, str], top_k: int | None) -> Scoring | None:
    """Return what a model says of a corpus; None without a model. models: their names, by the flag."""
    pairs = content in (PREFERENCE, UNPAIRED)
    reference, teacher = models["reference"], models["teacher"]
    if reference and not pairs:
        raise InputError(f"--reference {reference}: it reads answers: add --content {PREFERENCE} or {UNPAIRED}")
    if teacher and pairs:
        raise InputError(f"--teacher {teacher}: training.objective distill reads no pairs: set another --content")
    if not teacher and top_k is not None:
        raise InputError(f"--top-k {top_k}: it counts tokens of a teacher: name one with --teacher, or leave it out")
    if teacher and top_k is not None and top_k < 1:
        raise InputError(f"--top-k {top_k}: must be at least 1")
    if teacher:
        return Scoring("teacher", teacher, prepared.TOP_K if top_k is None else top_k)
    return Scoring("reference", reference) if reference else None


@errors.own_flags(_list_flags())
def main() -> int:
    arguments = vars(make_parser().parse_args(sys.argv[1:]))
    workers, paths, directory = (arguments.pop(name) for name in ("workers", "input", "output"))
    verified_directory, preview_count = arguments.pop("verify"), arguments.pop("preview")
    models = {kind: arguments.pop(kind) for kind in ("reference", "teacher")}
    top_k = arguments.pop("top_k")
    _check_local("--output", directory)
    _check_local("--verify", verified_directory)
    if workers < 1:
        raise InputError(f"--workers {workers}: must be at least 1")
    if verified_directory:
        if paths or directory:
            raise InputError("--verify only reads a prepared corpus: leave out --input and --output")
        verify(verified_directory, workers)
        return 0
    if not paths or (directory is None) == (preview_count is None):
        raise InputError("give --input PATH and either --output DIR or --preview N, or give --verify DIR")
    arguments |= {name: tuple(arguments[name]) for name in ("columns", "template_arguments", "label_names")}
    config = DataConfig(paths=tuple(paths), **arguments)
    if problems := config.problems():
        raise InputError("; ".join(problems))
    scoring = _choose_scoring(config.content, models, top_k)
    if scoring and preview_count is not None:
        raise InputError(f"{scoring.flag} {scoring.name}: --preview asks no model; leave one of the two out")
    if preview_count is None:
        prepare(config, directory, workers, scoring)
    elif config.content == "text" or preview_count < 1:
        raise InputError(f"--preview {preview_count}: give at least 1 and a --content of conversations, such as chat")
    else:
        preview(config, preview_count)
    return 0


if __name__ == "__main__":
    errors.run_command(main)
