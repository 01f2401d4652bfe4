"""float16 through the whole of a run: placements, the command, and what reads its checkpoint."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from commands import assert_one_line, checkpoint, command, metrics, train

from jaxopt_llm.config import LoraConfig, OptimizerConfig, PrecisionConfig, RematConfig, ScheduleConfig, TrainingConfig
from jaxopt_llm.core import tree
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
    precision = PrecisionConfig("float16", reduce_dtype)  # type: ignore[arg-type]
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


@pytest.mark.slow
def test_a_run_resumes_equal_to_the_bit_and_its_checkpoint_is_read_in_float16(tmp_path: Path) -> None:
    settings = (
        *(*FLOAT16, "--precision.initial-loss-scale", 2**18, "--precision.loss-scale-growth-interval", 2),
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
    refused = train(whole, "--training.steps", 9, *settings[8:], "--run.allow-change", "precision.compute_dtype")
    assert refused.returncode == 2 and "precision.compute_dtype was float16 and is bfloat16" in refused.stderr


def test_a_scale_below_one_ends_the_run_with_3(tmp_path: Path) -> None:
    broken = ("--precision.initial-loss-scale", 2, "--optimizer.learning-rate", 1e38)  # it spoils the first update
    ended = train(tmp_path, "--training.steps", 8, *FLOAT16, *broken)
    assert ended.returncode == 3
    assert_one_line(ended.stderr, "step 3:", "loss scale now 0.5: no loss scale prevents the overflows")
    assert "loss scale now 1" in ended.stdout
    assert [record["loss_scale"] for record in metrics(tmp_path)] == [2, 1]
