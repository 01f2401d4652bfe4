"""The pages of docs/guides: their blocks, run in order in one shell, and what the pages say that they print.

A page has blocks of `bash` and `python`, which are run; `text`, what the block before printed; and `console`, commands
that need a cluster, a terminal, the network or minutes, which are not run. In a `text` block a line `...` stands for
any lines, and ` ...` at the end of a line for its rest.
"""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from commands import ENVIRONMENT, ROOT
from standins import write_llama, write_settings_of_llama

MODEL = "models/Llama-3.2-1B-Instruct"
HOME = "/home/me"  # the reader's folder
RUN = ("bash", "python")
WIDTH = 88  # columns of a block: what a page of the site and a half of a screen show
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What differs from run to run and from machine to machine. Everything else must be equal.
_TIMES = (
    r"\d{4}-\d\d-\d\d( \d\d:\d\d|T\d\d:\d\d:\d\d)",
    r"[\d,.]+ (tokens|rows)/s",
    r"compiled in [\d.]+ s",
    r"\d+:\d\d(:\d\d)?",  # time left
    r"preempted at step \d+|continues from step \d+|from step \d+",
    r"grad.norm'?:? +[\d.]+",  # of a trained model, it is mostly noise
)
# Losses and the like are rounded differently by other processors.
_MEASURED = re.compile(r"(loss|held-out|perplexity|step \d+ on .*?)'?:? +([\d.]+)|([\d.]+) nats")
_SHARE, _LEAST = 0.02, 0.03  # relative difference of such numbers, or absolute difference of small ones


class Block(NamedTuple):
    language: str
    code: str

    def command(self) -> str:
        """Return what the shell runs."""
        return self.code if self.language == "bash" else f"python - <<'END_OF_BLOCK'\n{self.code}END_OF_BLOCK\n"


class Done(NamedTuple):
    code: str
    printed: str  # standard output
    told: str  # standard error


def read_blocks(page: str) -> list[Block]:
    return [Block(*found) for found in FENCED.findall((ROOT / f"docs/guides/{page}.md").read_text())]


def follow(page: str, folder: Path, leave_out: tuple[str, ...] = ()) -> list[Done]:
    """Run the blocks of a page in one shell, without those that contain one of the texts of `leave_out`.

    Where a page names a model to download, a small stand-in is there. Plans are of the model itself, which takes no
    weights.
    """
    folder.mkdir(exist_ok=True)
    if MODEL in "".join(block.code for block in read_blocks(page)):
        write_llama(folder / MODEL)
    blocks = [block for block in read_blocks(page) if block.language in RUN]
    blocks = [block for block in blocks if not any(text in block.code for text in leave_out)]
    done = run(folder, "".join(f"{block.command()}\nprintf '\\0'\nprintf '\\0' >&2\n" for block in blocks))
    (*printed, rest), (*told, error) = done.stdout.split("\0"), done.stderr.split("\0")
    if done.returncode:
        raise AssertionError(f"{page}.md, this block fails:\n{blocks[len(printed)].code}\n{rest}\n{error}")
    texts = ([text.replace(str(folder), HOME) for text in output] for output in (printed, told))
    return [Done(block.code, *pair) for block, *pair in zip(blocks, *texts, strict=True)]


def plans_the_model(code: str) -> bool:
    return " plan " in code and MODEL in code


