"""Continuations for clients that come at any time. One thread owns the models and the devices.

Other threads hand over queries. Each choice of a query is a request to the generator of its model, and joins the rows
that run. What is new of it goes back part by part.

Letters: B rows, S tokens of a row, V vocabulary, K most likely tokens.
"""

import functools
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxopt_llm.data.tokens.continuation import Continuation
from jaxopt_llm.data.tokens.tokenizer import Tokenizer
from jaxopt_llm.execution.decode import MAX_FILL_TOKENS, MAX_MOST_LIKELY, Drawn, Request, TokenGenerator
from jaxopt_llm.execution.sampling import read_log_probabilities
from jaxopt_llm.inference import log_probabilities
from jaxopt_llm.inference.log_probabilities import DocumentReader
from jaxopt_llm.inference.models import LoadedModel
from jaxopt_llm.kernels.support import map_chunks
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.model import Params

CHUNKS = 16  # of a row; the logits of only one chunk exist at a time


@dataclass(frozen=True)
class Token:
    """A token of a choice.

    Attributes:
        id: its id.
        offset: characters before it in the text of the choice.
        log_probability: by the model, before any setting of sampling; None for the first token of a prompt.
        most_likely: the most likely tokens in its place and their log-probabilities, highest first.
    """

    id: int
    offset: int
    log_probability: float | None
    most_likely: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Part:
    """New text and tokens of a choice.

    Attributes:
        index: number of the choice in its query.
        text: new text in whole characters.
        drawn: new tokens.
        prompt: tokens of the prompt, if the query asks for their log-probabilities.
        end: why the choice ends with this part: `stop` at a token or a text that ends it, `length` with its number of
            tokens; None: it goes on.
    """

    index: int
    text: str
    drawn: tuple[Token, ...] = ()
    prompt: tuple[Token, ...] = ()
    end: str | None = None


def join_parts(parts: Sequence[Part]) -> Part:
    """Return consecutive parts of a choice as one."""
    drawn, prompt = (tuple(token for part in parts for token in getattr(part, name)) for name in ("drawn", "prompt"))
    return Part(parts[0].index, "".join(part.text for part in parts), drawn, prompt, parts[-1].end)


@dataclass(eq=False)
class Choice:
    """A continuation of a prompt.

    Attributes:
        request: the request to the generator. With a count of 0 nothing is generated.
        continuation: its text.
        prompt_text: the text in front of it, which is its first part; None for none.
        drawn: number of tokens so far.
    """

    request: Request
    continuation: Continuation
    prompt_text: str | None = None
    drawn: int = 0


@dataclass(eq=False)
class Query:
    """Continuations that a client waits for.

    Attributes:
        model: name of the model.
        choices: the continuations.
        reads_prompts: whether it asks for the log-probabilities of the prompts.
        send: called in the worker's thread with each part, or with what ended the worker.
    """

    model: str
    choices: list[Choice]
    reads_prompts: bool = False
    send: Callable[[Part | Exception], None] = lambda part: None


