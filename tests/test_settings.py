"""Tests of the settings that save memory, singly and in pairs, against the plain step: same loss and updates."""

import functools
import itertools
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
import pytest
import toy

from jaxopt_llm.config import (
    Config,
    MeshConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
    ShardingConfig,
    TrainingConfig,
)
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.planning.advice import Settings, apply_settings
from jaxopt_llm.step import state as training_state
from jaxopt_llm.step.program import Program
from jaxopt_llm.step.state import TrainState

ROWS, LENGTH = 24, 16
PLAIN = Config(
    # Wide enough for the blocks and groups of 8-bit and 4-bit codes, and as fast to compile.
    model=replace(toy.UNIFORM, width=256, head_dim=64, mlp_width=512),
    training=TrainingConfig(batch_size=ROWS, sequence_length=LENGTH, loss_chunk=0),
    # With this large epsilon the first update is nearly the gradient, and rounding noise of a zero is not a full step.
    optimizer=OptimizerConfig(learning_rate=1e-1, epsilon=1.0, weight_decay=0, clip_norm=0),
    schedule=ScheduleConfig(1, 10),
    precision=PrecisionConfig(compute_dtype="float32"),
    mesh=MeshConfig(),
    sharding=ShardingConfig(0),
)
# The first value of each factor is that of PLAIN; the pairs are of the other ones.
FACTORS: dict[str, dict[str, Settings]] = {
    "precision": {
        "float32": {},
        "bfloat16": {"precision.compute_dtype": "bfloat16"},
        "reduced": {"precision.compute_dtype": "bfloat16", "precision.reduce_dtype": "bfloat16"},
        "float16": {"precision.compute_dtype": "float16", "precision.loss_scaling": "dynamic"},
    },
    "matmul": {
        "plain": {},
        **{name: {"precision.matmul": name} for name in ("fp8", "int8", "int4_qat")},
    },
    "remat": {
        "full": {},
        "none": {"remat.policy": "none"},
        "attention": {"remat.policy": "save_attention"},
        "named": {"remat.policy": ("query", "mlp_up")},
        "every": {"remat.every": 3},
        "offload": {"remat.offload": ("block_input", "attention")},
    },
    "update": {"after": {}, "backward": {"optimizer.in_backward": True}},
    "state": {"float32": {}, **{name: {"optimizer.state_dtype": name} for name in ("bfloat16", "int8")}},
    "optimizer": {"device": {}, "host": {"offload.optimizer": True}},
    "parameters": {"device": {}, "host": {"offload.parameters": True}},
    "loss": {"whole": {}, "chunks": {"training.loss_chunk": 7}},
    "microbatches": {"1": {}, "3": {"training.accumulation": 3}},
    "devices": {
        "one": {},
        "stage1": {"mesh.fsdp": 8, "sharding.zero_stage": 1},
        "stage3": {"mesh.fsdp": 4, "mesh.tensor": 2, "sharding.zero_stage": 3},
        "pipeline": {"mesh.pipeline": 3, "mesh.fsdp": 2, "sharding.zero_stage": 2},
    },
}
# A pairwise cover: every allowed pair of values is in at least one case.
CASES = """
precision  matmul    remat      update    state     optimizer  parameters  loss    microbatches  devices
reduced    plain     full       backward  int8      device     host        whole   1             one
reduced    int8      offload    after     float32   device     device      chunks  3             one
bfloat16   fp8       attention  after     float32   host       host        chunks  1             one
float32    int4_qat  named      after     bfloat16  device     host        whole   3             one
bfloat16   int8      none       after     float32   device     device      whole   1             one
float16    plain     every      after     float32   device     device      whole   3             one
float32    int8      every      after     float32   host       host        chunks  1             stage1
bfloat16   fp8       full       backward  bfloat16  device     host        whole   1             stage1
float16    int4_qat  offload    after     int8      host       host        whole   3             stage1
reduced    fp8       none       after     int8      device     device      chunks  3             stage1
float32    int8      attention  after     int8      host       device      whole   1             stage1
float16    plain     named      after     float32   host       host        whole   1             stage1
reduced    int8      full       backward  int8      host       host        whole   1             stage1
float32    fp8       every      after     float32   device     host        chunks  1             stage1
float16    int4_qat  attention  after     bfloat16  device     device      whole   3             stage3
float32    int4_qat  full       backward  float32   host       device      chunks  1             stage3
reduced    int8      named      after     bfloat16  host       host        whole   1             stage3
bfloat16   plain     every      after     int8      device     device      whole   3             stage3
float32    fp8       offload    after     bfloat16  host       host        chunks  1             stage3
bfloat16   int4_qat  none       after     bfloat16  device     device      whole   1             stage3
bfloat16   fp8       named      after     int8      host       device      chunks  3             pipeline
float16    plain     none       after     bfloat16  host       host        chunks  1             pipeline
float32    plain     none       after     float32   device     device      whole   3             pipeline
float16    int8      full       after     float32   host       device      chunks  3             pipeline
reduced    int4_qat  every      after     bfloat16  host       device      chunks  1             pipeline
reduced    plain     attention  after     float32   device     host        whole   1             pipeline
bfloat16   plain     offload    after     float32   device     host        whole   1             pipeline
"""


