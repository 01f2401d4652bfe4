"""Tests of the loop of a run: when it reads metrics, and what it writes in addition to them."""

import contextlib
import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import toy
from boards import events

from jaxopt_llm import train as command
from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.config import Config, LoggingConfig, MeshConfig, ProfileConfig, cli, fields
from jaxopt_llm.core.errors import InputError, TrainingDiverged
from jaxopt_llm.kernels.attention_auto import AttentionChoice
from jaxopt_llm.model import flops
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.observe.meter import LossWindow
from jaxopt_llm.observe.preemption import Preemption
from jaxopt_llm.observe.progress import ProgressLine
from jaxopt_llm.planning import free_memory
from jaxopt_llm.planning.settings_choice import format_choices, list_choices
from jaxopt_llm.run import attention_choice, compile, divergence, setup, workload
from jaxopt_llm.run.compile import LossSum
from jaxopt_llm.step import guard, program


def tiny(directory: Path, **sections: Any) -> Config:
    """Create the directory and documents next to it; return the configuration of a run there."""
    directory.mkdir()
    documents = (json.dumps({"text": f"{index} " * 40}) for index in range(100))
    (directory.parent / "documents.jsonl").write_text("\n".join(documents))
    recipe = cli.load_recipe("quickstart.py")
    return dataclasses.replace(
        recipe,
        run=dataclasses.replace(recipe.run, directory=str(directory)),
        model=toy.UNIFORM,
        data=dataclasses.replace(recipe.data, paths=(str(directory.parent / "*.jsonl"),), held_out=0.5),
        mesh=MeshConfig(fsdp=8),
        training=dataclasses.replace(recipe.training, steps=5, batch_size=8, sequence_length=32),
        evaluation=dataclasses.replace(recipe.evaluation, every=4, batches=1),
        logging=dataclasses.replace(recipe.logging, every=1, tensorboard=False),
        **sections,
    )


@dataclasses.dataclass
class Watched:
    """Metric that records when it is read."""

    value: Any
    step: int
    events: list[str]
    ndim: int = 0

    def __float__(self) -> float:
        if self.events[-1] != f"read {self.step}":
            self.events.append(f"read {self.step}")
        return float(self.value)

    def __int__(self) -> int:
        return int(float(self))


def test_metrics_are_read_a_step_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics are read immediately only before a measurement of the held-out loss: after steps 4 and 5."""
    events: list[str] = []
    make_program = setup.make_program

    def watched_program(*arguments: Any, **options: Any) -> Any:
        program = make_program(*arguments, **options)
        compiled = program.step.lower(program.state, program.batch).compile(toy.QUICK_COMPILE)

        class Watching:
            def lower(self, *_: Any) -> "Watching":
                return self

            def compile(self, **_: Any) -> "Watching":
                return self

            def memory_analysis(self) -> Any:
                return compiled.memory_analysis()

            hyperparameters, placed = program.step.hyperparameters, program.step.placed

            def __call__(self, *arguments: Any) -> tuple[Any, Any]:
                step = sum(event.startswith("run") for event in events) + 1
                events.append(f"run {step}")
                state, metrics = compiled(*arguments)
                return state, {name: Watched(value, step, events) for name, value in metrics.items()}

        return dataclasses.replace(program, step=Watching())

    monkeypatch.setattr(setup, "make_program", watched_program)
    with Preemption() as preemption:
        command.train(tiny(tmp_path / "run"), preemption)
    assert events == [
        *("run 1", "run 2", "read 1", "run 3", "read 2", "run 4", "read 3", "read 4"),
        *("run 5", "read 5"),
    ]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert ["eval_loss" in record for record in records] == [False, False, False, True, True]


def test_what_attention_was_chosen_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check also that a run on CPUs, where there is no choice, prints nothing."""
    with Preemption() as preemption:
        command.train(tiny(tmp_path / "silent"), preemption)
    assert "attention: " not in capsys.readouterr().out
    choice = AttentionChoice("xla", "for a reason", "another failed")
    monkeypatch.setattr(attention_choice._Chooser, "choose", lambda self: (choice, 0))
    with Preemption() as preemption:
        command.train(tiny(tmp_path / "run"), preemption)
    said = capsys.readouterr()
    assert said.out.splitlines().count("attention: xla, for a reason") == 1
    assert said.err.splitlines().count("warning: another failed") == 1


