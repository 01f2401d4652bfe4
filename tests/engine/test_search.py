"""Search for the fastest settings of a user's model: its arithmetic next to the compiler, and what it chooses."""

import functools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import test_contrastive
import test_several_losses
from flax import nnx
from marks import slow
from test_step_bytes import Model, loss

import jaxopt_llm
from jaxopt_llm import plan as command
from jaxopt_llm.config import Config, MeshConfig
from jaxopt_llm.core.errors import DoesNotFit, InputError
from jaxopt_llm.engine import search
from jaxopt_llm.engine.engine import Engine
from jaxopt_llm.engine.plan import plan_job
from jaxopt_llm.engine.search import EngineCandidate, EngineSearch
from jaxopt_llm.planning import free_memory
from jaxopt_llm.planning.search import ranking
from jaxopt_llm.planning.search.roofline import Cluster

pytestmark = pytest.mark.core

CLUSTER = Cluster("h100", 1, 8)
WIDTH, HIDDEN = 1024, 4096


class Network(nnx.Module):
    """Products of which `tensor` may divide the hidden dimension."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def make(first: int, last: int, *names: str | None) -> nnx.Linear:
            kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
            return nnx.Linear(first, last, use_bias=False, kernel_init=kernel, rngs=rngs)

        self.up, self.down = make(WIDTH, HIDDEN, None, "hidden"), make(HIDDEN, WIDTH, "hidden", None)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


def regress(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((model(batch["x"].astype(jnp.bfloat16)).astype(jnp.float32) - batch["x"]) ** 2)


def make_engine(rows: int = 64, config: Config | None = None, **arguments: Any) -> Engine:
    example = {"x": jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)}
    return jaxopt_llm.initialize(lambda: Network(nnx.Rngs(0)), regress, example, config, **arguments)


def make_decoder(listed: bool) -> Engine:
    batch = {name: jax.ShapeDtypeStruct((64, 1024), jnp.int32) for name in ("ids", "next")}
    return jaxopt_llm.initialize(lambda: Model(listed, False, 8, rngs=nnx.Rngs(0)), loss, batch)


def allow_bytes(count: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "MEMORY_FRACTION", count / CLUSTER.chip.memory_bytes)


def list_candidates(engine: Engine, *allowed: str) -> list[EngineCandidate]:
    return search._Space(engine._job, CLUSTER, allowed).list_candidates()


@functools.cache
def estimate(listed: bool) -> list[EngineCandidate]:
    return list_candidates(make_decoder(listed))


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    ("policy", "accumulation", "stage"),
    [("none", 1, 3), *slow(("full", 1, 3), ("none", 4, 3), ("full", 4, 0), ("none", 1, 0))],
)
def test_the_arithmetic_is_close_to_the_compiler(listed: bool, policy: str, accumulation: int, stage: int) -> None:
    """Memory and transfers are meant as lower bounds.

    XLA keeps more of the layers of a list than of those of a loop, and it hides few of the transfers.
    """
    mesh = MeshConfig(fsdp=8) if stage else MeshConfig(data=8, fsdp=1)
    (found,) = (
        each
        for each in estimate(listed)
        if (each.config.mesh, each.config.remat.policy) == (mesh, policy)
        and (each.config.training.accumulation, each.config.sharding.zero_stage) == (accumulation, stage)
        and not each.config.offload.optimizer
        and not each.config.sharding.optimizer_over_data
    )
    plan = plan_job(found.job, CLUSTER)
    assert found.work.flops == pytest.approx(plan.flops, rel=0.001)
    assert (0.45 if listed else 0.75) * plan.memory.peak < found.footprint.peak < 1.05 * plan.memory.peak
    assert found.compute_compiled_time(plan).total == pytest.approx(plan.step_seconds)
    assert 0.65 * plan.step_seconds < found.time.total < 1.3 * plan.step_seconds


@pytest.fixture(scope="module")
def found() -> EngineSearch:
    return make_engine().search("h100", gpus=8)


def test_the_fastest_that_fits_is_what_its_own_plan_says(found: EngineSearch) -> None:
    assert found.config is not None and found.plan.spare > 0
    again = make_engine(config=found.config).plan("h100")
    assert (again.memory, again.step_seconds) == (found.plan.memory, found.plan.step_seconds)
    times = [each.time.total for each in found.result.compiled]
    assert times == sorted(times) and times[0] == pytest.approx(found.plan.step_seconds)
    lines = str(found).splitlines()
    assert "settings on 1 × 8 NVIDIA H100 80GB HBM3" in lines[0] and "rows/s" in lines[2]
    assert lines[-1].startswith("fastest that fits: --") and found.config.sharding.zero_stage != 3


def test_less_memory_changes_the_choice(found: EngineSearch, monkeypatch: pytest.MonkeyPatch) -> None:
    divided = make_engine(config=Config(mesh={"fsdp": 8})).plan("h100")  # type: ignore[arg-type]
    allow_bytes(1.01 * divided.memory.peak / (1 - free_memory.FREE), monkeypatch)
    tight = make_engine().search("h100", gpus=8)
    assert tight.config is not None
    assert tight.config.sharding.zero_stage == 3
    assert tight.plan.memory.peak <= 1.01 * divided.memory.peak and tight.plan.spare > 0
    assert found.plan.memory.peak > tight.plan.limit


RECIPE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from flax import nnx
import jax
import jax.numpy as jnp
from jaxopt_llm import Config
from test_search import Network, WIDTH, regress as loss

def model():
    return Network(nnx.Rngs(0))

example, data = {{"x": jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)}}, []
"""


