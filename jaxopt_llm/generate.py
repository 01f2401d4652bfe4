"""Command `generate`: text generation and chat.

python -m jaxopt_llm.generate --checkpoint DIR [--step N|best] [--adapter FOLDER] --prompt TEXT [--prompt TEXT ...] ...
python -m jaxopt_llm.generate --checkpoint DIR [--step N|best] [--adapter FOLDER] --chat [--system TEXT] ...
"""

import argparse
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxopt_llm.config import cli
from jaxopt_llm.core import errors, json_files
from jaxopt_llm.inference import flags

DEFAULT_TOKENS = 200  # of a continuation


def make_parser() -> argparse.ArgumentParser:
    parser = errors.ArgumentParser(
        prog=errors.program_name("generate"),
        description="Continue text. For one prompt, print it and its continuation as the tokens are generated. For "
        'several prompts, print one line of JSON each, {"prompt": ..., "text": ...}, where text is only the '
        "continuation. With --chat, answer the lines of standard input.",
    )
    add = parser.add_argument
    flags.add_model_flags(parser)
    flags.add_tokenizer_flags(parser)
    add("--prompt", action="append", default=[], metavar="TEXT", help="text to continue; can be given several times")
    add("--prompts", type=Path, metavar="FILE", help="file of further prompts, a JSON string on each line")
    add("--chat", action="store_true", help="hold a conversation with the tokenizer's chat template, until Ctrl-D")
    add("--system", metavar="TEXT", help="system message at the start of the conversation")
    tokens = f"default: {DEFAULT_TOKENS}; with --chat, the room left in the context"
    add("--tokens", type=int, metavar="N", help=f"maximum tokens to generate ({tokens})")
    add("--temperature", type=float, default=0.0, metavar="T", help="divisor of the logits (default: 0, greedy)")
    add("--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens (default: all)")
    top_p = "sample from the most likely tokens with total probability P (default: 1)"
    add("--top-p", type=float, default=1.0, metavar="P", help=top_p)
    min_p = "sample from tokens with at least P times the probability of the most likely one (default: 0)"
    add("--min-p", type=float, default=0.0, metavar="P", help=min_p)
    penalty = "divisor of the positive logits of tokens that were there before, factor of negative ones (default: 1)"
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help=penalty)
    add("--seed", type=int, default=0, metavar="N", help="seed of the sampling (default: 0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; can be given several times")
    return parser


if __name__ == "__main__":
    cli.answer_help(make_parser(), sys.argv[1:])  # the imports below take seconds, because they import JAX

import numpy as np

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens.continuation import Continuation, extend_continuations, find_eos_ids
from jaxopt_llm.execution.decode import MAX_ROWS, Request, TokenGenerator
from jaxopt_llm.execution.sampling import Sampling
from jaxopt_llm.inference import chat, models
from jaxopt_llm.inference.models import LoadedModel
from jaxopt_llm.planning import oom


