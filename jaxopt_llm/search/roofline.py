"""How long a step takes: a roofline, and the one place for what is assumed of the hardware (docs/plan.md explains it).

Of every kind of work the time is its amount by the rate that programs attain. Kernels run one after another: time for
products and time for memory add up. What is sent or copied beside them costs only what it takes longer than they do.
"""

from dataclasses import dataclass
from typing import Protocol

from jaxopt_llm.parallel.topology import CHIPS, Chip

# Shares of the chip's figures that programs attain.
# Products: the best shapes reach 80% (H100, H200), 86% (A100) and 78% (B200) in bf16 (Bekman, Machine Learning
# Engineering, "Maximum Achievable Matmul FLOPS"); a model's are not the best.
PRODUCTS = 0.7
# Memory: copies reach about 90% of what the datasheet says.
MEMORY = 0.85
# Flash attention: FlashAttention-2, the method of our kernels, reaches 35% on H100 (Shah et al. 2024, arXiv:2407.08608)
# and 50 to 73% on A100 (Dao 2023, arXiv:2307.08691). Ours have been measured on none.
FLASH = 0.35
# Rings on 8 GPUs, by nccl-tests' bus bandwidth: 230 to 240 of 300 GB/s (A100), 360 to 370 of 450 (H100).
NVLINK = 0.8
NETWORK = 0.8
# 55 of 64 GB/s into or out of pinned memory.
PCIE = 0.85

# XLA schedules the copies of offloaded activations beside kernels. How much of their time that hides has not been
# measured; all GPUs of a host share its memory.
COPIED_BESIDE = 0.5
# What is sent over these axes is what the next product reads: XLA may schedule a kernel beside it, but none that lasts.
# So are the heads that an all-to-all brings, and what goes over `expert` alone: tokens, to their experts and back.
WAITED = {"tensor", "pipeline"}


@dataclass(frozen=True)
class Cluster:
    gpu: str
    hosts: int
    gpus_per_host: int

    @property
    def chip(self) -> Chip:
        return CHIPS[self.gpu]

    @property
    def devices(self) -> int:
        return self.hosts * self.gpus_per_host


class Sent(Protocol):
    """What each GPU sends in a step over one link; seconds: by the link's own rate. overlapped: the share of it beside
    which other kernels are scheduled."""

    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def link(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def overlapped(self) -> float: ...


@dataclass(frozen=True)
class Work:
    """Of one GPU in one step.

    flops: of products with weights. attention_flops, attention_bytes: of its scores, by which it is bound; flash: a
    kernel's, which keeps them on the chip.
    repeated_flops: of both, those of forwards that were run before. bytes: read and written by what is no product.
    pcie_bytes: to the host and back; pcie_beside: of those, scheduled beside kernels. idle: share of the step in which
    a pipeline's stage computes what does not count.
    """

    flops: float
    attention_flops: float
    attention_bytes: float
    flash: bool
    repeated_flops: float
    bytes: float
    sent: tuple[Sent, ...]
    pcie_bytes: float
    pcie_beside: float
    idle: float


LABELS = {
    "compute": "compute",
    "memory": "memory bandwidth",
    "links": "links",
    "pcie": "PCIe",
    "idle": "idle pipeline",
}


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what takes them; they add up. links: where no kernel runs beside them."""

    compute: float
    memory: float
    links: float
    pcie: float
    idle: float

    @property
    def total(self) -> float:
        return self.compute + self.memory + self.links + self.pcie + self.idle

    @property
    def binds(self) -> str:
        """What takes most of the step."""
        return LABELS[max(LABELS, key=lambda name: getattr(self, name))]


def step_time(work: Work, chip: Chip, compute_dtype: str) -> StepTime:
    """Raises KeyError for a dtype that the chip does not multiply."""
    peak, memory = PRODUCTS * chip.peak_flops[compute_dtype], MEMORY * chip.memory_bytes_per_second
    compute, streaming = work.flops / peak, work.bytes / memory
    attention_flops = work.attention_flops / ((FLASH if work.flash else PRODUCTS) * chip.peak_flops[compute_dtype])
    attention_bytes = work.attention_bytes / memory
    if attention_flops > attention_bytes:
        compute += attention_flops
    else:
        streaming += attention_bytes
    shares = {"nvlink": NVLINK, "network": NETWORK}
    sent = [(each, each.seconds / shares[each.link]) for each in work.sent]
    hidden = sum(seconds * _beside(each) for each, seconds in sent)
    exposed = sum(seconds * (1 - _beside(each)) for each, seconds in sent)
    in_ring = sum(seconds * _beside(each) for each, seconds in sent if _goes_round(each))
    pcie = work.pcie_bytes / (PCIE * chip.pcie_bytes_per_second)
    beside = pcie * COPIED_BESIDE * work.pcie_beside / max(work.pcie_bytes, 1)
    kernels = compute + streaming
    # Kernels, links and PCIe run at once: the slowest sets the pace, and the others are taken off it.
    attention = max(attention_flops, attention_bytes)
    links_longer = max(0.0, hidden - kernels, in_ring - attention)
    pcie_longer = max(0.0, beside - max(hidden, kernels))
    works = 1 - work.idle
    return StepTime(
        compute=works * compute,
        memory=works * streaming,
        links=exposed + links_longer,
        pcie=pcie - beside + pcie_longer,
        idle=work.idle * kernels,
    )


def _beside(sent: Sent) -> float:
    """The share of it beside which kernels run."""
    waited = WAITED & {*sent.axes} or sent.axes == ("expert",) or sent.kind == "all-to-all"
    return 0.0 if waited else sent.overlapped


def _goes_round(sent: Sent) -> bool:
    """Whether it is a ring's keys and values, beside which attention alone runs."""
    return sent.axes == ("context",) and sent.kind == "collective-permute"
