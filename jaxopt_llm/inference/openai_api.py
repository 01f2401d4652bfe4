"""Requests and answers in the form of OpenAI's API, with the fields that vLLM adds: reading and writing of JSON.

Nothing that a client asks for is left out in silence: a field that is not known here is refused, unless its value
changes nothing.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxopt_llm.core import json_files
from jaxopt_llm.data.tokens.tokenizer import Tokenizer
from jaxopt_llm.execution.decode import MAX_MOST_LIKELY
from jaxopt_llm.execution.sampling import Sampling
from jaxopt_llm.inference.serving import Part, Token

Json = dict[str, Any]
MAX_CHOICES = 1024  # of a request
DEFAULT_TOKENS = 16  # of a completion, as in OpenAI's API
# Fields without a meaning here: they identify the client.
IGNORED = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"}
# Fields that are not supported, with the values that change nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "load_inplace": (False,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
}


class ApiError(Exception):
    """Refusal of a request: a message of one line, the HTTP status, and the field that is wrong."""

    def __init__(self, message: str, field: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.status, self.code = field, status, code

    def write(self) -> Json:
        """Return the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": " ".join(str(self).split()), "type": kind, "param": self.field, "code": self.code}
        return {"error": error}


@dataclass(frozen=True)
class Options:
    """Options of a request.

    Attributes:
        model: name of the model; empty for the base.
        choices: number of continuations of each prompt.
        tokens: maximum number of tokens to draw; None: as many as there is room for.
        sampling: how they are drawn.
        stops: texts that end a continuation.
        most_likely: number of the most likely tokens to list with each token; None lists no log-probabilities.
        echoes: whether the prompt is a part of the text.
        streams: whether parts are sent as soon as they exist.
        counts_at_end: whether a stream ends with the numbers of tokens.
        lists_ids: whether choices have the ids of their tokens.
        ending_ids: ids that end a continuation.
        ignores_eos: whether those that end it by themselves do not.
    """

    model: str
    choices: int
    tokens: int | None
    sampling: Sampling
    stops: tuple[str, ...]
    most_likely: int | None
    echoes: bool
    streams: bool
    counts_at_end: bool
    lists_ids: bool
    ending_ids: frozenset[int]
    ignores_eos: bool


def is_ids(value: Any) -> bool:
    """Return whether a value is a list of whole numbers."""
    return isinstance(value, list) and all(type(each) is int for each in value)


