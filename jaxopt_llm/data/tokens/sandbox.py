"""Rendering of conversations by a chat template, in Jinja's sandbox.

A chat template is a program, and comes with weights from any source. The sandbox keeps it away from Python's objects,
and with them from files and the network. It does not bound time and memory: a template can compute without end.
"""

import functools
import hashlib
import itertools
import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jaxopt_llm.config.data import RESERVED_ARGUMENTS
from jaxopt_llm.data.tokens.turns import (
    EXAMPLES,
    PROBES,
    REASONING,
    Conversation,
    Document,
    Lost,
    Refused,
    Specials,
    find_ending,
    find_frame,
    find_owners,
    fit_arguments,
    mark,
)

MAX_CHARACTERS = 2**26  # of a rendered conversation

Messages = list[dict[str, Any]]
Blocks = list[tuple[int, int]]  # ranges of characters
# Messages with their reasoning where a template looks for it.
Form = Callable[[Messages], Messages]

_NONCE = str(secrets.randbits(128))  # random, so that no conversation can contain these marks
_BEGIN, _END = f"\0{_NONCE}<", f"\0{_NONCE}>"

# Exceptions that a template raises for a conversation of another form than it expects.
_UNEXPECTED = (jinja2.UndefinedError, TypeError, ValueError, AttributeError, LookupError, ZeroDivisionError)


class Undated(jinja2.TemplateError):
    """Exception that `strftime_now` raises if there is no current date."""


class Generation(Extension):
    """Extension for `{% generation %} ... {% endgeneration %}` around the text that the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 (as in the base class)
    used = False  # whether the template contains a block
    rendered = 0  # blocks rendered since the last reset

    def parse(self, parser: Parser) -> nodes.Node:
        self.used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        body = caller()
        if _BEGIN in body:
            raise jinja2.TemplateError("a generation block is inside another one")
        self.rendered += 1
        return _BEGIN + body + _END


class Sandbox(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Raise SecurityError. Jinja's own implementation would render a forbidden attribute as an empty string."""
        raise jinja2.exceptions.SecurityError(f"it accesses {attribute!r} of a {type(obj).__name__}")


