"""python sandbox.py SECONDS: renders conversations by a chat template, in a process of its own that can be ended.

A chat template is a program, and comes with weights from anywhere. Jinja's sandbox keeps it from Python's objects; that
it ends, and how much memory it takes, only a process of its own can bound. Imports nothing of this package.

Standard input: a JSON object on each line. The first is {"template", "special" (tokens by name), "ends" (tokens that
can end a turn), "date"}, the others are conversations: {"messages", "tools"}. Each is answered by one on standard
output: {"text", "spans" ([begin, end) of what the assistant wrote, in characters)}, {"refused": why} where the template
itself raises an exception, or {"error": why}. Of a conversation with "add_generation_prompt", true where the assistant
is to speak next, the text alone is made.
"""

import faulthandler
import itertools
import json
import os
import re
import secrets
import signal
import sys
from collections.abc import Callable
from datetime import date
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY = 2**31  # bytes
MOST_TEXT = 2**26  # characters of a conversation

_NONCE = str(secrets.randbits(128))  # no conversation can spell these marks
_BEGIN, _END = f"\0{_NONCE}<", f"\0{_NONCE}>"


class Refused(jinja2.TemplateError):
    """The template's own raise_exception."""


class Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: around what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 (its base has it so)
    used = False  # in the template
    made = 0  # since it was set to 0

    def parse(self, parser: Parser) -> nodes.Node:
        self.used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        body = caller()
        if _BEGIN in body:
            raise jinja2.TemplateError("one generation block inside another")
        self.made += 1
        return _BEGIN + body + _END


class Sandbox(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Jinja's own would be written as nothing, as long as it is only written."""
        raise jinja2.exceptions.SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}")


class SafeNamespace(Namespace):
    """Without names that mean something to Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace with the name {name!r}")
        Namespace.__setitem__(self, name, value)


class Renderer:
    """What a template makes of conversations. `ends`: special tokens."""

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
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None, add_generation_prompt: bool | None = None
    ) -> dict[str, Any]:
        def text(count: int, add_generation_prompt: bool = False) -> str:
            made = self._template.render(
                messages=messages[:count],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
            if len(made) > MOST_TEXT:
                raise jinja2.TemplateError(f"more than {MOST_TEXT:,} characters for one conversation")
            return made

        self._generation.made = 0
        whole = text(len(messages), bool(add_generation_prompt))
        if self._generation.used:
            return _unmarked(whole, self._generation.made)
        if add_generation_prompt is not None:
            return {"text": whole, "spans": []}
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        return {"text": whole, "spans": [self._span(whole, number, text) for number in turns]}

    def _span(self, whole: str, number: int, text: Callable[..., str]) -> tuple[int, int]:
        """Where a turn lies: between the prompt for it and all up to it, without the blanks behind its last token."""
        try:
            before, after = text(number, add_generation_prompt=True), text(number + 1)
        except Refused as error:
            raise jinja2.TemplateError(
                f"it has no generation block and refuses the first messages of a conversation alone ({error}), so that "
                "the assistant's turns cannot be told; put {% generation %} ... {% endgeneration %} around them"
            ) from error
        if not (whole.startswith(after) and after.startswith(before)):
            raise jinja2.TemplateError(
                "it has no generation block and writes earlier turns otherwise once others follow, so that the "
                "assistant's cannot be told; put {% generation %} ... {% endgeneration %} around them"
            )
        turn = after[len(before) :]
        stripped = turn.rstrip()
        return len(before), len(before) + len(stripped if stripped.endswith(self._ends) else turn)


def _unmarked(marked: str, blocks: int) -> dict[str, Any]:
    """The text without its marks, and where they were."""
    pieces = re.split(f"({_BEGIN}|{_END})", marked)
    texts, marks = pieces[::2], pieces[1::2]
    if marks != [_BEGIN, _END] * blocks:
        raise jinja2.TemplateError("it does not write what each of its generation blocks has made once, as it is")
    edges = list(itertools.accumulate(map(len, texts[:-1])))
    return {"text": "".join(texts), "spans": list(zip(edges[::2], edges[1::2], strict=True))}


def _raise(message: str) -> NoReturn:
    raise Refused(message)


def _dict(*items: Any, **named: Any) -> dict[str, Any]:
    """Python's own has methods that make objects of classes."""
    return dict(*items, **named)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own escapes what means something in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _clock(day: str) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        if not day:
            raise jinja2.TemplateError(
                "it writes today's date, with which no run could be resumed tomorrow: give one, as in data.date "
                "2026-01-31"
            )
        return date.fromisoformat(day).strftime(form)

    return strftime_now


def _bound_memory() -> None:
    if os.name != "posix":  # where the time alone bounds it
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if most == resource.RLIM_INFINITY else min(MEMORY, most), most))


def main() -> None:
    seconds = float(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too; its parent ends it
    _bound_memory()
    renderer = None
    with open(os.devnull, "w") as nowhere:
        for line in sys.stdin.buffer:
            # A thread of C ends the process whatever it computes. It would write a traceback first.
            faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
            try:
                if renderer is None:
                    renderer, answer = Renderer(**json.loads(line)), "{}"
                else:
                    answer = json.dumps(renderer.render(**json.loads(line)))
            except Refused as error:
                answer = json.dumps({"refused": str(error)})
            except jinja2.TemplateSyntaxError as error:
                answer = json.dumps({"error": f"line {error.lineno}: {error}"})
            except Exception as error:  # a stranger's program can raise anything
                kind = type(error).__name__
                answer = json.dumps({"error": f"{kind}: {error}" if str(error) else kind})
            sys.stdout.write(answer + "\n")
            sys.stdout.flush()
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
