"""Continuations for clients that come at any time. One thread owns the models and the devices.

Other threads hand over queries. Each choice of a query is a request to the generator of its model, and joins the rows
that run. What is new of it goes back part by part.
"""

import functools
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jaxopt_llm.data.tokens.continuation import Continuation
from jaxopt_llm.data.tokens.tokenizer import Tokenizer
from jaxopt_llm.execution.decode import MAX_MOST_LIKELY, Drawn, Request, TokenGenerator
from jaxopt_llm.inference.models import LoadedModel
from jaxopt_llm.run.log_probabilities import DocumentReader, make_prompt_reader, make_requests

T = TypeVar("T")


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


class Engine:
    """Generator and reader of a model, each made when it is first asked for.

    A model with the same specs, such as one with the next adapters, can take them over with their compiled programs.

    Args:
        rows, length: see `Worker`.
    """

    def __init__(self, source: LoadedModel, rows: int, length: int) -> None:
        self._source, self._rows, self._length = source, rows, length
        self._generator: TokenGenerator | None = None
        self._reader: DocumentReader | None = None

    @property
    def generator(self) -> TokenGenerator:
        if self._generator is None:
            loaded = self._source.model, self._source.params, self._source.placement
            size = self._source.config.model.vocabulary_size
            self._generator = TokenGenerator(*loaded, size, self._rows, self._length)
        return self._generator

    @property
    def is_busy(self) -> bool:
        return self._generator is not None and self._generator.is_busy

    def read(self, prompts: Sequence[Sequence[int]]) -> list[tuple[Token, ...]]:
        """Return the tokens of prompts with their log-probabilities."""
        source = self._source
        if self._reader is None:
            size = source.config.model.vocabulary_size
            self._reader = make_prompt_reader(source.model, source.placement, size, MAX_MOST_LIKELY)
        found = self._reader.read_each(source.params, make_requests(prompts), self._length)
        return [list_tokens(source.tokenizer, *each) for each in zip(prompts, found, strict=True)]

    def suits(self, source: LoadedModel) -> bool:
        """Return whether a model can take the engine over."""
        return bool(source.model.specs == self._source.model.specs)

    def load(self, source: LoadedModel) -> None:
        """Serve another model from now on."""
        self._source = source
        if self._generator is not None:
            self._generator.load(source.params)

    def unload(self) -> None:
        """Free the parameters and the cache, until `load` is called."""
        self._source = replace(self._source, params={})
        if self._generator is not None:
            self._generator.unload()


class ModelInUse(ValueError):
    """Refusal to replace weights that adapters or requests use."""


class Worker:
    """The thread that generates. Only `run` uses the devices; the other methods may be called from any thread.

    Args:
        models: models by name, which may share arrays. Each that is asked for gets a cache of its own.
        rows: requests that a model continues at a time.
        length: maximum tokens of a prompt with its continuation.

    Attributes:
        models: models by name. Another thread sees the models of before or after a change.
        failure: what ended `run` before `stop` was called.
    """

    def __init__(self, models: Mapping[str, LoadedModel], rows: int, length: int) -> None:
        self.models, self._rows, self.length = dict(models), rows, length
        self._inbox = queue.SimpleQueue[Callable[[], None] | None]()
        self._engines = dict[str, Engine]()
        self._free: Engine | None = None  # of the model that was removed last
        self._running = dict[Request, tuple[int, Query]]()  # the index of the choice
        self.failure: Exception | None = None

    def submit(self, query: Query) -> None:
        """Begin a query."""
        self._inbox.put(functools.partial(self._begin, query))

    def end(self, query: Query) -> None:
        """End all choices of a query that have not ended, and free their rows."""
        self._inbox.put(functools.partial(self._end, query))

    def add_model(self, name: str, load: Callable[[LoadedModel], LoadedModel]) -> Future[None]:
        """Load a model, and serve it under a name that no other has. The result is an error if it cannot be loaded.

        load: given the first model.
        """

        def add() -> None:
            if name in self.models:
                raise ValueError(f"there is a model {name} already")
            self.models = self.models | {name: load(next(iter(self.models.values())))}

        return self._call(add)

    def remove_model(self, name: str) -> Future[None]:
        """Stop to serve a model, and free its arrays. The result is an error if there is none, or it has requests."""

        def remove() -> None:
            if name not in self.models:
                raise KeyError(name)
            if any(query.model == name for _, query in self._running.values()):
                raise ValueError(f"requests for {name} are running; end them first")
            self.models = {each: model for each, model in self.models.items() if each != name}
            if name in self._engines:
                self._free = self._engines.pop(name)
                self._free.unload()

        return self._call(remove)

    def reload_model(self, name: str, load: Callable[[], LoadedModel]) -> Future[None]:
        """Replace the weights of the only model. The result is an error if that fails.

        It is ModelInUse if there are adapters, which share the weights, or requests.
        """

        def reload() -> None:
            if len(self.models) > 1:
                raise ModelInUse(f"adapters of {name} share its weights; unload them first")
            if self._running:
                raise ModelInUse(f"requests for {name} are running; end them first")
            self.models = {name: load()}
            if name in self._engines:
                self._engines[name].load(self.models[name])

        return self._call(reload)

    def stop(self) -> None:
        """Let `run` return."""
        self._inbox.put(None)

    def run(self) -> None:
        """Work until `stop` is called."""
        try:
            while self._read_inbox():
                for engine in self._engines.values():
                    for drawn in engine.generator.advance() if engine.is_busy else ():
                        self._add(engine.generator, drawn)
        except Exception as error:
            self.failure = error
            for query in {id(query): query for _, query in self._running.values()}.values():
                query.send(error)

    def _call(self, act: Callable[[], T]) -> Future[T]:
        """Call a function in the worker's thread. Its error is the caller's, and does not end the worker."""
        future = Future[T]()

        def call() -> None:
            try:
                future.set_result(act())
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(call)
        return future

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

    def _find_engine(self, name: str) -> Engine:
        source = self.models[name]
        if name not in self._engines:
            if self._free is not None and self._free.suits(source):
                self._engines[name], self._free = self._free, None
                self._engines[name].load(source)
            else:
                self._engines[name] = Engine(source, self._rows, self.length)
        return self._engines[name]

    def _begin(self, query: Query) -> None:
        if query.model not in self.models:
            query.send(KeyError(query.model))
            return
        engine = self._find_engine(query.model)
        read: Mapping[int, tuple[Token, ...]] = {}
        if query.reads_prompts:
            prompts = {id(choice.request.prompt): choice.request.prompt.tolist() for choice in query.choices}
            read = dict(zip(prompts, engine.read([*prompts.values()]), strict=True))
        for index, choice in enumerate(query.choices):
            if choice.prompt_text is not None:
                query.send(Part(index, choice.prompt_text, prompt=read.get(id(choice.request.prompt), ())))
            if not choice.request.count:
                query.send(Part(index, "", end="length"))
                continue
            self._running[choice.request] = index, query
            engine.generator.add(choice.request)

    def _end(self, query: Query) -> None:
        for request in [request for request, (_, owner) in self._running.items() if owner is query]:
            del self._running[request]
            self._engines[query.model].generator.end(request)

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
