"""Speed of a run in words."""

import json
from dataclasses import replace

from commands import ROOT

from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.planning.breakdown import Part
from jaxopt_llm.planning.links import Traffic
from jaxopt_llm.planning.search.grouped_rate import Groups, describe_rates
from jaxopt_llm.planning.search.roofline import GroupedWork, Work
from jaxopt_llm.planning.step_plan import MEASURED_RATIOS, Speed, format_speed, list_assumptions

WORK = Work(
    flops=1,
    grouped=None,
    attention_flops=0,
    attention_bytes=0,
    attention_efficiency=1,
    repeated_flops=0,
    bytes=0,
    transfers=(),
    pcie_bytes=0,
    idle=0,
)
PARTS = (Part("matmuls", 1.5, 0.0, 7, 10, 10), Part("casts", 0.5, 0.0, 5, 0, 10))


def test_assumptions_name_the_rates_of_what_a_step_uses() -> None:
    sent = Traffic(("fsdp",), "pcie", "all-gather", 1, 1.0, 1.0, ("bf16",), 1)
    matmuls = "assumed: matmuls 75% of the chip's peak"
    clocks = "clocks that fall under load (steps of one H200 took 1.03 to 1.10 times as long as planned)"
    assert list_assumptions(CHIPS["4090"], "pallas", PARTS, replace(WORK, transfers=(sent, sent))) == (
        f"{matmuls} (pallas 35% and 35%), memory 87.5% of 1.008 TB/s, pcie 80% of 32 GB/s",
        f"left out: launches of 12 kernels, latency of transfers, {clocks}, multiprocessors that collectives take from "
        "kernels (not measured), reading of data, evaluations, checkpoints",
    )
    copies = Part("copies to the host and back (NVLink-C2C)", 1.0, 0.0, 3, 0, 10)
    (assumed, left_out) = list_assumptions(CHIPS["gh200"], "cudnn", (*PARTS, copies), WORK)
    assert assumed.startswith(f"{matmuls} (cudnn 50% and 41%), memory")
    assert list_assumptions(CHIPS["gh200"], "xla", PARTS, WORK)[0].startswith(f"{matmuls}, memory")
    assert assumed.endswith("memory 87.5% of 4 TB/s, NVLink-C2C to the host 85% of 450 GB/s")
    assert "launches of 12 kernels" in left_out and "multiprocessors" not in left_out


def test_assumptions_name_the_rates_of_experts() -> None:
    grouped = GroupedWork(1.0, 0.5, Groups(2048, 4096, 14_336))
    _, rates, left_out = list_assumptions(CHIPS["h200"], "cudnn", PARTS, replace(WORK, grouped=grouped))
    assert rates == describe_rates(CHIPS["h200"], grouped.groups) and left_out.startswith("left out: ")


def test_measured_steps_took_as_much_longer_as_is_said() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "nvidia-h200-steps.json").read_text())["rows"]
    planned = [sum(part["roofline"] for part in row["milliseconds"]) / 1e3 for row in rows]
    ratios = [row["step_seconds"] / seconds for row, seconds in zip(rows, planned, strict=True)]
    assert (round(min(ratios), 2), round(max(ratios), 2)) == MEASURED_RATIOS


def test_speed_in_words() -> None:
    def lines(days: float) -> list[str]:
        return format_speed(Speed(2.0, 4096, 0.4, days, 50, 1.9, ("assumed: this",), PARTS))

    assert lines(2.5)[1:4] == [
        "  2 s a step, 4,096 tokens/s, MFU 40.0%, 2.5 days for 50 steps (0.0004096B tokens)",
        "  assumed: this",
        "  --search, which counts memory traffic by arithmetic, estimates 1.9 s",
    ]
    assert "6.00 hours for 50 steps" in lines(0.25)[1]
    speed = Speed(2.0, 65_536, 0.4, 2.5, 1_000_000, 1.9, ("assumed: this",), PARTS)
    assert "for 1,000,000 steps (131.1B tokens)" in format_speed(speed)[1]
    assert format_speed(speed, fits=False)[0].startswith("speed if it fitted, by")
    assert lines(1)[-1].split() == ["all", "2000.00"]
