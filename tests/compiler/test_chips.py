"""Figures of the known GPUs."""

import pytest

from jaxopt_llm.compiler.chips import CHIPS, chip_of


def test_peaks() -> None:
    for name, chip in CHIPS.items():
        peak = chip.peak_flops
        assert peak["bfloat16"] == peak["float16"] == 2 * peak["float32"]
        # GeForce GPUs accumulate 16-bit products in float32 at half the rate.
        assert peak["int8"] == pytest.approx((4 if name == "4090" else 2) * peak["bfloat16"], rel=1e-3)
        assert ("float8" in peak) == (name != "a100")
        assert chip.memory_bytes_per_second > chip.nvlink_bytes_per_second > chip.network_bytes_per_second
    assert CHIPS["h200"].memory_bytes > CHIPS["h100"].memory_bytes


@pytest.mark.parametrize(
    "kind, chip",
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        *((each, None) for each in ("NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL")),
        *((each, None) for each in ("NVIDIA A100-SXM4-40GB", "NVIDIA H200 MIG 1g.18gb", "NVIDIA GB200", "cpu")),
    ],
)
def test_a_chip_is_found_by_its_whole_name(kind: str, chip: str | None) -> None:
    assert chip_of(kind) == (CHIPS[chip] if chip else None)