class SafeNamespace(Namespace):
    """Namespace that rejects names with a meaning in Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"it sets the name {name!r} in a namespace")
        Namespace.__setitem__(self, name, value)


@dataclass(frozen=True)
class Template:
    """Chat template of a tokenizer.

    Attributes:
        path: the file of the template, for messages.
        source: the template, in Jinja.
        special: special tokens by the names that the template uses: bos_token, eos_token, ...
        ends: special tokens that can end a turn.
        date: the date that the template writes as the current date.
        arguments: further variables of the template.
        tool_source: the template for conversations with tools; None if it is the same one.
    """

    path: Path
    source: str
    special: dict[str, str]
    ends: tuple[str, ...]
    date: str
    arguments: dict[str, Any] = field(default_factory=dict)
    tool_source: str | None = None

    @property
    def sha256(self) -> str:
        parts = [self.source, self.special, self.ends, self.date, self.arguments, self.tool_source]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class _Compiled:
    """Compiled template, and what its texts of examples show of it."""

    def __init__(self, source: str, template: Template) -> None:
        environment = Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, "jinja2.ext.loopcontrols"],
            loader=jinja2.FunctionLoader(_load),
        )
        environment.filters["tojson"] = _tojson
        del environment.globals["lipsum"]
        environment.globals.update(
            raise_exception=_raise, strftime_now=_clock(template.date), namespace=SafeNamespace, dict=TemplateDict()
        )
        self._template = environment.from_string(source)
        generation = environment.extensions[Generation.identifier]
        assert isinstance(generation, Generation)
        self._generation = generation
        self._variables = template.special | template.arguments
        self._specials = Specials(template.ends, template.special.get("eos_token", ""))
        self.find_ending = functools.cache(functools.partial(find_ending, self.bind({}), self._specials))

    @property
    def marks(self) -> bool:
        """True if the template has generation blocks."""
        return self._generation.used

    def bind(self, arguments: dict[str, Any]) -> Callable[..., str]:
        """Return a function that renders messages and tools, with or without the generation prompt."""
        return lambda messages, tools, prompts: self.render(messages, tools, prompts, arguments)[0]

    def render(
        self, messages: Messages, tools: list[Any] | None, prompts: bool, arguments: dict[str, Any]
    ) -> tuple[str, Blocks]:
        """Return the text, and the ranges of the generation blocks. prompts: whether the generation prompt follows.

        Raises:
            Refused: the template rejects the conversation, or fails because it has another form than expected.
        """
        if any(name in message for message in messages for name in REASONING):
            messages = self._form(messages)
        return self._write(messages, tools=tools, add_generation_prompt=prompts, **arguments)

    def _write(self, messages: Any, **given: Any) -> tuple[str, Blocks]:
        variables = {"tools": None, "add_generation_prompt": False, "documents": None} | self._variables | given
        self._generation.rendered = 0
        try:
            rendered = self._template.render(variables, messages=messages)
        except _UNEXPECTED as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        if not _is_text(rendered):
            raise jinja2.TemplateError("it writes half of a surrogate pair, which is no text")
        if len(rendered) > MAX_CHARACTERS:
            raise jinja2.TemplateError(f"it renders more than {MAX_CHARACTERS:,} characters for one conversation")
        return _remove_marks(rendered, self._generation.rendered) if self.marks else (rendered, [])

    @functools.cached_property
    def _form(self) -> Form:
        """The first form of reasoning that the template writes, or else fields of the message."""
        return next(filter(self._writes_reasoning, _FORMS), _FORMS[0])

    def _writes_reasoning(self, form: Form) -> bool:
        key, value = PROBES
        for example in EXAMPLES:
            answered = _alias_reasoning([*example[:-1], {**example[-1], "content": key, "thinking": value + key}])
            try:
                text, _ = self._write(form(answered))
            except (Refused, jinja2.TemplateError):
                continue
            return value + key in text and not re.search("[\"']type[\"']", text)  # a list as Python or JSON writes it
        return False


@dataclass(frozen=True)
class Rendered:
    """A conversation as the template writes it.

    Attributes:
        documents: several if the template rewrites earlier turns when more turns follow.
        ends: whether special tokens end the learned turns.
    """

    documents: list[Document]
    ends: bool


class Renderer:
    """Renderer of conversations.

    Raises:
        jinja2.TemplateError: the template cannot be compiled.
    """

    def __init__(self, template: Template) -> None:
        self._template = self._tool_template = _Compiled(template.source, template)
        if template.tool_source is not None:
            self._tool_template = _Compiled(template.tool_source, template)
        self._specials = Specials(template.ends, template.special.get("eos_token", ""))

    def render(
        self,
        messages: Messages,
        tools: list[Any] | None = None,
        arguments: dict[str, Any] | None = None,
        unlearned: Collection[int] = (),
    ) -> Rendered:
        """Return a conversation as the template writes it.

        Raises:
            Refused: the template rejects the conversation or cannot write it.
            Lost: the template leaves out a part.
        """
        if wrong := sorted(RESERVED_ARGUMENTS & {*(arguments or {})}):
            raise Refused(f"the arguments of the row have names that are reserved: {', '.join(wrong)}")
        failures: list[Exception] = []
        for given in _fill_contents(_alias_reasoning(messages)):
            try:
                documents = self._find_documents(given, tools, arguments or {}, unlearned)
                return Rendered(documents, self._have_ends(documents, has_tools=bool(tools)))
            except (Refused, Lost) as error:
                failures.append(error)
        # What the template itself says tells more than its failure on a content of another form.
        raise min(failures, key=lambda error: (not isinstance(error, Lost), error.__cause__ is not None))

    def _have_ends(self, documents: list[Document], has_tools: bool) -> bool:
        """Return whether a special token ends each learned range, or with generation blocks the last one."""
        marks = (self._tool_template if has_tools else self._template).marks
        learned = [text[begin:end] for text, spans in documents for begin, end in (spans[-1:] if marks else spans)]
        return all(self._specials.end(text.rstrip()) for text in learned)

    def _find_documents(
        self,
        messages: Messages,
        tools: list[Any] | None,
        arguments: dict[str, Any],
        unlearned: Collection[int],
    ) -> list[Document]:
        template = self._tool_template if tools else self._template
        render = template.bind(arguments)
        messages = fit_arguments(render, messages, tools)
        learned = [i for i, each in enumerate(messages) if each["role"] == "assistant" and i not in unlearned]
        conversation = Conversation(render, messages, tools, self._specials)
        conversation.render_first(len(messages))
        conversation.check_parts(learned)
        if not template.marks:
            return list(conversation.find_documents(learned, template.find_ending(bool(tools))))

        cut = max((index + 1 for index in learned if conversation.is_shortened(index)), default=0)
        documents = (
            self._find_documents(messages[:cut], tools, arguments, [i for i in unlearned if i < cut]) if cut else []
        )
        if any(index >= cut for index in learned):
            others = {*unlearned, *(index for index in learned if index < cut)}
            write = functools.partial(template.render, tools=tools, prompts=False, arguments=arguments)
            documents.append(_find_blocks(write, messages, others))
        return documents

    def render_prompt(self, messages: Messages) -> str:
        """Return the text of a running conversation, up to the start of the assistant's next turn."""
        return self._template.bind({})(_alias_reasoning(messages), None, True)

    def read_answer(self, answer: str) -> dict[str, Any]:
        """Return the message of an answer that the model wrote, with its special tokens.

        What the template would write around the reasoning and the content is not part of them.
        """
        reasoning, content = (self._specials.remove(part) for part in find_frame(self._template.bind({})).split(answer))
        return {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {})

    def find_turn_end(self) -> str:
        """Return the special token that ends an answer, or an empty text."""
        render, ending = self._template.bind({}), self._template.find_ending(False)
        failures = []
        for example in EXAMPLES:
            conversation = Conversation(render, example, None, self._specials)
            try:
                return self._specials.end(conversation.read_turn(len(example) - 1, ending).text)
            except Refused as error:
                failures.append(error)
        raise failures[0]


