"""Server with the endpoints of OpenAI's API. This module needs the packages starlette and uvicorn.

The event loop reads requests, makes queries of them and writes answers; a thread of its own generates (serving.py).
"""

import asyncio
import contextlib
import functools
import hmac
import ipaddress
import json
import secrets
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
import uvicorn
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.datastructures import URL, Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxopt_llm.core.errors import InputError, own_flags
from jaxopt_llm.data.tokens.continuation import Continuation, find_eos_ids
from jaxopt_llm.data.tokens.template import Renderer
from jaxopt_llm.execution import decode
from jaxopt_llm.inference import openai_api
from jaxopt_llm.inference.chat import open_template
from jaxopt_llm.inference.flags import TOKENIZER_FLAGS
from jaxopt_llm.inference.models import LoadedModel
from jaxopt_llm.inference.openai_api import ApiError, Json, Names, Options
from jaxopt_llm.inference.serving import Choice, ModelInUse, Part, Query, Worker, join_parts

SHUTDOWN_SECONDS = 10  # that answers have to end, once the server is asked to stop
CLIENT_LEFT = 499  # status of an answer that nobody reads


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is that of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Form:
    """Form of the answers of an endpoint: the prefix of their ids, their kinds, and the writer of a choice."""

    prefix: str
    whole: str
    chunk: str
    write: Callable[[Part, Options, Names], Json]


COMPLETION = Form("cmpl", "text_completion", "text_completion", openai_api.write_completion)
CHAT = Form("chatcmpl", "chat.completion", "chat.completion.chunk", openai_api.write_message)


@dataclass(frozen=True)
class Folders:
    """Folders that clients may load.

    Attributes:
        root: the folder that they lie in.
        adapt: (model, folder) -> the model with the adapters of a folder. Only the worker's thread calls `adapt` and
            `reload`.
        reload: (model, folder) -> the model with the weights of a folder. The given model has none.
    """

    root: Path
    adapt: Callable[[LoadedModel, Path], LoadedModel]
    reload: Callable[[LoadedModel, Path], LoadedModel]

    def find(self, field: str, path: str) -> Path:
        """Return the folder that a field names. Raises ApiError if it is elsewhere, also by a link or `..`."""
        try:
            folder = Path(path).resolve()
        except ValueError as error:  # a zero byte
            raise ApiError(f"{field}: {error}", field) from error
        if not folder.is_relative_to(self.root.resolve()):
            message = f"{field}: {path} is not in {self.root}: the server reads folders only there (--load-from)"
            raise ApiError(message, field, 403)
        return folder


