"""Speed of a run, from the time of its step by the breakdown of the compiled program."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jaxopt_llm.compiler.chips import Chip
from jaxopt_llm.config import Config
from jaxopt_llm.planning.breakdown import HOST_COPIES, KERNELS, Part, format_breakdown
from jaxopt_llm.planning.search import roofline
from jaxopt_llm.planning.search.attention_cost import resolve_attention
from jaxopt_llm.planning.search.grouped_rate import describe_rates

# Smallest and largest ratio of the measured time of a step to the planned one, over the steps in
# benchmarks/results/nvidia-h200-steps.json.
MEASURED_RATIOS = (1.03, 1.10)


@dataclass(frozen=True)
class Speed:
    """Speed of a run by arithmetic; nothing is measured.

    Attributes:
        step_seconds: sum of the breakdown.
        tokens_per_second: of all GPUs together, with padding.
        mfu: model FLOPs per second divided by the chip's peak, with causal attention, as `train` reports it.
        days: time of all steps of the run, without evaluations and checkpoints; None if epochs determine the steps.
        steps: steps of the run; 0 if epochs determine them.
        search_step_seconds: the same step by the arithmetic with which `--search` ranks settings.
        assumptions: rates, and what the estimate leaves out.
    """

    step_seconds: float
    tokens_per_second: float
    mfu: float
    days: float | None
    steps: int
    search_step_seconds: float
    assumptions: tuple[str, ...]
    breakdown: tuple[Part, ...]


def compute_speed(
    config: Config, chip: Chip, breakdown: tuple[Part, ...], mfu_per_token: float, work: roofline.Work
) -> Speed:
    """Return the speed of a run.

    Args:
        mfu_per_token: MFU at one token per second.
        work: the step's work as `--search` counts it, with the compiled FLOPs and transfers.
    """
    training = config.training
    attention = resolve_attention(config, chip.compute_capability).training.attention
    seconds = sum(part.seconds for part in breakdown)
    tokens_per_second = training.batch_size * training.sequence_length / seconds
    by_search = roofline.compute_step_time(work, chip, config.precision.compute_dtype).total
    return Speed(
        step_seconds=seconds,
        tokens_per_second=tokens_per_second,
        mfu=mfu_per_token * tokens_per_second,
        days=training.steps * seconds / 86_400 if training.steps else None,
        steps=training.steps,
        search_step_seconds=by_search,
        assumptions=list_assumptions(chip, attention, breakdown, work),
        breakdown=breakdown,
    )


def list_assumptions(chip: Chip, attention: str, breakdown: Sequence[Part], work: roofline.Work) -> tuple[str, ...]:
    """Return the rates that the step's time assumes, and what it leaves out. The last line is what it leaves out.

    attention: its implementation.
    """
    links = dict.fromkeys(each.link for each in work.transfers)
    rates = {"network": chip.network_bytes_per_second, chip.peer_link: chip.peer_bytes_per_second}
    used = [f"{link} {_percent(roofline.LINK_EFFICIENCY[link])} of {rates[link] / 1e9:,.4g} GB/s" for link in links]
    if any(part.name.startswith(HOST_COPIES) for part in breakdown):
        rate = f"{chip.host_bytes_per_second / 1e9:,.4g} GB/s"
        used.append(f"{chip.host_link} to the host {_percent(roofline.PCIE_EFFICIENCY)} of {rate}")
    memory = f"memory {_percent(roofline.MEMORY_EFFICIENCY)} of {chip.memory_bytes_per_second / 1e12:.4g} TB/s"
    matmuls = f"matmuls {_percent(roofline.MATMUL_EFFICIENCY)} of the chip's peak"
    if attention in roofline.KERNEL_EFFICIENCY:
        directions = (roofline.kernel_efficiency(chip, attention, each) for each in ("forward", "backward"))
        matmuls += f" ({attention} {' and '.join(map(_percent, directions))})"
    launches = sum(part.runs for part in breakdown if part.name in KERNELS)
    left_out = [f"launches of {launches:,} kernels", "latency of transfers", _describe_clocks(links)]
    return (
        f"assumed: {', '.join([matmuls, memory, *used])}",
        *([describe_rates(chip, work.grouped.groups)] if work.grouped else []),
        f"left out: {', '.join([*left_out, 'reading of data', 'evaluations', 'checkpoints'])}",
    )


def _describe_clocks(links: Collection[str]) -> str:
    """Return what the time leaves out of the speed of kernels, with what was measured of it."""
    least, most = MEASURED_RATIOS
    clocks = f"clocks that fall under load (steps of one H200 took {least:.2f} to {most:.2f} times as long as planned)"
    return f"{clocks}, multiprocessors that collectives take from kernels (not measured)" if links else clocks


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def format_speed(speed: Speed, fits: bool = True) -> list[str]:
    """Return the lines of the speed, its assumptions and the breakdown."""
    if speed.days is None:
        length = "the number of steps follows from training.epochs and the data"
    else:
        days = f"{speed.days:,.1f} days" if speed.days >= 1 else f"{24 * speed.days:,.2f} hours"
        tokens = speed.tokens_per_second * speed.step_seconds * speed.steps
        length = f"{days} for {speed.steps:,} steps ({tokens / 1e9:,.4g}B tokens)"
    return [
        f"speed{'' if fits else ' if it fitted'}, by a roofline of the compiled program (not measured)",
        f"  {speed.step_seconds:,.4g} s a step, {speed.tokens_per_second:,.0f} tokens/s, MFU {speed.mfu:.1%}, {length}",
        *(f"  {line}" for line in speed.assumptions),
        f"  --search, which counts memory traffic by arithmetic, estimates {speed.search_step_seconds:,.4g} s",
        "",
        *format_breakdown(speed.breakdown),
    ]
