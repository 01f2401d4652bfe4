"""Speed of a run in words."""

from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.planning.breakdown import Part
from jaxopt_llm.planning.links import Traffic
from jaxopt_llm.planning.speed import Speed, format_speed, list_assumptions

PARTS = (Part("matmuls", 1.5, 0.0, 7, 10, 10), Part("casts", 0.5, 0.0, 5, 0, 10))


def test_assumptions_name_the_rates_of_what_a_step_uses() -> None:
    sent = Traffic(("fsdp",), "pcie", "all-gather", ("bf16",), 1, 1, 1.0, 1.0)
    matmuls = "assumed: matmuls 75% of the chip's peak"
    assert list_assumptions(CHIPS["4090"], "pallas", PARTS, [sent, sent]) == (
        f"{matmuls} (pallas 35% and 35%), memory 87.5% of 1.008 TB/s, pcie 80% of 32 GB/s",
        "left out: launches of 12 kernels, latency of transfers, reading of data, evaluations, checkpoints",
    )
    copies = Part("copies to the host and back (NVLink-C2C)", 1.0, 0.0, 3, 0, 10)
    (assumed, left_out) = list_assumptions(CHIPS["gh200"], "cudnn", (*PARTS, copies), [])
    assert assumed.startswith(f"{matmuls} (cudnn 50% and 41%), memory")
    assert list_assumptions(CHIPS["gh200"], "xla", PARTS, [])[0].startswith(f"{matmuls}, memory")
    assert assumed.endswith("memory 87.5% of 4 TB/s, NVLink-C2C to the host 85% of 450 GB/s")
    assert "launches of 12 kernels" in left_out


def test_speed_in_words() -> None:
    def lines(days: float, search: float | None) -> list[str]:
        return format_speed(Speed(2.0, 4096, 0.4, days, 50, search, ("assumed: this",), PARTS))

    assert lines(2.5, 1.9)[1:4] == [
        "  2 s a step, 4,096 tokens/s, MFU 40.0%, 2.5 days for 50 steps (0.0004096B tokens)",
        "  assumed: this",
        "  --search, which counts memory traffic by arithmetic, estimates 1.9 s",
    ]
    assert "6.00 hours for 50 steps" in lines(0.25, None)[1] and not any("--search" in line for line in lines(1, None))
    speed = Speed(2.0, 65_536, 0.4, 2.5, 1_000_000, None, ("assumed: this",), PARTS)
    assert "for 1,000,000 steps (131.1B tokens)" in format_speed(speed)[1]
    assert format_speed(speed, fits=False)[0].startswith("speed if it fitted, by")
    assert lines(1, None)[-1].split() == ["all", "2000.00"]