def plan_of_the_model(command: str, folder: Path) -> str:
    """Return what a command with `plan` prints where the downloaded model is, instead of its stand-in."""
    write_settings_of_llama(folder / MODEL)
    done = run(folder, command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a reader does: XLA optimises, unlike in other tests, because that changes the digits."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # `python` and `jaxopt-llm`
    environment = os.environ | ENVIRONMENT | {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"):
        environment.pop(name, None)
    command = ["bash", "-c", f"set -euo pipefail\n{script}"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def shown_outputs(page: str) -> dict[str, str]:
    """Return the `text` block that follows each block that is run, by the code of the latter."""
    blocks = read_blocks(page)
    pairs = itertools.pairwise(blocks)
    return {run.code: text.code for run, text in pairs if run.language in RUN and text.language == "text"}


def is_of_this_jax(shown: str) -> bool:
    """Return whether a `text` block is of the installed JAX: of the one that it names, or else of the older one."""
    named = re.search(r"with jax (\d+\.\d+)\.", shown)
    return metadata.version("jax").startswith(f"{named[1] if named else '0.10'}.")


def find_differences(shown: str, done: Done) -> list[str]:
    """Return the lines of a `text` block that a block did not print.

    A page may show what goes to standard error, before what goes to standard output.
    """
    return _find_missing(shown, done.printed) and _find_missing(shown, done.told + done.printed)


def _find_missing(shown: str, printed: str) -> list[str]:
    lines, missing, at, free = printed.rstrip("\n").splitlines(), [], 0, False
    for line in shown.splitlines():
        if line.strip() == "...":
            free = True
            continue
        candidates = range(at, len(lines) if free else min(at + 1, len(lines)))
        found = next((index for index in candidates if _equal(line, lines[index])), None)
        if found is None:
            missing.append(line)
        else:
            at, free = found + 1, False
    if not missing and not free and at < len(lines):
        missing.append(f"(the page ends here; the command also prints {lines[at]!r})")
    return missing


def _equal(shown: str, printed: str) -> bool:
    if shown.endswith(" ..."):
        shown = shown.removesuffix(" ...")
        same = _mask(printed).startswith(_mask(shown))
    else:
        same = _mask(printed) == _mask(shown)
    pairs = zip(_numbers(shown), _numbers(printed), strict=False)
    return same and all(abs(a - b) <= max(_SHARE * max(a, b), _LEAST) for a, b in pairs)


def _mask(line: str) -> str:
    for pattern in _TIMES:
        line = re.sub(pattern, "·", line)
    line = _MEASURED.sub(lambda found: found[1] or "nats", line)
    return " ".join(line.split())


def _numbers(line: str) -> list[float]:
    return [float(found[2] or found[3]) for found in _MEASURED.finditer(line)]


def choose_output(shown: str, printed: str, told: str) -> str:
    """Return standard output, or both outputs if a `text` block begins with a line of standard error."""
    first = next((_words(line) for line in shown.splitlines() if line.strip() != "..."), [])
    return told + printed if first in map(_words, told.splitlines()) else printed


def rewrite(shown: str, printed: str) -> str:
    """Return a `text` block with the lines of an output in place of its own, with the same lines left out.

    Lines up to the first `...` are taken from the start, lines after the last one from the end, and lines between two
    of them where the words of their first line occur.
    """
    lines = printed.rstrip("\n").splitlines()
    split = re.split(r"^( *\.\.\.\n)", shown, flags=re.MULTILINE)
    parts, left_out = split[::2], split[1::2]
    counts, taken, at = [len(part.splitlines()) for part in parts], [], 0
    for index, (part, count) in enumerate(zip(parts, counts, strict=True)):
        if index == len(parts) - 1 and len(parts) > 1:
            at = len(lines) - count
        elif index and count:
            words = _words(part.splitlines()[0])
            at = next((i for i in range(at, len(lines)) if _words(lines[i]) == words), at)
        end = len(lines) if len(parts) == 1 else at + count
        taken.append("".join(f"{_shorten(line)}\n" for line in lines[at:end]))
        at = end
    return "".join(itertools.chain(*itertools.zip_longest(taken, left_out, fillvalue="")))


def _words(line: str) -> Sequence[str]:
    return re.findall(r"[A-Za-z]+", line)


def _shorten(line: str) -> str:
    if len(line) <= WIDTH:
        return line
    return re.sub(r" +[\d,]+$", "", line[: WIDTH - 4].rpartition(" ")[0].rstrip()) + " ..."  # no rate without its unit
