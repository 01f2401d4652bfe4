"""Command `serve`: a server of a model with OpenAI's API.

python -m jaxopt_llm.serve --checkpoint DIR [--step N|best] [--adapter NAME=FOLDER ...] [--port N] [--rows N] ...
"""

import argparse
import functools
import os
import socket
import sys
from pathlib import Path

from jaxopt_llm.config import cli
from jaxopt_llm.core import errors
from jaxopt_llm.inference import flags
from jaxopt_llm.run.answer_server import TOKEN_VARIABLE


def make_parser() -> argparse.ArgumentParser:
    parser = errors.ArgumentParser(
        prog=errors.program_name("serve"),
        description="Serve a model, with adapters by name, at the endpoints of OpenAI's API: completions and chat. The "
        f"server listens to this machine alone, or to other hosts if {TOKEN_VARIABLE} of the environment is set: the "
        "token that clients must send.",
    )
    add = parser.add_argument
    flags.add_model_flags(parser, named_adapters=True)
    flags.add_tokenizer_flags(parser)
    add(
        "--load-adapters-from",
        type=Path,
        metavar="FOLDER",
        help="let clients load and unload adapters whose folders lie in this one (/v1/load_lora_adapter)",
    )
    add("--rows", type=errors.positive, default=16, metavar="N", help="requests that run at a time (default: 16)")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen at (default: 127.0.0.1)")
    add("--port", type=errors.whole, default=8000, metavar="N", help="port, or 0 for a free one (default: 8000)")
    return parser


if __name__ == "__main__":
    cli.answer_help(make_parser(), sys.argv[1:])  # the imports below take seconds, because they import JAX

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.inference import models
from jaxopt_llm.inference.models import LoadedModel
from jaxopt_llm.planning import oom


@errors.own_flags(flags.TOKENIZER_FLAGS)
def main() -> int:
    arguments = make_parser().parse_args(sys.argv[1:])
    try:
        from jaxopt_llm.inference import server
    except ModuleNotFoundError as error:
        install = errors.describe_install("serve")
        raise InputError(f"serve requires the packages starlette and uvicorn ({error}); run: {install}") from error
    flags.check_tokenizer_flags(arguments)
    root = arguments.load_adapters_from
    if root and arguments.quantise:
        raise InputError(f"--quantise {arguments.quantise} does not support adapters: leave --load-adapters-from out")
    token = os.environ.get(TOKEN_VARIABLE, "").strip()  # no flag: other users of the machine see flags
    if not token and not server.is_loopback(arguments.host):
        raise InputError(
            f"--host {arguments.host}: other hosts can reach the server, so it needs a token: set {TOKEN_VARIABLE}, "
            "for example to the output of openssl rand -hex 32"
        )
    with _listen(arguments.host, arguments.port) as listener:
        with oom.explain_oom("loading the checkpoint", "use a GPU with more memory"):
            loaded = _load_models(arguments)
        source = next(iter(loaded.values()))
        length = flags.resolve_context(arguments.context, source.config.model)
        host, port = listener.getsockname()[:2]
        address = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
        print(f"serving {', '.join(loaded)} at {address} (Ctrl-C ends it)", file=sys.stderr, flush=True)
        with oom.explain_oom("generating", "set a smaller --rows or --context"):
            adapt = functools.partial(models.adapt_loaded, source, arguments.checkpoint, family=arguments.family)
            folders = server.AdapterFolders(root, adapt) if root else None
            server.Server(loaded, arguments.rows, length, token.encode(), folders).serve_on(listener)
    return 0


def _load_models(arguments: argparse.Namespace) -> dict[str, LoadedModel]:
    """Load the model and its adapters. Returns them by name, first the model without adapters."""
    quantisation, directory = flags.read_quantisation(arguments), arguments.checkpoint
    if quantisation and arguments.adapter:
        raise InputError(f"--quantise {quantisation.base} does not support --adapter: leave one of them out")
    names = [str(directory), *(name for name, _ in arguments.adapter)]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise InputError(f"--adapter {repeated[0]}=...: two models have this name; choose another one")
    source = models.load_model(
        directory,
        models.read_data_settings(arguments),
        tensor=arguments.tensor,
        step=arguments.step,
        base=arguments.base,
        quantisation=quantisation,
        family=arguments.family,
    )
    adapted = {name: models.adapt_loaded(source, directory, path, arguments.family) for name, path in arguments.adapter}
    return {str(directory): source} | adapted


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens, opened before the model is loaded so that a wrong address is reported at once."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"--host {host} --port {port}: cannot listen there ({problem}); choose another one") from error


if __name__ == "__main__":
    errors.run_command(main)
