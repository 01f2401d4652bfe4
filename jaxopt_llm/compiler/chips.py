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
        peer_link, peer_bytes_per_second: link between two GPUs of a host, "nvlink" or "pcie", and its rate of one GPU
            in one direction. Bridges that connect only 2 GPUs do not count, because a ring over more GPUs is as slow as
            its slowest link.
        network_bytes_per_second: the usual network of a server with 8 such GPUs, for one GPU in one direction.
        host_bytes_per_second, host_link: rate to the host's memory in one direction, and the name of that link.
        compute_capability: this field and those after it are inputs of XLA's cost model and code generator.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_second: float
    peak_flops: Mapping[str, float]
    peer_link: str
    peer_bytes_per_second: float
    network_bytes_per_second: float
    host_bytes_per_second: float
    compute_capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    float32_units_per_core: int
    clock_ghz: float
    threads_per_core: int
    shared_memory_bytes_per_core: int
    shared_memory_bytes_per_block: int  # the opt-in limit
    l2_cache_bytes: int
    host_link: str = "PCIe"


@dataclass(frozen=True)
class LinkRates:
    """Rates of links that differ from the usual ones of a GPU's server; None for the usual ones.

    Attributes:
        network: Gb/s of a host in one direction, which its GPUs share.
        nvlink: GB/s of a GPU in one direction.
        pcie: GB/s of a GPU in one direction, to the host; between GPUs too, where they have no NVLink.
    """

    network: float | None = None
    nvlink: float | None = None
    pcie: float | None = None

    def apply(self, chip: Chip, gpus_per_host: int) -> Chip:
        """Return the figures of a GPU in a host with this number of GPUs."""
        if self.network is not None:
            chip = replace(chip, network_bytes_per_second=self.network * 1e9 / 8 / gpus_per_host)
        if self.pcie is not None and chip.host_link == "PCIe":
            chip = replace(chip, host_bytes_per_second=self.pcie * 1e9)
        if self.pcie is not None and chip.peer_link == "pcie":
            chip = replace(chip, peer_bytes_per_second=self.pcie * 1e9)
        if self.nvlink is not None:
            chip = replace(chip, peer_link="nvlink", peer_bytes_per_second=self.nvlink * 1e9)
        return chip


USUAL_LINKS = LinkRates()

# Keys of Chip.peak_flops, by XLA's names of the operands' dtype.
PEAK_KEYS = {
    "f8e4m3fn": "float8",
    "f8e5m2": "float8",
    "s8": "int8",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
}

# Sources of the figures, in this order of preference: NVIDIA's datasheet of the GPU (named above each entry), NVIDIA's
# whitepaper of its architecture, and openxla/xla, xla/backends/gpu/target_config/specs (memory, cores, clocks and
# caches of the A100, H100, H200 and B200).
# - Peaks: datasheets state them with sparsity, which doubles them, and NVLink as the sum of both directions. GeForce
#   GPUs accumulate 16-bit products in float32 at half the rate; these figures are for float32.
# - Memory: bytes that CUDA reports, which is less than the datasheet's. Where no output of deviceQuery was at hand, the
#   figure is rounded down ("about").
# - Network: DGX A100 (200 Gb/s per GPU), DGX H100, H200 and B200 (400), DGX B300 (800). PCIe cards for servers: 200, as
#   in NVIDIA's reference architectures for enterprises. Consumer and small cards have no usual network: the figure
#   assumes one card of 100 Gb/s for 8 GPUs.
# - PCIe: 16 lanes of generation 4 (32 GB/s) or 5 (64 GB/s), without protocol overhead. GeForce drivers support no
#   direct transfer between GPUs, so NCCL goes through the host and reaches less than the link's rate.
# - Threads and shared memory: CUDA programming guide, by compute capability.
_PCIE_4, _PCIE_5 = 32e9, 64e9
_NETWORK_SHARED, _NETWORK_SERVER = 1.5625e9, 25e9


def _peaks(bfloat16: float, int8: float, float8: float | None = None) -> Mapping[str, float]:
    """Return the peaks by dtype from figures in TFLOPS. TF32 runs at half the rate of 16 bits."""
    peaks = {"bfloat16": bfloat16, "float16": bfloat16, "float32": bfloat16 / 2, "int8": int8}
    return {name: 1e12 * peak for name, peak in (peaks | ({"float8": float8} if float8 else {})).items()}


