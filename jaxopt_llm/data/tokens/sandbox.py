"""Rendering of conversations by a chat template, in Jinja's sandbox.

A chat template is a program, and comes with weights from any source. The sandbox keeps it away from Python's objects,
and with them from files and the network. It does not bound time and memory: a template can compute without end.
"""

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

# Messages with their reasoning where a template looks for it.
Form = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]

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
    """Compiled template."""

    def __init__(self, source: str, date: str) -> None:
        environment = Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, "jinja2.ext.loopcontrols"],
            loader=jinja2.FunctionLoader(_load),
        )
        environment.filters["tojson"] = _tojson
        del environment.globals["lipsum"]
        environment.globals.update(
            raise_exception=_raise, strftime_now=_clock(date), namespace=SafeNamespace, dict=TemplateDict()
        )
        self._template = environment.from_string(source)
        generation = environment.extensions[Generation.identifier]
        assert isinstance(generation, Generation)
        self._generation = generation

    @property
    def marks(self) -> bool:
        """True if the template has generation blocks."""
        return self._generation.used

    def render(self, **variables: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and the ranges of the generation blocks.

        Raises:
            Refused: the template rejects the conversation, or fails because it has another form than expected.
        """
        self._generation.rendered = 0
        try:
            rendered = self._template.render(**variables)
        except _UNEXPECTED as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        if not _is_text(rendered):
            raise jinja2.TemplateError("it writes half of a surrogate pair, which is no text")
        if len(rendered) > MAX_CHARACTERS:
            raise jinja2.TemplateError(f"it renders more than {MAX_CHARACTERS:,} characters for one conversation")
        return _remove_marks(rendered, self._generation.rendered) if self.marks else (rendered, [])


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
        self._template = self._tool_template = _Compiled(template.source, template.date)
        if template.tool_source is not None:
            self._tool_template = _Compiled(template.tool_source, template.date)
        self._variables = template.special | template.arguments
        self._specials = Specials(template.ends, template.special.get("eos_token", ""))
        self._endings: dict[tuple[_Compiled, bool], Any] = {}
        self._forms: dict[_Compiled, Form] = {}

    def render(
        self,
        messages: list[dict[str, Any]],
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
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        arguments: dict[str, Any],
        unlearned: Collection[int],
    ) -> list[Document]:
        template = self._tool_template if tools else self._template
        render = self._bind(template, arguments)
        messages = fit_arguments(render, messages, tools)
        learned = [i for i, each in enumerate(messages) if each["role"] == "assistant" and i not in unlearned]
        conversation = Conversation(render, messages, tools, self._specials)
        conversation.render_first(len(messages))
        conversation.check_parts(learned)
        if not template.marks:
            return list(conversation.find_documents(learned, self._find_ending(template, bool(tools))))

        cut = max((index + 1 for index in learned if conversation.is_shortened(index)), default=0)
        documents = (
            self._find_documents(messages[:cut], tools, arguments, [i for i in unlearned if i < cut]) if cut else []
        )
        if any(index >= cut for index in learned):
            others = {*unlearned, *(index for index in learned if index < cut)}
            documents.append(self._find_blocks(template, messages, tools, arguments, others))
        return documents

    def _find_blocks(
        self,
        template: _Compiled,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        arguments: dict[str, Any],
        unlearned: set[int],
    ) -> Document:
        """Return the text of a conversation, and its generation blocks without those of unlearned messages."""
        text, spans = self._render(template, messages, tools, False, arguments)
        if unlearned:
            owners = self._find_owners(template, messages, tools, arguments, unlearned)
            if len(owners) != len(spans) or any(0 < len(each & unlearned) < len(each) for each in owners):
                problem = "it does not show which generation blocks are those of a message that is not learned"
                raise Refused(f"{problem}; put one block around the text of each message in a copy of the template")
            spans = [span for span, each in zip(spans, owners, strict=True) if not each & unlearned]
        return text, spans

    def _find_owners(
        self,
        template: _Compiled,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        arguments: dict[str, Any],
        unlearned: set[int],
    ) -> list[set[int]]:
        """Return the messages of each generation block. There is none if an unlearned message leaves no mark."""
        marks = [f"{PROBES[0]}-{index}-" for index in range(len(messages))]
        marked = [mark(message, each) for message, each in zip(messages, marks, strict=True)]
        text, blocks = self._render(template, marked, tools, False, arguments)
        roles = [message["role"] for message in messages]
        is_shown = all(marks[index] in text for index in unlearned)
        return find_owners(text, blocks, roles, marks) if is_shown else []

    def render_prompt(self, messages: list[dict[str, Any]]) -> str:
        """Return the text of a running conversation, up to the start of the assistant's next turn."""
        return self._bind(self._template, {})(_alias_reasoning(messages), None, True)

    def read_answer(self, answer: str) -> dict[str, Any]:
        """Return the message of an answer that the model wrote, with its special tokens.

        What the template would write around the reasoning and the content is not part of them.
        """
        reasoning, content = (
            self._specials.remove(part) for part in find_frame(self._bind(self._template, {})).split(answer)
        )
        return {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {})

    def find_turn_end(self) -> str:
        """Return the special token that ends an answer, or an empty text."""
        render, ending = self._bind(self._template, {}), self._find_ending(self._template, has_tools=False)
        failures = []
        for example in EXAMPLES:
            conversation = Conversation(render, example, None, self._specials)
            try:
                return self._specials.end(conversation.read_turn(len(example) - 1, ending).text)
            except Refused as error:
                failures.append(error)
        raise failures[0]

    def _find_ending(self, template: _Compiled, has_tools: bool) -> Any:
        key = template, has_tools
        if key not in self._endings:
            render = self._bind(template, {})
            self._endings[key] = find_ending(render, self._specials, has_tools)
        return self._endings[key]

    def _bind(self, template: _Compiled, arguments: dict[str, Any]) -> Callable[..., str]:
        """Return a function that renders messages and tools, with or without the generation prompt."""

        def render(messages: list[dict[str, Any]], tools: list[Any] | None, prompts: bool) -> str:
            return self._render(template, messages, tools, prompts, arguments)[0]

        return render

    def _render(
        self,
        template: _Compiled,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        prompts: bool,
        arguments: dict[str, Any],
    ) -> tuple[str, list[tuple[int, int]]]:
        if any(name in message for message in messages for name in REASONING):
            messages = self._find_form(template)(messages)
        defaults = {"documents": None} | self._variables | arguments
        return template.render(messages=messages, tools=tools, add_generation_prompt=prompts, **defaults)

    def _find_form(self, template: _Compiled) -> Form:
        """Return the first form of reasoning that the template writes, or else fields of the message."""
        if template not in self._forms:
            forms = (form for form in _FORMS if self._writes_reasoning(template, form))
            self._forms[template] = next(forms, _FORMS[0])
        return self._forms[template]

    def _writes_reasoning(self, template: _Compiled, form: Form) -> bool:
        key, value = PROBES
        for example in EXAMPLES:
            answered = _alias_reasoning([*example[:-1], {**example[-1], "content": key, "thinking": value + key}])
            try:
                text, _ = template.render(
                    messages=form(answered), tools=None, add_generation_prompt=False, documents=None, **self._variables
                )
            except (Refused, jinja2.TemplateError):
                continue
            return value + key in text and not re.search("[\"']type[\"']", text)  # a list as Python or JSON writes it
        return False


def _alias_reasoning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with their reasoning under each name that a template may read, as transformers does."""
    aliased = []
    for message in messages:
        texts = [message[name] for name in REASONING if message.get(name) is not None]
        named = {"thinking": texts[0], **message, "reasoning_content": texts[0]} if texts else message
        aliased.append(named)
    return aliased


def _keep_fields(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return messages


def _write_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with reasoning as a part of the content, as templates of Magistral and Ministral read it."""
    return _replace_contents(messages, lambda parts: parts, ("thinking", "thinking"), ("text", "text"))


def _write_blocks(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with reasoning as a block of the content, as Apertus' template reads it."""
    return _replace_contents(messages, lambda parts: {"blocks": parts}, ("thoughts", "text"), ("response", "text"))


# Places where templates look for reasoning: fields of the message, or a part of its content.
_FORMS: tuple[Form, ...] = (_keep_fields, _write_parts, _write_blocks)


def _replace_contents(
    messages: list[dict[str, Any]], wrap: Callable[[list[Any]], Any], thought: tuple[str, str], text: tuple[str, str]
) -> list[dict[str, Any]]:
    """Return messages whose assistant's contents are lists of parts. thought, text: type of a part, and its field."""
    changed = []
    for message in messages:
        values = [(thought, message.get("reasoning_content")), (text, message.get("content"))]
        parts = [{"type": kind, field: value} for (kind, field), value in values if value]
        is_changed = message["role"] == "assistant" and parts
        changed.append({**message, "content": wrap(parts)} if is_changed else message)
    return changed


def _fill_contents(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
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
