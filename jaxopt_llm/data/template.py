"""The chat template that makes conversations text, found beside the tokenizer and run in a process of its own."""

import hashlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from jaxopt_llm.data.config import DataConfig
from jaxopt_llm.data.source import Document, Part, read, refuse
from jaxopt_llm.data.tokenizer import Tokenizer, read_object
from jaxopt_llm.errors import InputError

PROGRAM = Path(__file__).with_name("sandbox.py")
MOST_BYTES = 2**20  # of a template: published ones have 20 kB at most
SECONDS = 30.0  # for one conversation, which takes less than a millisecond


@dataclass(frozen=True)
class Template:
    """source: in Jinja. special: what it may call bos_token, eos_token, ... ends: special tokens that can end a turn.
    date: the day that it writes as today's."""

    path: Path
    source: str
    special: dict[str, str]
    ends: tuple[str, ...]
    date: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps([self.source, self.special, self.ends, self.date]).encode()).hexdigest()


def find_template(config: DataConfig, tokenizer: Tokenizer) -> Template:
    """data.chat_template; else chat_template.jinja beside the tokenizer; else what tokenizer_config.json there says.

    Raises:
        InputError: none of them, or one that cannot be read.
    """
    path = Path(config.tokenizer)
    folder = path if path.is_dir() else path.parent
    settings = {} if config.tokenizer == "bytes" else read_object(folder / "tokenizer_config.json")
    named = {key: _content(token) for key, token in settings.items() if key.endswith("_token")}
    special = {key: token for key, token in named.items() if isinstance(token, str)}
    beside = folder / "chat_template.jinja"
    path = Path(config.chat_template) if config.chat_template else beside
    if config.chat_template or (config.tokenizer != "bytes" and beside.is_file()):
        try:
            with path.open("rb") as file:
                source = file.read(MOST_BYTES + 1).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"data.chat_template={path}: it cannot be read ({error})") from error
    else:
        path, found = folder / "tokenizer_config.json", settings.get("chat_template")
        if isinstance(found, list):  # of several, by name
            found = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}.get("default")
        if not isinstance(found, str):
            raise InputError(
                f"data.tokenizer={config.tokenizer} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json): put one there, or name a file of one with data.chat_template"
            )
        source = found
    if len(source.encode()) > MOST_BYTES:
        raise InputError(f"{path}: a chat template of more than {MOST_BYTES:,} bytes; it is too large to be one")
    return Template(path, source, special, tuple(tokenizer.special), config.date)


@contextmanager
def rendering(template: Template, seconds: float = SECONDS) -> Iterator["Renderer"]:
    """A template at work: its process ends with the context."""
    # -P: what lies beside the program is not to be taken for modules of Python's library.
    command = [sys.executable, "-P", str(PROGRAM), str(seconds)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield Renderer(template, process, seconds)
    finally:
        process.kill()
        process.communicate()


class Renderer:
    """See `rendering`."""

    def __init__(self, template: Template, process: "subprocess.Popen[bytes]", seconds: float) -> None:
        self._template, self._process, self._seconds = template, process, seconds
        told = {"template": template.source, "special": template.special, "ends": template.ends, "date": template.date}
        answer = self._ask(json.dumps(told).encode(), "as it is compiled")
        self._check(answer, "as it is compiled")

    def __call__(self, document: Document, config: DataConfig) -> Document | None:
        """A conversation as text; None where the template refuses it and it may be skipped."""
        answer = self._ask(document.content, document.name)
        if "refused" in answer:
            refuse(f"{document.name}: the chat template {self._template.path} refuses it ({answer['refused']})", config)
            return None
        self._check(answer, document.name)
        spans = tuple((begin, end) for begin, end in answer["spans"])
        return Document(document.name, answer["text"].encode(), document.key, spans)

    def prompt(self, messages: list[dict[str, str]]) -> str:
        """A conversation as text, up to where the assistant's next turn begins."""
        return self._text(messages, add_generation_prompt=True)

    def turn_end(self) -> str | None:
        """The special token that the template writes behind an answer, if it writes one there."""
        roles = ("user", "assistant")
        text = self._text([{"role": role, "content": role} for role in roles], add_generation_prompt=False).rstrip()
        return next((token for token in self._template.ends if text.endswith(token)), None)

    def _text(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """Of what the user says now. Raises InputError where the template refuses it, too."""
        asked = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        answer = self._ask(json.dumps(asked).encode(), "in a conversation")
        if "refused" in answer:
            raise InputError(f"{self._template.path}: the chat template refuses it ({answer['refused']})")
        self._check(answer, "in a conversation")
        return str(answer["text"])

    def _ask(self, line: bytes, where: str) -> dict[str, Any]:
        try:
            _pipe(self._process.stdin).write(line + b"\n")
            _pipe(self._process.stdin).flush()
            answer: dict[str, Any] = json.loads(_pipe(self._process.stdout).readline())
        except (OSError, ValueError) as error:
            raise InputError(
                f"{self._template.path}: the chat template was stopped, {where}: it took more than "
                f"{self._seconds:g} s, or broke its process; is it one that can be trusted?"
            ) from error
        return answer

    def _check(self, answer: dict[str, Any], where: str) -> None:
        if "error" in answer:
            raise InputError(f"{self._template.path}: the chat template fails, {where}: {answer['error']}")


Reader = Callable[[Part, Counter[str]], Iterator[Document]]


@contextmanager
def reader(config: DataConfig, tokenizer: Tokenizer) -> Iterator[Reader]:
    """How the documents of a part are read: as `source.read` does, and conversations made text."""
    if config.content == "text":
        yield lambda part, skipped: read(part, config, skipped)
        return
    with rendering(find_template(config, tokenizer)) as renderer:
        yield lambda part, skipped: _rendered(read(part, config, skipped), renderer, config, skipped)


def _rendered(
    documents: Iterable[Document], renderer: Renderer, config: DataConfig, skipped: Counter[str]
) -> Iterator[Document]:
    for document in documents:
        rendered = renderer(document, config)
        if rendered is None:
            skipped["refused by the chat template"] += 1
        elif not any(begin < end for begin, end in rendered.spans or ()):
            skipped["nothing of the assistant's"] += 1
        else:
            yield rendered


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token
