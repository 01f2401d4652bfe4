"""Figures of the GPUs that this package knows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Chip:
    """Figures of one GPU. Sizes are in bytes (not bits), rates are per second, peaks are without sparsity.

    Attributes:
        name: the driver's name, which is JAX's `device_kind`.
        peak_flops: peaks by the dtype of a matmul's operands. "float32" is the TF32 rate, because XLA multiplies
            float32 in TF32 at its default precision. A dtype that the tensor cores do not support is absent.
        network_bytes_per_second: the usual network of a server with 8 such GPUs, with one network card per GPU.
        compute_capability: this field and those after it are inputs of XLA's cost model and code generator.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_second: float
    peak_flops: Mapping[str, float]
    nvlink_bytes_per_second: float  # one GPU, one direction; the PCIe rate if there is no NVLink
    network_bytes_per_second: float  # one GPU, one direction
    pcie_bytes_per_second: float  # to the host over 16 lanes, one direction
    compute_capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    float32_units_per_core: int
    clock_ghz: float
    threads_per_core: int
    shared_memory_bytes_per_core: int
    shared_memory_bytes_per_block: int  # the opt-in limit
    l2_cache_bytes: int


# Keys of Chip.peak_flops, by XLA's names of the operands' dtype.
PEAK_KEYS = {
    "f8e4m3fn": "float8",
    "f8e5m2": "float8",
    "s8": "int8",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
}

# Sources of the figures:
# - Peaks and NVLink: NVIDIA's datasheets of the A100 80GB, H100 and H200 (SXM) and of HGX B200 (one eighth of the
#   board), and the whitepaper "NVIDIA H100 Tensor Core GPU Architecture". They state peaks with sparsity, which are
#   twice the dense ones, and NVLink as the sum of both directions.
# - Network: DGX A100 (200 Gb/s per GPU), DGX H100, H200 and B200 (400 Gb/s per GPU).
# - PCIe: generation 4 for the A100, 5 for the others, without protocol overhead.
# - Memory (as the driver reports it), cores, clocks and caches: openxla/xla, xla/backends/gpu/target_config/specs.
# - RTX 4090: NVIDIA's whitepaper "NVIDIA Ada GPU Architecture", peaks of matmuls that accumulate in float32. Memory
#   and cache: output of deviceQuery with driver 13.0. Threads and shared memory: CUDA programming guide. The RTX 4090
#   has no NVLink, and NVIDIA's driver supports no direct transfer between such GPUs. The PCIe rate is the rate of the
#   link, not the rate that NCCL reaches through the host. There is no usual network either: the figure assumes one card
#   of 100 Gb/s for 8 GPUs.
_H100 = Chip(
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=84_942_979_072,
    memory_bytes_per_second=3.35e12,
    peak_flops={"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 494.7e12, "float8": 1978.9e12, "int8": 1978.9e12},
    nvlink_bytes_per_second=450e9,
    network_bytes_per_second=50e9,
    pcie_bytes_per_second=64e9,
    compute_capability=(9, 0),
    cores=132,
    float32_units_per_core=128,
    clock_ghz=1.98,
    threads_per_core=2048,
    shared_memory_bytes_per_core=233_472,
    shared_memory_bytes_per_block=232_448,
    l2_cache_bytes=52_428_800,
)
CHIPS: Mapping[str, Chip] = {
    "a100": Chip(
        name="NVIDIA A100-SXM4-80GB",
        memory_bytes=85_100_068_864,
        memory_bytes_per_second=2.039e12,
        peak_flops={"bfloat16": 312e12, "float16": 312e12, "float32": 156e12, "int8": 624e12},
        nvlink_bytes_per_second=300e9,
        network_bytes_per_second=25e9,
        pcie_bytes_per_second=32e9,
        compute_capability=(8, 0),
        cores=108,
        float32_units_per_core=64,
        clock_ghz=1.41,
        threads_per_core=2048,
        shared_memory_bytes_per_core=167_936,
        shared_memory_bytes_per_block=166_912,
        l2_cache_bytes=41_943_040,
    ),
    "h100": _H100,
    "h200": replace(_H100, name="NVIDIA H200", memory_bytes=151_397_597_184, memory_bytes_per_second=4.8e12),
    "b200": replace(
        _H100,
        name="NVIDIA B200",
        memory_bytes=191_514_411_008,
        memory_bytes_per_second=7.67e12,
        peak_flops={"bfloat16": 2250e12, "float16": 2250e12, "float32": 1125e12, "float8": 4500e12, "int8": 4500e12},
        nvlink_bytes_per_second=900e9,
        compute_capability=(10, 0),
        cores=148,
        clock_ghz=1.965,
        l2_cache_bytes=132_644_864,
    ),
    "4090": Chip(
        name="NVIDIA GeForce RTX 4090",
        memory_bytes=25_250_627_584,
        memory_bytes_per_second=1.008e12,
        peak_flops={
            "bfloat16": 165.2e12,
            "float16": 165.2e12,
            "float32": 82.6e12,
            "float8": 330.3e12,
            "int8": 660.6e12,
        },
        nvlink_bytes_per_second=32e9,
        network_bytes_per_second=1.5625e9,
        pcie_bytes_per_second=32e9,
        compute_capability=(8, 9),
        cores=128,
        float32_units_per_core=128,
        clock_ghz=2.52,
        threads_per_core=1536,
        shared_memory_bytes_per_core=102_400,
        shared_memory_bytes_per_block=101_376,
        l2_cache_bytes=75_497_472,
    ),
}


def chip_of(device_kind: str) -> Chip | None:
    """Return the chip with this `device_kind` of JAX, or None if CHIPS does not contain it.

    The whole name must match. An H100 PCIe or NVL, a GH200, an A100 of 40 GB and a part of a GPU (MIG) have other rates
    than the GPU whose name their own name contains.
    """
    return next((chip for chip in CHIPS.values() if chip.name == device_kind), None)


def seconds_at_peak(chip: Chip, flops: Mapping[str, float]) -> float:
    """Return the time of matmuls at the peaks of a chip.

    Args:
        flops: FLOPs by XLA's name of the operands' dtype. See `hlo.count_dot_flops_by_dtype`.
    """
    return sum(count / chip.peak_flops[PEAK_KEYS[dtype]] for dtype, count in flops.items())
