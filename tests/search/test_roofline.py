"""The roofline: what adds up, and what runs beside what."""

from dataclasses import replace

import pytest

from jaxopt_llm.parallel.topology import CHIPS
from jaxopt_llm.search.roofline import FLASH, MEMORY, NVLINK, PCIE, PRODUCTS, StepTime, Work, step_time
from jaxopt_llm.search.workload import Sent

CHIP = CHIPS["h100"]
SECOND = PRODUCTS * CHIP.peak_flops["bfloat16"]  # FLOPs that take one
NOTHING = Work(
    flops=SECOND,
    attention_flops=0,
    attention_bytes=0,
    flash=False,
    repeated_flops=0,
    bytes=0,
    sent=(),
    pcie_bytes=0,
    pcie_beside=0,
    idle=0,
)


def time(**changes: object) -> StepTime:
    return step_time(replace(NOTHING, **changes), CHIP, "bfloat16")


def sent(seconds: float, axis: str = "fsdp", overlapped: float = 1.0, kind: str = "all-gather") -> tuple[Sent, ...]:
    return (Sent((axis,), "nvlink", kind, 0.0, seconds * NVLINK, overlapped),)


def test_kernels_run_one_after_another() -> None:
    found = time(bytes=2 * MEMORY * CHIP.memory_bytes_per_second)
    assert (found.total, found.binds) == (pytest.approx(3), "memory bandwidth")
    assert (time().total, time().binds) == (pytest.approx(1), "compute")


def test_attention_takes_the_longer_of_its_products_and_its_scores() -> None:
    rate = MEMORY * CHIP.memory_bytes_per_second
    assert time(attention_flops=0.5 * SECOND, attention_bytes=0.25 * rate).total == pytest.approx(1.5)
    assert time(attention_flops=0.5 * SECOND, attention_bytes=2 * rate).total == pytest.approx(3)


def test_what_is_sent_beside_kernels_costs_what_it_takes_longer() -> None:
    assert time(sent=sent(0.9)).total == pytest.approx(1)
    assert time(sent=sent(0.9, overlapped=0.0)).total == pytest.approx(1.9)
    longer = time(sent=sent(3))
    assert (longer.total, longer.binds) == (pytest.approx(3), "links")
    # What the next product reads is waited for, whatever is scheduled beside it.
    assert time(sent=sent(0.9, axis="tensor")).total == pytest.approx(1.9)


def test_tokens_on_their_way_to_experts_are_waited_for() -> None:
    """Which are what goes over `expert` alone."""
    assert time(sent=sent(0.9, axis="expert")).total == pytest.approx(1.9)
    (each,) = sent(0.9)
    assert time(sent=(replace(each, axes=("fsdp", "expert")),)).total == pytest.approx(1)


def test_a_kernels_attention_has_a_rate_of_its_own() -> None:
    scores = {"attention_flops": 0.5 * SECOND, "attention_bytes": 0}
    assert time(**scores, flash=True).total == pytest.approx(1 + 0.5 * PRODUCTS / FLASH)


def test_what_goes_round_a_ring_is_hidden_by_attention_alone() -> None:
    ring, attention = sent(0.9, "context", kind="collective-permute"), {"attention_flops": 0.5 * SECOND}
    assert time(sent=ring).total == pytest.approx(1.9)
    assert time(sent=ring, **attention).total == pytest.approx(1.9)
    assert time(sent=sent(0.4, "context", kind="collective-permute"), **attention).total == pytest.approx(1.5)
    # Weights that are gathered over the same devices are hidden by all kernels.
    assert time(sent=sent(0.9, "context"), **attention).total == pytest.approx(1.5)


def test_an_all_to_all_is_waited_for() -> None:
    assert time(sent=sent(0.9, "context", kind="all-to-all"), attention_flops=SECOND).total == pytest.approx(2.9)


def test_half_of_offloaded_activations_is_hidden_and_nothing_of_the_optimizer() -> None:
    moved = PCIE * CHIP.pcie_bytes_per_second
    assert time(pcie_bytes=moved).total == pytest.approx(2)
    assert time(pcie_bytes=moved, pcie_beside=moved).total == pytest.approx(1.5)


def test_an_idle_pipeline_is_told_apart() -> None:
    found = time(idle=0.75)
    assert (found.total, found.idle, found.binds) == (pytest.approx(1), pytest.approx(0.75), "idle pipeline")
