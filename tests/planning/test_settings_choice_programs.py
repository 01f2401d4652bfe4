"""Which choices a run that continues keeps, and what the processes of a run exchange before they choose."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxopt_llm.config import Config, fields
from jaxopt_llm.planning import settings_choice
from jaxopt_llm.planning.free_memory import count_usable_bytes
from jaxopt_llm.planning.settings_choice import compile_fitting, find_deciding_changes
from jaxopt_llm.run.directory import Started

CHOSEN = fields.replace_fields(
    Config(),
    {"remat.policy": "none", "training.unroll": "none", "training.loss_chunk": 1024, "xla.own_remat": "off"},
)


def find_changes(**values: Any) -> str:
    """Continue, with changed settings, a run that chose policy `none`."""
    device = jax.devices("cpu")[0]
    config = fields.replace_fields(Config(), {name.replace("__", "."): value for name, value in values.items()})
    return find_deciding_changes(Started(CHOSEN, device.device_kind), config, device)


def test_a_choice_is_kept_while_nothing_changes_that_decides_it() -> None:
    assert find_changes() == find_changes(training__steps=7, remat__policy="none") == ""
    assert find_changes(training__accumulation=2) == "training.accumulation changed"
    assert find_changes(remat__every=2, optimizer__in_backward=True) == "remat.every, optimizer.in_backward changed"
    assert find_changes(training__unroll="all") == "training.unroll changed"
    assert find_changes(pipeline__split=(1, 3)) == "pipeline.split changed"
    assert find_changes(mesh__fsdp=2) == "the mesh changed"


@pytest.mark.parametrize("names", [settings_choice.DECIDING])
def test_deciding_settings_exist_and_may_change(names: tuple[str, ...]) -> None:
    assert {*names} <= {*fields.FIELDS}


class Devices:
    platform, device_kind = "gpu", "NVIDIA H200"

    def __init__(self, statistics: dict[str, int] | None) -> None:
        self._statistics = statistics

    def memory_stats(self) -> dict[str, int] | None:
        return self._statistics


def test_an_allocator_without_statistics_may_use_the_memory_of_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    for statistics in ({"bytes_limit": 7}, {}, None):
        device: Any = Devices(statistics)
        monkeypatch.setattr(jax, "local_devices", lambda device=device: [device])
        found = count_usable_bytes(device)
        assert found == 7 if statistics else 100 * 2**30 < found < 141e9


def test_all_processes_take_the_limit_of_process_0(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []

    def list_candidates(config: Config, cluster: Any, limit: int, on_gpu: bool) -> Any:
        limits.append(limit)
        raise KeyboardInterrupt  # nothing else is of interest

    monkeypatch.setattr(settings_choice, "list_candidates", list_candidates)
    mesh = SimpleNamespace(devices=SimpleNamespace(flat=jax.devices("cpu")))
    channel = SimpleNamespace(exchange=lambda mine: ["123", mine])
    setup: Any = SimpleNamespace(
        config=Config(),
        program=SimpleNamespace(state=None),  # run.check_replicas is off
        started=None,
        placement=SimpleNamespace(mesh=mesh),
        processes=SimpleNamespace(channel=lambda name: channel),
    )
    with pytest.raises(KeyboardInterrupt):
        compile_fitting(setup, None, print)  # type: ignore[arg-type]
    # A check of replicas may hold a copy of the state beside the step.
    monkeypatch.setattr(settings_choice, "count_copied_bytes", lambda every, state: 100)
    with pytest.raises(KeyboardInterrupt):
        compile_fitting(setup, None, print)  # type: ignore[arg-type]
    assert limits == [123, 23]
