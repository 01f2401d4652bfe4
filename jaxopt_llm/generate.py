"""python -m jaxopt_llm.generate --checkpoint DIR --prompt TEXT [--prompt TEXT ...] [--tokens N] ...
python -m jaxopt_llm.generate --checkpoint DIR --chat [--system TEXT] ..."""

import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxopt_llm import chat, errors, oom, run
from jaxopt_llm.data.continuation import Continuation, end_ids, write
from jaxopt_llm.errors import InputError
from jaxopt_llm.execution.decode import Decoder, Sampling
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.run import Run

MOST_TOKENS = 100_000  # the cache holds keys and values of all of them
TOKENS = 200  # of a continuation, by default
CONTEXT = 4096  # tokens of a conversation, by default


def generate(
    source: Run,
    prompts: Sequence[str],
    count: int,
    sampling: Sampling,
    seed: int,
    stops: Sequence[str],
    show: Callable[[str], None] = lambda text: None,
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
    show(prompts[0])
    ends = end_ids(source.config.data, tokenizer)
    written = [Continuation(tokenizer, each.tolist(), ends, stops) for each in ids]
    decoder = Decoder(
        source.parts,
        source.params,
        source.placement,
        model.vocabulary_size,
        sampling,
        seed,
        rows=len(ids),
        length=longest + count,
    )
    write(decoder(ids, count), written, show)
    return [continuation.text for continuation in written]


def main() -> int:
    parser = errors.ArgumentParser(
        prog="python -m jaxopt_llm.generate",
        description="Continues text. One prompt is written out with its continuation as it comes; of several each is a "
        'line of JSON, {"prompt": ..., "text": ...}, where text is the continuation alone. With --chat it answers the '
        "lines of standard input.",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory of a training run, or folder of a Hugging Face model",
    )
    parser.add_argument(
        "--tensor", type=int, default=1, metavar="N", help="devices that split every weight and head (default: 1)"
    )
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="the text to continue; may be given several times"
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="more of them: a JSON string on each line")
    parser.add_argument("--chat", action="store_true", help="converse, by the tokenizer's chat template, until Ctrl-D")
    parser.add_argument("--system", metavar="TEXT", help="what a conversation begins with")
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help=f"most tokens of a conversation (default: {CONTEXT}, or the model's learned positions)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help=f"most tokens to add (default: {TOKENS}; of an answer, what the context has room for)",
    )
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
    _check_mode(arguments.chat, prompts, arguments.system, arguments.context)
    count = arguments.tokens if arguments.tokens is not None else MOST_TOKENS if arguments.chat else TOKENS
    _check(count, sampling, arguments.seed, arguments.stop)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    with oom.remedied("loading the checkpoint", "take a GPU with more"):
        source = run.load(arguments.checkpoint, tensor=arguments.tensor)
    rest = (count, sampling, arguments.seed, arguments.stop)
    with oom.remedied("generating", "give fewer or shorter prompts at once, or --tokens or --context less"):
        if arguments.chat:
            chat.converse(source, arguments.system, _context(arguments.context, source.config.model), *rest)
        elif len(prompts) == 1 and not arguments.prompts:
            generate(source, prompts, *rest, show=chat.show)
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


def _context(given: int | None, model: ModelConfig) -> int:
    """Tokens of a conversation."""
    limit = model.max_positions if model.positions == "learned" else MOST_TOKENS
    if given is None:
        return min(limit, CONTEXT)
    if given > limit:
        raise InputError(f"--context {given}: exceeds the model's {limit} learned positions")
    return given


def _check_mode(converses: bool, prompts: list[str], system: str | None, context: int | None) -> None:
    if converses and prompts:
        raise InputError("--chat answers the lines of standard input: give no --prompt or --prompts with it")
    if not converses and (system is not None or context is not None):
        raise InputError("--system and --context are of a conversation: give --chat with them")
    if not converses and not prompts:
        raise InputError("nothing to continue: give --prompt TEXT, --prompts FILE, or --chat")
    if context is not None and not 2 <= context <= MOST_TOKENS:
        raise InputError(f"--context {context}: must lie between 2 and {MOST_TOKENS:,}")


def _check(tokens: int, sampling: Sampling, seed: int, stops: list[str]) -> None:
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