class Fields:
    """Fields of the body of a request. Each is taken once; None, as in OpenAI's API, is the default.

    Args:
        vocabulary_size: ids in the fields are below it.

    Raises:
        ApiError: the body is not a JSON object.
    """

    def __init__(self, body: bytes, vocabulary_size: int = 0) -> None:
        try:
            fields = json_files.parse_settings(body)
        except ValueError as error:
            raise ApiError(f"the body is not JSON ({error}); send a JSON object") from error
        if not isinstance(fields, dict):
            raise ApiError("the body must be a JSON object")
        self._left: Json = {name: value for name, value in fields.items() if value is not None}
        self._vocabulary_size = vocabulary_size

    def take(self, name: str, default: Any, valid: Callable[[Any], bool], needed: str) -> Any:
        """Take a field. Raises ApiError if its value is not valid."""
        value = self._left.pop(name, None)
        if value is not None and not valid(value):
            raise ApiError(f"{name}: must be {needed}", name)
        return default if value is None else value

    def flag(self, name: str) -> bool:
        return bool(self.take(name, False, lambda value: type(value) is bool, "true or false"))

    def whole(self, name: str, default: int | None, low: int, high: int) -> Any:
        needed = f"a whole number from {low} to {high}"
        return self.take(name, default, lambda value: type(value) is int and low <= value <= high, needed)

    def number(self, name: str, default: float) -> float:
        return float(
            self.take(name, default, lambda value: type(value) in (int, float) and abs(value) < 1e9, "a number")
        )

    def finish(self) -> None:
        """Raise ApiError for a field that nothing has taken."""
        for name, value in self._left.items():
            if name in IGNORED or value in NEUTRAL.get(name, ()):
                continue
            others = ", ".join(map(repr, NEUTRAL.get(name, ())))
            raise ApiError(f"{name}: is not supported; leave it out" + f", or give {others}" * bool(others), name)

    # --- several fields

    def take_options(self, most_likely: int | None, tokens: int | None, echoes: bool = False) -> Options:
        """Take the fields that both endpoints have, and finish."""
        sampling = Sampling(
            temperature=self.number("temperature", 1.0),
            top_k=max(self.whole("top_k", 0, -1, 2**31 - 1), 0),
            top_p=self.number("top_p", 1.0),
            min_p=self.number("min_p", 0.0),
            repetition_penalty=self.number("repetition_penalty", 1.0),
            seed=self.whole("seed", secrets.randbits(32), 0, 2**32 - 1),
            forced=self._take_forced(),
        )
        for name, needed in sampling.problems().items():
            raise ApiError(f"{name}: must be {needed}", name)
        streams = self.flag("stream")
        of_stream = self.take("stream_options", {}, lambda value: isinstance(value, dict), "an object")
        options = Options(
            model=self.take("model", "", lambda value: isinstance(value, str), "the name of a model"),
            choices=self.whole("n", 1, 1, MAX_CHOICES),
            tokens=tokens,
            sampling=sampling,
            stops=self._take_stops(),
            most_likely=most_likely,
            echoes=echoes,
            streams=streams,
            counts_at_end=of_stream.get("include_usage") is True,
            lists_ids=self.flag("return_token_ids"),
            ending_ids=frozenset(self.take("stop_token_ids", [], is_ids, "a list of token ids")),
            ignores_eos=self.flag("ignore_eos"),
        )
        self.finish()
        return options

    def _take_stops(self) -> tuple[str, ...]:
        def is_valid(value: Any) -> bool:
            return all(isinstance(stop, str) and stop for stop in (value if isinstance(value, list) else [value]))

        stops = self.take("stop", [], is_valid, "a text that is not empty, or a list of such texts")
        return tuple([stops] if isinstance(stops, str) else stops)

    def _take_forced(self) -> int:
        def is_valid(value: Any) -> bool:
            return is_ids(value) and len(value) == 1 and 0 <= value[0] < self._vocabulary_size

        needed = f"a list of one token id below {self._vocabulary_size}"
        (forced,) = self.take("allowed_token_ids", [-1], is_valid, needed)
        return int(forced)

    def take_prompts(self) -> list[str | list[int]]:
        """Take the prompts of a completion: texts, or lists of ids."""

        def is_prompt(value: Any) -> bool:
            return isinstance(value, str) or (is_ids(value) and bool(value))

        def is_valid(value: Any) -> bool:
            many = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES and all(map(is_prompt, value))
            return is_prompt(value) or many

        needed = f"a text, a list of token ids, or a list of up to {MAX_CHOICES} of either"
        prompts = self.take("prompt", None, is_valid, needed)
        if prompts is None:
            raise ApiError(f"prompt: is missing; give {needed}", "prompt")
        return [prompts] if is_prompt(prompts) else prompts

    def take_text(self, name: str) -> str:
        """Take a text that must be there."""

        def is_text(value: Any) -> bool:
            return isinstance(value, str) and bool(value)

        text: str = self.take(name, "", is_text, "a text")
        if not text:
            raise ApiError(f"{name}: is missing", name)
        return text

    def take_messages(self) -> list[Json]:
        """Take the messages of a conversation, with texts as their contents."""

        def is_valid(value: Any) -> bool:
            return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)

        needed = "a list of objects with role and content"
        messages = self.take("messages", [], is_valid, needed)
        if not messages:
            raise ApiError(f"messages: is missing; give {needed}", "messages")
        return [self._read_message(message) for message in messages]

    def _read_message(self, message: Json) -> Json:
        content = message.get("content")
        if isinstance(content, list) and all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        ):
            content = "\n".join(part["text"] for part in content)
        if not isinstance(message.get("role"), str) or not isinstance(content, str):
            raise ApiError("messages: each needs a role and, as content, a text or parts of type text", "messages")
        return {**message, "content": content}


def read_completion(body: bytes, vocabulary_size: int) -> tuple[list[str | list[int]], Options]:
    """Return the prompts and the options of a request for completions."""
    fields = Fields(body, vocabulary_size)
    prompts, echoes = fields.take_prompts(), fields.flag("echo")
    most_likely = fields.whole("logprobs", None, 0, MAX_MOST_LIKELY)
    tokens = fields.whole("max_tokens", DEFAULT_TOKENS, 0, 2**31 - 1)
    options = fields.take_options(most_likely, tokens, echoes)
    if not tokens and not echoes:
        raise ApiError("max_tokens: must be at least 1 without echo", "max_tokens")
    return prompts, options