def run(monkeypatch: pytest.MonkeyPatch, recipe: Path, *arguments: Any) -> None:
    recipe.write_text(RECIPE)
    flags = ("--search", "--config", recipe, "--gpu", "h100", "--gpus-per-host", 2, *arguments)
    monkeypatch.setattr(sys, "argv", ["plan", *map(str, flags)])
    monkeypatch.setattr(command, "prepare_jax", lambda: None)
    command.main()


def test_the_command_says_in_one_line_that_nothing_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allow_bytes(2**20, monkeypatch)
    with pytest.raises(
        DoesNotFit, match=r"^nothing fits: the smallest .* lacks \d.\d\d GiB of each GPU; take more GPUs"
    ):
        run(monkeypatch, tmp_path / "own.py")
    text = capsys.readouterr().out
    assert "0 fit by arithmetic, 1 compiled" in text and ": DOES NOT FIT" in text and "fastest" not in text


@pytest.mark.slow
def test_the_command_prints_json_and_takes_allowed_fields(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, tmp_path / "own.py", "--json", "--explain", "--rows", 32, "--allow", "precision.reduce_dtype")
    values = json.loads(capsys.readouterr().out)
    best = values["ranked"][0]
    assert best["rows_per_second"] == pytest.approx(32 / best["step_seconds"]) and best["plan"]["fits"]
    assert best["settings"]["precision.reduce_dtype"] == "bfloat16" and values["tree"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus": 3}, r"search: no mesh of 1 × 3 GPUs is legal: example: 64 rows are not divisible by mesh.data=3"),
        ({"gpu": "h1000"}, "gpu=h1000 is unknown; choose one of"),
        ({"gpus": 0}, "plan: gpus=0: must be at least 1"),
        ({"rows": 0}, "plan: rows=0: must be at least 1"),
        ({"gpus": 12, "rows": 24}, "12 GPUs are not a whole number of hosts with 8; set gpus_per_host"),
        ({"allow": ["optimizer.in_backward"]}, "optimizer.in_backward changes nothing, because an engine does not"),
        ({"allow": ["optimizer.state_dtype"]}, "changes nothing, because an optax transformation is the whole"),
    ],
)
def test_what_a_search_refuses(arguments: dict[str, Any], message: str) -> None:
    optimizer = optax.sgd(1e-3) if "state_dtype" in str(arguments) else None
    with pytest.raises(InputError, match=message):
        make_engine(optimizer=optimizer).search(**{"gpu": "h100", "gpus": 8} | arguments)


def test_rules_open_the_axis_tensor() -> None:
    """Each microbatch sums the result of the second product, and the gradient of what the first one reads."""
    plain, ruled = (list_candidates(make_engine(rules=rules)) for rules in (None, {"hidden": "tensor"}))
    assert {each.config.mesh.tensor for each in plain} == {1}
    assert {each.config.mesh.tensor for each in ruled} == {1, 2, 4, 8}
    found = next(each for each in ruled if each.config.mesh == MeshConfig(fsdp=4, tensor=2))
    (sent,) = (each for each in found.work.transfers if each.axes == ("tensor",))
    result = 2 * 64 // 4 * WIDTH  # bfloat16; the gradient of the batch is not formed
    assert sent.seconds == pytest.approx(result / CLUSTER.chip.peer_bytes_per_second)
    whole = next(each for each in ruled if each.config.mesh == MeshConfig(fsdp=8))
    assert found.state.layers.weights + found.state.non_layer.weights == WIDTH * HIDDEN
    assert whole.state.non_layer.weights == 2 * WIDTH * HIDDEN


def test_a_loss_over_the_batch_is_not_divided_into_microbatches() -> None:
    case = test_contrastive.CASE
    coupled = jaxopt_llm.initialize(case.model, case.loss, case.batches(1)[0], optimizer=case.optimizer)
    for loss_over, found in ((None, {1}), ("batch", {1}), ("rows", {1, 2, 3, 4, 6, 8, 12, 24})):
        space = search._Space(replace(coupled._job, loss_over=loss_over), Cluster("h100", 1, 1), ())
        assert {each.config.training.accumulation for each in space.estimate(MeshConfig())} == found


def test_the_own_setting_is_among_them() -> None:
    engine = make_engine(config=Config(mesh={"fsdp": 8}, sharding={"zero_stage": 2}))  # type: ignore[arg-type]
    assert sum(each.config == engine.config for each in list_candidates(engine)) == 1
    assert all(each.config.sharding.zero_stage != 2 for each in list_candidates(make_engine()))


def test_the_order_of_time_decides_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, compiled = make_engine(config=Config(mesh={"fsdp": 1})), list[Config]()  # type: ignore[arg-type]

    def remember(job: Any, cluster: Cluster) -> Any:
        compiled.append(job.config)
        return plan_job(job, cluster)

    monkeypatch.setattr(search, "plan_job", remember)
    monkeypatch.setattr(ranking, "MAX_COMPILED", 1)
    found = engine.search("h100", gpus=8)
    fastest = min(list_candidates(engine), key=lambda each: (each.time.total, each.footprint.peak))
    assert compiled == [found.config] and found.result.compiled[0].candidate.time == fastest.time


def test_one_of_several_losses_is_searched() -> None:
    """A step holds gradients only of what its loss trains, and the state of all."""
    engine, mesh = test_several_losses.make_engine(), MeshConfig(data=8, fsdp=1)
    spaces = [search._Space(engine.steps.find_job(name), CLUSTER, ()) for name in engine.losses]
    found = [next(space.estimate(mesh)) for space in spaces]
    assert all(each.work.flops > 0 for each in found) and len({each.footprint.optimizer for each in found}) == 1
    parameters = sum(math.prod(info.shape) for info in engine.parameters)
    assert sum(each.footprint.gradients for each in found) == 4 * parameters
