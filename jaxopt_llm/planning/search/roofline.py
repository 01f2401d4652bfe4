"""Time of a step by a roofline model, and all assumptions about the hardware (docs/plan.md explains them).

For every kind of work the time is its amount divided by the rate that programs attain. Kernels run one after another,
so times for matmuls and for memory add up. Transfers that overlap with kernels cost only the time by which they take
longer than the kernels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxopt_llm.compiler.chips import CHIPS, USUAL_LINKS, Chip, LinkRates
from jaxopt_llm.planning.search.grouped_rate import Groups

# Shares of the chip's figures that programs attain.
# Matmuls: the best shapes reach 80% (H100, H200), 86% (A100) and 78% (B200) in bf16 (Bekman, Machine Learning
# Engineering, "Maximum Achievable Matmul FLOPS"). The shapes of a model are not the best: 72 to 78% in steps of 1B and
# 8B models on an H200.
MATMUL_EFFICIENCY = 0.75
# Memory: copies reach about 90% of the datasheet's bandwidth; the update of an 8B model on an H200 87%.
MEMORY_EFFICIENCY = 0.875
# Flash attention before Hopper: FlashAttention-2, the method of our kernels, reaches 50 to 73% on A100 (Dao 2023,
# arXiv:2307.08691). No kernel has been measured there.
FLASH_EFFICIENCY = 0.35
# Attention from Hopper on, measured on an H200: causal, 8192 tokens, heads of size 128, in bf16. Alone, cuDNN reaches
# 61% and 50% forward and backward; within the step of an 8B model, whose matmuls slow the clock, 52% and 43%, and with
# packed documents 48% and 39%. Our kernels were measured alone (triton 44% and 53%, pallas 40% and 30%) and are listed
# at the same ratio. Their backward computes two products twice, which count here.
KERNEL_EFFICIENCY: Mapping[str, Mapping[str, float]] = {
    "cudnn": {"forward": 0.5, "backward": 0.41},
    "triton": {"forward": 0.37, "backward": 0.44},
    "pallas": {"forward": 0.34, "backward": 0.25},
}
HOPPER = (9, 0)  # compute capability
# Rings on 8 GPUs, by the bus bandwidth of nccl-tests: 230 to 240 of 300 GB/s (A100), 360 to 370 of 450 (H100).
NVLINK_EFFICIENCY = 0.8
NETWORK_EFFICIENCY = 0.8
# Rings over PCIe have not been measured. Without direct transfers between GPUs (GeForce) they are slower than this.
PCIE_RING_EFFICIENCY = 0.8
# 55 of 64 GB/s into or out of pinned memory.
PCIE_EFFICIENCY = 0.85

# Share of the time of asynchronous copies to and from the host that kernels hide, outside of loops. In a loop they hide
# nothing: XLA captures it into a CUDA graph, whose copies and kernels run one after the other (measured on an H200).
COPY_OVERLAP = 0.5
LINK_EFFICIENCY = {"nvlink": NVLINK_EFFICIENCY, "pcie": PCIE_RING_EFFICIENCY, "network": NETWORK_EFFICIENCY}


@dataclass(frozen=True)
class Cluster:
    """Hosts with the same number of GPUs each. links: rates that differ from the usual ones."""

    gpu: str
    hosts: int
    gpus_per_host: int
    links: LinkRates = USUAL_LINKS

    @property
    def chip(self) -> Chip:
        return self.links.apply(CHIPS[self.gpu], self.gpus_per_host)

    @property
    def devices(self) -> int:
        return self.hosts * self.gpus_per_host


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind over the same mesh axes in a step, as one GPU sees them.

    link: "nvlink" or "pcie", or "network" if the axes cross hosts.
    bytes: bytes that the GPU sends on a ring.
    seconds: time at the full rate of the slowest link, without latency.
    overlapped: share of the transfer that kernels hide, if they take long enough.
    """

    axes: tuple[str, ...]
    link: str
    kind: str
    bytes: float
    seconds: float
    overlapped: float


@dataclass(frozen=True)
class GroupedWork:
    """Grouped matmuls of a step.

    efficiency: share of the chip's peak that they attain together.
    """

    flops: float
    efficiency: float
    groups: Groups


@dataclass(frozen=True)
class Work:
    """Work of one GPU in one step.

    flops: FLOPs of matmuls with weights, without matmuls of experts and of codes.
    grouped: grouped matmuls of experts; None without any.
    attention_flops, attention_bytes: FLOPs and bytes of attention's scores. The slower of the two takes the time.
    attention_efficiency: share of the chip's peak that the matmuls of attention attain.
    repeated_flops: the part of all kinds of FLOPs that repeats forwards.
    bytes: bytes that everything other than matmuls reads and writes.
    transfers: collectives.
    pcie_bytes: bytes to the host and back. No kernel hides them.
    idle: share of the step in which a pipeline stage does no useful computation.
    code_flops: FLOPs of matmuls of codes, by their dtype.
    """

    flops: float
    repeated_flops: float
    bytes: float
    transfers: tuple[Transfer, ...]
    pcie_bytes: float
    grouped: GroupedWork | None = None
    attention_flops: float = 0.0
    attention_bytes: float = 0.0
    attention_efficiency: float = 1.0
    idle: float = 0.0
    code_flops: Mapping[str, float] = field(default_factory=dict)

    @property
    def all_flops(self) -> float:
        """FLOPs of all matmuls."""
        of_experts = self.grouped.flops if self.grouped else 0.0
        return self.flops + self.attention_flops + of_experts + sum(self.code_flops.values())


