"""Compare planned and measured peak memory of a model that fills 80% of one GPU with layers of a recipe.

    python benchmarks/fill_gpu.py --config benchmarks/recipes/llama_1b.py [--share 0.8] [--gigabytes N] --json FILE

Programs with a few layers give the bytes per layer; benchmarks/train_step.py then runs the depth that follows from
them. --gigabytes gives the memory of the GPU if the device does not report it.
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

DEPTHS = (2, 4)  # layers of the programs that the plan is based on
PROBE = "--probe"  # argument with which this file starts itself, so that only the measured process holds the GPU


def probe(recipe: str, share: float, gigabytes: float) -> dict[str, Any]:
    """Return the number of layers that fill the share, and the bytes that XLA may use (or `gigabytes`, if given)."""
    import jax

    from jaxopt_llm.compiler import hlo
    from jaxopt_llm.config import fields
    from jaxopt_llm.parallel.mesh import make_mesh
    from jaxopt_llm.parallel.placement import Placement
    from jaxopt_llm.step.program import make_program

    limit = gigabytes * 1e9 or (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        raise InputError("this device does not report its memory; give it with --gigabytes")
    config = cli.load_recipe(recipe)
    placement = Placement(make_mesh(config.mesh, jax.devices()[:1]), config.sharding, config.precision)

    def peak(layers: int) -> int:
        program = make_program(fields.replace_fields(config, {"model.layers": layers}), placement)
        return hlo.read_memory(program.step.lower(program.state, program.batch).compile()).peak

    few, many = DEPTHS
    low, high = peak(few), peak(many)
    for _ in range(2):  # repeat from the result: with few layers, the peak is at another moment of the step
        layers = many + int((share * limit - high) * (many - few) / (high - low))
        if layers < 1:
            raise InputError(f"--share {share} of {limit / 1e9:.3f} GB fits no layer of {recipe}; raise --share")
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
    """Write the base recipe with these fields to a file: overrides on a command line would require another package."""
    base = str(Path(base).resolve()) if Path(base).is_file() else base
    file.write_text(RECIPE.format(base=base, settings=settings))
    return file


def main() -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="recipe for one GPU; its model.layers is replaced")
    parser.add_argument("--share", type=float, default=0.8, help="share of the memory that XLA may use (default: 0.8)")
    parser.add_argument("--gigabytes", type=float, default=0.0, help="memory, if the device does not report it")
    parser.add_argument("--json", type=Path, required=True, help="file for the figures")
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
