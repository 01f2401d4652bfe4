"""What benchmarks/gpu_figures.py and hot_path.py measure on a GPU: what of it is known without one."""

import ast
import json
import re
import subprocess
import sys
from typing import Any

import gpu_figures
import hot_path
import pytest
from commands import ENVIRONMENT, ROOT

from jaxopt_llm import config as configuration
from jaxopt_llm.model import flops
from jaxopt_llm.model.decoder import param_specs
from jaxopt_llm.parallel.topology import CHIPS, gpu_topology
from jaxopt_llm.plan import GIB, make_plan
from jaxopt_llm.validation import validate

QUICK = ("llama_1b", "llama_8b")


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in gpu_figures.CASES]
)
def test_a_case_fits_its_gpu_and_computes_nothing_again(case: str) -> None:
    path = gpu_figures.recipe(case, on_cpu=False)
    config = configuration.load(str(path))
    validate(config)
    on_80gb = case.endswith("80gb")
    plan = make_plan(config, "h100" if on_80gb else "h200", 1, 1)
    assert plan.spare > 0
    said = re.search(
        r"([\d.]+) GiB at the peak", " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    )
    assert said and plan.memory.peak / GIB == pytest.approx(float(said[1]), rel=0.02)
    # Attention's backward is 7 products where the model needs 4, an adapter's first is formed again.
    assert plan.flops / plan.model_flops == pytest.approx(1.30 if on_80gb else 1.07, abs=0.03)


def test_a_step_says_its_utilisation_in_both_conventions() -> None:
    """On a CPU that is taken for an H200."""
    path = gpu_figures.recipe("", on_cpu=True)
    program = (
        "import json, sys, time; sys.path.insert(0, 'benchmarks')\n"
        "from jaxopt_llm import utilisation\nfrom jaxopt_llm.parallel import topology\n"
        "topology.chip_of = utilisation.chip_of = lambda kind: topology.CHIPS['h200']\n"
        "import train_step\n"
        f"print(json.dumps(train_step.measure(time.time(), 1, ['--config', {str(path)!r}])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    config = configuration.load(str(path))
    needed = flops.per_token(config.model, param_specs(config.model), {}, config.training.sequence_length)
    peak = CHIPS["h200"].peak_flops["bfloat16"] * found["step_seconds"]
    assert found["mfu"] == pytest.approx(needed.causal * found["tokens_per_step"] / peak)
    assert found["mfu_full_attention"] == pytest.approx(needed.full * found["tokens_per_step"] / peak)
    assert found["state_bytes"] / found["parameters"] == pytest.approx(12, rel=0.01)


def test_a_case_without_room_is_named_beside_what_was_predicted() -> None:
    row = {"case": "llama_8b", "unavailable": "needs 102.0 GiB", "predicted": {"peak_bytes": 102 * GIB}}
    assert gpu_figures.line(row) == "llama_8b          not run (needs 102.0 GiB); plan 102.0 GiB"


@pytest.fixture(scope="module")
def moved() -> dict[str, float]:
    """Bytes as compiled for an H200, by the least."""
    (gpu,) = gpu_topology("h200", gpus_per_host=1)
    model = configuration.load("llama3_8b.py").model
    rows = (hot_path.compiled_row(name, of, gpu) for name, of in hot_path.passes(model, 8192, gpu).items())
    return {row["name"]: row["bytes"] / row["least_bytes"] for row in rows}


def test_what_lies_between_products_moves_no_more_than_it_must_but_for_a_norms_backward(
    moved: dict[str, float],
) -> None:
    backward = moved.pop("RMSNorm backward")
    assert all(0.99 < ratio < 1.1 for ratio in moved.values()), moved
    # The sum that is the scale's gradient reads both operands once more.
    assert backward == pytest.approx(5 / 3, rel=0.02)
