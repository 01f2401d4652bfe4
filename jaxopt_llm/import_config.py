"""Command `import-config`: settings of another trainer as a recipe.

python -m jaxopt_llm.import_config deepspeed FILE [--output RECIPE.py] [--devices N]
"""

import argparse
import sys
from pathlib import Path

from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine import deepspeed
from jaxopt_llm.planning.search.recipe import format_recipe

PROGRAM = errors.program_name("import_config")


def main() -> int:
    options = make_parser().parse_args(sys.argv[1:])
    source: Path = options.file
    output: Path = options.output or Path(f"{source.stem}.py")
    if options.devices is not None and options.devices < 1:
        raise InputError(f"--devices {options.devices}: must be at least 1")
    if output.exists() or not output.parent.is_dir():
        problem = "it exists" if output.exists() else f"there is no folder {output.parent}"
        raise InputError(f"--output {output}: {problem}; name a new file")
    read = deepspeed.read_file(source, options.devices)
    docstring = f"Settings of the DeepSpeed configuration {source.name}.\n\nIt names no model and no data."
    with output.open("x", encoding="utf-8") as file:
        file.write(format_recipe(read.config, docstring))
    print("\n".join(read.lines()))
    if read.config.mesh.devices == 1 and options.devices is None:
        print("the number of devices is not in the file: give --devices, or set mesh.fsdp in the recipe")
    print(f"written: {output}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = errors.ArgumentParser(
        prog=PROGRAM,
        description="Write the settings of another trainer as a recipe, and print what became of each. A setting that "
        "has no equivalent is an error.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="trainer", required=True, metavar="deepspeed")
    reading = commands.add_parser("deepspeed", help="read the JSON of deepspeed.initialize(config=...)")
    add = reading.add_argument
    add("file", type=Path, metavar="FILE", help="DeepSpeed's configuration, in JSON")
    add("--output", type=Path, metavar="RECIPE.py", help="new file (default: FILE with .py, in this folder)")
    add("--devices", type=int, metavar="N", help="number of devices, which the batch sizes for each GPU need")
    return parser


if __name__ == "__main__":
    errors.run_command(main)
