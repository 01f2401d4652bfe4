"""Command `jaxopt-llm`: every command of this package under one name.

jaxopt-llm train --config FILE is the same as python -m jaxopt_llm.train --config FILE.
"""

import sys

from jaxopt_llm.core import stop_signals

# Name: module, its first arguments, what it does. The modules are not imported here, because most of them import JAX.
COMMANDS = {
    "train": ("train", (), "train a model, or fine-tune one"),
    "supervise": ("supervise", (), "run train, and start it again after faults"),
    "generate": ("generate", (), "continue a text"),
    "chat": ("generate", ("--chat",), "talk to a model"),
    "serve": ("serve", (), "serve a model with OpenAI's API"),
    "evaluate": ("evaluate", (), "compute the held-out loss"),
    "prepare": ("prepare", (), "tokenize a corpus once"),
    "plan": ("plan", (), "compile a step for GPUs that this machine need not have, and print what it needs"),
    "convert": ("convert", (), "convert between runs, Hugging Face folders and PEFT folders"),
    "import-config": ("import_config", (), "write a DeepSpeed configuration as a recipe"),
    "report": ("report", (), "write the curves and events of runs as a page for the browser"),
    "checkpoint": ("checkpoint", (), "list and verify the checkpoints of a run"),
    "completion": ("completion", (), "print a script that completes commands and flags in bash or zsh"),
}
USAGE = "\n".join(
    [
        "jaxopt-llm COMMAND [ARGUMENTS], or jaxopt-llm --version",
        "",
        *(f"  {name:<15}{text}" for name, (_, _, text) in COMMANDS.items()),
        "",
        "jaxopt-llm COMMAND --help lists the arguments of a command.",
    ]
)


def run(arguments: list[str]) -> int:
    """Run a command as `python -m jaxopt_llm.COMMAND` does.

    Raises:
        InputError: there is no such command.
    """
    import runpy
    from importlib import metadata

    from jaxopt_llm.core import errors

    name = arguments[0] if arguments else "--help"
    if name in ("--help", "-h"):
        print(USAGE)
    elif name == "--version":
        print(f"jaxopt_llm {metadata.version('jaxopt_llm')}")
    elif name not in COMMANDS:
        raise errors.InputError(f"jaxopt-llm {name}: no such command; choose one of {', '.join(COMMANDS)}")
    else:
        module, first, _ = COMMANDS[name]
        errors.set_program_prefix("jaxopt-llm ")
        sys.argv = [f"jaxopt-llm {name}", *first, *arguments[1:]]
        runpy.run_module(f"jaxopt_llm.{module}", run_name="__main__", alter_sys=True)
    return 0


def main() -> None:
    # Before the other imports, which a signal does not wait for.
    if sys.argv[1:2] in (["train"], ["supervise"]):
        stop_signals.end_at_signals()
    from jaxopt_llm.core import errors

    errors.run_command(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    main()
