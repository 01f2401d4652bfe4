"""python -m jaxopt_llm.prepare --input PATH [PATH ...] --output DIR [--tokenizer FILE] [...]
python -m jaxopt_llm.prepare --input PATH [PATH ...] --content chat --tokenizer DIR --preview N
python -m jaxopt_llm.prepare --verify DIR

Tokenises a corpus once, on all cores, into memory-mapped files that training reads with --data.paths DIR. Killed and
run again, it keeps the shards that are whole and ends with the same bytes. --verify reads such a corpus whole and says
what of it is damaged. --preview shows conversations, and what of them is learnt, and writes nothing.
"""

import argparse
import io
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from jaxopt_llm import errors
from jaxopt_llm.checkpoint.lock import sole_owner
from jaxopt_llm.data import prepared, source
from jaxopt_llm.data.config import Content, DataConfig
from jaxopt_llm.data.find import PLAN, find_all
from jaxopt_llm.data.source import Part
from jaxopt_llm.data.template import reader
from jaxopt_llm.data.tokenizer import Tokenizer, load_tokenizer
from jaxopt_llm.data.tokens import within
from jaxopt_llm.errors import InputError


def prepare(config: DataConfig, directory: Path, workers: int) -> None:
    """Writes the corpus of `config.paths` into a directory, or completes what was begun there.

    Raises:
        InputError: what reading the sources raises; the directory holds another preparation, or anything else.
    """
    tokenizer = load_tokenizer(config)
    files = list(chain.from_iterable(find_all(config)))
    for file in files:
        if file.format not in ("text", "jsonl", "parquet"):
            raise InputError(f"--input {file.path} holds tokens, not text: train on it as it is")
    console = Console(highlight=False, soft_wrap=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("looking at files", total=len(files))
        looked = prepared.look_at(files, config, lambda: progress.advance(task))
    plan = prepared.plan(files, [fingerprint for fingerprint, _ in looked], config, tokenizer)
    _check(directory, plan)
    with sole_owner(directory, "--output"):
        _check(directory, plan)  # nobody else writes there from here on
        for left in directory.glob("*.tmp"):  # by a process that died
            left.unlink()
        prepared.write_json(directory / PLAN, plan)
        if (directory / prepared.MANIFEST).exists():
            console.print(f"{directory} is finished already", markup=False)
        else:
            collection = prepared.Collection(directory, plan["dtype"], config.content != "text")
            shards = prepared.shards(files, [parts for _, parts in looked])
            _write(shards, collection, config, directory, workers, console)
            if not sum(each["tokens"] for each in collection.shards):
                skipped = _skipped(collection.shards) or "empty"
                raise InputError(f"nothing to learn from in {', '.join(config.paths)}: {skipped}")
            collection.finish(plan)
    written = prepared.read_shards(directory)
    documents, tokens = (sum(each[name] for each in written) for name in ("documents", "tokens"))
    skipped = _skipped(written) or "nothing"
    console.print(f"{documents:,} documents, {tokens:,} tokens in {directory}; skipped: {skipped}", markup=False)
    console.print(f"train on it with --data.paths {directory} --data.tokenizer {config.tokenizer}", markup=False)


def preview(config: DataConfig, count: int) -> None:
    """Shows the first conversations with what is learnt of them in colour, or in brackets where there is none.

    Raises:
        InputError: what reading the sources raises.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    console = Console(highlight=False, soft_wrap=True)
    tokenizer = load_tokenizer(config)
    skipped: Counter[str] = Counter()
    parts = chain.from_iterable(source.parts(file, config) for file in chain.from_iterable(find_all(config)))
    with reader(config, tokenizer) as read:
        documents = chain.from_iterable(read(part, skipped) for part in parts)
        for document in islice(documents, count):
            ((ids, begins),) = tokenizer.encode_placed([document.content])
            learnt = within(begins, document.spans or ())
            console.print(f"--- {document.name}: {ids.size:,} tokens, {learnt.sum():,} learnt", markup=False)
            console.print(_marked(document.content.decode(), begins, learnt, console.color_system is not None))
    if skipped:
        console.print(f"skipped: {_counted(skipped)}", markup=False)


def _marked(text: str, begins: NDArray[np.int64], learnt: NDArray[np.bool_], coloured: bool) -> Text:
    """A text whose learnt tokens stand out. What would steer the terminal is spelt out."""
    changes = np.flatnonzero(np.diff(learnt)) + 1
    marked = Text()
    for first, last in pairwise([0, *changes.tolist(), learnt.size]):
        end = int(begins[last]) if last < learnt.size else len(text)
        piece = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text[int(begins[first]) : end])
        if not learnt[first]:
            marked.append(piece)
        elif coloured:
            marked.append(piece, style="bold green")
        else:
            marked.append(f"⟦{piece}⟧")
    return marked


def _check(directory: Path, plan: dict[str, Any]) -> None:
    """Raises InputError where the directory holds anything but this preparation."""
    if not directory.exists() or not any(path.name != "lock" for path in directory.iterdir()):
        return
    try:
        old = json.loads((directory / PLAN).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--output {directory} is not empty and no preparation; choose another") from error
    if not isinstance(old, dict):
        old = {}
    differ = [name for name in sorted({*plan, *old}) if old.get(name) != plan.get(name)]
    if differ:
        raise InputError(
            f"--output {directory} holds another preparation, with other {', '.join(differ)}; choose another directory"
        )


def _write(
    shards: list[list[Part]],
    collection: prepared.Collection,
    config: DataConfig,
    directory: Path,
    workers: int,
    console: Console,
) -> None:
    missing = [i for i in range(len(shards)) if i not in collection]
    # Of fewer shards than workers, as one compressed file is, the tokenizer's own threads make more of the cores.
    alone = len(missing) < workers
    # Spawned, because a fork would copy the locks of this process's threads.
    pool = ProcessPoolExecutor(
        min(workers, len(missing)) or 1, multiprocessing.get_context("spawn"), _start_worker, (config, alone)
    )
    with pool, Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("shards", total=len(shards), completed=len(shards) - len(missing))
        done = [pool.submit(_work, directory, number, shards[number]) for number in missing]
        try:
            collection.grow()
            for each in as_completed(done):
                each.result()
                collection.grow()
                progress.advance(task)
        except BrokenProcessPool as error:
            raise InputError(
                "a worker was killed, perhaps for lack of memory; run again to continue, with fewer --workers"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def verify(directory: Path, workers: int) -> None:
    clock = time.perf_counter()
    shards, size = prepared.verify(directory, workers)
    rate = size / 1e6 / (time.perf_counter() - clock)
    print(f"{directory} is whole: {shards:,} shards, {size / 1e6:,.1f} MB read at {rate:,.0f} MB/s")


_worker: tuple[DataConfig, Tokenizer]


def _start_worker(config: DataConfig, alone: bool) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = str(alone).lower()  # else the workers are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches them too; the parent ends them
    _worker = config, load_tokenizer(config)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)  # a worker that outlives a killed parent would wait for it for ever

    threading.Thread(target=follow, daemon=True).start()


def _work(directory: Path, number: int, parts: list[Part]) -> None:
    prepared.write_shard(directory, number, parts, *_worker)


def _skipped(counts: Sequence[dict[str, Any]]) -> str:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each["skipped"])
    return _counted(total)


def _counted(skipped: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))


def main() -> int:
    default = DataConfig()
    parser = errors.ArgumentParser(
        prog="python -m jaxopt_llm.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", nargs="+", metavar="PATH", help="files, folders or globs of text, JSONL or Parquet")
    add("--output", type=Path, metavar="DIR", help="a new directory, or one of an unfinished preparation")
    add("--verify", type=Path, metavar="DIR", help="read a prepared corpus whole instead, and say what is damaged")
    add("--preview", type=int, metavar="N", help="show the first N conversations instead, and what of them is learnt")
    add("--tokenizer", default=default.tokenizer, metavar="FILE", help="a tokenizer.json, or bytes (the default)")
    add("--beginning", default=default.beginning, metavar="TOKEN", help="before each document (the tokenizer's own)")
    add("--end", default=default.end, metavar="TOKEN", help="after each document (default: the tokenizer's own)")
    add("--format", default=default.format, choices=("auto", "text", "jsonl", "parquet"), help="default: by suffix")
    add("--separator", default=default.separator, metavar="TEXT", help="between documents of a text file (none)")
    add(
        "--content",
        default=default.content,
        choices=get_args(Content),
        help="what rows hold; chat: conversations, of the form that their fields say (default: text)",
    )
    add("--chat-template", default=default.chat_template, metavar="FILE", help="default: the tokenizer's own")
    add("--date", default=default.date, metavar="DAY", help="for a template that writes today's, as in 2026-01-31")
    add("--text-field", default=default.text_field, metavar="NAME", help="column with the text (default: text)")
    add(
        "--malformed",
        default=default.malformed,
        choices=("error", "skip", "replace"),
        help="what to do with text that is not UTF-8 or is cut (default: error)",
    )
    add("--workers", type=int, default=os.cpu_count(), metavar="N", help="processes (default: one per core)")
    arguments = vars(parser.parse_args(sys.argv[1:]))
    workers, paths, directory = (arguments.pop(name) for name in ("workers", "input", "output"))
    verified, previewed = arguments.pop("verify"), arguments.pop("preview")
    if workers < 1:
        raise InputError(f"--workers {workers}: must be at least 1")
    if verified:
        if paths or directory:
            raise InputError("--verify reads what is there: give it without --input and --output")
        verify(verified, workers)
        return 0
    if not paths or (directory is None) == (previewed is None):
        raise InputError("--input PATH and either --output DIR or --preview N are needed, or --verify DIR")
    config = DataConfig(paths=tuple(paths), **arguments)
    if problems := config.problems():
        raise InputError("; ".join(problems))
    if previewed is None:
        prepare(config, directory, workers)
    elif config.content == "text" or previewed < 1:
        raise InputError(f"--preview {previewed}: shows at least 1 conversation, of --content chat, for one")
    else:
        preview(config, previewed)
    return 0


if __name__ == "__main__":
    errors.run(main)
