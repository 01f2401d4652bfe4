"""Engines in jobs of several processes, through scripts as users write them: they train, stop and save as one."""

import errno
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from commands import metrics, start_python
from gates import finish
from ports import free_address

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.stop_signals import SIGNALS
from jaxopt_llm.engine.batches import BatchRows, make_batches

STEPS, ROWS = 6, 16

# Its arguments: run directory, number of devices of the process, kind of data, step at which the process stops itself
# (0 for none), seed of the model, and what else to do.
SCRIPT = """
import os, signal, sys
import jax, numpy as np, optax
from flax import nnx
import jaxopt_llm

directory, devices, kind, stop, seed, *more = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", int(devices))

class Network(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.up(x))))

def loss(model, batch):
    error = (model(batch["x"]) - batch["y"]) ** 2
    near = error < 0.5
    near_by = (error * near).sum(), near.sum()
    return error.mean(), {"far": jaxopt_llm.Max(error.max()), "count": jaxopt_llm.Sum(near.sum()), "near": near_by}

def predict(model, batch):
    return model(batch["x"])

def read_row(index):
    x = np.random.default_rng(index).normal(size=8).astype(np.float32)
    return {"x": x, "y": np.abs(x).mean(keepdims=True)}

def read_rows(indices):
    return jax.tree.map(lambda *rows: np.stack(rows), *map(read_row, indices))

def whole(step):
    if step == int(stop or 0) > 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return read_rows(range(16 * step, 16 * step + 16))

def own_rows(step, rows):
    print("reads", *rows, file=sys.stderr)
    return read_rows(16 * step + rows)

class Rows:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return read_row(index)

def main():
    config = jaxopt_llm.Config(
        mesh=dict(fsdp=4), training=dict(accumulation=2, ema_decay=0.5), checkpoint=dict(every=100),
        logging=dict(every=1, tensorboard=False), precision=dict(compute_dtype="float32"),
    )
    data = {"whole": whole, "own_rows": own_rows, "dataset": Rows(), "iterable": map(whole, range(6))}[kind]
    engine = jaxopt_llm.initialize(lambda: Network(nnx.Rngs(int(seed))), loss, whole(0), config, optax.adamw(1e-2))
    jaxopt_llm.fit(engine, data, 6, directory, [whole(1000)])
    if more:
        for step in (6, 7):
            local = read_rows(16 * step + np.asarray(engine.rows.local))
            print("loss", float(engine.step(local if step % 2 else whole(step))["loss"]))
            engine.save(f"{directory}/saved")
            assert engine.restore(f"{directory}/saved") == step + 1
        print("predicted, loss", float(np.sum(engine.predict(predict, whole(1000)) ** 2)))
        print("gradients of the loss", float(jax.jit(optax.global_norm)(engine.gradients(whole(1000)))))
        print("held out", engine.evaluate([whole(1000), whole(1001)]))
        sys.exit(0)

jaxopt_llm.run_job(main)
"""

# Its arguments: number of devices of the process, and the lengths of the batches that it gives.
SHAPES_SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
import jaxopt_llm

devices, *lengths = map(int, sys.argv[1:])
jax.config.update("jax_num_cpu_devices", devices)

