"""Rendering of conversations by a chat template: python sandbox.py SECONDS, a separate process that can be killed.

A chat template is a program, and comes with weights from any source. Jinja's sandbox keeps it away from Python's
objects. Only a separate process can bound its time and its memory, and have neither files nor a network (isolation.py).
This program imports nothing of this package.

Standard input has one JSON object per line. The first is {"template", "special" (tokens by name), "ends" (tokens that
can end a turn), "date"}, the others are conversations: {"messages", "tools", "arguments" (further variables of the
template), "unlearned" (indices of the assistant's messages without spans)}. Each line is answered by one line on standard output: {"text", "spans" (ranges
[begin, end) of the assistant's text, in characters)}, {"refused": reason} if the template itself raises an exception,
{"undated": true} if it asks for the current date and there is none, or {"error": reason}. A conversation with
"add_generation_prompt", which is true if the assistant speaks next, is answered without spans.
"""

import contextlib
import faulthandler
import itertools
import json
import os
import re
import runpy
import secrets
import signal
import sys
from collections.abc import Callable, Collection
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_MEMORY = 2**31  # bytes
MAX_CHARACTERS = 2**26  # of a rendered conversation

_NONCE = str(secrets.randbits(128))  # random, so that no conversation can contain these marks
_BEGIN, _END = f"\0{_NONCE}<", f"\0{_NONCE}>"


class Refused(jinja2.TemplateError):
    """Exception that the template raises with raise_exception."""


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


class Renderer:
    """Renderer of conversations with one template.

    Args:
        template: the template, in Jinja.
        special: special tokens by name.
        ends: special tokens that can end a turn.
        date: current date for `strftime_now`, or empty.
    """

    def __init__(self, template: str, special: dict[str, str], ends: list[str], date: str) -> None:
        environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _tojson
        del environment.globals["lipsum"]
        environment.globals.update(
            raise_exception=_raise, strftime_now=_clock(date), namespace=SafeNamespace, dict=_dict
        )
        self._template = environment.from_string(template)
        generation = environment.extensions[Generation.identifier]
        assert isinstance(generation, Generation)
        self._generation = generation
        self._special, self._ends = special, tuple(ends)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        add_generation_prompt: bool | None = None,
        arguments: dict[str, Any] | None = None,
        unlearned: Collection[int] = (),
    ) -> dict[str, Any]:
        """Return the answer for one conversation: its text and the spans of the assistant's text."""

        def render_first(count: int, add_generation_prompt: bool = False) -> str:
            rendered = self._template.render(
                messages=messages[:count],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._special, **(arguments or {})},
            )
            if len(rendered) > MAX_CHARACTERS:
                raise jinja2.TemplateError(f"it renders more than {MAX_CHARACTERS:,} characters for one conversation")
            return rendered

        def count_blocks(count: int) -> int:
            self._generation.rendered = 0
            render_first(count)
            return self._generation.rendered

        blocks: set[int] = set()  # of unlearned messages
        if self._generation.used:
            blocks = {block for index in unlearned for block in range(count_blocks(index), count_blocks(index + 1))}
        self._generation.rendered = 0
        text = render_first(len(messages), bool(add_generation_prompt))
        if self._generation.used:
            answer = _remove_marks(text, self._generation.rendered)
            return answer | {"spans": [span for block, span in enumerate(answer["spans"]) if block not in blocks]}
        if add_generation_prompt is not None:
            return {"text": text, "spans": []}
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i not in unlearned]
        return {"text": text, "spans": [self._find_span(text, index, render_first) for index in turns]}

    def _find_span(self, text: str, index: int, render_first: Callable[..., str]) -> tuple[int, int]:
        """Return the span of a turn.

        The span starts at the end of the prompt for the turn, and ends at the end of the conversation up to the turn.
        Trailing whitespace is excluded if a special token precedes it.
        """
        remedy = "put {% generation %} ... {% endgeneration %} around the assistant's turns, which cannot be found"
        try:
            before, after = render_first(index, add_generation_prompt=True), render_first(index + 1)
        except Refused as error:
            problem = f"rejects the first part of a conversation ({error})"
            raise jinja2.TemplateError(f"it has no generation block and {problem}; {remedy}") from error
        if not (text.startswith(after) and after.startswith(before)):
            problem = "renders earlier turns differently when more turns follow"
            raise jinja2.TemplateError(f"it has no generation block and {problem}; {remedy}")
        turn = after[len(before) :]
        stripped = turn.rstrip()
        return len(before), len(before) + len(stripped if stripped.endswith(self._ends) else turn)


def _remove_marks(marked: str, blocks: int) -> dict[str, Any]:
    """Return the text without its marks, and the spans that they enclosed."""
    pieces = re.split(f"({_BEGIN}|{_END})", marked)
    texts, marks = pieces[::2], pieces[1::2]
    if marks != [_BEGIN, _END] * blocks:
        raise jinja2.TemplateError("it does not write the text of each generation block exactly once and unchanged")
    edges = list(itertools.accumulate(map(len, texts[:-1])))
    return {"text": "".join(texts), "spans": list(zip(edges[::2], edges[1::2], strict=True))}


def _raise(message: str) -> NoReturn:
    raise Refused(message)


def _dict(*items: Any, **named: Any) -> dict[str, Any]:
    """Return a dict. The type `dict` itself would give the template access to its class methods."""
    return dict(*items, **named)


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


def _bound_memory() -> None:
    if os.name != "posix":  # only the timeout bounds it there
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = MAX_MEMORY if hard == resource.RLIM_INFINITY else min(MAX_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _warm_up() -> None:
    """Import what Python and Jinja import at the first use, and a template may need once no file can be read."""
    text = "{{ strftime_now('%d %B') }}{{ 'a\\n' | tojson | trim | upper | urlize }}{{ raise_exception('') }}"
    with contextlib.suppress(Refused):
        Renderer(text, {}, [], "2000-01-01").render([])


def main() -> None:
    seconds = float(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # this process also receives Ctrl-C; its parent ends it
    _bound_memory()
    renderer = None
    with open(os.devnull, "w") as null:
        _warm_up()
        runpy.run_path(str(Path(__file__).with_name("isolation.py")))["isolate"]()
        for line in sys.stdin.buffer:
            # A C thread ends the process, even during a long computation in C. It first writes a traceback.
            faulthandler.dump_traceback_later(seconds, exit=True, file=null)
            try:
                if renderer is None:
                    renderer, answer = Renderer(**json.loads(line)), "{}"
                else:
                    answer = json.dumps(renderer.render(**json.loads(line)))
            except Refused as error:
                answer = json.dumps({"refused": str(error)})
            except Undated:
                answer = json.dumps({"undated": True})
            except jinja2.TemplateSyntaxError as error:
                answer = json.dumps({"error": f"line {error.lineno}: {error}"})
            except Exception as error:  # an untrusted program can raise any exception
                kind = type(error).__name__
                answer = json.dumps({"error": f"{kind}: {error}" if str(error) else kind})
            print(answer, flush=True)
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