class Worker:
    """The thread that generates. Only `run` uses the devices; the other methods may be called from any thread.

    Args:
        models: models by name, which may share arrays. Each that is asked for gets a cache of its own.
        rows: requests that a model continues at a time.
        length: maximum tokens of a prompt with its continuation.

    Attributes:
        failure: what ended `run` before `stop` was called.
    """

    def __init__(self, models: Mapping[str, LoadedModel], rows: int, length: int) -> None:
        self.models, self._rows, self.length = models, rows, length
        self._inbox = queue.SimpleQueue[Callable[[], None] | None]()
        self._generators = dict[str, TokenGenerator]()
        self._readers = dict[str, DocumentReader]()
        self._running = dict[Request, tuple[int, Query]]()  # the index of the choice
        self.failure: Exception | None = None

    def submit(self, query: Query) -> None:
        """Begin a query."""
        self._inbox.put(functools.partial(self._begin, query))

    def end(self, query: Query) -> None:
        """End all choices of a query that have not ended, and free their rows."""
        self._inbox.put(functools.partial(self._end, query))

    def stop(self) -> None:
        """Let `run` return."""
        self._inbox.put(None)

    def run(self) -> None:
        """Work until `stop` is called."""
        try:
            while self._read_inbox():
                for generator in self._generators.values():
                    for drawn in generator.advance() if generator.is_busy else ():
                        self._add(generator, drawn)
        except Exception as error:
            self.failure = error
            for query in {id(query): query for _, query in self._running.values()}.values():
                query.send(error)

    def _read_inbox(self) -> bool:
        """Do what was asked for; wait for it if nothing runs. Return False if the end was asked for."""
        waits = not self._running
        while True:
            try:
                act = self._inbox.get(waits)
            except queue.Empty:
                return True
            if act is None:
                return False
            act()
            waits = False

    def _begin(self, query: Query) -> None:
        source, name = self.models[query.model], query.model
        read: Mapping[int, tuple[Token, ...]] = {}
        if query.reads_prompts:
            reader = self._readers.setdefault(name, make_prompt_reader(source))
            prompts = {id(choice.request.prompt): choice.request.prompt.tolist() for choice in query.choices}
            asked = [log_probabilities.Request(prompt, len(prompt) - 1) for prompt in prompts.values()]
            found = zip(prompts.items(), reader.read_each(source.params, asked, self.length), strict=True)
            read = {key: list_tokens(source.tokenizer, prompt, values) for (key, prompt), values in found}
        for index, choice in enumerate(query.choices):
            if choice.prompt_text is not None:
                query.send(Part(index, choice.prompt_text, prompt=read.get(id(choice.request.prompt), ())))
            if not choice.request.count:
                query.send(Part(index, "", end="length"))
                continue
            if name not in self._generators:
                loaded = source.model, source.params, source.placement, source.config.model.vocabulary_size
                self._generators[name] = TokenGenerator(*loaded, self._rows, self.length)
            self._running[choice.request] = index, query
            self._generators[name].add(choice.request)

    def _end(self, query: Query) -> None:
        for request in [request for request, (_, owner) in self._running.items() if owner is query]:
            del self._running[request]
            self._generators[query.model].end(request)

    def _add(self, generator: TokenGenerator, drawn: Drawn) -> None:
        """Add a token to its choice, and send what is new."""
        index, query = self._running[drawn.request]
        choice = query.choices[index]
        text, choice.drawn = choice.continuation, choice.drawn + 1
        offset = len(choice.prompt_text or "") + len(text.text)
        text.add(drawn.token)
        end = "stop" if text.done else "length" if choice.drawn == drawn.request.count else None
        if end:
            text.finish()
            del self._running[drawn.request]
            generator.end(drawn.request)
        token = Token(drawn.token, offset, drawn.log_probability, drawn.most_likely)
        query.send(Part(index, text.take_new_text(), (token,), end=end))


def make_prompt_reader(source: LoadedModel) -> DocumentReader:
    """Return the reader of the tokens of prompts, by what `read_log_probabilities` returns of each.

    The logits of a row exist only in chunks.
    """
    size, model = source.config.model.vocabulary_size, source.model

    def read(non_layer: Params, x: jax.Array, batch: Batch, context: Context) -> tuple[jax.Array, ...]:
        def read_chunk(x: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
            logits = model.logits(non_layer, x, context)[..., :size]
            return read_log_probabilities(logits, targets, min(MAX_MOST_LIKELY, size))

        return map_chunks(read_chunk, -(-x.shape[1] // CHUNKS), x, batch.targets)

    return DocumentReader(model, source.placement, size, MAX_FILL_TOKENS, read, waits=True)


def list_tokens(tokenizer: Tokenizer, prompt: Sequence[int], read: Any) -> tuple[Token, ...]:
    """Return the tokens of a prompt. read: of the tokens after the first one; None if there are none."""
    text, tokens = Continuation(tokenizer, (), (), ()), list[Token]()
    values: list[tuple[float | None, tuple[tuple[int, float], ...]]] = [(None, ())]
    for value, ids, highest in zip(*(each.tolist() for each in read or ()), strict=True):
        values.append((value, tuple(zip(ids, highest, strict=True))))
    for token, (value, most_likely) in zip(prompt, values, strict=True):
        tokens.append(Token(token, len(text.text), value, most_likely))
        text.add(token)
    return tuple(tokens)