def use_compiled_figures(work: Work, flops: float, transfers: Sequence[Transfer], pcie_bytes: float) -> Work:
    """Replace estimated FLOPs, collectives and copies by the compiled program's.

    Args:
        flops: FLOPs of all matmuls, with attention, experts and codes.
    """
    return replace(
        work,
        flops=max(flops - (work.all_flops - work.flops), 0.0),
        transfers=tuple(transfers),
        pcie_bytes=pcie_bytes,
    )


LABELS = {"compute": "compute", "memory": "memory bandwidth", "links": "links", "pcie": "PCIe", "idle": "idle pipeline"}


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by cause; they add up to the step's time.

    links and pcie count only the time that no kernel hides.
    """

    compute: float
    memory: float
    links: float
    pcie: float
    idle: float

    @property
    def total(self) -> float:
        return self.compute + self.memory + self.links + self.pcie + self.idle

    @property
    def bottleneck(self) -> str:
        """Label of the cause that takes most of the step."""
        return LABELS[max(LABELS, key=lambda name: getattr(self, name))]


def compute_step_time(work: Work, chip: Chip, compute_dtype: str) -> StepTime:
    """Return the time of a step.

    Raises:
        KeyError: the chip has no matmuls in this dtype.
    """
    by_dtype = [(compute_dtype, work.flops), *work.code_flops.items()]
    compute = sum(seconds_of_matmuls(flops, chip, dtype) for dtype, flops in by_dtype)
    if grouped := work.grouped:
        compute += seconds_of_matmuls(grouped.flops, chip, compute_dtype, grouped.efficiency)
    streaming = seconds_in_memory(work.bytes, chip)
    attention_compute = seconds_of_matmuls(work.attention_flops, chip, compute_dtype, work.attention_efficiency)
    attention_streaming = seconds_in_memory(work.attention_bytes, chip)
    if attention_compute > attention_streaming:
        compute += attention_compute
    else:
        streaming += attention_streaming
    kernels, attention = compute + streaming, max(attention_compute, attention_streaming)
    links = compute_link_time(work.transfers, kernels, attention)
    host = compute_host_time(work.pcie_bytes, 0.0, chip, max(links.hidden, kernels))
    busy = 1 - work.idle
    return StepTime(
        compute=busy * compute,
        memory=busy * streaming,
        links=links.exposed,
        pcie=host.exposed,
        idle=work.idle * kernels,
    )


def seconds_of_matmuls(flops: float, chip: Chip, dtype: str, efficiency: float = MATMUL_EFFICIENCY) -> float:
    """Return the time of matmuls.

    Args:
        dtype: a key of Chip.peak_flops.
        efficiency: share of the chip's peak that they attain; see `kernel_efficiency` for those of attention kernels,
            and `grouped_rate.find_efficiency` for those of experts.
    """
    return flops / (efficiency * chip.peak_flops[dtype])


def kernel_efficiency(chip: Chip, implementation: str, direction: str) -> float:
    """Return the share of the peak that an attention kernel attains: FLASH_EFFICIENCY if it has not been measured.

    Args:
        direction: forward or backward.
    """
    measured = KERNEL_EFFICIENCY.get(implementation, {}) if chip.compute_capability >= HOPPER else {}
    return measured.get(direction, FLASH_EFFICIENCY)


def seconds_in_memory(read_and_written: float, chip: Chip) -> float:
    """Return the time in which this many bytes are read and written."""
    return read_and_written / (MEMORY_EFFICIENCY * chip.memory_bytes_per_second)


@dataclass(frozen=True)
class TransferTime:
    """Seconds of transfers.

    exposed: the part that makes the step longer, including the time by which hidden transfers take longer than kernels.
    hidden: the part scheduled next to kernels.
    """

    exposed: float
    hidden: float


def compute_link_time(transfers: Sequence[Transfer], kernels: float, attention: float) -> TransferTime:
    """Return the time of collectives next to kernels that take this long.

    Args:
        attention: the part of the kernels that is attention, the only one that hides a ring's keys and values.
    """
    hidden = sum(seconds_on_link(each) * each.overlapped for each in transfers)
    exposed = sum(seconds_on_link(each) * (1 - each.overlapped) for each in transfers)
    in_ring = sum(seconds_on_link(each) * each.overlapped for each in transfers if _is_ring_attention(each))
    # Kernels and links run at the same time, and the slower takes the time.
    links_longer = max(0.0, hidden - kernels, in_ring - attention)
    return TransferTime(exposed + links_longer, hidden)


def compute_host_time(moved: float, overlapped: float, chip: Chip, others: float) -> TransferTime:
    """Return the time of copies to the host and back, next to kernels and links that take `others` seconds.

    Args:
        moved: bytes in both directions together.
        overlapped: the part of these bytes that is scheduled next to kernels.
    """
    rate = PCIE_EFFICIENCY * chip.host_bytes_per_second
    hidden = COPY_OVERLAP * overlapped / rate
    return TransferTime(moved / rate - hidden + max(0.0, hidden - others), hidden)


def seconds_on_link(transfer: Transfer) -> float:
    """Return the time of a transfer at the rate that its link attains."""
    return transfer.seconds / LINK_EFFICIENCY[transfer.link]


def _is_ring_attention(transfer: Transfer) -> bool:
    """Return whether a transfer is a ring's keys and values, which only attention hides."""
    return transfer.axes == ("context",) and transfer.kind == "collective-permute"
