"""Chat templates: search for the template of a tokenizer, and rendering of conversations."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import jinja2

from jaxopt_llm.config import DataConfig
from jaxopt_llm.config.data import NO_TEMPLATE, PROMPT, TEMPLATE_FILE, TEXT_FORMS, UNPAIRED, parse_arguments
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.files import check_is_regular
from jaxopt_llm.data.reading.conversation import JUDGED, MISMATCHED, SIDES
from jaxopt_llm.data.reading.rows import Part
from jaxopt_llm.data.reading.skipped import Malformed, Skipped
from jaxopt_llm.data.reading.source import Document, read_documents, reject
from jaxopt_llm.data.tokens import sandbox
from jaxopt_llm.data.tokens.sandbox import Template
from jaxopt_llm.data.tokens.tokenizer import Tokenizer, find_tokenizer_folder, read_json_object
from jaxopt_llm.data.tokens.tokenizer_folder import NAMED_TEMPLATES, SETTINGS
from jaxopt_llm.data.tokens.turns import Lost, Refused

T = TypeVar("T")
MAX_TEMPLATE_BYTES = 2**20  # published templates have at most 20 kB
_UNLEARNED = "without assistant tokens"
_LEARN_LAST = "--data.learn-turns last learns its last turn"


def find_template(config: DataConfig, tokenizer: Tokenizer) -> Template:
    """Return the chat template of a tokenizer, or the one that data.chat_template names.

    Raises:
        InputError: there is no template, or it cannot be read.
    """
    if (found := _find_sources(config)) is None:
        raise InputError(_explain_no_template(config))
    path, source, tool_use = found
    for text in filter(None, (source, tool_use)):
        if len(text.encode()) > MAX_TEMPLATE_BYTES:
            raise InputError(f"{path}: the chat template is larger than {MAX_TEMPLATE_BYTES:,} bytes; check the file")
    ends, arguments = tuple(tokenizer.special_tokens), parse_arguments(config.template_arguments)
    return Template(path, source, dict(tokenizer.named_tokens), ends, config.date, arguments, tool_use)


def has_template(config: DataConfig) -> bool:
    """Return whether there is a chat template. Raise InputError as `find_template` does for one that cannot be read."""
    return _find_sources(config) is not None


def _find_sources(config: DataConfig) -> tuple[Path, str, str | None] | None:
    """Return the file of the template, the template, and the one for conversations with tools; None: there is none.

    As in transformers, data.chat_template is the name of one of the tokenizer's templates, or else a file. Without it,
    conversations with tools get the tokenizer's template `tool_use` if there is one, and the others `default`.
    """
    if config.chat_template == NO_TEMPLATE:
        return None
    folder = find_tokenizer_folder(config)
    settings = read_json_object(folder / SETTINGS) if folder else {}
    named = _find_named_templates(folder, settings) if folder else {}
    if config.chat_template in named:
        return *named[config.chat_template], None
    if config.chat_template:
        path = Path(config.chat_template)
        names = sorted(named.keys() - {"default"})
        return path, _read_template(path, f"data.chat_template={path}", names), None
    if "default" in named:
        return *named["default"], named["tool_use"][1] if "tool_use" in named else None
    if named:
        problem = f"data.tokenizer={config.tokenizer} has several chat templates and none named default"
        raise InputError(f"{problem}: name one with --data.chat_template: {', '.join(sorted(named))}")
    return None


def _find_named_templates(folder: Path, settings: dict[str, Any]) -> dict[str, tuple[Path, str]]:
    """Return the templates of a tokenizer's folder by name, each with its file.

    Files of their own replace all templates of tokenizer_config.json.
    """
    main, others = folder / TEMPLATE_FILE, sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))
    files = {"default": main} if main.is_file() else {}
    files |= {path.stem: path for path in others}
    if files:
        return {name: (path, _read_template(path, str(path))) for name, path in files.items()}
    value = settings.get("chat_template")
    items = value if isinstance(value, list) else [{"name": "default", "template": value}]
    found = {item.get("name"): item.get("template") for item in items if isinstance(item, dict)}
    path = folder / SETTINGS
    return {str(name): (path, text) for name, text in found.items() if isinstance(text, str)}


def _read_template(path: Path, where: str, names: Sequence[str] = ()) -> str:
    """Return the text of a template file. names: names that the user may have meant, for the message."""
    try:
        check_is_regular(path)
        with path.open("rb") as file:
            return file.read(MAX_TEMPLATE_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        remedy = "name a text file with Jinja" + (f", or a template of the tokenizer: {', '.join(names)}" * bool(names))
        raise InputError(f"{where}: the template cannot be read ({error}); {remedy}") from error


def _explain_no_template(config: DataConfig) -> str:
    if config.chat_template == NO_TEMPLATE:
        return "data.chat_template=none: messages need a template; name a file, or leave it out for the tokenizer's own"
    if config.uses_bytes:
        where, remedy = "", "give --data.tokenizer FOLDER, the folder or hub id of a model that has one"
    else:
        where, remedy = f" ({TEMPLATE_FILE}, or chat_template in {SETTINGS})", "add one"
    problem = f"data.tokenizer={config.tokenizer} has no chat template{where}"
    return f"{problem}: {remedy}, or name a template file with --data.chat_template"


class Renderer:
    """Renderer of a template, whose errors name the template and the conversation.

    Raises:
        InputError: the template cannot be compiled.
    """

    def __init__(self, template: Template) -> None:
        self._template = template
        self._sandbox = self._run(lambda: sandbox.Renderer(template), "when it was compiled")

    def render(self, document: Document, config: DataConfig, skipped: Skipped) -> Iterator[Document]:
        """Yield the documents of a conversation, or of a pair of them, with the same key.

        A conversation has several if the template rewrites earlier turns when more turns follow. There is none if the
        template rejects the conversation or leaves out a part of it, and `data.malformed` allows skipping it.

        A pair has one document a side, or none: if a side cannot be read, the other side is left out too.
        """
        sides = _list_sides(document, config)
        is_pair = len(sides) == 2
        try:
            rendered = [self._run(partial(self._sandbox.render, **each), document.name) for each, *_ in sides]
            if (is_pair or config.content == UNPAIRED) and any(len(each.documents) > 1 for each in rendered):
                raise Malformed("with an answer of several turns that the chat template rewrites", _LEARN_LAST)
        except Refused as error:
            problem = f"the chat template {self._template.path} rejects the conversation ({error})"
            reject(document.name, problem, config)
            skipped.add("rejected by the chat template", document.name)
            return
        except Lost as error:
            lost = Malformed(*error.args)
            remedy = "name a template that has a place for it with --data.chat_template"
            reject(document.name, f"{lost}: {self._template.path}; {remedy}", config)
            skipped.add(lost.reason, document.name)
            return
        except Malformed as error:
            reject(document.name, error, config)
            skipped.add(error.reason, document.name)
            return
        # A tokenizer of bytes has no special tokens: there a text, such as a newline, ends a turn.
        skipped.read["endless"] += bool(self._template.ends) and not all(each.ends for each in rendered)
        documents = [
            Document(document.name, text.encode(), document.key, tuple(spans), side, label)
            for each, (_, side, label) in zip(rendered, sides, strict=True)
            for text, spans in (each.documents if document.label is None else each.documents[-1:])  # the whole one
        ]
        learned = [each for each in documents if any(begin < end for begin, end in each.spans or ())]
        if is_pair and len(learned) < len(documents):
            skipped.add(_UNLEARNED)
            return
        for _ in range(len(documents) - len(learned)):
            skipped.add(_UNLEARNED)
        if not is_pair:
            skipped.add_divided(len(learned))
        yield from learned

    def render_prompt(self, messages: list[dict[str, Any]]) -> str:
        """Render a running conversation as text, up to the start of the assistant's next turn.

        Raises:
            InputError: the template rejects the messages or fails.
        """
        return self._ask(lambda: self._sandbox.render_prompt(messages))

    def read_answer(self, text: str, whole: str) -> dict[str, Any]:
        """Return the message of an answer of the model. whole: its text with its special tokens.

        A text without special tokens is the content; templates look for reasoning between <think> and </think> in it.
        """
        if text == whole:
            return {"role": "assistant", "content": text}
        return self._run(lambda: self._sandbox.read_answer(whole), "in a conversation")

    def find_turn_end(self) -> str | None:
        """Return the special token that ends an answer, or None. Raises InputError as `render_prompt` does."""
        return self._ask(self._sandbox.find_turn_end) or None

    def _ask(self, render: Callable[[], str]) -> str:
        try:
            return self._run(render, "in a conversation")
        except Refused as error:
            problem = f"the chat template rejects the conversation ({error})"
            raise InputError(f"{self._template.path}: {problem}; start a new one, or correct the template") from error

    def _run(self, render: Callable[[], T], where: object) -> T:
        """Return what the template makes.

        Raises:
            Refused, Lost: the template does not write the conversation.
            InputError: the template is wrong.
        """
        try:
            return render()
        except (Refused, Lost):
            raise
        except sandbox.Undated as error:
            problem = "the chat template writes the current date, so the tokens would differ on another day"
            remedy = "give a fixed date, as in --data.date 2026-01-31"
            raise InputError(f"{self._template.path}: {problem}; {remedy}") from error
        except Exception as error:  # a program of a stranger can raise any exception
            kind = f"line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else type(error).__name__
            problem = f"the chat template failed ({where}): {': '.join(filter(None, (kind, str(error))))}"
            raise InputError(f"{self._template.path}: {problem}; correct the template") from error


def _list_sides(document: Document, config: DataConfig) -> list[tuple[dict[str, Any], str, float | None]]:
    """Return a conversation without a side, or both of a pair: what is rendered, the side, and the label."""
    conversation = json_files.parse(document.content)
    if SIDES[0] not in conversation:
        return [(conversation, "", document.label)]
    labels = (1.0, 0.0) if config.content == UNPAIRED else (document.label, document.label)
    return [(conversation[side], side, label) for side, label in zip(SIDES, labels, strict=True)]


class Joiner:
    """Writer of prompts and answers that are texts without a template: joined as they are, with EOS, as in TRL."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ends = (token for token in tokenizer.special_tokens if tokenizer.vocabulary[token] == tokenizer.eos)
        end = next(ends, "")
        (ids,) = tokenizer.encode([end.encode()])
        self._end = end if ids.tolist() == [tokenizer.eos] else ""  # otherwise the tokenizer adds it to the ids

    def render(self, document: Document, config: DataConfig, _: Skipped) -> Iterator[Document]:
        """Yield the document of a prompt and its answer, or the two of a pair, with the same key."""
        for each, side, label in _list_sides(document, config):
            prompt, answer = (message["content"] for message in each["messages"])
            text = prompt + answer + ("" if answer.endswith(self._end) else self._end)
            spans = ((len(prompt), len(text)),)
            yield Document(document.name, text.encode(), document.key, spans, side, label, is_joined=True)