def test_the_resolved_attention_is_in_the_configuration_of_the_run(tmp_path: Path) -> None:
    """And the kind of the devices beside it, which decides whether a run that continues chooses anew."""
    with Preemption() as preemption:
        command.train(tiny(tmp_path / "run"), preemption)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["training"]["attention"] == "xla"
    started = setup.read_started(tmp_path / "run")
    assert started is not None and started.device == "cpu"


def test_chosen_settings_are_in_the_configuration_and_a_run_that_continues_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(tmp_path / "run")

    def train(**values: Any) -> tuple[dict[str, Any], str]:
        """Train to a step, and return what was chosen and the line that says so."""
        with Preemption() as preemption:
            command.train(fields.replace_fields(config, values), preemption)
        written = fields.from_json((tmp_path / "run" / "config.json").read_text())
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("chosen: ")]
        return list_choices(config, written), "".join(lines)

    chosen, line = train(**{"training.steps": 2})
    assert chosen == {
        "remat.policy": "none",
        "training.unroll": "none",
        "training.loss_chunk": 1024,
        "xla.own_remat": "off",
    }
    assert line == f"chosen: {format_choices(chosen)}"
    # From now on "full" would be chosen.
    monkeypatch.setattr(free_memory, "CPU_SHARE", 1e-9)
    chosen, line = train(**{"training.steps": 3})
    assert chosen["remat.policy"] == "none" and "anew" not in line
    chosen, line = train(**{"training.steps": 4, "mesh.fsdp": 4, "mesh.data": 2})
    assert chosen["remat.policy"] == "full" and line.endswith("; chosen anew because the mesh changed")
    others = {"mesh.fsdp": 4, "mesh.data": 2}
    chosen, line = train(**others, **{"training.steps": 5, "remat.policy": "save_qkv"})
    assert chosen["remat.policy"] == "save_qkv" and line.endswith("; chosen anew because remat.policy changed")


def test_records_have_the_utilisation_of_a_known_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "chip_of", lambda kind: CHIPS["h200"])
    config = tiny(tmp_path / "run")
    with Preemption() as preemption:
        command.train(config, preemption)
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    needed = flops.count_per_token(config.model, param_specs(config.model), {}, 32)
    per_token_and_second = record["tokens_per_second"] / (8 * CHIPS["h200"].peak_flops["float32"])
    assert record["mfu"] == pytest.approx(needed.causal * per_token_and_second)
    assert record["mfu_full_attention"] == pytest.approx(needed.full * per_token_and_second)


def test_a_profile_of_the_steps_that_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[tuple[str, int]] = []
    steps = 0

    def advance(progress: Any, step: int) -> None:
        nonlocal steps
        steps = step

    monkeypatch.setattr(ProgressLine, "advance", advance)
    start, stop = jax.profiler.start_trace, jax.profiler.stop_trace
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: (running.append(("start", steps)), start(path)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: (running.append(("stop", steps)), stop()))
    with Preemption() as preemption:
        profile = ProfileConfig(start_step=2, steps=2)
        command.train(tiny(tmp_path / "run", profile=profile), preemption)
    assert running == [("start", 1), ("stop", 2)]  # before step 2, and after step 3, whose metrics are not read yet
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


def test_what_is_recorded_and_compiled_is_as_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repeated: list[str] = []

    def waiting(*arguments: Any) -> Any:
        with contextlib.closing(read_ahead(*arguments)) as batches:
            yield from ((batch, 0.25) for batch, _ in batches)

    def repeatable_options(lowered: Any, *_: Any) -> dict[str, Any]:
        repeated.append(lowered.as_text().split()[1])
        return {}

    read_ahead = workload.read_ahead
    monkeypatch.setattr(workload, "read_ahead", waiting)
    monkeypatch.setattr(compile, "repeatable_options", repeatable_options)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(guard, "HISTORY", 4)
    config = tiny(tmp_path / "run")
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, deterministic=True),
        training=dataclasses.replace(config.training, steps=8, skip_outliers=1.001),
        evaluation=dataclasses.replace(config.evaluation, every=8),
        logging=LoggingConfig(every=3),
    )
    with Preemption() as preemption:
        command.train(config, preemption)
    assert repeated == ["@jit_step", "@jit_sums"]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [3, 6, 8]
    assert all(record["data_seconds"] > 0.1 for record in records)
    assert records[-1]["skipped"] > 0
    shown = [event for event in events(tmp_path / "run") if event.summary.value]
    losses = [
        (event.step, value.simple_value) for event in shown for value in event.summary.value if value.tag == "loss"
    ]
    assert losses == [(record["step"], np.float32(record["loss"])) for record in records]