class Api:
    """The endpoints.

    Args:
        worker: generates. The first of its models is the base, which a request without a model gets.
        folders: adapters and weights that clients may load; None: they may not.
    """

    def __init__(self, worker: Worker, folders: Folders | None = None) -> None:
        self._worker, self._started, self._folders = worker, int(time.time()), folders
        self._base, *_ = worker.models
        self._source: LoadedModel = replace(worker.models[self._base], params={})  # other weights may follow
        self._names = Names(self._source.tokenizer)
        self.routes = [
            Route("/health", self._check_health),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._show_model),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/load_lora_adapter", self._load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._unload_adapter, methods=["POST"]),
            Route("/collective_rpc", self._reload, methods=["POST"]),
            Route("/reset_prefix_cache", self._reset_cache, methods=["POST"]),
        ]

    async def _check_health(self, request: Request) -> Response:
        return Response(status_code=200 if self._worker.failure is None else 503)

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._describe(name) for name in self._worker.models]})

    async def _show_model(self, request: Request) -> Response:
        return JSONResponse(self._describe(self._find_model(request.path_params["name"])))

    def _describe(self, name: str) -> Json:
        parent = None if name == self._base else self._base
        known = {"id": name, "object": "model", "created": self._started, "owned_by": "jaxopt_llm"}
        return known | {"root": name, "parent": parent, "max_model_len": self._worker.length}

    def _find_model(self, name: str) -> str:
        if name and name not in self._worker.models:
            raise _no_model(name, self._worker)
        return name or self._base

    async def _load_adapter(self, request: Request) -> Response:
        folders = self._find_folders()
        name, path = openai_api.read_adapter(await request.body(), loads=True)
        folder = folders.find("lora_path", path)
        try:
            await asyncio.wrap_future(self._worker.add_model(name, lambda base: folders.adapt(base, folder)))
        except ValueError as error:
            raise ApiError(f"lora_name: {error}", "lora_name") from error
        return PlainTextResponse(f"loaded {name}")

    async def _unload_adapter(self, request: Request) -> Response:
        self._find_folders()
        name, _ = openai_api.read_adapter(await request.body(), loads=False)
        if name == self._base:
            raise ApiError(f"lora_name: {name} is the model itself", "lora_name")
        try:
            await asyncio.wrap_future(self._worker.remove_model(name))
        except KeyError as error:
            raise _no_model(name, self._worker) from error
        except ValueError as error:
            raise ApiError(f"lora_name: {error}", "lora_name", 409) from error
        return PlainTextResponse(f"unloaded {name}")

    async def _reload(self, request: Request) -> Response:
        folders = self._find_folders()
        folder = folders.find("weights_path", openai_api.read_reload(await request.body()))
        try:
            load = functools.partial(folders.reload, self._source, folder)
            await asyncio.wrap_future(self._worker.reload_model(self._base, load))
        except ValueError as error:
            raise ApiError(str(error), "weights_path", 409 if isinstance(error, ModelInUse) else 400) from error
        return JSONResponse({"results": [None]})

    async def _reset_cache(self, request: Request) -> Response:
        self._find_folders()
        return JSONResponse({"success": True})  # weights are loaded with an empty cache

    def _find_folders(self) -> Folders:
        if self._folders is None:
            raise ApiError(
                "clients may not change the weights of this server; start it with --load-from FOLDER", status=403
            )
        return self._folders

    async def _complete(self, request: Request) -> Response:
        prompts, options = openai_api.read_completion(await request.body(), self._vocabulary_size)
        ids = [self._encode(prompt) for prompt in prompts]
        texts: list[str | None] = [None] * len(ids)
        if options.echoes:
            texts = [prompt if isinstance(prompt, str) else self._source.tokenizer.decode(prompt) for prompt in prompts]
        return await self._answer(request, self._make_query(ids, texts, options, self._ends), options, COMPLETION)

    async def _chat(self, request: Request) -> Response:
        messages, options = openai_api.read_chat(await request.body(), self._vocabulary_size)
        with own_flags(TOKENIZER_FLAGS):
            renderer, ends = self._open_template(date.today())
            text = renderer.render_prompt(messages)
        ids = self._source.tokenizer.encode([text.encode()])[0].astype(np.int32)
        return await self._answer(request, self._make_query([ids], [None], options, ends), options, CHAT)

    @functools.cached_property
    def _ends(self) -> frozenset[int]:
        return find_eos_ids(self._source.config.data, self._source.tokenizer)

    @functools.lru_cache(maxsize=1)  # noqa: B019 (there is one object)
    def _open_template(self, today: date) -> tuple[Renderer, frozenset[int]]:
        """Return the renderer of conversations, with the date of today, and the ids that end an answer."""
        renderer = open_template(self._source)
        return renderer, find_eos_ids(self._source.config.data, self._source.tokenizer, renderer.find_turn_end())

    @property
    def _vocabulary_size(self) -> int:
        return self._source.config.model.vocabulary_size

    def _encode(self, prompt: str | list[int]) -> NDArray[np.int32]:
        """Return the ids of a prompt, as `generate` does."""
        tokenizer, size = self._source.tokenizer, self._vocabulary_size
        if isinstance(prompt, str):
            (text,) = tokenizer.encode([prompt.encode()])
            return np.array([*tokenizer.prefix, *text] or [tokenizer.eos], np.int32)
        if wrong := [token for token in prompt if not 0 <= token < size]:
            raise ApiError(f"prompt: {wrong[0]} is no token id; ids are at least 0 and below {size}", "prompt")
        return np.array(prompt, np.int32)

    def _make_query(
        self,
        prompts: Sequence[NDArray[np.int32]],
        texts: Sequence[str | None],
        options: Options,
        ends: frozenset[int],
    ) -> Query:
        """Return the query of a request: several choices of each prompt, which draw different random numbers."""
        model, choices = self._find_model(options.model), list[Choice]()
        ends = options.ending_ids | (frozenset() if options.ignores_eos else ends)
        if len(prompts) * options.choices > openai_api.MAX_CHOICES:
            raise ApiError(f"n: {len(prompts)} prompts with {options.choices} choices each are too many", "n")
        for prompt, text in zip(prompts, texts, strict=True):
            room = self._worker.length - prompt.size
            needed = 1 if options.tokens is None else options.tokens
            if room < needed:
                raise ApiError(
                    f"the prompt has {prompt.size:,} tokens, and the answer up to {needed:,}: together more than the "
                    f"context of {self._worker.length:,}; shorten them, or start the server with a larger --context"
                )
            count = room if options.tokens is None else needed
            for _ in range(options.choices):
                request = decode.Request(prompt, count, options.sampling, len(choices), options.most_likely or 0)
                continuation = Continuation(self._source.tokenizer, prompt.tolist(), ends, options.stops)
                choices.append(Choice(request, continuation, text))
        return Query(model, choices, options.echoes and options.most_likely is not None)

    # --- answers

    async def _answer(self, request: Request, query: Query, options: Options, form: Form) -> Response:
        frame = {"id": f"{form.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": query.model}
        if options.streams:
            parts = self._stream(request, query, options, form, frame | {"object": form.chunk})
            return StreamingResponse(parts, media_type="text/event-stream")
        collected: list[list[Part]] = [[] for _ in query.choices]
        async with contextlib.aclosing(self._follow(request, query)) as parts_of_query:
            async for part in parts_of_query:
                collected[part.index].append(part)
        whole = [join_parts(parts) for parts in collected]
        choices = [self._write(part, query, options, form) for part in whole]
        usage = openai_api.count_tokens(_list_prompts(query), sum(len(part.drawn) for part in whole))
        return JSONResponse(frame | {"object": form.whole, "choices": choices, "usage": usage})

    def _write(self, part: Part, query: Query, options: Options, form: Form) -> Json:
        choice = form.write(part, options, self._names)
        if options.lists_ids:
            choice["token_ids"] = [token.id for token in part.drawn]
            if part.end:
                choice["prompt_token_ids"] = query.choices[part.index].request.prompt.tolist()
        return choice

    async def _stream(
        self, request: Request, query: Query, options: Options, form: Form, frame: Json
    ) -> AsyncGenerator[str]:
        """Yield the events of an answer that is sent part by part."""
        drawn = 0
        frame |= {"usage": None} if options.counts_at_end else {}
        if form is CHAT:
            for index in range(len(query.choices)):
                begin = {"role": "assistant", "content": ""}
                choice = {"index": index, "delta": begin, "logprobs": None, "finish_reason": None}
                yield _make_event(frame | {"choices": [choice]})
        try:
            async with contextlib.aclosing(self._follow(request, query)) as parts:
                async for part in parts:
                    drawn += len(part.drawn)
                    if part.text or part.end or options.most_likely is not None or options.lists_ids:
                        yield _make_event(frame | {"choices": [self._write(part, query, options, form)]})
        except ClientDisconnect:
            return
        except ApiError as error:  # the status is sent already
            yield _make_event(error.write())
            return
        if options.counts_at_end:
            yield _make_event(frame | {"choices": [], "usage": openai_api.count_tokens(_list_prompts(query), drawn)})
        yield "data: [DONE]\n\n"

    async def _follow(self, request: Request, query: Query) -> AsyncGenerator[Part]:
        """Yield the parts of a query until all its choices have ended, or end these if the client leaves.

        Raises:
            ClientDisconnect: the client has left.
            ApiError: the worker has failed.
        """
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Part | Exception]()

        def send(part: Part | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server ends
                loop.call_soon_threadsafe(arrived.put_nowait, part)

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            arrived.put_nowait(ClientDisconnect())

        query.send = send
        self._worker.submit(query)
        watching, left = asyncio.create_task(watch()), len(query.choices)
        try:
            while left:
                part = await arrived.get()
                if isinstance(part, ClientDisconnect):
                    raise part
                if isinstance(part, KeyError):  # it was unloaded meanwhile
                    raise _no_model(query.model, self._worker)
                if isinstance(part, Exception):
                    raise ApiError("the server has failed, and ends; its own output says why", status=500) from part
                left -= part.end is not None
                yield part
        finally:
            watching.cancel()
            self._worker.end(query)


def _no_model(name: str, worker: Worker) -> ApiError:
    known = ", ".join(worker.models)
    return ApiError(f"model: there is no {name}; choose one of {known}", "model", 404, "model_not_found")


def _list_prompts(query: Query) -> list[list[int]]:
    """Return the prompts of a query, each once."""
    return list({id(each.request.prompt): each.request.prompt.tolist() for each in query.choices}.values())


def _make_event(value: Json) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False)}\n\n"


