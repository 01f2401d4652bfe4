"""Conversation in the terminal with the chat template of the tokenizer."""

import functools
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

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens.continuation import Continuation, extend_continuations, find_eos_ids
from jaxopt_llm.data.tokens.template import Renderer, find_template
from jaxopt_llm.execution.decode import Request, TokenGenerator
from jaxopt_llm.execution.sampling import Sampling
from jaxopt_llm.inference.models import LoadedModel


def open_template(source: LoadedModel) -> Renderer:
    """Return the renderer of a model's chat template. The current date is today's, unless data.date is set."""
    data = source.config.data
    data = replace(data, date=data.date or date.today().isoformat())
    return Renderer(find_template(data, source.tokenizer))


def converse(
    source: LoadedModel,
    system: str | None,
    context: int,
    max_answer_tokens: int,
    sampling: Sampling,
    stop_strings: list[str],
) -> None:
    """Answer each line of standard input, given the conversation before it, until the end of the input.

    Args:
        source: the model.
        system: system message at the start of the conversation; None for no system message.
        context: maximum number of tokens of the conversation.
        max_answer_tokens: maximum number of tokens of an answer.
        sampling: settings of sampling.
        stop_strings: texts that end an answer.

    Raises:
        InputError: there is no chat template, or the conversation does not fit into `context`.
    """
    tokenizer, data = source.tokenizer, source.config.data
    if data.uses_bytes and not data.names_template:
        raise InputError(
            "--chat: the model was trained on bytes, which have no chat template; continue a text with --prompt TEXT "
            "instead, or name a template file with --chat-template"
        )
    renderer = open_template(source)
    loaded = source.model, source.params, source.placement, source.config.model.vocabulary_size
    generator = TokenGenerator(*loaded, rows=1, length=context)
    remedy = "start a new one, or increase --context"
    messages = [] if system is None else [{"role": "system", "content": system}]
    eos_ids = find_eos_ids(data, tokenizer, renderer.find_turn_end())
    for line in _read_lines():
        messages.append({"role": "user", "content": line})
        # The whole conversation is rendered again; tokens in the cache are not computed again. The cache is valid
        # only up to the first difference, if the template omits earlier reasoning, or if the text of an answer is
        # tokenized differently from its sampled tokens.
        ids = tokenizer.encode([renderer.render_prompt(messages).encode()])[0].astype(np.int32)
        room = context - ids.size
        if room < 1:
            raise InputError(f"--context {context}: the conversation now has {ids.size:,} tokens; {remedy}")
        answer = Continuation(tokenizer, ids.tolist(), eos_ids, stop_strings)
        with _catch_interrupt() as interrupted:
            request = Request(ids, min(max_answer_tokens, room), sampling, number=len(messages))
            has_ended = functools.partial(_has_ended, answer, interrupted)
            drawn = generator.run([request], has_ended)
            ended = extend_continuations(((0, each.token) for each in drawn), [answer], print_text)
        print(flush=True)
        if not ended and room <= max_answer_tokens and not interrupted.is_set():
            problem = "the answer is cut off because the conversation is full"
            raise InputError(f"--context {context}: {problem}; {remedy}")
        messages.append(renderer.read_answer(answer.text, answer.whole))


def _has_ended(answer: Continuation, interrupted: threading.Event, request: Request) -> bool:
    return answer.done or interrupted.is_set()


def _read_lines() -> Iterator[str]:
    """Yield the non-blank lines of standard input, with a prompt sign if input and output are a terminal."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    while True:
        try:
            line = input("> " if terminal else "")
        except EOFError:
            if terminal:
                print()
            return
        except UnicodeDecodeError as error:
            raise InputError(
                f"standard input: not valid {sys.stdin.encoding} text ({error}); convert it to {sys.stdin.encoding}"
            ) from error
        if line.strip():
            yield line


def print_text(text: str) -> None:
    """Print generated text. On a terminal, control characters are escaped, because they could control the terminal."""
    if sys.stdout.isatty():
        text = "".join(ascii(c)[1:-1] if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
    print(text, end="", flush=True)


@contextmanager
def _catch_interrupt() -> Iterator[threading.Event]:
    """Set an event on Ctrl-C, and raise KeyboardInterrupt only on a second one.

    An exception during a step would lose the cache, which the step donates.
    """
    event = threading.Event()

    def handle(signal_number: int, frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
