"""A conversation in the terminal, by the chat template that comes with the tokenizer."""

import itertools
import signal
import sys
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from types import FrameType

import numpy as np

from jaxopt_llm.data.continuation import Continuation, end_ids, write
from jaxopt_llm.data.template import find_template, rendering
from jaxopt_llm.errors import InputError
from jaxopt_llm.execution.decode import Decoder, Sampling
from jaxopt_llm.run import Run


def converse(
    source: Run, system: str | None, context: int, most: int, sampling: Sampling, seed: int, stops: list[str]
) -> None:
    """Answers the lines of standard input, each after all before it, until there is no more.

    system: its turn, which comes first. context: tokens of the whole conversation. most: tokens of an answer.

    Raises InputError where there is no chat template, or the conversation has outgrown the context.
    """
    tokenizer, data = source.tokenizer, source.config.data
    data = replace(data, date=data.date or date.today().isoformat())  # as the templates' authors mean it
    template = find_template(data, tokenizer)
    decoder = Decoder(
        source.parts,
        source.params,
        source.placement,
        source.config.model.vocabulary_size,
        sampling,
        seed,
        rows=1,
        length=context,
    )
    messages = [] if system is None else [{"role": "system", "content": system}]
    with rendering(template) as renderer:
        ends = end_ids(data, tokenizer, renderer.turn_end())
        for line in _lines():
            messages.append({"role": "user", "content": line})
            # The whole conversation anew. What of it the cache has is not computed again; where a template leaves
            # out what was thought, or an answer's text is other tokens than it came as, the cache is taken up there.
            ids = tokenizer.encode([renderer.prompt(messages).encode()])[0].astype(np.int32)
            room = context - ids.size
            if room < 1:
                raise InputError(
                    f"the conversation has {ids.size:,} tokens by now, and --context {context} wants fewer: begin a "
                    "new one, or give more"
                )
            answer = Continuation(tokenizer, ids.tolist(), ends, stops)
            with _interrupted() as interrupted:
                steps = itertools.takewhile(lambda _: not interrupted.is_set(), decoder([ids], min(most, room)))
                ended = write(steps, [answer], show)
            print(flush=True)
            if not ended and room <= most and not interrupted.is_set():
                raise InputError(
                    f"the answer was cut: the conversation fills --context {context}; begin a new one, or give more"
                )
            messages.append({"role": "assistant", "content": answer.text})


def _lines() -> Iterator[str]:
    """What the user says, without what is blank; asked for with a sign where a terminal is there to show it."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    while True:
        try:
            line = input("> " if terminal else "")
        except EOFError:
            if terminal:
                print()
            return
        except UnicodeDecodeError as error:
            raise InputError(f"standard input is no text in {sys.stdin.encoding} ({error})") from error
        if line.strip():
            yield line


def show(text: str) -> None:
    """Prints what a model writes as it comes; for a terminal spelt out where it would steer it."""
    if sys.stdout.isatty():
        text = "".join(ascii(c)[1:-1] if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
    print(text, end="", flush=True)


@contextmanager
def _interrupted() -> Iterator[threading.Event]:
    """Ctrl-C is told by the event, so that no step is broken off whose cache is given away; a second one ends the
    command."""
    event = threading.Event()

    def tell(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = signal.signal(signal.SIGINT, tell)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
