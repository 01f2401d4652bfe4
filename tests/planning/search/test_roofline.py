"""Roofline: times that add up, and times that overlap."""

from dataclasses import replace

import pytest

from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.planning.search.grouped_rate import Groups
from jaxopt_llm.planning.search.roofline import (
    FLASH_EFFICIENCY,
    KERNEL_EFFICIENCY,
    MATMUL_EFFICIENCY,
    MEMORY_EFFICIENCY,
    NVLINK_EFFICIENCY,
    PCIE_EFFICIENCY,
    GroupedWork,
    StepTime,
    Transfer,
    Work,
    compute_step_time,
    kernel_efficiency,
    use_compiled_figures,
)

CHIP = CHIPS["h100"]
SECOND = MATMUL_EFFICIENCY * CHIP.peak_flops["bfloat16"]  # FLOPs that take one second
NOTHING = Work(
    flops=SECOND,
    grouped=None,
    attention_flops=0,
    attention_bytes=0,
    attention_efficiency=MATMUL_EFFICIENCY,
    repeated_flops=0,
    bytes=0,
    transfers=(),
    pcie_bytes=0,
    idle=0,
)


def time(**changes: object) -> StepTime:
    return compute_step_time(replace(NOTHING, **changes), CHIP, "bfloat16")


def transfer(
    seconds: float, axis: str = "fsdp", overlapped: float = 1.0, kind: str = "all-gather"
) -> tuple[Transfer, ...]:
    return (Transfer((axis,), "nvlink", kind, 0.0, seconds * NVLINK_EFFICIENCY, overlapped),)


def test_kernels_run_one_after_another() -> None:
    found = time(bytes=2 * MEMORY_EFFICIENCY * CHIP.memory_bytes_per_second)
    assert (found.total, found.bottleneck) == (pytest.approx(3), "memory bandwidth")
    assert (time().total, time().bottleneck) == (pytest.approx(1), "compute")


def test_attention_takes_the_longer_of_matmuls_and_scores() -> None:
    rate = MEMORY_EFFICIENCY * CHIP.memory_bytes_per_second
    assert time(attention_flops=0.5 * SECOND, attention_bytes=0.25 * rate).total == pytest.approx(1.5)
    assert time(attention_flops=0.5 * SECOND, attention_bytes=2 * rate).total == pytest.approx(3)


def test_overlapped_transfers_cost_only_their_excess() -> None:
    assert time(transfers=transfer(0.9)).total == pytest.approx(1)
    assert time(transfers=transfer(0.9, overlapped=0.0)).total == pytest.approx(1.9)
    longer = time(transfers=transfer(3))
    assert (longer.total, longer.bottleneck) == (pytest.approx(3), "links")


def test_flash_attention_has_its_own_efficiency() -> None:
    scores = {"attention_flops": 0.5 * SECOND, "attention_bytes": 0}
    flash = time(**scores, attention_efficiency=FLASH_EFFICIENCY)
    assert flash.total == pytest.approx(1 + 0.5 * MATMUL_EFFICIENCY / FLASH_EFFICIENCY)


def test_grouped_matmuls_have_their_own_efficiency() -> None:
    grouped = GroupedWork(0.5 * SECOND, MATMUL_EFFICIENCY / 2, Groups(1, 1, 1))
    assert time(grouped=grouped).total == pytest.approx(2)
    # As compiled: all FLOPs, of which those of experts are not counted again.
    work = use_compiled_figures(replace(NOTHING, grouped=grouped), 1.5 * SECOND, (), 0)
    assert compute_step_time(work, CHIP, "bfloat16").total == pytest.approx(2)


def test_cudnn_is_faster_from_hopper_on() -> None:
    for name, by_direction in KERNEL_EFFICIENCY.items():
        for direction, expected in by_direction.items():
            assert kernel_efficiency(CHIPS["h100"], name, direction) == expected
            assert kernel_efficiency(CHIPS["a100"], name, direction) == FLASH_EFFICIENCY
    assert KERNEL_EFFICIENCY["cudnn"]["forward"] > FLASH_EFFICIENCY


def test_only_attention_hides_ring_transfers() -> None:
    ring, attention = transfer(0.9, "context", kind="collective-permute"), {"attention_flops": 0.5 * SECOND}
    assert time(transfers=ring).total == pytest.approx(1.9)
    assert time(transfers=ring, **attention).total == pytest.approx(1.9)
    assert time(transfers=transfer(0.4, "context", kind="collective-permute"), **attention).total == pytest.approx(1.5)
    # All kernels hide weights that are gathered over the same devices.
    assert time(transfers=transfer(0.9, "context"), **attention).total == pytest.approx(1.5)


def test_copies_to_the_host_are_not_hidden() -> None:
    moved = PCIE_EFFICIENCY * CHIP.host_bytes_per_second
    assert time(pcie_bytes=moved).total == pytest.approx(2)


def test_idle_time_of_a_pipeline_is_separate() -> None:
    found = time(idle=0.75)
    assert (found.total, found.idle, found.bottleneck) == (pytest.approx(1), pytest.approx(0.75), "idle pipeline")