def add_mismatched(documents: Iterable[Document], skipped: Skipped) -> Iterator[Document]:
    """Yield each document with a judged answer, and after it the same prompt with the answer to another prompt.

    The other answer is that of the last document before it with another prompt or, at the beginning, of the first one
    after it. TRL rotates the answers of a batch. Documents that have no other prompt are skipped.
    """
    waiting = list[Document]()  # documents at the beginning, which have the same prompt
    last: Document | None = None
    other: Document | None = None  # the last document before `last` with another prompt
    for document in documents:
        if last is not None and last.prompt != document.prompt:
            other = last
        last = document
        if other is None:
            waiting.append(document)
            continue
        for each in waiting:
            yield from _put_to_prompt(each, document)
        waiting.clear()
        yield from _put_to_prompt(document, other)
    for _ in waiting:
        skipped.add("in a part of a file without a second prompt")


def _put_to_prompt(document: Document, other: Document) -> tuple[Document, Document]:
    """Return a document as the first one of a pair, and its prompt with the answer of the other document."""
    assert document.label is not None and other.spans
    prompt, begin = document.prompt, other.spans[0][0]
    text = prompt + other.content.decode()[begin:]
    spans = tuple((first - begin + len(prompt), last - begin + len(prompt)) for first, last in other.spans)
    judged = replace(document, side=JUDGED[int(document.label)])
    return judged, replace(document, content=text.encode(), spans=spans, side=MISMATCHED)


