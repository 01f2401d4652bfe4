"""The programs of docs/examples, with fewer steps and smaller models than a reader runs."""

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import ROOT

import jaxopt_llm
import jaxopt_llm.engine.fit
from jaxopt_llm.config import (
    Config,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RopeConfig,
    ScheduleConfig,
    TrainingConfig,
)
from jaxopt_llm.engine.frontends import unbox
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step.program import make_program
from jaxopt_llm.step.state import initialize_state

# A program whose products are in float32 by accident is no example.
pytestmark = pytest.mark.filterwarnings("error::jaxopt_llm.engine.checks.EngineWarning")
FOLDER = ROOT / "docs/examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py"))


def load(name: str, **constants: Any) -> Any:
    """Return an example as a module, with other values of some constants."""
    path = FOLDER / f"{name}.py"
    specification = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert vars(module).keys() >= constants.keys()
    vars(module).update(constants)
    return module


def recorded(directory: Path) -> dict[str, Any]:
    """Return the last record of a run."""
    return json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])


def test_vit(tmp_path: Path) -> None:
    found = load("vit", LAYERS=2).main(steps=60, directory=tmp_path)
    assert found["accuracy"] > 0.6 > 1 / 8, "it guesses one of eight directions without learning"
    assert recorded(tmp_path)["eval_accuracy"] == pytest.approx(found["accuracy"])


def test_bert(tmp_path: Path) -> None:
    found = load("bert", WIDTH=48, LAYERS=1, ROWS=32).main(steps=40, directory=tmp_path)
    assert found["loss"] < 3.3 < math.log(256)


def test_linen(tmp_path: Path) -> None:
    found = load("linen", LAYERS=2).main(steps=100, directory=tmp_path)
    assert found["accuracy"] > 0.7 > 1 / 8


def test_dpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Any] = []

    def fit(*arguments: Any) -> Any:
        trained.append(jaxopt_llm.engine.fit.fit(*arguments))
        return trained[0]

    monkeypatch.setattr(jaxopt_llm, "fit", fit, raising=False)
    example = load("dpo")
    found = example.main(steps=60, directory=tmp_path)
    assert found["accuracy"] > 0.95 and found["margin"] > 1
    assert found["loss"] < math.log(2), "the loss of a policy that is its reference"
    kernels = [
        {name: parameters[name]["segment_0"]["block_0"]["mlp"]["up"] for name in ("policy", "reference")}
        for parameters in (unbox(example.make_pair()), trained[0].model())
    ]
    before, after = kernels
    assert jnp.array_equal(after["reference"], before["reference"].astype(jnp.bfloat16)), "it is frozen in bfloat16"
    assert jnp.abs(after["policy"] - before["policy"]).max() > 0.005


def test_two_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled after the first turn of both but the evaluation, and both states rest on all devices."""
    example, compiled, counts = load("two_engines"), list[str](), list[int]()
    states = []
    run = jaxopt_llm.engine.engine.Engine.step

    def step(engine: Any, batch: Any) -> Any:
        metrics = run(engine, batch)
        counts.append(len(compiled))
        states.append(engine.state)
        assert len(batch["chosen"].sharding.device_set) == jax.device_count(), "what the other chose stays there"
        return metrics

    def note(name: str, seconds: float, **others: Any) -> None:
        compiled.extend([name] * name.endswith("backend_compile_duration"))

    monkeypatch.setattr(jaxopt_llm.engine.engine.Engine, "step", step)
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        found = example.main(steps=20)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert max(found) < 1 < math.log(32) / 2
    assert 0 < counts[0] < counts[1] and set(counts[2:]) == {counts[1]}, "one of the two is compiled again"
    masters = [jax.tree.leaves(state.masters) for state in states[-2:]]
    assert [{len(x.sharding.device_set) for x in each} for each in masters] == [{jax.device_count()}] * 2


def test_custom_optimizer(tmp_path: Path) -> None:
    found = load("custom_optimizer").main(steps=80, directory=tmp_path)
    assert found["loss"] < 0.01, "the variance of the targets is 0.023"


def to_package(params: Any) -> Any:
    """Return parameters of one_file.py as those of a decoder of the package."""
    layers = dict(params["layers"])
    norms = {name: {"scale": layers.pop(name)} for name in ("attention_norm", "mlp_norm")}
    mlp = {name: layers.pop(name) for name in ("gate", "up", "down")}
    outer = {"embedding": {"table": params["embedding"]}, "head": {"table": params["head"]}}
    block = norms | {"mlp": mlp, "attention": layers}
    return {
        "non_layer": outer | {"final_norm": {"scale": params["final_norm"]}},
        "segment_0": {"block_0": block},
    }


def test_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    """It computes what the package computes, on its mesh and on one device: neither shares code with the other."""
    example = load("one_file")
    random, params = np.random.default_rng(1), example.initialize()
    batches = random.integers(0, example.V, (4, example.BATCH, 33), np.int32)
    losses, _ = example.train(params, batches)
    model = ModelConfig(
        vocabulary_size=example.V,
        width=example.D,
        layers=example.L,
        heads=example.H,
        kv_heads=example.G,
        head_dim=example.K,
        mlp_width=example.F,
        tied_head=False,
        rope=RopeConfig(theta=10_000.0),
    )
    config = Config(
        model=model,
        mesh=MeshConfig(**example.MESH),
        precision=PrecisionConfig(compute_dtype="float32"),
        training=TrainingConfig(batch_size=example.BATCH, sequence_length=32),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        schedule=ScheduleConfig(kind="constant", warmup_steps=0),
    )
    placement = Placement(make_mesh(config.mesh), config.sharding, config.precision)
    program = make_program(config, placement)
    state = initialize_state(program.specs, program.optimizers, 0, placement, to_package(params))
    found = []
    for tokens in batches:
        rows = np.ones((example.BATCH, 32), np.int32)
        positions = np.broadcast_to(np.arange(32, dtype=np.int32), rows.shape)
        batch = Batch(tokens[:, :-1], tokens[:, 1:], rows.astype(bool), rows, positions)
        state, metrics = program.step(state, jax.tree.map(lambda field: field[None], batch))
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, found, rtol=1e-6)
    assert losses[3] != losses[0]


def test_the_example_of_the_overviews(capsys: pytest.CaptureFixture[str]) -> None:
    readme, overview = (
        re.findall(r"^## Any model\n\n```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
        for page in ("README.md", "docs/index.md")
    )
    assert readme == overview and len(readme) == 1
    exec(readme[0], {"__name__": "readme"})
    assert float(capsys.readouterr().out) > 0


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_short_and_is_run_by_a_test(name: str) -> None:
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    assert len(lines) <= (250 if name == "one_file" else 60)
    assert f"test_{name}" in globals(), "no test runs it"


def test_the_notebook_has_the_code_of_the_example() -> None:
    notebook = json.loads((FOLDER / "vit.ipynb").read_text())
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    _, _, rest = (FOLDER / "vit.py").read_text().partition('"""\n\nimport')
    assert "\n\n\n".join(code) == f"import{rest}".strip("\n")
    check = subprocess.run([sys.executable, ROOT / "scripts/notebook.py", "--check"], capture_output=True, text=True)
    assert (check.returncode, check.stderr) == (0, "")
