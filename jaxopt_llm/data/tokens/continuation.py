"""Text of generated continuations, token by token, up to an EOS token or a stop string."""

from collections.abc import Callable, Collection, Iterable, Sequence

from jaxopt_llm.config import DataConfig
from jaxopt_llm.data.tokens.tokenizer import Tokenizer, find_tokenizer_folder, read_eos_ids


def find_eos_ids(config: DataConfig, tokenizer: Tokenizer, turn_end: str | None = None) -> frozenset[int]:
    """Return the ids that end generated text.

    These are the tokenizer's EOS tokens, the special token `turn_end`, and eos_token_id of generation_config.json next
    to the tokenizer or, if that has none, of config.json. Chat models name the token that ends a turn there.

    Raises InputError if a file names an invalid id.
    """
    ends = set(tokenizer.eos_ids)
    if turn_end is not None:
        ends |= {int(i) for i in tokenizer.encode([turn_end.encode()])[0]}
    folder = find_tokenizer_folder(config)
    return frozenset(ends.union(read_eos_ids(folder, tokenizer.vocabulary_size) if folder else []))


class Continuation:
    """Text that is generated after one prompt, up to an EOS token or a stop string.

    Tokens are decoded together with the tokens before them, because a tokenizer may drop a space at the start of the
    text that it decodes. Special tokens are not part of the text, but stop strings are also found in them.

    Args:
        tokenizer: decodes the tokens.
        prompt: ids of the prompt.
        eos_ids: ids that end the text.
        stop_strings: texts that end the text; they are not part of it.

    Attributes:
        text: the text so far.
        whole: the text with its special tokens.
        done: whether the text is complete.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], eos_ids: Collection[int], stop_strings: Sequence[str]
    ) -> None:
        self._tokenizer, self._eos_ids, self._stop_strings = tokenizer, eos_ids, stop_strings
        self._special = {tokenizer.vocabulary[token]: token for token in tokenizer.special_tokens}
        self._context = list(prompt)  # the last decoded tokens (at first the prompt), and special tokens after them
        self._pending: list[int] = []  # later tokens, which end inside a character
        self._hidden: list[tuple[int, int]] = []  # begin and end of each special token in it
        self._shown = 0
        self.done = False
        self.text = self.whole = ""

    def add(self, token: int) -> None:
        """Add the next token. Does nothing after the end of the text."""
        if self.done:
            return
        if token in self._eos_ids:
            self.finish()
            return
        self._pending.append(token)
        self._decode_pending(whole_characters=True)
        if token in self._special and not self.done:
            self._extend(self._special[token], hidden=True)

    def finish(self) -> None:
        """End the text: no token follows."""
        if not self.done:
            self._decode_pending(whole_characters=False)
        self.done = True

    def _decode_pending(self, whole_characters: bool) -> None:
        decode = self._tokenizer.decode
        new = decode(self._context + self._pending)[len(decode(self._context)) :]
        if not self._pending or (whole_characters and new.endswith("\N{REPLACEMENT CHARACTER}")):
            return
        self._context, self._pending = self._pending if new else self._context + self._pending, []
        self._extend(new)

    def _extend(self, new: str, hidden: bool = False) -> None:
        """Add text, or a special token, which is hidden; and end the text at the first stop string."""
        old = len(self.whole)
        self.whole += new
        if hidden:
            self._hidden.append((old, len(self.whole)))
        else:
            self.text += new
        begins = [self.whole.find(stop, max(0, old - len(stop))) for stop in self._stop_strings]
        if found := [begin for begin in begins if begin >= 0]:
            self.text, self.done = self._text_before(min(found)), True
            self.whole = self.whole[: min(found)]

    def _text_before(self, end: int) -> str:
        """Return the text before a position of the text with special tokens."""
        edges = [0, *(min(edge, end) for span in self._hidden for edge in span), end]
        return "".join(self.whole[begin:stop] for begin, stop in zip(edges[::2], edges[1::2], strict=True))

    def take_new_text(self) -> str:
        """Return the text that was not returned before, without a possible start of a stop string at its end."""
        end = len(self.text)
        if not self.done:
            started = [
                length
                for stop in self._stop_strings
                for length in range(1, min(len(stop), len(self.whole) + 1))
                if self.whole.endswith(stop[:length])
            ]
            if started:
                end = len(self._text_before(len(self.whole) - max(started)))
        new = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return new


def extend_continuations(
    tokens: Iterable[tuple[int, int]],
    continuations: Sequence[Continuation],
    show: Callable[[str], None] = lambda text: None,
) -> bool:
    """Add tokens to continuations, and finish these.

    Args:
        tokens: yields the index of a continuation and its next token.
        continuations: the continuations.
        show: called with new text of the first continuation.

    Returns True if all continuations ended by themselves.
    """
    for index, token in tokens:
        continuations[index].add(token)
        if index == 0:
            show(continuations[0].take_new_text())
    ended = all(continuation.done for continuation in continuations)
    for continuation in continuations:
        continuation.finish()
    show(continuations[0].take_new_text())
    return ended