class Pair(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.actor, self.critic = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(4, 8, rngs=rngs)

def act(model, batch):
    return jnp.mean((model.actor(batch["x"]).mean(1) - model.critic(batch["x"]).max(1)) ** 2)

def judge(model, batch):
    error = (model.critic(batch["x"]).mean((1, 2)) - batch["y"]) ** 2
    return error.sum(), jnp.float32(len(error))

def draw(step, length):
    random = np.random.default_rng(step)
    return {"x": random.normal(size=(16, length, 4)).astype(np.float32), "y": random.normal(size=16).astype(np.float32)}

def main():
    config = jaxopt_llm.Config(
        mesh=dict(fsdp=4), training=dict(accumulation=2), precision=dict(compute_dtype="float32")
    )
    engine = jaxopt_llm.initialize(
        Pair, {"actor": act, "critic": judge}, draw(0, 3), config, {"actor": optax.adam(1e-2), "critic": optax.sgd(0.1)}
    )
    for step, length in enumerate(lengths):
        for loss in engine.losses:
            local = np.asarray(engine.rows.by_loss[loss].local)
            own = jax.tree.map(lambda x: x[local], draw(step, length))
            metrics = engine.step(own, loss)
            print(loss, len(local), float(metrics["loss"]), float(metrics["grad_norm"]))

jaxopt_llm.run_job(main)
"""


def start_job(directory: Path, count: int, kind: str, *arguments: object) -> list[subprocess.Popen[str]]:
    """Start processes with four devices in all. Each argument is for all processes, or a list of one for each."""
    return start_script(SCRIPT, count, directory, 4 // count, kind, *arguments)


def start_script(script: str, count: int, *arguments: object) -> list[subprocess.Popen[str]]:
    """Start processes of a job. Each argument is for all of them, or a list of one for each."""
    address, port = free_address().split(":")
    job = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    return [
        start_python(
            *("-c", script),
            *(each[index] if isinstance(each, list) else each for each in arguments),
            RANK=str(index),
            **job,
        )
        for index in range(count)
    ]


def run_job(directory: Path, count: int, kind: str, *more: object) -> list[tuple[str, str]]:
    return [finish(process) for process in start_job(directory, count, kind, 0, 0, *more)]


def losses(directory: Path) -> list[float]:
    names = "loss", "eval_loss", "far", "count", "near"
    return [record[name] for record in metrics(directory) for name in names if name in record]


def test_processes_stop_as_one_and_another_number_of_them_continues(tmp_path: Path) -> None:
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    run_job(alone, 1, "whole")
    # Only process 1 gets a signal.
    ended = [finish(process, 75) for process in start_job(stopped, 2, "whole", [0, 3], 0)]
    step = len(metrics(stopped))
    assert [stderr for _, stderr in ended] == [f"preempted at step {step}; run again to continue\n", ""]
    assert 1 <= step < STEPS
    ((printed, _),) = run_job(stopped, 1, "whole")
    assert f"continues from step {step}" in printed
    np.testing.assert_allclose(losses(stopped), losses(alone), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own_rows", "dataset", "iterable"])
def test_each_process_reads_its_own_rows(kind: str, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    ((first, _),) = run_job(alone, 1, kind, "more")
    outputs = run_job(together, 2, kind, "more")
    np.testing.assert_allclose(losses(together), losses(alone), rtol=1e-6)
    printed = [[line for line in text.splitlines() if "loss" in line] for text in (first, outputs[0][0])]
    numbers = [[float(line.split()[-1].rstrip("}")) for line in lines if "step" not in line] for lines in printed]
    assert len(numbers[0]) == 5
    np.testing.assert_allclose(*numbers, rtol=1e-6)
    if kind == "own_rows":  # in each microbatch of 8 rows, the first half is of process 0
        assert [{*stderr.splitlines()} for _, stderr in outputs] == [
            {"reads 0 1 2 3 8 9 10 11"},
            {"reads 4 5 6 7 12 13 14 15"},
        ]


def test_two_losses_train_on_batches_of_two_shapes_as_in_one_process() -> None:
    lengths = 3, 5, 3, 5
    alone, (together, silent) = (
        [finish(process) for process in start_script(SHAPES_SCRIPT, count, 4 // count, *lengths)] for count in (1, 2)
    )
    lines = [
        [line.split() for line in text.splitlines() if "critic" in line or "actor" in line]
        for text in (alone[0][0], together[0])
    ]
    names, numbers = ([[line[:1] for line in each] for each in lines], [[line[2:] for line in each] for each in lines])
    assert names[0] == names[1] and len(names[0]) == 2 * len(lengths)
    assert [{line[1] for line in each} for each in lines] == [{"16"}, {"8"}]
    np.testing.assert_allclose(*(np.asarray(each, float) for each in numbers), rtol=1e-6)
    assert together[1].count("compiles another step, for batches of x float32[16,5,4]") == 2 and not silent[1]


def test_processes_that_give_batches_of_other_new_shapes_are_refused() -> None:
    for process in start_script(SHAPES_SCRIPT, 2, 2, 3, [5, 6]):
        (line,) = finish(process, 2)[1].splitlines()
        assert "the shapes of a batch differs between process 0 and process 1; all processes must give" in line


def test_processes_with_other_models_are_refused(tmp_path: Path) -> None:
    message = "the model that the function makes differs between process 0 and process 1; all processes must run the"
    for process in start_job(tmp_path / "run", 2, "whole", 0, [0, 1]):
        assert message in finish(process, 2)[1]
    assert not (tmp_path / "run").exists()


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the handlers of signals, which `run_job` leaves to the end of its process."""
    before = {each: signal.getsignal(each) for each in SIGNALS}
    yield
    signal.set_wakeup_fd(-1)
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("handlers")
def test_a_process_that_has_not_joined_its_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    make = {"w": np.ones((8, 1), np.float32)}.copy
    with pytest.raises(InputError, match=r"process 1 of a job of 2 processes, which it has not joined.*run_job"):
        jaxopt_llm.initialize(make, lambda model, batch: (batch @ model["w"]).mean(), np.ones((ROWS, 8), np.float32))
    with pytest.raises(SystemExit) as stopped:  # the tests have opened the devices
        jaxopt_llm.run_job(lambda: None)
    assert stopped.value.code == 2


@pytest.mark.usefixtures("handlers")
def test_a_script_ends_with_the_exit_code_of_its_error(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        Config(mesh={"fspd": 8})  # type: ignore[arg-type]

    codes = []
    for main in (lambda: None, fail):
        with pytest.raises(SystemExit) as stopped:
            jaxopt_llm.run_job(main)
        codes.append(stopped.value.code)
    assert codes == [0, 2]
    assert capfd.readouterr().err == "error: config: mesh has no setting fspd; did you mean fsdp?\n"
    for code in (0, 3):
        with pytest.raises(SystemExit) as stopped:
            jaxopt_llm.run_job(lambda code=code: sys.exit(code))
        assert stopped.value.code == code
    with pytest.raises(ZeroDivisionError):  # a fault of the script keeps its traceback
        jaxopt_llm.run_job(lambda: 1 / 0)
    with pytest.raises(SystemExit) as stopped:
        jaxopt_llm.run_job(lambda: None, {"processes": 2, "process_id": 2})
    assert "distributed.process_id=2" in capfd.readouterr().err


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (OSError(errno.EIO, "Input/output error", "a.npy"), 74, "error: a.npy: Input/output error\n"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a.npy"), 2, "error: there is no file a.npy\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),  # by a handler of the script's own
    ],
)
def test_a_script_ends_as_a_command_does(
    error: BaseException, code: int, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as stopped:
        jaxopt_llm.run_job(main)
    assert (stopped.value.code, capfd.readouterr().err) == (code, line)


def make_example(rows: int) -> dict[str, Any]:
    return {"x": np.arange(rows * 2, dtype=np.float32).reshape(rows, 2), "y": np.arange(rows)}


@pytest.mark.parametrize("local", [range(8), [1, 2, 5, 6]])
def test_rows_are_taken_from_whole_batches_and_from_own_ones(local: Sequence[int]) -> None:
    whole = make_example(8)
    rows = BatchRows(whole, local)
    own = jax.tree.map(lambda leaf: leaf[list(local)], whole)
    jax.tree.map(np.testing.assert_array_equal, rows.take(whole), own)
    jax.tree.map(np.testing.assert_array_equal, rows.take(own), own)
    if len(local) < 8:
        with pytest.raises(InputError, match="batch: it has 3 rows; in a job of several processes"):
            rows.take(make_example(3))
    # What the example does not have is not looked at, whatever its length; lists are arrays.
    for batch in (whole, own):
        jax.tree.map(np.testing.assert_array_equal, rows.take({"a": np.ones(3), "name": "first"} | batch), own)
        jax.tree.map(np.testing.assert_array_equal, rows.take({key: x.tolist() for key, x in batch.items()}), own)


def test_a_function_that_takes_rows_gets_those_of_the_process() -> None:
    asked: list[Any] = []

    def read(step: int, rows: np.ndarray, dtype: str = "float32") -> dict[str, Any]:
        asked.append((step, json.dumps(rows.tolist())))
        return jax.tree.map(lambda leaf: leaf[rows], make_example(8))

    batches = make_batches(read, BatchRows(make_example(8), [4, 7]), seed=0)
    assert batches.batch_at(5)["y"].tolist() == [4, 7] and asked == [(5, "[4, 7]")]


def test_the_processes_of_a_job_read_different_rows_of_a_dataset() -> None:
    rows = [{"x": np.full(2, index, np.float32)} for index in range(16)]
    example = {"x": np.zeros((8, 2), np.float32)}

    def read(local: Sequence[int]) -> list[float]:
        batches = make_batches(rows, BatchRows(example, local), seed=0)
        return [float(row[0]) for step in range(2) for row in batches.batch_at(step)["x"]]

    first, second = read([0, 1, 4, 5]), read([2, 3, 6, 7])
    assert sorted(first + second) == [float(index) for index in range(16)]
    whole = read(range(8))
    assert [whole[index] for index in (0, 1, 4, 5, 8, 9, 12, 13)] == first