def read_chat(body: bytes, vocabulary_size: int) -> tuple[list[Json], Options]:
    """Return the messages and the options of a request for an answer."""
    fields = Fields(body, vocabulary_size)
    messages, lists = fields.take_messages(), fields.flag("logprobs")
    most_likely = fields.whole("top_logprobs", None, 0, MAX_MOST_LIKELY)
    if most_likely is not None and not lists:
        raise ApiError("top_logprobs: needs logprobs; set it to true", "top_logprobs")
    older = fields.whole("max_tokens", None, 1, 2**31 - 1)
    tokens = fields.whole("max_completion_tokens", older, 1, 2**31 - 1)
    return messages, fields.take_options((most_likely or 0) if lists else None, tokens)


def read_adapter(body: bytes, loads: bool) -> tuple[str, str]:
    """Return the name of an adapter and the path of its folder, given a request to load or to unload it."""
    fields = Fields(body)
    name, path = fields.take_text("lora_name"), fields.take_text("lora_path") if loads else ""
    fields.flag("is_3d_lora_weight")  # adapters of experts are read in either form
    fields.finish()
    return name, path


def read_reload(body: bytes) -> str:
    """Return the path of the folder to read weights from, given vLLM's call of `reload_weights`."""
    fields = Fields(body)
    method = fields.take_text("method")
    given = fields.take("kwargs", {}, lambda value: isinstance(value, dict), "an object")
    fields.finish()
    if method != "reload_weights" or {*given} != {"weights_path"} or not isinstance(given["weights_path"], str):
        raise ApiError("method: the only call is reload_weights, with kwargs {weights_path: FOLDER}", "method")
    path: str = given["weights_path"]
    return path


# --- answers


class Names:
    """Names of tokens: the text of a token that is whole characters, a special token, or `token_id:` and the id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str | None] = {tokenizer.vocabulary[name]: name for name in tokenizer.special_tokens}

    def read_text(self, token: int) -> str | None:
        """Return the text of a token, or None if it is a part of a character."""
        if token not in self._texts:
            # After the token itself, because a tokenizer may drop a space at the start of the text that it decodes.
            alone, twice = (self._tokenizer.decode([token] * count) for count in (1, 2))
            is_whole = alone and "\N{REPLACEMENT CHARACTER}" not in alone
            self._texts[token] = twice[len(alone) :] if is_whole else None
        return self._texts[token]

    def __call__(self, token: int) -> str:
        text = self.read_text(token)
        return f"token_id:{token}" if text is None else text


def write_completion(part: Part, options: Options, names: Names) -> Json:
    """Return a part of a completion, or a whole one."""
    choice = {"index": part.index, "text": part.text, "logprobs": None, "finish_reason": part.end}
    if options.most_likely is not None:
        tokens = (*part.prompt, *part.drawn)
        count = options.most_likely
        listed = [_list_most_likely(token, count, names) for token in tokens] if count else None
        choice["logprobs"] = {
            "tokens": [names(token.id) for token in tokens],
            "token_logprobs": [token.log_probability for token in tokens],
            "top_logprobs": listed,
            "text_offset": [token.offset for token in tokens],
        }
    return choice


def _list_most_likely(token: Token, count: int, names: Names) -> dict[str, float] | None:
    """Return the log-probabilities of the most likely tokens and of the token itself, by name."""
    if token.log_probability is None:
        return None
    found: dict[str, float] = {}
    for index, value in (*token.most_likely[:count], (token.id, token.log_probability)):
        name = names(index)
        found[name if found.get(name, value) == value else f"token_id:{index}"] = value  # two tokens may have one text
    return found


def write_message(part: Part, options: Options, names: Names) -> Json:
    """Return a part of an answer, or a whole one."""
    message = {"content": part.text} if options.streams else {"role": "assistant", "content": part.text}
    named = "delta" if options.streams else "message"
    choice = {"index": part.index, named: message, "logprobs": None, "finish_reason": part.end}
    if options.most_likely is not None:

        def describe(token: int, value: float | None) -> Json:
            text = names.read_text(token)
            values = None if text is None else list(text.encode())
            return {"token": names(token), "logprob": value, "bytes": values}

        choice["logprobs"] = {
            "content": [
                describe(token.id, token.log_probability)
                | {"top_logprobs": [describe(*each) for each in token.most_likely[: options.most_likely]]}
                for token in part.drawn
            ]
        }
    return choice


def count_tokens(prompts: Sequence[Sequence[int]], drawn: int) -> Json:
    """Return the numbers of tokens of a request."""
    read = sum(map(len, prompts))
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}