def generate(
    source: LoadedModel,
    prompts: Sequence[str],
    count: int,
    sampling: Sampling,
    stops: Sequence[str],
    show: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Return the continuation of each prompt, of up to `count` tokens.

    stops: texts that end a continuation before them. show: callback that gets the first prompt, then each part of its
    continuation as soon as it exists.

    Raises:
        InputError: the tokenizer cannot encode a prompt, or the model has too few learned positions.
    """
    tokenizer = source.tokenizer
    try:
        texts = tokenizer.encode([prompt.encode(errors="surrogateescape") for prompt in prompts])
    except UnicodeError as error:
        raise InputError(f"the tokenizer cannot encode a prompt ({error}); give prompts as UTF-8 text") from error
    # An empty prompt of a tokenizer without a BOS token starts from the EOS token of a preceding document.
    ids = [np.array([*tokenizer.prefix, *text] or [tokenizer.eos], np.int32) for text in texts]
    model, longest = source.config.model, max(prompt_ids.size for prompt_ids in ids)
    if model.positions == "learned" and longest + count > model.max_positions:
        problem = f"with the {longest} of the prompt they exceed the model's {model.max_positions} learned positions"
        raise InputError(f"--tokens {count}: {problem}; give a shorter prompt or a smaller --tokens")
    show(prompts[0])
    ends = find_eos_ids(source.config.data, tokenizer)
    continuations = [Continuation(tokenizer, prompt_ids.tolist(), ends, stops) for prompt_ids in ids]
    loaded = source.model, source.params, source.placement, model.vocabulary_size
    generator = TokenGenerator(*loaded, rows=min(len(ids), MAX_ROWS), length=longest + count)
    requests = [Request(prompt_ids, count, sampling, number) for number, prompt_ids in enumerate(ids)]
    drawn = generator.run(requests, lambda request: continuations[request.number].done)
    extend_continuations(((each.request.number, each.token) for each in drawn), continuations, show)
    return [continuation.text for continuation in continuations]


@errors.own_flags(flags.TOKENIZER_FLAGS)
def main() -> int:
    arguments = make_parser().parse_args(sys.argv[1:])
    prompts = arguments.prompt + (_read_prompts(arguments.prompts) if arguments.prompts else [])
    sampling = Sampling(
        *(arguments.temperature, arguments.top_k, arguments.top_p, arguments.min_p, arguments.repetition_penalty),
        seed=arguments.seed,
    )
    _check_mode(arguments, prompts)
    default = flags.MAX_TOKENS if arguments.chat else DEFAULT_TOKENS
    count = default if arguments.tokens is None else arguments.tokens
    _check_sampling(count, sampling, arguments.stop)
    quantisation = flags.read_quantisation(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    with oom.explain_oom("loading the checkpoint", "use a GPU with more memory"):
        source = models.load_model(
            arguments.checkpoint,
            models.read_data_settings(arguments),
            tensor=arguments.tensor,
            adapter=arguments.adapter,
            step=arguments.step,
            base=arguments.base,
            quantisation=quantisation,
            family=arguments.family,
        )
    rest = (count, sampling, arguments.stop)
    with oom.explain_oom("generating", "give fewer or shorter prompts at once, or a smaller --tokens or --context"):
        if arguments.chat:
            chat.converse(
                source, arguments.system, flags.resolve_context(arguments.context, source.config.model), *rest
            )
        elif len(prompts) == 1 and not arguments.prompts:
            generate(source, prompts, *rest, show=chat.print_text)
            print()
        else:
            for prompt, text in zip(prompts, generate(source, prompts, *rest), strict=True):
                print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False))
    return 0


def _read_prompts(file: Path) -> list[str]:
    prompts = []
    for line_number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            prompt = json_files.parse(line)
        except ValueError:
            prompt = None
        if not isinstance(prompt, str):
            raise InputError(f'--prompts {file}: line {line_number} is not a JSON string, such as "def main"')
        prompts.append(prompt)
    return prompts


def _check_mode(arguments: argparse.Namespace, prompts: list[str]) -> None:
    context = arguments.context
    if arguments.chat and prompts:
        raise InputError("--chat answers the lines of standard input: leave out --prompt and --prompts")
    of_template = arguments.chat_template or arguments.template_arguments
    if not arguments.chat and (arguments.system is not None or context is not None or of_template):
        flags_of_chat = "--system, --context, --chat-template and --template-arguments"
        raise InputError(f"{flags_of_chat} apply to a conversation: add --chat")
    if not arguments.chat and not prompts:
        raise InputError("no prompt is given: give --prompt TEXT, --prompts FILE, or --chat")
    flags.check_tokenizer_flags(arguments)


def _check_sampling(tokens: int, sampling: Sampling, stops: list[str]) -> None:
    if not 1 <= tokens <= flags.MAX_TOKENS:
        raise InputError(f"--tokens {tokens}: must lie between 1 and {flags.MAX_TOKENS:,}")
    for name, needed in sampling.problems().items():
        raise InputError(f"--{name.replace('_', '-')} {getattr(sampling, name)}: must be {needed}")
    if sampling.temperature == 0 and (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        raise InputError("--top-k, --top-p and --min-p need sampling: set --temperature above 0")
    if not 0 <= sampling.seed < 2**32:
        raise InputError(f"--seed {sampling.seed}: must lie between 0 and 2**32 - 1")
    if "" in stops:
        raise InputError("--stop is empty, which would end every continuation at once: give a text")


if __name__ == "__main__":
    errors.run_command(main)
