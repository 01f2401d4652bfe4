"""Command `completion`: completion of commands, flags and values in a shell.

jaxopt-llm completion bash > ~/.local/share/bash-completion/completions/jaxopt-llm
jaxopt-llm completion zsh > DIR/_jaxopt-llm

DIR is a folder of zsh's fpath. The script holds all flags, so that completing starts no Python.
"""

import argparse
import importlib
import sys
import typing
from pathlib import Path

import shtab

from jaxopt_llm.__main__ import COMMANDS
from jaxopt_llm.config import Config, cli, fields
from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import InputError

SHELLS = ("bash", "zsh")
USAGE = f"jaxopt-llm completion {'|'.join(SHELLS)}"


def make_completion_parser() -> argparse.ArgumentParser:
    """Return a parser of every command with every flag, which is only read by shtab.

    shtab leaves out a command without a help text.
    """
    parser = argparse.ArgumentParser(prog="jaxopt-llm")
    commands = parser.add_subparsers()
    for name, (path, _, _) in COMMANDS.items():
        if name in ("checkpoint", "completion"):  # their arguments are words
            continue
        module = importlib.import_module(f"jaxopt_llm.{path}")
        parents = [module.make_parser()] if hasattr(module, "make_parser") else []  # train's flags are settings alone
        command = commands.add_parser(name, help=name, parents=parents, add_help=not parents)
        if name in ("train", "plan"):
            recipes = sorted(path.name for path in cli.RECIPES.glob("*.py"))
            command.add_argument("--config", choices=recipes)
            _add_settings(command, ("",))
        elif name == "evaluate":
            _add_settings(command, module.OVERRIDABLE)
    checkpoint = commands.add_parser("checkpoint", help="checkpoint")
    checkpoint.add_argument("action", choices=("list", "verify"))
    checkpoint.add_argument("run").complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    commands.add_parser("completion", help="completion").add_argument("shell", choices=SHELLS)
    _complete_paths(parser)
    return parser


def _add_settings(parser: argparse.ArgumentParser, prefixes: tuple[str, ...]) -> None:
    """Add the settings that are flags of a command. prefixes: how their names begin."""
    for name, hint, _ in fields.walk_fields(Config):
        if name.startswith(prefixes):
            choices = ("True", "False") if hint is bool else typing.get_args(hint)
            is_choice = hint is bool or typing.get_origin(hint) is typing.Literal
            parser.add_argument(f"--{name.replace('_', '-')}", choices=choices if is_choice else None)


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    """Let the flags that take a path complete the names of files."""
    for action in parser._actions:
        if action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command)


def main() -> int:
    match sys.argv[1:]:
        case [shell] if shell in SHELLS:
            print(shtab.complete(make_completion_parser(), shell))
        case ["-h" | "--help"]:
            print(__doc__)
        case _:
            raise InputError(f"the shell is missing or unknown; usage: {USAGE}")
    return 0


if __name__ == "__main__":
    errors.run_command(main)