def cases() -> list[dict[str, str]]:
    """Return the cases, each a value for every factor."""
    names, *rows = (line.split() for line in CASES.strip().splitlines())
    return [dict(zip(names, row, strict=True)) for row in rows]


def configure(case: dict[str, str]) -> Config | None:
    """Return the configuration of a case, or None if it is refused."""
    settings: Settings = {}
    for factor, value in case.items():
        settings |= FACTORS[factor][value]
    return apply_settings(PLAIN, settings)


class Result(NamedTuple):
    """Result of two steps. updates: the change of the parameters in each step."""

    losses: tuple[float, float]
    updates: tuple[Params, Params]


def train(config: Config) -> Result:
    mesh = make_mesh(config.mesh, jax.devices("cpu")[: config.mesh.devices])
    placement = Placement(mesh, config.sharding, config.precision, config.offload)
    program = toy.make_program(
        config.model, config.training, config.optimizer, config.schedule, config.remat, config.lora, placement
    )
    state = training_state.initialize_state(program.specs, program.optimizers, 0, placement)
    masters, losses = [masters_of(program, state)], []
    for seed in range(2):
        batch = toy.microbatches(toy.packed(ROWS, LENGTH, seed), config.training.accumulation)
        state, metrics = program.step(state, jax.device_put(batch, program.batch_sharding))
        assert metrics["skipped"] == 0
        losses.append(float(metrics["loss"]))
        masters.append(masters_of(program, state))
    first, second = (jax.tree.map(np.subtract, after, before) for before, after in itertools.pairwise(masters))
    return Result((losses[0], losses[1]), (first, second))


def masters_of(program: Program, state: TrainState) -> Params:
    return jax.tree.map(np.asarray, program.to_checkpoint(state)["masters"])


@functools.cache
def train_plain(matmul: str) -> Result:
    """Train on one device in float32, with only `matmul` changed."""
    config = configure({"matmul": matmul})
    assert config is not None
    return train(config)


# Relative error of the whole update from the rounding of products and activations, by precision.
ROUNDING = {"float32": 1e-5, "bfloat16": 2e-2, "reduced": 2e-2, "float16": 5e-3}
# The code of a value between two codes is unstable. In float32 it changes where the order of a sum changes the last
# bit, together with other codes of its row; in 16 bits it changes everywhere, as much as by quantisation itself.
NOISE = {"plain": (0, 0), "fp8": (0.06, 0.11), "int8": (0.012, 0.03), "int4_qat": (0, 0.07)}
QUANTISING = {"fp8": 0.11, "int8": 0.03, "int4_qat": 0.28}
# Error of the second update from the rounding of the moments in the first step.
STATE = {"float32": 0, "bfloat16": 2e-3, "int8": 1e-2}


@pytest.mark.parametrize(
    "case",
    # One fast case is enough to see that the settings work together.
    [pytest.param(case, marks=[pytest.mark.slow] * (index > 0)) for index, case in enumerate(cases())],
    ids=lambda case: "-".join(case.values()),
)
def test_the_update_is_that_of_the_plain_step(case: dict[str, str]) -> None:
    config = configure(case)
    assert config is not None
    found, expected = train(config), train_plain(case["matmul"])
    share = ROUNDING[case["precision"]] + NOISE[case["matmul"]][case["precision"] != "float32"]
    assert found.losses == pytest.approx(expected.losses, rel=share / 10)
    assert toy.distance(found.updates[0], expected.updates[0]) < share
    # The second update starts from parameters that differ by the error of the first one.
    assert toy.distance(found.updates[1], expected.updates[1]) < 1.6 * share + STATE[case["state"]]


@pytest.mark.parametrize(
    "matmul", ["int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8", "int4_qat"))]
)
def test_quantised_products_are_near_and_not_the_same(matmul: str) -> None:
    off = toy.distance(train_plain(matmul).updates[0], train_plain("plain").updates[0])
    assert QUANTISING[matmul] / 2 < off < QUANTISING[matmul]


def test_the_cover_has_every_pair() -> None:
    plainest = {factor: next(iter(values)) for factor, values in FACTORS.items()}
    covered = {pair for case in cases() for pair in itertools.combinations(case.items(), 2)}
    missing = []
    for one, other in itertools.combinations(FACTORS, 2):
        for pair in itertools.product(FACTORS[one], FACTORS[other]):
            named = tuple(zip((one, other), pair, strict=True))
            if named not in covered and configure(plainest | dict(named)):
                missing.append(named)
    assert not missing
