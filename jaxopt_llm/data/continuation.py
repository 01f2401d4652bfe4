"""What is written after a prompt, as text: token by token, up to where it ends."""

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.data.config import DataConfig
from jaxopt_llm.data.tokenizer import Tokenizer, read_object
from jaxopt_llm.errors import InputError


def end_ids(config: DataConfig, tokenizer: Tokenizer, turn_end: str | None = None) -> frozenset[int]:
    """The ids that end what a model writes: the tokenizer's end, what generation_config.json beside it or, where that
    says nothing, config.json has as eos_token_id (chat models name what ends a turn there), and the special token
    `turn_end`.

    Raises InputError where a file names what is no token.
    """
    ends = {tokenizer.end}
    if turn_end is not None:
        ends |= {int(i) for i in tokenizer.encode([turn_end.encode()])[0]}
    if config.tokenizer == "bytes":
        return frozenset(ends)
    path = Path(config.tokenizer)
    for name in ("generation_config.json", "config.json"):
        file = (path if path.is_dir() else path.parent) / name
        said = read_object(file).get("eos_token_id")
        if said is None:
            continue
        ids = said if isinstance(said, list) else [said]
        if any(type(i) is not int or not 0 <= i < tokenizer.vocabulary_size for i in ids):
            raise InputError(
                f"{file}: eos_token_id={said!r}: must be a token's number or a list of them, each below the "
                f"tokenizer's {tokenizer.vocabulary_size}"
            )
        return frozenset({*ends, *ids})
    return frozenset(ends)


class Continuation:
    """The text that is added to one prompt as its tokens come: up to an id that ends it, or to a stop string.

    Tokens are decoded after those before them: at the start of what it decodes a tokenizer may drop a space.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], ends: Collection[int], stops: Sequence[str]
    ) -> None:
        self._tokenizer, self._ends, self._stops = tokenizer, ends, stops
        self._before = list(prompt)  # the tokens that came last into the text, or the prompt, and special ones since
        self._pending: list[int] = []  # those after them that end within a character
        self._shown = 0
        self.done = False
        self.text = ""

    def add(self, token: int) -> None:
        if self.done:
            return
        if token in self._ends:
            self.end()
            return
        self._pending.append(token)
        self._take(whole_characters=True)

    def end(self) -> None:
        """No token follows."""
        if not self.done:
            self._take(whole_characters=False)
        self.done = True

    def _take(self, whole_characters: bool) -> None:
        decode = self._tokenizer.decode
        new = decode(self._before + self._pending)[len(decode(self._before)) :]
        if not self._pending or (whole_characters and new.endswith("\N{REPLACEMENT CHARACTER}")):
            return
        self._before, self._pending = self._pending if new else self._before + self._pending, []
        old = len(self.text)
        self.text += new
        begins = [self.text.find(stop, max(0, old - len(stop))) for stop in self._stops]
        found = [begin for begin in begins if begin >= 0]
        if found:
            self.text, self.done = self.text[: min(found)], True

    def news(self) -> str:
        """What can be shown that was not yet: of a stop string no part."""
        until = len(self.text)
        if not self.done:
            begun = [
                length
                for stop in self._stops
                for length in range(1, min(len(stop), until + 1))
                if self.text.endswith(stop[:length])
            ]
            until -= max(begun, default=0)
        new = self.text[self._shown : until]
        self._shown = max(self._shown, until)
        return new


def write(
    steps: Iterable[NDArray[np.integer]],
    continuations: Sequence[Continuation],
    show: Callable[[str], None] = lambda text: None,
) -> bool:
    """Adds tokens as they come, one to each continuation in a step, until all have ended; the rest is not asked for.

    show: is given the first one's text as it comes. Returns whether all have ended by themselves.
    """
    for tokens in steps:
        for continuation, token in zip(continuations, tokens, strict=True):
            continuation.add(int(token))
        show(continuations[0].news())
        if all(continuation.done for continuation in continuations):
            return True
    for continuation in continuations:
        continuation.end()
    show(continuations[0].news())
    return False
