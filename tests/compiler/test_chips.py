"""Figures of the known GPUs."""

import pytest

from jaxopt_llm.compiler.chips import CHIPS, chip_of

GEFORCE = ("3090", "4090", "5090")


@pytest.mark.parametrize("name", CHIPS)
def test_figures_are_consistent(name: str) -> None:
    chip = CHIPS[name]
    peak = chip.peak_flops
    assert peak["bfloat16"] == peak["float16"] == 2 * peak["float32"]
    # GeForce GPUs accumulate 16-bit products in float32 at half the rate. The B300 has given up int8.
    share = 4 if name in GEFORCE else 1 / 18 if name == "b300" else 2
    assert peak["int8"] == pytest.approx(share * peak["bfloat16"], rel=1e-3)
    assert ("float8" in peak) == (chip.compute_capability >= (8, 9))
    assert peak.get("float8", 2 * peak["bfloat16"]) == pytest.approx(2 * peak["bfloat16"], rel=1e-3)
    assert chip.memory_bytes_per_second > chip.peer_bytes_per_second > chip.network_bytes_per_second
    assert len({other.name for other in CHIPS.values()}) == len(CHIPS)


@pytest.mark.parametrize(
    ("name", "memory", "terabytes", "bfloat16"),
    [  # GB, TB/s and dense TFLOPS of the datasheets
        ("3090", 24, 0.936, 71),
        ("4090", 24, 1.008, 165),
        ("5090", 32, 1.792, 209.5),
        ("a10", 24, 0.6, 125),
        ("l4", 24, 0.3, 121),
        ("l40s", 48, 0.864, 362),
        ("a100", 80, 2.039, 312),
        ("a100-40", 40, 1.555, 312),
        ("a100-pcie", 80, 1.935, 312),
        ("a100-40-pcie", 40, 1.555, 312),
        ("h100", 80, 3.35, 989),
        ("h100-pcie", 80, 2.0, 756),
        ("h100-nvl", 94, 3.9, 835),
        ("h200", 141, 4.8, 989),
        ("gh200", 96, 4.0, 989),
        ("b200", 180, 7.7, 2250),
        ("b300", 270, 7.7, 2250),
        ("rtx-6000-ada", 48, 0.96, 364),
        ("rtx-pro-6000", 96, 1.792, 504),
    ],
)
def test_figures_of_the_datasheets(name: str, memory: float, terabytes: float, bfloat16: float) -> None:
    chip = CHIPS[name]
    assert chip.memory_bytes_per_second == pytest.approx(terabytes * 1e12, rel=5e-3)
    assert chip.peak_flops["bfloat16"] == pytest.approx(bfloat16 * 1e12, rel=5e-3)
    assert 0.9 * memory * 2**30 < chip.memory_bytes < 1.01 * memory * 2**30


def test_every_chip_has_its_datasheet_checked() -> None:
    (mark,) = test_figures_of_the_datasheets.pytestmark  # type: ignore[attr-defined]
    assert {name for name, *_ in mark.args[1]} == set(CHIPS)


def test_only_boards_with_nvlink_between_all_gpus_name_it() -> None:
    linked = {name for name, chip in CHIPS.items() if chip.peer_link == "nvlink"}
    assert linked == {"a100", "a100-40", "h100", "h200", "gh200", "b200", "b300"}
    assert {chip.peer_link for chip in CHIPS.values()} == {"nvlink", "pcie"}
    for chip in CHIPS.values():  # without NVLink, both directions of traffic go over the same 16 lanes
        assert chip.peer_link == "nvlink" or chip.peer_bytes_per_second == chip.host_bytes_per_second
    assert {name: chip.host_link for name, chip in CHIPS.items() if chip.host_link != "PCIe"} == {"gh200": "NVLink-C2C"}


@pytest.mark.parametrize(
    "kind, chip",
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA A10", "a10"),
        *(
            (each, None)
            for each in ("NVIDIA H200 NVL", "NVIDIA A10G", "NVIDIA H200 MIG 1g.18gb", "NVIDIA GB200", "cpu")
        ),
    ],
)
def test_a_chip_is_found_by_its_whole_name(kind: str, chip: str | None) -> None:
    assert chip_of(kind) == (CHIPS[chip] if chip else None)
