"""float16 through the whole of a run: placements, the command, and what reads its checkpoint."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from commands import assert_one_line, checkpoint, command, metrics, train
from test_loop import tiny

from jaxopt_llm import train as training_command
from jaxopt_llm.config import LoraConfig, OptimizerConfig, PrecisionConfig, RematConfig, ScheduleConfig, TrainingConfig
from jaxopt_llm.core import tree
from jaxopt_llm.observe.preemption import Preemption
from jaxopt_llm.step import state as training_state

MODEL = replace(toy.CONFIG, layers=2, pattern=("global",), attention_softcap=5.0)
ROWS, LENGTH = 8, 16


@pytest.mark.parametrize(
    ("zero", "reduce_dtype", "axes"),
    [
        (3, "float16", {"fsdp": 2, "tensor": 2}),
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in (
                (0, "float32", {}),
                (1, "float16", {"pipeline": 2, "fsdp": 2}),
                (3, "float32", {"pipeline": 2, "fsdp": 2, "tensor": 2}),
            )
        ),
    ],
)
def test_gradients_are_float32s_within_rounding(zero: int, reduce_dtype: str, axes: dict[str, int]) -> None:
    """float16 has 11 bits: within 0.2% as a whole and 0.3% leaf by leaf. A scale out of range before it shows that the
    backward works on scaled gradients, the pipeline's own, too."""
    precision = PrecisionConfig("float16", reduce_dtype, "dynamic")  # type: ignore[arg-type]
    placement = replace(toy.placement(zero, **axes), precision=precision)
    accumulation = 2 if "pipeline" in axes else 1
    program = toy.make_program(
        MODEL,
        TrainingConfig(batch_size=ROWS, sequence_length=LENGTH, accumulation=accumulation),
        OptimizerConfig(name="sgd", learning_rate=10.0, momentum=0.0, weight_decay=0.0, clip_norm=1e9),
        ScheduleConfig(1, 10),
        RematConfig("full"),
        LoraConfig(),
        placement,
    )
    batch = toy.packed(ROWS, LENGTH)
    state = training_state.initialize_state(program.specs, program.optimizers, 0, placement)
    before = to_host(program.to_checkpoint(state)["masters"])
    scale = state.loss_scale["scale"]
    state = replace(state, loss_scale={**state.loss_scale, "scale": jnp.full_like(scale, 2.0**30)})
    rows = jax.device_put(toy.microbatches(batch, accumulation), program.batch_sharding)
    state, metrics = program.step(state, rows)
    assert metrics["overflow"] and metrics["skipped_in_a_row"] == 0
    state, metrics = program.step(replace(state, loss_scale={**state.loss_scale, "scale": scale}), rows)
    assert not metrics["overflow"] and metrics["loss_scale"] == 2.0**16

    after = to_host(program.to_checkpoint(state)["masters"])
    found = jax.tree.map(lambda old, new: (old - new) / float(metrics["learning_rate"]), before, after)
    loss, expected = toy.reference_mean(MODEL, before, batch)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert toy.distance(found, expected) < 2e-3

    def check(path: str, a: np.ndarray, b: np.ndarray) -> None:
        assert toy.distance(a, b) < 3e-3, path

    tree.map_with_path(check, found, expected)


def to_host(leaves: Any) -> Any:
    return jax.tree.map(np.asarray, leaves)


FLOAT16 = ("--precision.compute-dtype", "float16", "--precision.reduce-dtype", "float16")
SCALED = (*FLOAT16, "--precision.loss-scaling", "dynamic")


@pytest.mark.slow
def test_a_run_resumes_equal_to_the_bit_and_its_checkpoint_is_read_in_float16(tmp_path: Path) -> None:
    settings = (
        *(*SCALED, "--precision.initial-loss-scale", 2**18, "--precision.loss-scale-growth-interval", 2),
        *("--evaluation.every", 5, "--checkpoint.every", 1, "--checkpoint.keep", 8),
    )
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for directory, stops in ((whole, (8,)), (resumed, (5, 8))):
        for steps in stops:
            done = train(directory, "--training.steps", steps, *settings)
            assert (done.returncode, done.stderr) == (0, "")
    records = metrics(whole)
    scales = [record["loss_scale"] for record in records]
    assert scales[0] == 2**17 and records[0]["grad_norm"] is None and records[0]["skipped"] == 1
    assert any(after == 2 * before for before, after in itertools.pairwise(scales))
    # As after any step that is skipped, a checkpoint waits for the next one; the last step's does not.
    saved = {int(path.name) for path in (whole / "checkpoints").iterdir()}
    assert saved == {record["step"] for record in records if record["grad_norm"] is not None} | {8}
    assert metrics(resumed) == records
    trees = ("masters", "moments", "guard", "loss_scale")
    jax.tree.map(np.testing.assert_array_equal, checkpoint(resumed, 8, trees), checkpoint(whole, 8, trees))

    told = command("evaluate", "--checkpoint", whole)
    assert told.returncode == 0, told.stderr
    assert " nats per token" in told.stdout and "nan" not in told.stdout
    written = command("generate", "--checkpoint", whole, "--prompt", "def ", "--tokens", 3)
    assert written.returncode == 0 and written.stdout.startswith("def "), written.stderr
    refused = train(whole, "--training.steps", 9, *FLOAT16)
    assert refused.returncode == 2 and "precision.loss_scaling was dynamic and is none" in refused.stderr


def test_a_scale_below_one_ends_the_run_with_3(tmp_path: Path) -> None:
    broken = ("--precision.initial-loss-scale", 2, "--optimizer.learning-rate", 1e38)  # it spoils the first update
    ended = train(tmp_path, "--training.steps", 8, *SCALED, *broken)
    assert ended.returncode == 3
    assert_one_line(ended.stderr, "step 3:", "loss scale now 0.5: no loss scale prevents the overflows")
    assert "loss scale now 1" in ended.stdout
    assert [record["loss_scale"] for record in metrics(tmp_path)] == [2, 1]


def test_without_a_scale_float16_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny(tmp_path / "run", precision=PrecisionConfig(compute_dtype="float16"))
    config = replace(config, model=replace(MODEL, window=128), training=replace(config.training, steps=1))
    config = replace(config, schedule=replace(config.schedule, warmup_steps=0))
    with Preemption() as preemption:
        training_command.train(config, preemption)
    said = capsys.readouterr().err
    assert said.startswith("warning: float16") and said.count("\n") == 1 and "--precision.loss-scaling dynamic" in said
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"]) and "loss_scale" not in record
