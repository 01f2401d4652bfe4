"""Judgements of published claims for benchmarks/claims.py: each by the claim's own criterion."""

from collections.abc import Mapping
from dataclasses import dataclass

from memory import Row, extra_flops, saved

Rows = Mapping[str, Row]
Measured = Mapping[str, float]
HOLDS, PARTLY, REFUTED = "holds", "holds in part", "refuted"
STATE = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Finding:
    """Finding on a claim.

    Attributes:
        verdict: HOLDS, PARTLY, REFUTED, or `holds_under` a condition.
    """

    verdict: str
    found: str


def holds_under(condition: str) -> str:
    """Return the verdict on a claim that holds with some settings or against some baselines only."""
    return f"holds under {condition}"


def state_bytes(row: Row) -> int:
    return sum(row["memory"][kind] for kind in STATE)


def beyond_state(row: Row, base: Row) -> float:
    """Return the bytes of the peak beyond parameters, moments and the gradients of the base.

    A step that recomputes has its peak in the update, where no activations are left. So this is compared instead.
    """
    return float(row["memory"]["peak"] - state_bytes(base))


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


def judge_mixed_precision(rows: Rows, measured: Measured) -> Finding:
    whole, divided = saved(rows["bf16"], rows["off"]), saved(rows["bf16, ZeRO-3"], rows["ZeRO-3"])
    activations = saved(rows["bf16"], rows["off"], "activations")
    return Finding(
        HOLDS if max(whole, divided) >= 0.5 else REFUTED,
        f"bf16 saves {whole:.0%} of the peak, {activations:.0%} of activations: master weights, gradients and moments "
        f"stay in float32, 16 bytes per parameter. Where activations dominate, because ZeRO-3 divides these by 8, it "
        f"saves {divided:.0%} of the peak",
    )


def judge_checkpointing(rows: Rows, measured: Measured) -> Finding:
    full, off, plain = (beyond_state(rows[name], rows["off"]) for name in ("full", "off", "plain autodiff"))
    activations = 1 - full / plain
    roofline = rows["full, bf16"]["step_seconds"] / rows["none, bf16"]["step_seconds"] - 1
    clock = measured["full / none, step seconds"] - 1
    enough, cheap = activations >= 0.6, roofline <= 0.3 and clock <= 0.3
    price = "less than claimed" if roofline < 0.2 else "as claimed" if roofline <= 0.3 else "more than claimed"
    return Finding(
        HOLDS if enough and cheap else PARTLY if enough or cheap else REFUTED,
        f"it saves {activations:.0%} of the activations of plain autodiff, {1 - full / off:.0%} of those of `none`, "
        f"for {extra_flops(rows['full'], rows['off']):.0%} more FLOPs; time: {roofline:+.0%} by the roofline (bf16, "
        f"7B), which is {price}, and {clock:+.0%} measured on a CPU (6M parameters, {measured['pairs']:.0f} pairs, the "
        f"middle half from {measured['first quartile'] - 1:+.0%} to {measured['third quartile'] - 1:+.0%})",
    )


def judge_zero_280(rows: Rows, measured: Measured) -> Finding:
    names = ("off", "ZeRO-3, bf16", "ZeRO-3, fp16", "off, 7 rows")
    before, after, in_fp16, more_rows = (rows[name]["memory"]["peak"] for name in names)
    literal = abs(before / 280e9 - 1) < 0.1 and abs(in_fp16 / 35e9 - 1) < 0.1
    states = [state_bytes(rows[name]) for name in ("off", "ZeRO-3, bf16")]
    return Finding(
        HOLDS if literal else REFUTED,
        f"{gigabytes(before)} to {gigabytes(in_fp16)} in fp16 ({gigabytes(after)} in bf16), a factor of "
        f"{before / in_fp16:.1f}; parameters, gradients and moments alone {gigabytes(states[0])} to "
        f"{gigabytes(states[1])}, a factor of {states[0] / states[1]:.1f}. These have one row of "
        f"4096 tokens a GPU; float32 needs 7 rows to come near 280 GB ({gigabytes(more_rows)}). 280 GB are also the "
        "float32 weights of a model of 70B, and 35 GB these weights in 4 bits: quantisation, not training",
    )


def judge_gpt3(rows: Rows, measured: Measured) -> Finding:
    pairs = [(name, base) for name in ("both", "checkpointing alone") for base in ("plain autodiff", "none")]
    peaks = {pair: saved(rows[pair[0]], rows[pair[1]]) for pair in pairs}
    plain, none = (peaks["checkpointing alone", base] >= 0.78 for base in ("plain autodiff", "none"))
    return Finding(
        HOLDS if plain and none else holds_under("plain autodiff as the baseline") if plain else REFUTED,
        f"it saves {peaks['checkpointing alone', 'plain autodiff']:.0%} of the peak of plain autodiff in float32, "
        f"{peaks['checkpointing alone', 'none']:.0%} of that with `none`, which keeps less; with 16 bits as well "
        f"{peaks['both', 'plain autodiff']:.0%} and {peaks['both', 'none']:.0%}; of activations, with 16 bits as well, "
        f"{saved(rows['both'], rows['plain autodiff'], 'activations'):.0%} and "
        f"{saved(rows['both'], rows['none'], 'activations'):.0%}",
    )


