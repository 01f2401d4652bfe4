"""Client of a server with OpenAI's API: it asks for answers with their log-probabilities, and hands over weights.

The requests are those of vLLM's server (https://docs.vllm.ai), which `jaxopt-llm serve` answers too. Nothing of an
answer is taken on trust: one that lacks something, or does not fit to what was asked, is an error.
"""

import contextlib
import http.client
import json
import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from jaxopt_llm.config import Config
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError, ServerFailed, describe_error

T = TypeVar("T")
Drawn = list[tuple[int, float]]  # the tokens of an answer with their log-probabilities

TOKEN_VARIABLE = "JAXOPT_LLM_SERVE_TOKEN"  # of the environment: what clients of a server send
AT_ONCE = 64  # requests that wait for answers
BEAT_SECONDS = 5.0
HINTS = {  # what mends a refusal, by path and status
    ("/models", 404): "; the address usually ends in /v1",
    ("", 401): f"; set its token as {TOKEN_VARIABLE} of the run's environment",
}
# Statuses of a server that is not there yet, or not any more. So is 500 for completions; for adapters, vLLM has it for
# those that it does not take.
MAY_PASS = (502, 503, 504)
AT_ROOT = ("/collective_rpc", "/reset_prefix_cache")  # endpoints that are not below /v1
# The whole distribution at temperature 1. All are sent, because vLLM's defaults are those of a model's
# generation_config.json.
WHOLE_DISTRIBUTION: Mapping[str, Any] = {
    **{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
    **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
}


@dataclass(frozen=True)
class Draw:
    """Answers to ask for.

    Attributes:
        prompt: ids of the prompt.
        count: number of answers.
        tokens: maximum number of tokens of an answer.
        seed: of the random numbers.
        ends: ids that end an answer.
    """

    prompt: Sequence[int]
    count: int
    tokens: int
    seed: int
    ends: frozenset[int]


class Scored(NamedTuple):
    """A token that a server has scored: its log-probability, and its text as the server writes it."""

    value: float
    name: str


class AnswerServer:
    """A server, asked by up to AT_ONCE threads.

    Args:
        address: its base address, such as http://127.0.0.1:8000/v1.
        seconds: time limit of a request.
        vocabulary_size: of the run; larger ids are refused.

    Attributes:
        is_gone: whether a request had no answer.
    """

    def __init__(self, address: str, seconds: float, vocabulary_size: int) -> None:
        self._parts, self._seconds, self._vocabulary_size = urlsplit(address.rstrip("/")), seconds, vocabulary_size
        self._name = f"rollouts.server={address}"
        self._open, self.is_gone = set[http.client.HTTPConnection](), False

    def check(self, adapters: bool) -> None:
        """Raise InputError unless the server answers and lets clients load adapters, or weights of the model."""
        loaded = self._list_models(has_parent=True)
        if loaded and not adapters:
            raise InputError(
                f"{self._name}: it serves adapters ({loaded[0]}), beside which it cannot load weights: start it anew "
                "without them"
            )
        if adapters:
            what, path, body = "adapters", "/load_lora_adapter", {"lora_name": "", "lora_path": ""}
            start = "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
        else:
            what, path, body, start = "weights", "/collective_rpc", {}, "VLLM_SERVER_DEV_MODE=1"
        status, data = self._exchange(path, body)
        if status != 400:  # the request names nothing
            raise InputError(
                f"{self._name}: it does not let clients load {what} (status {status}: {_read_message(data)}): start "
                f"vLLM with {start}, or jaxopt-llm serve with --load-from (docs/grpo.md)"
            )

    def list_models(self) -> list[str]:
        """Return the names of the models that the server has, first its own ones."""
        return self._list_models(has_parent=False) + self._list_models(has_parent=True)

    def _list_models(self, has_parent: bool) -> list[str]:
        """Return the names of the server's own models, or of their adapters, which have a parent."""
        found = self._ask_json("/models")
        with self._expect("/models"):
            return [each["id"] for each in found["data"] if bool(each.get("parent")) is has_parent]

    def load_adapter(self, name: str, path: str) -> None:
        """Let the server read the adapters of a folder. They are a model of this name."""
        # PEFT's form for transformers 5, with all experts of a layer in one tensor, is vLLM's "3D".
        self._ask("/load_lora_adapter", {"lora_name": name, "lora_path": path, "is_3d_lora_weight": True})

    def unload_adapter(self, name: str) -> None:
        self._ask("/unload_lora_adapter", {"lora_name": name})

    def load_weights(self, path: str) -> None:
        """Let the server read the weights of its model from a folder, and forget the keys of older ones."""
        self._ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        if not self._ask_json("/reset_prefix_cache", {}).get("success"):
            raise InputError(
                f"{self._name}: /reset_prefix_cache: other requests use its cache while it loads weights; let this "
                "run be its only client"
            )

    def draw(self, model: str, wanted: Draw) -> list[Drawn]:
        """Return answers of a model to a prompt."""
        body = {
            "model": model,
            "prompt": list(wanted.prompt),
            "n": wanted.count,
            "max_tokens": wanted.tokens,
            "seed": wanted.seed,
            **WHOLE_DISTRIBUTION,
            "stop_token_ids": sorted(wanted.ends),
            "ignore_eos": True,  # what ends an answer is what the run says
            "logprobs": 0,
            "return_token_ids": True,
        }
        choices = self._complete(body, wanted.count)
        return [self._read_answer(choice, wanted) for choice in choices]

    def score(self, model: str, prompt: Sequence[int], token: int) -> Scored:
        """Return the log-probability that a model gives a token after a prompt.

        The server draws an answer of one token, and may draw no other one. It computes as for every answer. The
        log-probabilities of the tokens of a prompt are no substitute: with adapters, vLLM may leave those of the head
        out of them, and on CPUs it fails (vLLM's issues 51594 and 29955).
        """
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": 1,
            **WHOLE_DISTRIBUTION,
            "allowed_token_ids": [token],
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        (choice,) = self._complete(body, 1)
        with self._expect("/completions"):
            ids, found = choice["token_ids"], choice["logprobs"]
            if ids != [token] or len(found["token_logprobs"]) != 1:
                raise ValueError(
                    f"it has the tokens {ids}, against allowed_token_ids of the request, which has {token}"
                )
            return Scored(_read_value(found["token_logprobs"][0]), str(found["tokens"][0]))

    def map(self, ask: Callable[[Any], T], requests: Sequence[Any], beat: Callable[[], object]) -> list[T]:
        """Return what `ask` returns for each request. Many are under way at once.

        After an error the others are given up. beat: called again and again meanwhile; the time limit of a request
        limits the wait.
        """
        with ThreadPoolExecutor(min(AT_ONCE, len(requests)), thread_name_prefix="answers") as pool:
            futures = [pool.submit(ask, request) for request in requests]
            try:
                waiting: set[Future[T]] = {*futures}
                while waiting:
                    done, waiting = wait(waiting, BEAT_SECONDS, FIRST_COMPLETED)
                    beat()
                    for future in done:
                        future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._hang_up()
                raise
        return [future.result() for future in futures]

    def _complete(self, body: Mapping[str, Any], count: int) -> list[Any]:
        """Return the choices of a completion, in order."""
        answer = self._ask_json("/completions", body)
        with self._expect("/completions"):
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            if [choice["index"] for choice in choices] != list(range(count)):
                raise ValueError(f"it has {len(choices)} of {count} choices")
            return choices

    def _read_answer(self, choice: Mapping[str, Any], wanted: Draw) -> Drawn:
        with self._expect("/completions"):
            ids, found = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            if not ids or len(ids) > wanted.tokens or len(found) != len(ids):
                raise ValueError(f"an answer has {len(ids)} tokens, and {len(found)} log-probabilities")
            if wrong := [each for each in ids if type(each) is not int or not 0 <= each < self._vocabulary_size]:
                raise ValueError(
                    f"the token {wrong[0]} is not below {self._vocabulary_size}, the size of the vocabulary of the run"
                )
            ends = [place for place, each in enumerate(ids) if each in wanted.ends]
            if ends not in ([], [len(ids) - 1]) or (not ends and len(ids) < wanted.tokens):
                raise ValueError(
                    f"an answer ends with the token {ids[-1]} after {len(ids)} of {wanted.tokens} tokens "
                    f"({choice.get('finish_reason')}), against stop_token_ids and ignore_eos of the request"
                )
            return [(each, _read_value(value)) for each, value in zip(ids, found, strict=True)]

    @contextlib.contextmanager
    def _expect(self, path: str) -> Iterator[None]:
        """Raise InputError if an answer lacks something, or has something else in its place."""
        try:
            yield
        except (KeyError, TypeError, ValueError, IndexError) as error:
            lacks = isinstance(error, (KeyError, TypeError))
            problem = f"the answer lacks {describe_error(error)}" if lacks else describe_error(error)
            raise InputError(
                f"{self._name}: {path}: {problem}; the run needs a server that returns token ids and log-probabilities "
                "as vLLM's does (docs/grpo.md)"
            ) from error

    def _ask_json(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = self._ask(path, body)
        try:
            return json_files.parse(data)
        except ValueError as error:
            raise InputError(f"{self._name}: {path}: the answer is not JSON ({error}); name another server") from error

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Return the body of the answer to a request.

        Raises:
            ServerFailed: there is no answer.
            InputError: the server refuses the request.
        """
        status, data = self._exchange(path, body)
        if status != 200:
            failure = ServerFailed if status in MAY_PASS or (path, status) == ("/completions", 500) else InputError
            hint = HINTS.get((path, status)) or HINTS.get(("", status), "")
            raise failure(f"{self._name}: {path}: status {status}: {_read_message(data)}{hint}")
        return data

    def _exchange(self, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        """Return the status and the body of the answer to a request: GET without a body, else POST."""
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.netloc, timeout=self._seconds)
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(TOKEN_VARIABLE, "").strip():
            headers["Authorization"] = f"Bearer {token}"
        self._open.add(connection)
        try:
            content = None if body is None else json.dumps(body).encode()
            base = self._parts.path.removesuffix("/v1") if path in AT_ROOT else self._parts.path
            connection.request("GET" if body is None else "POST", base + path, content, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.is_gone = True
            late = f"no answer within rollouts.server_seconds={self._seconds:g}"
            reason = late if isinstance(error, TimeoutError) else describe_error(error) or type(error).__name__
            raise ServerFailed(f"{self._name}: {path}: {reason}; see to the server, and run again") from error
        finally:
            self._open.discard(connection)
            connection.close()

    def _hang_up(self) -> None:
        """Close the connections, so that the threads that wait for answers end."""
        for connection in [*self._open]:
            if connection.sock is not None:
                with contextlib.suppress(OSError):  # it is closed already
                    connection.sock.shutdown(socket.SHUT_RDWR)


def check_server(config: Config) -> None:
    """Raise InputError if the server of `rollouts.server` does not answer, or takes no weights."""
    if config.draws and config.rollouts.server:
        rollouts = config.rollouts
        server = AnswerServer(rollouts.server, rollouts.server_seconds, config.model.vocabulary_size)
        server.check(adapters=config.lora.rank > 0)


def _read_value(value: Any) -> float:
    """Return a log-probability. Raises ValueError if it is none."""
    if type(value) not in (int, float) or not -math.inf < value < 0.01:  # 0 with the rounding of a server
        raise ValueError(f"{value!r} is no log-probability")
    return float(value)


def _read_message(data: bytes) -> str:
    """Return the message of an error, in the forms that servers give it, or the beginning of its text."""
    text = data.decode(errors="replace")
    try:
        found = json_files.parse(text)
    except ValueError:
        found = None
    if isinstance(found, dict):
        inner = found.get("error")
        found = inner if isinstance(inner, dict) else found
        text = str(found.get("message") or found.get("detail") or text)
    elif text.lstrip().startswith("<"):
        text = "a page of HTML"
    return " ".join(text.split())[:500] or "no message"