def test_what_was_learnt_before_a_batch_that_does_not_come_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ending(*arguments: Any) -> Any:
        with contextlib.closing(read_ahead(*arguments)) as batches:
            yield from itertools.islice(batches, 3)
            raise InputError("damaged")

    read_ahead = workload.read_ahead
    monkeypatch.setattr(workload, "read_ahead", ending)
    with Preemption() as preemption, pytest.raises(InputError):
        command.train(tiny(tmp_path / "run"), preemption)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["3"]


def test_a_held_out_loss_that_is_not_finite_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "measure_loss", lambda *_: LossSum(math.nan, 1))
    with Preemption() as preemption, pytest.raises(TrainingDiverged, match="step 4: held-out loss nan"):
        command.train(tiny(tmp_path / "run"), preemption)


def test_a_run_that_ends_without_an_update_has_diverged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two updates every step is an outlier. Steps 4 and 5 are skipped after the record of step 3."""
    monkeypatch.setattr(guard, "HISTORY", 2)
    config = tiny(tmp_path / "run")
    config = dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, skip_outliers=1e-6),
        evaluation=dataclasses.replace(config.evaluation, every=3),
        logging=LoggingConfig(every=10, tensorboard=False),
    )
    message = r"step 5: the run has ended, and none of the steps since the last record \(2\) updated"
    with Preemption() as preemption, pytest.raises(TrainingDiverged, match=message):
        command.train(config, preemption)
    # The parameters are those of step 2, and nothing is lost.
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["5"]


def test_the_history_of_a_run_is_kept_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two updates every step is an outlier, and the run diverges. Continued, it fails in an evaluation."""
    monkeypatch.setattr(guard, "HISTORY", 2)
    config = tiny(tmp_path / "run")
    config = dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, steps=4, skip_outliers=1e-6),
        evaluation=dataclasses.replace(config.evaluation, every=9),
        checkpoint=dataclasses.replace(config.checkpoint, every=2),
    )
    longer = dataclasses.replace(config, training=dataclasses.replace(config.training, steps=5))
    with Preemption() as preemption:
        with pytest.raises(TrainingDiverged):
            command.train(config, preemption)
        monkeypatch.setattr(workload, "measure_loss", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            command.train(longer, preemption)
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    # A checkpoint is complete some time after its step.
    assert [line["step"] for line in lines if line["event"] == "checkpoint"] == [2, 4]
    lines = [line for line in lines if line["event"] != "checkpoint"]
    assert [(line["step"], line["event"]) for line in lines] == [
        *((0, "start"), (3, "skipped"), (4, "skipped"), (4, "fault")),
        *((4, "resume"), (5, "skipped"), (5, "fault")),
    ]
    assert lines[1]["detail"].startswith("loss ") and lines[-1]["detail"] == "ZeroDivisionError: division by zero"
    assert lines[3]["detail"].startswith("step 4: the run has ended")
    kinds = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert sum(kinds["kinds"].values()) == kinds["peak"] and min(kinds["kinds"].values()) >= 0
    adam, resting = kinds["kinds"]["optimizer"], kinds["kinds"]["parameters"]
    assert adam == pytest.approx(2 * resting, rel=0.1)  # one float32 copy of the parameters, and two moments


def test_only_a_lone_overflow_at_the_end_is_no_divergence() -> None:
    def ends(steps: int, updates: int, overflow: bool, skipped: int) -> None:
        metrics = {"overflow": np.bool_(overflow), "skipped": np.int32(skipped)}
        divergence.check_end(divergence.FinishedStep(9, metrics, LossWindow(steps, updates)), Config())  # type: ignore[arg-type]

    ends(1, 1, False, 0)
    ends(3, 1, False, 2)
    ends(1, 0, True, 3)
    for wrong in ((1, 0, False, 3), (2, 0, True, 3), (1, 0, True, 9)):
        with pytest.raises(TrainingDiverged):
            ends(*wrong)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_repeatable_run_compiles_anew(deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[bool] = []
    monkeypatch.setattr(command.runtime, "configure_jax", lambda devices, processes, *, cache: caches.append(cache))
    monkeypatch.setattr(command, "train", lambda *_: None)
    arguments = [
        "--config",
        "quickstart.py",
        "--run.directory",
        str(tmp_path),
        "--run.deterministic",
        str(deterministic),
    ]
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    assert command.main() == 0
    assert caches == [not deterministic]