Reader = Callable[[Part, Skipped], Iterator[Document]]


def make_reader(config: DataConfig, tokenizer: Tokenizer) -> Reader:
    """Return a function that yields the documents of a part, with conversations rendered as text."""
    if config.content == "text":
        return lambda part, skipped: read_documents(part, config, skipped)
    if config.content == PROMPT:
        return _make_prompt_reader(config, tokenizer)
    may_join = config.content in ("chat", *TEXT_FORMS)
    template = None if may_join and not has_template(config) else find_template(config, tokenizer)
    sources = None if template is None else template.source + (template.tool_source or "")
    writer = Joiner(tokenizer) if template is None else Renderer(template)

    def read(part: Part, skipped: Skipped) -> Iterator[Document]:
        documents = read_documents(part, config, skipped, sources)
        rendered = chain.from_iterable(
            (document,) if document.spans is None else writer.render(document, config, skipped)
            for document in documents
        )
        return add_mismatched(rendered, skipped) if config.content == UNPAIRED else rendered

    return read


def _make_prompt_reader(config: DataConfig, tokenizer: Tokenizer) -> Reader:
    """Return a function that yields prompts. The template, which need not exist, renders those that are messages."""
    find_renderer = cache(lambda: Renderer(find_template(config, tokenizer)))

    def read(part: Part, skipped: Skipped) -> Iterator[Document]:
        for document in read_documents(part, config, skipped):
            prompt = json_files.parse(document.content)["prompt"]
            is_text = isinstance(prompt, str)
            text = prompt if is_text else find_renderer().render_prompt(prompt)
            spans = None if is_text else ()
            yield Document(document.name, text.encode(), document.key, spans, row=document.content)

    return read
