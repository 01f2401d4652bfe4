"""Chat templates: search for the template of a tokenizer, and rendering of conversations in a separate process."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.files import check_is_regular
from jaxopt_llm.data.rows import Part
from jaxopt_llm.data.skipped import Skipped
from jaxopt_llm.data.source import Document, read_documents, reject
from jaxopt_llm.data.tokenizer import Tokenizer, find_tokenizer_folder, read_json_object

SANDBOX_PROGRAM = Path(__file__).with_name("sandbox.py")
MAX_TEMPLATE_BYTES = 2**20  # published templates have at most 20 kB
TIMEOUT_SECONDS = 30.0  # for one conversation, which usually takes less than a millisecond


@dataclass(frozen=True)
class Template:
    """Chat template of a tokenizer.

    Attributes:
        path: the file of the template, for messages.
        source: the template, in Jinja.
        special: special tokens by the names that the template uses: bos_token, eos_token, ...
        ends: special tokens that can end a turn.
        date: the date that the template writes as the current date.
    """

    path: Path
    source: str
    special: dict[str, str]
    ends: tuple[str, ...]
    date: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps([self.source, self.special, self.ends, self.date]).encode()).hexdigest()


def find_template(config: DataConfig, tokenizer: Tokenizer) -> Template:
    """Return the chat template of a tokenizer.

    The template is, in this order: the file data.chat_template, chat_template.jinja next to the tokenizer, or
    chat_template in its tokenizer_config.json.

    Raises:
        InputError: there is no template, or it cannot be read.
    """
    folder = find_tokenizer_folder(config)
    settings = read_json_object(folder / "tokenizer_config.json") if folder else {}
    path = Path(config.chat_template) if config.chat_template else folder and folder / "chat_template.jinja"
    if path and (config.chat_template or path.is_file()):
        try:
            check_is_regular(path)
            with path.open("rb") as file:
                source = file.read(MAX_TEMPLATE_BYTES + 1).decode()
        except (OSError, UnicodeDecodeError) as error:
            remedy = "name a text file with Jinja"
            raise InputError(f"data.chat_template={path}: the template cannot be read ({error}); {remedy}") from error
    else:
        value = settings.get("chat_template")
        if isinstance(value, list):  # several templates with names
            value = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}.get("default")
        if not folder or not isinstance(value, str):
            if config.uses_bytes:
                where, remedy = "", "give --data.tokenizer FOLDER, the folder or hub id of a model that has one"
            else:
                where, remedy = " (chat_template.jinja, or chat_template in tokenizer_config.json)", "add one"
            raise InputError(
                f"data.tokenizer={config.tokenizer} has no chat template{where}: {remedy}, or name a template file "
                "with --data.chat_template"
            )
        path, source = folder / "tokenizer_config.json", value
    if len(source.encode()) > MAX_TEMPLATE_BYTES:
        raise InputError(f"{path}: the chat template is larger than {MAX_TEMPLATE_BYTES:,} bytes; check the file")
    return Template(path, source, dict(tokenizer.named_tokens), tuple(tokenizer.special_tokens), config.date)


@contextmanager
def open_renderer(template: Template, seconds: float = TIMEOUT_SECONDS) -> Iterator["Renderer"]:
    """Start a process that renders the template; it ends with the context.

    seconds: timeout of one conversation.
    """
    # -P: files next to the program must not shadow modules of Python's library.
    command = [sys.executable, "-P", str(SANDBOX_PROGRAM), str(seconds)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield Renderer(template, process, seconds)
    finally:
        process.kill()
        process.communicate()


class Renderer:
    """Client of the process that renders a template; see `open_renderer`."""

    def __init__(self, template: Template, process: "subprocess.Popen[bytes]", seconds: float) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._template, self._stdin, self._stdout, self._seconds = template, process.stdin, process.stdout, seconds
        settings = {"template": template.source, "special": template.special}
        settings |= {"ends": template.ends, "date": template.date}
        self._request(json.dumps(settings).encode(), "when it was compiled")

    def render(self, document: Document, config: DataConfig) -> Document | None:
        """Render a conversation as text.

        Returns None if the template rejects the conversation and `data.malformed` allows skipping it.
        """
        answer = self._request(document.content, document.name)
        if "refused" in answer:
            problem = f"the chat template {self._template.path} rejects the conversation ({answer['refused']})"
            reject(document.name, problem, config)
            return None
        spans = tuple((begin, end) for begin, end in answer["spans"])
        return Document(document.name, answer["text"].encode(), document.key, spans)

    def render_prompt(self, messages: list[dict[str, str]]) -> str:
        """Render a conversation as text, up to the start of the assistant's next turn."""
        return self._render_text(messages, add_generation_prompt=True)

    def find_turn_end(self) -> str | None:
        """Return the special token that the template writes after an answer, or None."""
        messages = [{"role": role, "content": role} for role in ("user", "assistant")]
        text = self._render_text(messages, add_generation_prompt=False).rstrip()
        return next((token for token in self._template.ends if text.endswith(token)), None)

    def _render_text(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """Render messages of a running conversation. Raises InputError if the template rejects them or fails."""
        request = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        answer = self._request(json.dumps(request).encode(), "in a conversation")
        if "refused" in answer:
            problem = f"the chat template rejects the conversation ({answer['refused']})"
            raise InputError(f"{self._template.path}: {problem}; start a new one, or correct the template")
        return str(answer["text"])

    def _request(self, line: bytes, where: object) -> dict[str, Any]:
        try:
            self._stdin.write(line + b"\n")
            self._stdin.flush()
            answer: dict[str, Any] = json_files.parse(self._stdout.readline())
        except (OSError, ValueError) as error:
            raise InputError(
                f"{self._template.path}: the chat template was stopped ({where}): it took more than "
                f"{self._seconds:g} s or crashed its process; check that the template can be trusted"
            ) from error
        if "undated" in answer:
            problem = "the chat template writes the current date, so the tokens would differ on another day"
            remedy = "give a fixed date, as in --data.date 2026-01-31"
            raise InputError(f"{self._template.path}: {problem}; {remedy}")
        if "error" in answer:
            problem = f"the chat template failed ({where}): {answer['error']}"
            raise InputError(f"{self._template.path}: {problem}; correct the template")
        return answer


Reader = Callable[[Part, Skipped], Iterator[Document]]


@contextmanager
def open_reader(config: DataConfig, tokenizer: Tokenizer) -> Iterator[Reader]:
    """Open a function that yields the documents of a part, with conversations rendered as text."""
    if config.content == "text":
        yield lambda part, skipped: read_documents(part, config, skipped)
        return
    with open_renderer(find_template(config, tokenizer)) as renderer:
        yield lambda part, skipped: _render_all(read_documents(part, config, skipped), renderer, config, skipped)


def _render_all(
    documents: Iterable[Document], renderer: Renderer, config: DataConfig, skipped: Skipped
) -> Iterator[Document]:
    for document in documents:
        rendered = renderer.render(document, config)
        if rendered is None:
            skipped.add("rejected by the chat template", document.name)
        elif not any(begin < end for begin, end in rendered.spans or ()):
            skipped.add("without assistant tokens")
        else:
            yield rendered