class Guard:
    """Middleware that refuses requests without the token.

    Without a token, it refuses those that were sent to another host name than this machine's, or in a form that any
    page in a browser may send, because such a page must not use the server.
    """

    def __init__(self, app: ASGIApp, token: bytes) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._find_refusal(scope) if scope["type"] == "http" and scope["path"] != "/health" else None
        app = self._app if refusal is None else write_error(refusal)
        await app(scope, receive, send)

    def _find_refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._token:
            given = headers.get("authorization", "").encode("latin-1")
            if hmac.compare_digest(given, b"Bearer " + self._token):
                return None
            return ApiError("the token is missing or wrong: send it as api_key", status=401, code="invalid_api_key")
        if not is_loopback(URL(scope=scope).hostname or ""):
            return ApiError("the name of the host must be localhost or a loopback address", status=403)
        is_json = headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
        if scope["method"] == "POST" and not is_json:
            return ApiError("the body must be JSON: send the header Content-Type: application/json", status=415)
        return None


def write_error(error: ApiError) -> JSONResponse:
    """Return the answer to a request that is refused."""
    return JSONResponse(error.write(), error.status)


async def _answer_error(request: Request, error: Exception) -> Response:
    match error:
        case ClientDisconnect():
            return Response(status_code=CLIENT_LEFT)
        case ApiError():
            return write_error(error)
        case InputError():
            return write_error(ApiError(str(error)))
        case HTTPException():
            told = f"{request.method} {request.url.path}: {error.detail}"
            return write_error(ApiError(told, status=error.status_code))
        case _:  # a bug; uvicorn prints its traceback
            return write_error(
                ApiError(f"the server failed: {type(error).__name__}; its own output says more", status=500)
            )


