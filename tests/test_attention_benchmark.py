"""benchmarks/attention.py at a toy's size: every way computes the same, and FLOPs are those of the paper."""

import attention
import pytest


def test_ways_compute_the_same() -> None:
    rows = attention.compare(attention.Case(64, 64, causal=True, dtype="float32"), only=[], runs=1)
    assert {row["name"] for row in rows} == {"xla", "pallas"}
    for row in rows:
        assert max(row["distance"], row["gradient_distance"]) < 1e-5
        assert row["backward_tflops"] / row["forward_tflops"] == pytest.approx(
            2.5 * row["forward_seconds"] / row["backward_seconds"]
        )
        assert attention.line(row)


def test_flops_are_counted_as_in_the_papers() -> None:
    """4 × length² × head_dim × heads × rows forward, half of it where causal (Dao 2023, arXiv:2307.08691)."""
    case = attention.Case(64, 128, causal=False, dtype="bfloat16")
    q, _, _, _ = case.operands()
    rows, length, heads, head_dim = q.shape
    assert 2 * case.products == 4 * length**2 * head_dim * heads * rows
    assert attention.Case(64, 128, causal=True, dtype="bfloat16").products == case.products / 2


def test_what_is_not_supported_is_named() -> None:
    (row,) = attention.compare(attention.Case(16, 64, causal=True, dtype="bfloat16"), only=["pallas"], runs=1)
    assert "KeyError" in row["unavailable"] and row["unavailable"] in attention.line(row)
