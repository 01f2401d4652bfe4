"""python -m jaxopt_llm.generate --checkpoint RUN_DIR --prompt TEXT [--prompt TEXT ...] [--tokens N] ..."""

import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxopt_llm import errors, oom, run
from jaxopt_llm.data.tokenizer import Tokenizer
from jaxopt_llm.errors import InputError
from jaxopt_llm.execution.decode import Sampling, continuations
from jaxopt_llm.run import Run

MOST_TOKENS = 100_000  # the cache holds keys and values of all of them


class Continuation:
    """The text that is added to one prompt as its tokens come: up to the end of the document, or to a stop string.

    Tokens are decoded after those before them: at the start of what it decodes a tokenizer may drop a space.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._before = list(prompt)  # the tokens that came last into the text, or the prompt
        self._pending: list[int] = []  # those after them that end within a character
        self._shown = 0
        self.done = False
        self.text = ""

    def add(self, token: int) -> None:
        if self.done:
            return
        if token == self._tokenizer.end:
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
        self._before, self._pending = self._pending, []
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


def generate(
    source: Run,
    prompts: Sequence[str],
    count: int,
    sampling: Sampling,
    seed: int,
    stops: Sequence[str],
    show: Callable[[str], None] | None = None,
) -> list[str]:
    """What the model continues each prompt with, up to `count` tokens. show: is given the first prompt, and its
    continuation as it comes."""
    tokenizer = source.tokenizer
    beginning = [] if tokenizer.beginning is None else [tokenizer.beginning]
    try:
        texts = tokenizer.encode([prompt.encode(errors="surrogateescape") for prompt in prompts])
    except UnicodeError as error:
        raise InputError(f"a prompt is not text that the tokenizer takes ({error})") from error
    # Of an empty prompt without a beginning, the end of a document before it.
    ids = [np.array([*beginning, *text] or [tokenizer.end], np.int32) for text in texts]
    model, longest = source.config.model, max(each.size for each in ids)
    if model.positions == "learned" and longest + count > model.max_positions:
        raise InputError(
            f"--tokens {count}: with the {longest} of the prompt they exceed the model's {model.max_positions} learned "
            "positions"
        )
    if show:
        show(prompts[0])
    written = [Continuation(tokenizer, each.tolist(), stops) for each in ids]
    for tokens in continuations(
        source.parts, source.params, ids, count, model.vocabulary_size, sampling, seed, source.placement
    ):
        for continuation, token in zip(written, tokens, strict=True):
            continuation.add(int(token))
        if show:
            show(written[0].news())
        if all(continuation.done for continuation in written):
            break
    for continuation in written:
        continuation.end()
    if show:
        show(written[0].news())
    return [continuation.text for continuation in written]


def main() -> int:
    parser = errors.ArgumentParser(
        prog="python -m jaxopt_llm.generate",
        description="Continues text. One prompt is written out with its continuation as it comes; of several each is a "
        'line of JSON, {"prompt": ..., "text": ...}, where text is the continuation alone.',
    )
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="RUN_DIR", help="directory of a training run")
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="the text to continue; may be given several times"
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="more of them: a JSON string on each line")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="most tokens to add (default: 200)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="divides the logits; 0, the default, is greedy"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K likeliest tokens (default: all)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="only the likeliest tokens that hold the share P (default: 1)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (default: 0)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends a continuation before it; may be repeated"
    )
    arguments = parser.parse_args(sys.argv[1:])
    prompts = arguments.prompt + (_read_prompts(arguments.prompts) if arguments.prompts else [])
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    _check(prompts, arguments.tokens, sampling, arguments.seed, arguments.stop)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    with oom.remedied("loading the checkpoint", "take a GPU with more"):
        source = run.load(arguments.checkpoint)
    rest = (arguments.tokens, sampling, arguments.seed, arguments.stop)
    with oom.remedied("generating", "give fewer or shorter prompts at once, or --tokens less"):
        if len(prompts) == 1 and not arguments.prompts:
            generate(source, prompts, *rest, show=lambda text: print(text, end="", flush=True))
            print()
        else:
            for prompt, text in zip(prompts, generate(source, prompts, *rest), strict=True):
                print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False))
    return 0


def _read_prompts(file: Path) -> list[str]:
    prompts = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            prompt = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"--prompts {file}: line {number} is no JSON ({error})") from error
        if not isinstance(prompt, str):
            raise InputError(f'--prompts {file}: line {number} is no JSON string, as in "def main"')
        prompts.append(prompt)
    return prompts


def _check(prompts: list[str], tokens: int, sampling: Sampling, seed: int, stops: list[str]) -> None:
    if not prompts:
        raise InputError("nothing to continue: give --prompt TEXT, or --prompts FILE")
    if not 1 <= tokens <= MOST_TOKENS:
        raise InputError(f"--tokens {tokens}: must lie between 1 and {MOST_TOKENS:,}")
    if not 0 <= sampling.temperature < float("inf"):
        raise InputError(f"--temperature {sampling.temperature}: must be at least 0")
    if sampling.top_k < 0:
        raise InputError(f"--top-k {sampling.top_k}: must be at least 0")
    if not 0 < sampling.top_p <= 1:
        raise InputError(f"--top-p {sampling.top_p}: must lie above 0, and 1 at most")
    if sampling.temperature == 0 and (sampling.top_k or sampling.top_p < 1):
        raise InputError("--top-k and --top-p choose among tokens that are drawn: give --temperature above 0 with them")
    if not 0 <= seed < 2**32:
        raise InputError(f"--seed {seed}: must lie between 0 and 2**32 - 1")
    if "" in stops:
        raise InputError("--stop: an empty text would end every continuation at once")


if __name__ == "__main__":
    errors.run(main)