def make_app(worker: Worker, token: bytes, folders: Folders | None = None) -> Starlette:
    """Return the application.

    Args:
        token: what clients send; empty: none is needed.
        folders: see `Api`.
    """
    handled = (ApiError, InputError, HTTPException, ClientDisconnect, Exception)
    return Starlette(
        routes=Api(worker, folders).routes,
        middleware=[Middleware(Guard, token=token)],
        exception_handlers=dict.fromkeys(handled, _answer_error),
    )


class Server(uvicorn.Server):
    """Server of models, until a signal ends it or the worker fails.

    Args:
        models: the models by name, first the base.
        rows, length: see `Worker`.
        token: see `make_app`.
        folders: see `Api`.
    """

    def __init__(
        self,
        models: Mapping[str, LoadedModel],
        rows: int,
        length: int,
        token: bytes,
        folders: Folders | None = None,
    ) -> None:
        self._worker = Worker(models, rows, length)
        app = make_app(self._worker, token, folders)
        wait = SHUTDOWN_SECONDS
        # A `log_config` would close the handlers that other packages have, and their streams.
        super().__init__(
            uvicorn.Config(
                app, log_config=None, log_level="warning", timeout_graceful_shutdown=wait, server_header=False
            )
        )

    def serve_on(self, listener: socket.socket) -> None:
        """Serve at a socket that listens. Raises what the worker fails with."""

        def work() -> None:
            self._worker.run()
            self.should_exit = True

        thread = threading.Thread(target=work, name="generation")
        thread.start()
        try:
            self.run(sockets=[listener])
        finally:
            self._worker.stop()
            thread.join()
        if self._worker.failure is not None:
            raise self._worker.failure
