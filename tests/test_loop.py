"""The loop of a run: what it reads when, and what it leaves beside the metrics."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import toy

from jaxopt_llm import config as configuration
from jaxopt_llm import train as command
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.errors import InputError
from jaxopt_llm.model import flops
from jaxopt_llm.model.decoder import param_specs
from jaxopt_llm.observe.preemption import Preemption
from jaxopt_llm.parallel.mesh import MeshConfig
from jaxopt_llm.parallel.topology import CHIPS


def tiny(directory: Path, **sections: Any) -> TrainConfig:
    """Of a run in this folder, which is made, over documents beside it."""
    directory.mkdir()
    documents = (json.dumps({"text": f"{number} " * 40}) for number in range(100))
    (directory.parent / "documents.jsonl").write_text("\n".join(documents))
    recipe = configuration.load("quickstart.py")
    return dataclasses.replace(
        recipe,
        run=dataclasses.replace(recipe.run, directory=str(directory)),
        model=toy.CONFIG,
        data=dataclasses.replace(recipe.data, paths=(str(directory.parent / "*.jsonl"),), held_out=0.5),
        mesh=MeshConfig(fsdp=8),
        training=dataclasses.replace(recipe.training, steps=5, batch_size=8, sequence_length=32),
        evaluation=dataclasses.replace(recipe.evaluation, every=4, batches=1),
        logging=dataclasses.replace(recipe.logging, every=1, tensorboard=False),
        **sections,
    )


@dataclasses.dataclass
class Watched:
    """A metric that tells when it is read."""

    value: Any
    step: int
    events: list[str]

    def __float__(self) -> float:
        if self.events[-1] != f"read {self.step}":
            self.events.append(f"read {self.step}")
        return float(self.value)

    def __int__(self) -> int:
        return int(float(self))


def test_metrics_are_read_a_step_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where a measurement of the held-out loss waits for the device in any case: after steps 4 and 5."""
    events: list[str] = []
    make_program = command.make_program

    def watched_program(*arguments: Any) -> Any:
        program = make_program(*arguments)
        compiled = program.step.lower(program.state, program.batch).compile(toy.QUICK_COMPILE)

        class Watching:
            def lower(self, *_: Any) -> "Watching":
                return self

            def compile(self, **_: Any) -> "Watching":
                return self

            def memory_analysis(self) -> Any:
                return compiled.memory_analysis()

            def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
                step = sum(event.startswith("run") for event in events) + 1
                events.append(f"run {step}")
                state, metrics = compiled(state, batch)
                return state, {name: Watched(value, step, events) for name, value in metrics.items()}

        return dataclasses.replace(program, step=Watching())

    monkeypatch.setattr(command, "make_program", watched_program)
    with Preemption() as preemption:
        command.train(tiny(tmp_path / "run"), preemption)
    assert events == [
        *("run 1", "run 2", "read 1", "run 3", "read 2", "run 4", "read 3", "read 4"),
        *("run 5", "read 5"),
    ]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert ["eval_loss" in record for record in records] == [False, False, False, True, True]


def test_records_have_the_utilisation_of_a_known_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "chip_of", lambda kind: CHIPS["h200"])
    config = tiny(tmp_path / "run")
    with Preemption() as preemption:
        command.train(config, preemption)
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    needed = flops.per_token(config.model, param_specs(config.model), {}, 32)
    per_token_and_second = record["tokens_per_second"] / (8 * CHIPS["h200"].peak_flops["float32"])
    assert record["mfu"] == pytest.approx(needed.causal * per_token_and_second)
    assert record["mfu_full_attention"] == pytest.approx(needed.full * per_token_and_second)


def test_a_step_that_exceeds_what_xla_may_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 2**30})
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    command._check_memory(2**30, 1)
    with pytest.raises(InputError, match="needs 1.5 GiB per device, XLA may use 1.0 GiB"):
        command._check_memory(3 * 2**29, 1)


def test_a_profile_of_the_steps_that_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[tuple[str, int]] = []
    steps = 0

    def advance(progress: Any, step: int) -> None:
        nonlocal steps
        steps = step

    monkeypatch.setattr(command.ProgressLine, "advance", advance)
    start, stop = jax.profiler.start_trace, jax.profiler.stop_trace
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: (running.append(("start", steps)), start(path)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: (running.append(("stop", steps)), stop()))
    with Preemption() as preemption:
        profile = configuration.ProfileConfig(start_step=2, steps=2)
        command.train(tiny(tmp_path / "run", profile=profile), preemption)
    assert running == [("start", 1), ("stop", 2)]  # before step 2, and after step 3, which is not counted yet
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