def judge_experts(rows: Rows, measured: Measured) -> Finding:
    peak, flops = saved(rows["experts"], rows["dense"]), -extra_flops(rows["experts"], rows["dense"])
    return Finding(
        HOLDS if peak >= 0.8 else REFUTED,
        f"with remat `full` they save {peak:.0%} of the memory and {flops:.0%} of the FLOPs of a dense model with as "
        "many parameters: all experts have master weights, gradients and moments",
    )


def judge_lora(rows: Rows, measured: Measured) -> Finding:
    whole, int8 = (saved(rows[name], rows["all parameters"]) for name in ("LoRA", "LoRA over int8"))
    alone = saved(rows["LoRA alone"], rows["all parameters alone"])
    condition = holds_under("16 bits, remat `full` and a loss in chunks")
    return Finding(
        HOLDS if min(whole, alone) >= 0.7 else condition if whole >= 0.7 else REFUTED,
        f"it saves {whole:.0%} of the peak in 16 bits with remat `full` and the loss in chunks, {int8:.0%} over an "
        f"int8 base, and {alone:.0%} without these settings, because it leaves the activations as they are",
    )


def judge_zero(stage: int, factor: float, traffic: float, rows: Rows, measured: Measured) -> Finding:
    """Judge a stage by its state and by what it sends, in relation to stage 0.

    factor, traffic: the claim's, by the paper's formula for 64 GPUs.
    """
    base, row = rows["ZeRO-0"], rows[f"ZeRO-{stage}"]
    less, more = state_bytes(base) / state_bytes(row), row["sent"] / base["sent"] - 1
    enough, cheap = less >= 0.95 * factor, more <= traffic
    return Finding(
        HOLDS if enough and cheap else PARTLY if enough or cheap else REFUTED,
        f"{less:.1f} times less state ({state_bytes(base) / base['parameters']:.1f} to "
        f"{state_bytes(row) / row['parameters']:.2f} bytes per parameter at the peak), for {more:+.0%} of bytes sent",
    )


GATHERS_16, GRADIENTS_16, FLOAT32 = "float32 gradients", "16-bit gradients", "float32"  # formats of ZeRO-3's cases


def judge_zero_3(factor: float, rows: Rows, measured: Measured) -> Finding:
    """Judge stage 3 in three formats. It sends weights twice more, in theirs, and gradients once less, in theirs."""
    formats = (GATHERS_16, GRADIENTS_16, FLOAT32)
    pairs = {name: (rows[f"ZeRO-0, {name}"], rows[f"ZeRO-3, {name}"]) for name in formats}
    less = state_bytes(pairs[GRADIENTS_16][0]) / state_bytes(pairs[GRADIENTS_16][1])
    more = {name: row["sent"] / base["sent"] - 1 for name, (base, row) in pairs.items()}
    cheap = [name for name in formats if more[name] <= 0.3]
    enough = less >= 0.95 * factor
    condition = holds_under("16-bit gathers with float32 gradients")
    return Finding(
        (HOLDS if len(cheap) == len(formats) else condition if cheap == [GATHERS_16] else PARTLY)
        if enough
        else REFUTED,
        f"{less:.1f} times less state; bytes sent: {more[GATHERS_16]:+.0%} with 16-bit weights and float32 gradients, "
        f"{more[GRADIENTS_16]:+.0%} with both in 16 bits and {more[FLOAT32]:+.0%} with both in float32. The paper "
        "itself says 50%",
    )


def judge_offload(rows: Rows, measured: Measured) -> Finding:
    weights = 2 * rows["on the GPU"]["parameters"]
    least, with_offload = (rows[name]["memory"]["peak"] / weights for name in ("on the GPU", "offloaded"))
    price = rows["offloaded"]["step_seconds"] / rows["on the GPU"]["step_seconds"]
    return Finding(
        HOLDS if least <= 1.5 else REFUTED,
        f"training all parameters with AdamW on one GPU takes {least:.1f} times the bytes of the 16-bit weights "
        f"without offload, with 8-bit moments and updates inside the backward, and {with_offload:.1f} times with all "
        f"that can be offloaded. Between these only offload fits, and a step takes {price:.0f} times as long by the "
        "roofline",
    )


def judge_flash(rows: Rows, measured: Measured) -> Finding:
    ratio = rows["xla"]["step_seconds"] / rows["cudnn"]["step_seconds"]
    memory_ratio = rows["xla"]["memory"]["peak"] / rows["cudnn"]["memory"]["peak"]
    return Finding(
        HOLDS if ratio >= 1.3 else REFUTED,
        f"a step of 7B is {ratio:.2f} times as fast with cuDNN's kernels as with blockwise attention in XLA by the "
        f"roofline, and needs {1 - 1 / memory_ratio:.0%} less memory. By the clock of an H200, cuDNN's forward and "
        f"backward alone are {measured['xla / cudnn, kernel seconds']:.1f} times as fast (rows of 8192 tokens). The "
        "baseline stores no scores either, so the gain over attention that stores them is larger",
    )


def judge_network(rows: Rows, measured: Measured) -> Finding:
    time = rows["two hosts"]
    share = time["network_seconds"] / time["step_seconds"]
    return Finding(
        HOLDS if share >= 0.5 else REFUTED,
        f"{share:.0%} of a step of {time['step_seconds']:.1f} s, which would otherwise take "
        f"{time['step_seconds'] - time['network_seconds']:.2f} s",
    )
