"""Planned and measured peak of a model that fills one GPU: as many layers of a recipe as 80% of its memory takes.

    python benchmarks/fill_gpu.py --config benchmarks/recipes/llama_1b.py [--share 0.8] [--gigabytes N] --json FILE

Programs of a few layers give the bytes of one; benchmarks/train_step.py then runs the depth that follows from them.
--gigabytes stands for the GPU's memory, where there is none to ask.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxopt_llm.config import cli
from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import InputError

DEPTHS = (2, 4)  # layers of the programs that are planned from
PROBE = "--probe"  # how this file starts itself, so that no process but the measured one holds the GPU


def probe(recipe: str, share: float, gigabytes: float) -> dict[str, Any]:
    """The layers that fill the share, and the bytes that XLA may use on this device (gigabytes, if any, instead)."""
    import jax

    from jaxopt_llm.compiler import hlo
    from jaxopt_llm.config import fields
    from jaxopt_llm.parallel.mesh import make_mesh
    from jaxopt_llm.parallel.placement import Placement
    from jaxopt_llm.training.program import make_program

    limit = gigabytes * 1e9 or (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        raise InputError("this device does not say how much memory it has: give --gigabytes")
    config = cli.load_recipe(recipe)
    placement = Placement(make_mesh(config.mesh, jax.devices()[:1]), config.sharding, config.precision)

    def peak(layers: int) -> int:
        program = make_program(fields.replace_fields(config, {"model.layers": layers}), placement)
        return hlo.read_memory(program.step.lower(program.state, program.batch).compile()).peak

    few, many = DEPTHS
    low, high = peak(few), peak(many)
    for _ in range(2):  # once more from there: in few layers, another moment of the step is the peak
        layers = many + int((share * limit - high) * (many - few) / (high - low))
        if layers < 1:
            raise InputError(f"--share {share} of {limit / 1e9:.3f} GB holds no layer of {recipe}")
        if layers == many:
            break
        few, low, many, high = many, high, layers, peak(layers)
    return {"layers": layers, "limit_bytes": limit}


RECIPE = """
from jaxopt_llm.config import cli, fields
def get_config():
    return fields.replace_fields(cli.load_recipe({base!r}), {settings!r})
"""


def write_recipe(file: Path, base: str, settings: dict[str, Any]) -> Path:
    """The base recipe with these fields: as a file, because overrides on a command line want one package more."""
    base = str(Path(base).resolve()) if Path(base).is_file() else base
    file.write_text(RECIPE.format(base=base, settings=settings))
    return file


def main() -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="recipe for one GPU, whose model.layers are replaced")
    parser.add_argument("--share", type=float, default=0.8, help="of the memory that XLA may use (default: 0.8)")
    parser.add_argument("--gigabytes", type=float, default=0.0, help="the memory, where the device does not say")
    parser.add_argument("--json", type=Path, required=True, help="file to write the figures to")
    asked = parser.parse_args()
    settings = [asked.config, str(asked.share), str(asked.gigabytes)]
    said = subprocess.run([sys.executable, __file__, PROBE, *settings], stdout=subprocess.PIPE, text=True, check=False)
    if said.returncode:
        return said.returncode
    found = json.loads(said.stdout.splitlines()[-1])
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_recipe(Path(folder) / "filled.py", asked.config, {"model.layers": found["layers"]})
        step = [sys.executable, str(Path(__file__).parent / "train_step.py"), "--config", str(recipe), "--runs", "1"]
        done = subprocess.run([*step, "--steps", "3", "--json", str(asked.json)], check=False)
    if done.returncode:
        return done.returncode
    report = json.loads(asked.json.read_text())
    asked.json.write_text(json.dumps(report | found, indent=2) + "\n")
    return 0


def probe_and_print() -> int:
    recipe, share, gigabytes = sys.argv[2:]
    print(json.dumps(probe(recipe, float(share), float(gigabytes))))
    return 0


if __name__ == "__main__":
    errors.run_command(probe_and_print if sys.argv[1:2] == [PROBE] else main)