# A100 80GB datasheet (SXM).
_A100 = Chip(
    name="NVIDIA A100-SXM4-80GB",
    memory_bytes=85_100_068_864,
    memory_bytes_per_second=2.039e12,
    peak_flops=_peaks(312, int8=624),
    peer_link="nvlink",
    peer_bytes_per_second=300e9,
    network_bytes_per_second=25e9,
    host_bytes_per_second=_PCIE_4,
    compute_capability=(8, 0),
    cores=108,
    float32_units_per_core=64,
    clock_ghz=1.41,
    threads_per_core=2048,
    shared_memory_bytes_per_core=167_936,
    shared_memory_bytes_per_block=166_912,
    l2_cache_bytes=41_943_040,
)
# A100 datasheet (PCIe). The optional NVLink bridge connects 2 GPUs.
_A100_PCIE = replace(
    _A100,
    name="NVIDIA A100 80GB PCIe",
    memory_bytes=84_900_000_000,  # about
    memory_bytes_per_second=1.935e12,
    peer_link="pcie",
    peer_bytes_per_second=_PCIE_4,
)
# H100 datasheet (SXM) and whitepaper "NVIDIA H100 Tensor Core GPU Architecture".
_H100 = Chip(
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=84_942_979_072,
    memory_bytes_per_second=3.35e12,
    peak_flops=_peaks(989.4, int8=1978.9, float8=1978.9),
    peer_link="nvlink",
    peer_bytes_per_second=450e9,
    network_bytes_per_second=50e9,
    host_bytes_per_second=_PCIE_5,
    compute_capability=(9, 0),
    cores=132,
    float32_units_per_core=128,
    clock_ghz=1.98,
    threads_per_core=2048,
    shared_memory_bytes_per_core=233_472,
    shared_memory_bytes_per_block=232_448,
    l2_cache_bytes=52_428_800,
)
# H100 datasheet (PCIe: 756 TFLOPS, 2 TB/s). The optional NVLink bridge connects 2 GPUs.
_H100_PCIE = replace(
    _H100,
    name="NVIDIA H100 PCIe",
    memory_bytes_per_second=2.0e12,
    peak_flops=_peaks(756, int8=1512, float8=1512),
    peer_link="pcie",
    peer_bytes_per_second=_PCIE_5,
    network_bytes_per_second=_NETWORK_SERVER,
    cores=114,
    clock_ghz=1.755,
)
# HGX B200 datasheet, one eighth of the board.
_B200 = replace(
    _H100,
    name="NVIDIA B200",
    memory_bytes=191_514_411_008,
    memory_bytes_per_second=7.67e12,
    peak_flops=_peaks(2250, int8=4500, float8=4500),
    peer_bytes_per_second=900e9,
    compute_capability=(10, 0),
    cores=148,
    clock_ghz=1.965,
    l2_cache_bytes=132_644_864,
)
# Whitepaper "NVIDIA Ada GPU Architecture". Memory and cache: output of deviceQuery with driver 13.0.
_RTX_4090 = Chip(
    name="NVIDIA GeForce RTX 4090",
    memory_bytes=25_250_627_584,
    memory_bytes_per_second=1.008e12,
    peak_flops=_peaks(165.2, int8=660.6, float8=330.3),
    peer_link="pcie",
    peer_bytes_per_second=_PCIE_4,
    network_bytes_per_second=_NETWORK_SHARED,
    host_bytes_per_second=_PCIE_4,
    compute_capability=(8, 9),
    cores=128,
    float32_units_per_core=128,
    clock_ghz=2.52,
    threads_per_core=1536,
    shared_memory_bytes_per_core=102_400,
    shared_memory_bytes_per_block=101_376,
    l2_cache_bytes=75_497_472,
)
# Whitepaper "NVIDIA Ampere GA102 GPU Architecture". The optional NVLink bridge connects 2 GPUs.
_RTX_3090 = replace(
    _RTX_4090,
    name="NVIDIA GeForce RTX 3090",
    memory_bytes=25_400_000_000,  # about
    memory_bytes_per_second=936e9,
    peak_flops=_peaks(71.2, int8=284.8),
    compute_capability=(8, 6),
    cores=82,
    clock_ghz=1.695,
    l2_cache_bytes=6_291_456,
)
# Whitepaper "NVIDIA RTX Blackwell GPU Architecture".
_RTX_5090 = replace(
    _RTX_4090,
    name="NVIDIA GeForce RTX 5090",
    memory_bytes=33_600_000_000,  # about
    memory_bytes_per_second=1.792e12,
    peak_flops=_peaks(209.5, int8=838.0, float8=419.0),
    peer_bytes_per_second=_PCIE_5,
    host_bytes_per_second=_PCIE_5,
    compute_capability=(12, 0),
    cores=170,
    clock_ghz=2.407,
    l2_cache_bytes=100_663_296,
)
CHIPS: Mapping[str, Chip] = {
    "3090": _RTX_3090,
    "4090": _RTX_4090,
    "5090": _RTX_5090,
    # A10 datasheet.
    "a10": replace(
        _RTX_3090,
        name="NVIDIA A10",
        memory_bytes=23_600_000_000,  # about, with error correction
        memory_bytes_per_second=600e9,
        peak_flops=_peaks(125, int8=250),
        cores=72,
    ),
    # L4 datasheet.
    "l4": replace(
        _RTX_4090,
        name="NVIDIA L4",
        memory_bytes=23_600_000_000,  # about, with error correction
        memory_bytes_per_second=300e9,
        peak_flops=_peaks(121, int8=242, float8=242),
        cores=58,
        clock_ghz=2.04,
        l2_cache_bytes=50_331_648,
    ),
    # L40S datasheet. It states 733 TFLOPS for 8 bits and 183 for TF32; the lower figures here follow from its 362.
    "l40s": replace(
        _RTX_4090,
        name="NVIDIA L40S",
        memory_bytes=47_600_000_000,  # about, with error correction
        memory_bytes_per_second=864e9,
        peak_flops=_peaks(362, int8=724, float8=724),
        network_bytes_per_second=_NETWORK_SERVER,
        cores=142,
        l2_cache_bytes=100_663_296,
    ),
    "a100": _A100,
    # A100 datasheet (40GB SXM and PCIe).
    "a100-40": replace(
        _A100, name="NVIDIA A100-SXM4-40GB", memory_bytes=42_400_000_000, memory_bytes_per_second=1.555e12
    ),
    "a100-pcie": _A100_PCIE,
    "a100-40-pcie": replace(
        _A100_PCIE, name="NVIDIA A100-PCIE-40GB", memory_bytes=42_400_000_000, memory_bytes_per_second=1.555e12
    ),
    "h100": _H100,
    "h100-pcie": _H100_PCIE,
    # H100 NVL datasheet: 94 GB, 3.9 TB/s; 1671 TFLOPS with sparsity. The bridge connects 2 GPUs.
    "h100-nvl": replace(
        _H100_PCIE,
        name="NVIDIA H100 NVL",
        memory_bytes=99_900_000_000,  # about
        memory_bytes_per_second=3.9e12,
        peak_flops=_peaks(835.5, int8=1671, float8=1671),
        cores=132,
        clock_ghz=1.785,
    ),
    # H200 datasheet.
    "h200": replace(_H100, name="NVIDIA H200", memory_bytes=151_397_597_184, memory_bytes_per_second=4.8e12),
    # GH200 datasheet, with 96 GB of HBM3: 4 TB/s, and NVLink-C2C to the CPU at 900 GB/s in both directions together.
    "gh200": replace(
        _H100,
        name="NVIDIA GH200 480GB",
        memory_bytes=101_000_000_000,  # about
        memory_bytes_per_second=4.0e12,
        host_bytes_per_second=450e9,
        host_link="NVLink-C2C",
    ),
    "b200": _B200,
    # HGX B300 datasheet, one eighth of the board. Memory bandwidth and cores as of the B200, which is conservative. So
    # is the rate of int8, which this chip has given up for narrower floats: the sources give 2 to 3 PFLOPS for a board
    # with sparsity. The host's PCIe counts as generation 5.
    "b300": replace(
        _B200,
        name="NVIDIA B300 SXM6 AC",
        memory_bytes=287_000_000_000,  # about
        peak_flops=_peaks(2250, int8=125, float8=4500),
        network_bytes_per_second=100e9,
        compute_capability=(10, 3),
        clock_ghz=1.92,
    ),
    # RTX 6000 Ada datasheet and whitepaper "NVIDIA Ada GPU Architecture".
    "rtx-6000-ada": replace(
        _RTX_4090,
        name="NVIDIA RTX 6000 Ada Generation",
        memory_bytes=50_900_000_000,  # about
        memory_bytes_per_second=960e9,
        peak_flops=_peaks(364.2, int8=728.5, float8=728.5),
        cores=142,
        clock_ghz=2.505,
        l2_cache_bytes=100_663_296,
    ),
    # Whitepaper "NVIDIA RTX Blackwell PRO GPU Architecture" (Workstation Edition).
    "rtx-pro-6000": replace(
        _RTX_5090,
        name="NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        memory_bytes=101_800_000_000,  # about
        peak_flops=_peaks(503.8, int8=1007.6, float8=1007.6),
        network_bytes_per_second=_NETWORK_SERVER,
        cores=188,
        clock_ghz=2.617,
        l2_cache_bytes=134_217_728,
    ),
}


def chip_of(device_kind: str) -> Chip | None:
    """Return the chip with this `device_kind` of JAX, or None if CHIPS does not contain it.

    The whole name must match. An H200 NVL, a GH200 with 144 GB and a part of a GPU (MIG) have other rates than the GPU
    whose name their own name contains.
    """
    return next((chip for chip in CHIPS.values() if chip.name == device_kind), None)


def seconds_at_peak(chip: Chip, flops: Mapping[str, float]) -> float:
    """Return the time of matmuls at the peaks of a chip.

    Args:
        flops: FLOPs by XLA's name of the operands' dtype. See `hlo.count_dot_flops_by_dtype`.
    """
    return sum(count / chip.peak_flops[PEAK_KEYS[dtype]] for dtype, count in flops.items())