def _find_blocks(write: Callable[[Messages], tuple[str, Blocks]], messages: Messages, unlearned: set[int]) -> Document:
    """Return the text of a conversation, and its generation blocks without those of unlearned messages.

    write: renders messages, and finds their generation blocks.
    """
    text, spans = write(messages)
    if unlearned:
        owners = _find_owners(write, messages, unlearned)
        if len(owners) != len(spans) or any(0 < len(each & unlearned) < len(each) for each in owners):
            problem = "it does not show which generation blocks are those of a message that is not learned"
            raise Refused(f"{problem}; put one block around the text of each message in a copy of the template")
        spans = [span for span, each in zip(spans, owners, strict=True) if not each & unlearned]
    return text, spans


def _find_owners(
    write: Callable[[Messages], tuple[str, Blocks]], messages: Messages, unlearned: set[int]
) -> list[set[int]]:
    """Return the messages of each generation block. There is none if an unlearned message leaves no mark."""
    marks = [f"{PROBES[0]}-{index}-" for index in range(len(messages))]
    text, blocks = write([mark(message, each) for message, each in zip(messages, marks, strict=True)])
    roles = [message["role"] for message in messages]
    is_shown = all(marks[index] in text for index in unlearned)
    return find_owners(text, blocks, roles, marks) if is_shown else []


def _alias_reasoning(messages: Messages) -> Messages:
    """Return messages with their reasoning under each name that a template may read, as transformers does."""
    aliased = []
    for message in messages:
        texts = [message[name] for name in REASONING if message.get(name) is not None]
        named = {"thinking": texts[0], **message, "reasoning_content": texts[0]} if texts else message
        aliased.append(named)
    return aliased


def _write_parts(messages: Messages) -> Messages:
    """Return messages with reasoning as a part of the content, as templates of Magistral and Ministral read it."""
    return _replace_contents(messages, lambda parts: parts, ("thinking", "thinking"), ("text", "text"))


def _write_blocks(messages: Messages) -> Messages:
    """Return messages with reasoning as a block of the content, as Apertus' template reads it."""
    return _replace_contents(messages, lambda parts: {"blocks": parts}, ("thoughts", "text"), ("response", "text"))


# Places where templates look for reasoning: fields of the message, or a part of its content.
_FORMS: tuple[Form, ...] = (lambda messages: messages, _write_parts, _write_blocks)


def _replace_contents(
    messages: Messages, wrap: Callable[[list[Any]], Any], thought: tuple[str, str], text: tuple[str, str]
) -> Messages:
    """Return messages whose assistant's contents are lists of parts. thought, text: type of a part, and its field."""
    changed = []
    for message in messages:
        values = [(thought, message.get("reasoning_content")), (text, message.get("content"))]
        parts = [{"type": kind, field: value} for (kind, field), value in values if value]
        is_changed = message["role"] == "assistant" and parts
        changed.append({**message, "content": wrap(parts)} if is_changed else message)
    return changed


def _fill_contents(messages: Messages) -> Iterator[Messages]:
    """Yield messages, first as they are, then with each value in place of an empty content beside tool calls.

    Templates differ in how they test for such a content: absent, as transformers passes it, null, or empty.
    """
    yield messages
    empty = [message.get("tool_calls") and not message.get("content") for message in messages]
    if any(empty):
        for content in (None, ""):
            filled = zip(messages, empty, strict=True)
            yield [{**message, "content": content} if is_empty else message for message, is_empty in filled]
    if any("content" in message for message, is_empty in zip(messages, empty, strict=True) if is_empty):
        filled = zip(messages, empty, strict=True)
        yield [{k: v for k, v in each.items() if k != "content"} if is_empty else each for each, is_empty in filled]


def _remove_marks(marked: str, blocks: int) -> tuple[str, list[tuple[int, int]]]:
    """Return the text without its marks, and the ranges that they enclosed."""
    pieces = re.split(f"({_BEGIN}|{_END})", marked)
    texts, marks = pieces[::2], pieces[1::2]
    if marks != [_BEGIN, _END] * blocks:
        raise jinja2.TemplateError("it does not write the text of each generation block exactly once and unchanged")
    edges = list(itertools.accumulate(map(len, texts[:-1])))
    return "".join(texts), list(zip(edges[::2], edges[1::2], strict=True))


def _is_text(rendered: str) -> bool:
    try:
        rendered.encode()
    except UnicodeEncodeError:
        return False
    return True


def _raise(message: str) -> NoReturn:
    raise Refused(str(message))


def _load(name: str) -> NoReturn:
    raise jinja2.exceptions.SecurityError(f"it reads another template, {name!r}")


class TemplateDict:
    """Dicts for templates. The type `dict` itself would give the template access to its other methods."""

    def __call__(self, *items: Any, **named: Any) -> dict[str, Any]:
        return dict(*items, **named)

    def fromkeys(self, *items: Any) -> dict[Any, Any]:
        return dict.fromkeys(*items)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return the value as JSON. Jinja's own filter would escape characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _clock(day: str) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        if not day:
            raise Undated
        return date.fromisoformat(day).strftime(form)

    return strftime_now
