"""Settle published claims about memory and speed, each by its own criterion.

    python benchmarks/claims.py [--only NAME ...] [--json FILE]

A claim is judged by programs that `plan` compiles for GPUs that need not be present: bytes and FLOPs are exact, times
are of the roofline. `checkpointing` also measures steps on this machine, in alternation. With --only, the other claims
keep their rows of FILE. scripts/claims_page.py writes docs/claims.md from benchmarks/results/claims.json.
"""

import functools
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import jax
import memory
import train_step
from cases import run_cases
from memory import (
    BF16,
    BF16_GRADIENTS,
    CHUNKS,
    FULL,
    INT8_MOMENTS,
    LORA,
    OFF,
    ONE_GPU,
    QLORA,
    ZERO_3,
    Row,
    adding_up,
    extra_flops,
    saved,
)
from outcomes import save as save_report
from train_step import HUGE_PAGES, Contender, run_alternating

from jaxopt_llm.config import cli
from jaxopt_llm.training.validation import validate

Rows = Mapping[str, Row]
HOLDS, PARTLY, REFUTED = "holds", "holds in part", "refuted"
EIGHT, SIXTY_FOUR, ONE = ("h200", 1, 8), ("h100", 8, 8), ("h200", 1, 1)
LLAMA = "llama2_7b.py"
STATE = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Case:
    """Recipe with settings, compiled for (GPU, hosts, GPUs of each). plain, networks: see `memory.compile_step`."""

    settings: str
    recipe: str = LLAMA
    machines: tuple[str, int, int] = EIGHT
    plain: bool = False
    networks: tuple[float, ...] = ()

    def compile(self) -> Row:
        config = cli.override_config(cli.load_recipe(self.recipe), shlex.split(self.settings), "benchmarks/claims.py")
        validate(config)
        return memory.compile_step(config, *self.machines, plain=self.plain, networks=self.networks)


@dataclass(frozen=True)
class Finding:
    verdict: str
    found: str


@dataclass(frozen=True)
class Claim:
    """A claim in its own words, and how it is settled.

    Attributes:
        cases: compiled cases by name.
        judge: (rows of the cases, measurements) -> finding.
        measure: returns measurements of this machine.
    """

    name: str
    says: str
    source: str
    setting: str
    cases: Mapping[str, Case]
    judge: Callable[[Rows, Mapping[str, float]], Finding]
    measure: Callable[[], Mapping[str, float]] = field(default=lambda: {})

    def settle(self) -> dict[str, Any]:
        rows = {name: case.compile() for name, case in self.cases.items()}
        measured = dict(self.measure())
        finding = self.judge(rows, measured)
        return {
            "case": self.name,
            "says": self.says,
            "source": self.source,
            "setting": self.setting,
            "verdict": finding.verdict,
            "found": finding.found,
            "measured": measured,
            "cases": {name: asdict(case) for name, case in self.cases.items()},
            "rows": rows,
        }


def state_bytes(row: Row) -> int:
    return sum(row["memory"][kind] for kind in STATE)


def beyond_state(row: Row, base: Row) -> float:
    """Return the bytes of the peak beyond parameters, moments and the gradients of the base.

    A step that recomputes has its peak in the update, where no activations are left. So this is compared instead.
    """
    return float(row["memory"]["peak"] - state_bytes(base))


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


# ---- Judgements.


def judge_mixed_precision(rows: Rows, measured: Mapping[str, float]) -> Finding:
    whole, divided = saved(rows["bf16"], rows["off"]), saved(rows["bf16, ZeRO-3"], rows["ZeRO-3"])
    activations = saved(rows["bf16"], rows["off"], "activations")
    return Finding(
        HOLDS if max(whole, divided) >= 0.5 else REFUTED,
        f"bf16 saves {whole:.0%} of the peak, {activations:.0%} of activations: master weights, gradients and moments "
        f"stay in float32, 16 bytes per parameter. Where activations dominate, because ZeRO-3 divides these by 8, it "
        f"saves {divided:.0%} of the peak",
    )


def measure_checkpointing() -> Mapping[str, float]:
    """Measure seconds of a step with and without recomputation on this machine, in alternation."""
    model = "--model.width 256 --model.heads 4 --model.kv-heads 4 --model.layers 8 --model.mlp-width 768"
    common = ["--config", "quickstart.py", *model.split(), "--evaluation.batches", "1"]
    without_profile = ""
    contenders: dict[str, Contender] = {
        policy: (train_step.__file__, [without_profile, *common, "--remat.policy", policy], HUGE_PAGES)
        for policy in ("none", "full")
    }
    *_, results = run_alternating(5, 10, contenders)
    ratios = [full["step_seconds"] / none["step_seconds"] for none, full in zip(*results, strict=True)]
    return {"full / none, step seconds": median(ratios), "least": min(ratios), "most": max(ratios)}


def judge_checkpointing(rows: Rows, measured: Mapping[str, float]) -> Finding:
    full, off, plain = (beyond_state(rows[name], rows["off"]) for name in ("full", "off", "plain autodiff"))
    activations = 1 - full / plain
    roofline = rows["full, bf16"]["step_seconds"] / rows["none, bf16"]["step_seconds"] - 1
    clock = measured["full / none, step seconds"] - 1
    enough, cheap = activations >= 0.6, roofline <= 0.3
    return Finding(
        HOLDS if enough and cheap else PARTLY if enough or cheap else REFUTED,
        f"it saves {activations:.0%} of the activations of plain autodiff, {1 - full / off:.0%} of those of `none`, "
        f"for {extra_flops(rows['full'], rows['off']):.0%} more FLOPs; time: {roofline:+.0%} by the roofline (bf16, "
        f"{LLAMA}), {clock:+.0%} measured on a CPU (6M parameters, 5 pairs: {measured['least'] - 1:+.0%} to "
        f"{measured['most'] - 1:+.0%})",
    )


def judge_zero_280(rows: Rows, measured: Mapping[str, float]) -> Finding:
    before, after = (rows[name]["memory"]["peak"] for name in ("off", "ZeRO-3, bf16"))
    literal = abs(before / 280e9 - 1) < 0.1 and abs(after / 35e9 - 1) < 0.1
    states = [state_bytes(rows[name]) for name in ("off", "ZeRO-3, bf16")]
    return Finding(
        HOLDS if literal else REFUTED,
        f"{gigabytes(before)} to {gigabytes(after)}, a factor of {before / after:.1f}; parameters, gradients and "
        f"moments alone {gigabytes(states[0])} to {gigabytes(states[1])}, a factor of {states[0] / states[1]:.1f}. No "
        "source says which 280 GB are meant: with the 16 bytes per parameter of AdamW they are the state of a model of "
        "17.5B, and an eighth of that is 35 GB",
    )


def judge_gpt3(rows: Rows, measured: Mapping[str, float]) -> Finding:
    of_plain, of_none = (saved(rows["both"], rows[name]) for name in ("plain autodiff", "none"))
    return Finding(
        HOLDS if of_plain >= 0.78 else REFUTED,
        f"they save {of_plain:.0%} of the peak of plain autodiff, {of_none:.0%} of that with `none`, which keeps less; "
        f"of activations {saved(rows['both'], rows['plain autodiff'], 'activations'):.0%} and "
        f"{saved(rows['both'], rows['none'], 'activations'):.0%}",
    )


def judge_experts(rows: Rows, measured: Mapping[str, float]) -> Finding:
    peak, flops = saved(rows["experts"], rows["dense"]), -extra_flops(rows["experts"], rows["dense"])
    return Finding(
        HOLDS if peak >= 0.8 else REFUTED,
        f"they save {peak:.0%} of the memory and {flops:.0%} of the FLOPs of a dense model with as many parameters: "
        "all experts have master weights, gradients and moments",
    )


def judge_lora(rows: Rows, measured: Mapping[str, float]) -> Finding:
    whole, int8 = (saved(rows[name], rows["all parameters"]) for name in ("LoRA", "LoRA over int8"))
    return Finding(
        HOLDS if whole >= 0.7 else REFUTED,
        f"it saves {whole:.0%} of the peak in 16 bits with remat `full`, {int8:.0%} over an int8 base",
    )


def judge_zero(stage: int, factor: float, traffic: float, rows: Rows, measured: Mapping[str, float]) -> Finding:
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


def judge_offload(rows: Rows, measured: Mapping[str, float]) -> Finding:
    weights = 2 * rows["on the GPU"]["parameters"]
    least, with_offload = (rows[name]["memory"]["peak"] / weights for name in ("on the GPU", "offloaded"))
    return Finding(
        HOLDS if least <= 1.5 else REFUTED,
        f"training all parameters with AdamW on one GPU takes {least:.1f} times the bytes of the 16-bit weights with "
        f"8-bit moments and all of it on the GPU, and {with_offload:.1f} times with masters and moments on the host: "
        "between these, only the setting with offload fits",
    )


def judge_flash(rows: Rows, measured: Mapping[str, float]) -> Finding:
    ratio = rows["xla"]["step_seconds"] / rows["cudnn"]["step_seconds"]
    memory_ratio = rows["xla"]["memory"]["peak"] / rows["cudnn"]["memory"]["peak"]
    return Finding(
        HOLDS if ratio >= 1.3 else REFUTED,
        f"a step of {LLAMA} is {ratio:.2f} times as fast with cuDNN's kernels as with blockwise attention in XLA by "
        f"the roofline, and needs {1 - 1 / memory_ratio:.0%} less memory. The baseline stores no scores either, so the "
        "gain over attention that stores them is larger",
    )


def judge_network(rows: Rows, measured: Mapping[str, float]) -> Finding:
    (time,) = rows["two hosts"]["networks"]
    share = time["network_seconds"] / time["step_seconds"]
    return Finding(
        HOLDS if share >= 0.5 else REFUTED,
        f"{share:.0%} of a step of {time['step_seconds']:.1f} s, which would otherwise take "
        f"{time['step_seconds'] - time['network_seconds']:.2f} s",
    )


# ---- Claims.

FLOAT32 = "--precision.compute-dtype float32 --remat.policy none --training.loss-chunk 0"
FAST = f"{BF16.settings} --sharding.zero-stage 3 --data.documents-per-row 1 --training.batch-size 8"
SMALL_GPU = f"{OFF} {ONE_GPU}"
ON_64 = (
    f"{BF16.settings} {BF16_GRADIENTS.settings} {FULL.settings} {CHUNKS.settings} --mesh.fsdp 64 "
    "--training.batch-size 64 --training.accumulation 1 --sharding.zero-stage"
)
STAGES = {f"ZeRO-{stage}": Case(f"{ON_64} {stage}", machines=SIXTY_FOUR) for stage in range(4)}
ZERO_PAPER = "ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054)"
DENSE = "--model.moe.experts 0 --model.mlp-width 114688 --mesh.expert 1 --mesh.fsdp 8"
BF16_FULL_CHUNKS = adding_up(BF16, FULL, CHUNKS)[-1].settings


def make_zero_claim(stage: int, says: str, factor: float) -> Claim:
    """Return the claim on a stage. factor: of the state, by the paper's formula for 64 GPUs."""
    traffic, words = (0.5, "for 50% more communication") if stage == 3 else (0.05, "with no more communication")
    return Claim(
        f"zero-{stage}",
        f"ZeRO-{stage}: {says}, {words}",
        ZERO_PAPER,
        f"{LLAMA}, 8 hosts of 8 H100s, bf16 with gradients in bf16",
        {name: STAGES[name] for name in ("ZeRO-0", f"ZeRO-{stage}")},
        functools.partial(judge_zero, stage, factor, traffic),
    )


CLAIMS = (
    Claim(
        "mixed-precision",
        "mixed precision halves memory",
        "after Micikevicius et al. 2018, arXiv:1710.03740, who say so where activations dominate",
        f"{LLAMA}, 8 H200s, ZeRO-0, one row of 4096 tokens each",
        {
            "off": Case(OFF),
            "bf16": Case(f"{OFF} {BF16.settings}"),
            "ZeRO-3": Case(f"{OFF} {ZERO_3.settings}"),
            "bf16, ZeRO-3": Case(f"{OFF} {BF16.settings} {ZERO_3.settings}"),
        },
        judge_mixed_precision,
    ),
    Claim(
        "checkpointing",
        "activation checkpointing saves 60 to 70% of activations for 20 to 30% more time",
        "after Chen et al. 2016, arXiv:1604.06174",
        f"{LLAMA}, 8 H200s; time: with bf16 and ZeRO-3",
        {
            "off": Case(OFF),
            "plain autodiff": Case(OFF, plain=True),
            "full": Case(f"{OFF} {FULL.settings}"),
            "none, bf16": Case(f"{FAST} --remat.policy none"),
            "full, bf16": Case(f"{FAST} --remat.policy full"),
        },
        judge_checkpointing,
        measure_checkpointing,
    ),
    Claim(
        "zero-280-to-35",
        "ZeRO-3 and 16 bits take LLaMA 2 7B from 280 to 35 GB a GPU",
        "repeated in reviews; no source found",
        f"{LLAMA}, 8 H200s, float32 and ZeRO-0 against bf16 and ZeRO-3",
        {"off": Case(OFF), "ZeRO-3, bf16": Case(f"{OFF} {BF16.settings} {ZERO_3.settings}")},
        judge_zero_280,
    ),
    Claim(
        "gpt3-checkpointing",
        "checkpointing and 16 bits save 78% of memory on GPT-3",
        "repeated in reviews; no source found",
        "gpt3_175b.py, 12 hosts of 8 H100s",
        {
            "none": Case(FLOAT32, "gpt3_175b.py", ("h100", 12, 8)),
            "plain autodiff": Case(FLOAT32, "gpt3_175b.py", ("h100", 12, 8), plain=True),
            "both": Case(f"{FLOAT32} {BF16.settings} {FULL.settings}", "gpt3_175b.py", ("h100", 12, 8)),
        },
        judge_gpt3,
    ),
    Claim(
        "experts",
        "sparse experts save 80% of memory",
        "repeated in reviews; no source found",
        "mixtral_8x7b.py against a dense model with one MLP as wide as all experts, 8 H200s",
        {"experts": Case("", "mixtral_8x7b.py"), "dense": Case(DENSE, "mixtral_8x7b.py")},
        judge_experts,
    ),
    Claim(
        "lora",
        "LoRA saves 70% of memory",
        "Hu et al. 2021, arXiv:2106.09685: GPT-3 from 1.2 TB to 350 GB",
        f"{LLAMA}, one H200, bf16, remat full, loss in chunks, rank 16",
        {
            "all parameters": Case(f"{SMALL_GPU} {BF16_FULL_CHUNKS}", machines=ONE),
            "LoRA": Case(f"{SMALL_GPU} {BF16_FULL_CHUNKS} {LORA.settings}", machines=ONE),
            "LoRA over int8": Case(f"{SMALL_GPU} {BF16_FULL_CHUNKS} {QLORA.settings}", machines=ONE),
        },
        judge_lora,
    ),
    make_zero_claim(1, "4 times less memory for the state on many GPUs (3.8 on 64)", 16 / (4 + 12 / 64)),
    make_zero_claim(2, "8 times less memory for the state on many GPUs (7.2 on 64)", 16 / (2 + 14 / 64)),
    make_zero_claim(3, "1/N of the state on each of N GPUs", 64),
    Claim(
        "offload",
        "offload pays only below 1.5 times the bytes of the parameters of GPU memory",
        "repeated in reviews; no source found",
        f"{LLAMA}, one H200, bf16 with gradients in bf16, remat full, loss in chunks",
        {
            name: Case(f"{SMALL_GPU} {BF16_FULL_CHUNKS} {BF16_GRADIENTS.settings} {more.settings}", machines=ONE)
            for name, more in (("on the GPU", INT8_MOMENTS), ("offloaded", memory.OFFLOAD_ALL))
        },
        judge_offload,
    ),
    Claim(
        "flash-attention",
        "FlashAttention makes training 1.3 to 2 times as fast",
        "repeated in reviews; no source found",
        f"{LLAMA}, 8 H200s, bf16, ZeRO-3, remat full",
        {
            name: Case(f"{FAST} --remat.policy full --training.attention {name}") for name in ("xla", "cudnn")
        },
        judge_flash,
    ),
    Claim(
        "10-gigabit",
        "on 10 Gb/s, the exchange of gradients takes more than half of a step",
        "repeated in reviews; no source found",
        f"{LLAMA}, 2 hosts of 8 H100s, ZeRO-3 inside a host, float32 gradients between hosts, 32 rows of 4096 tokens",
        {
            "two hosts": Case(
                f"{BF16.settings} --mesh.data 2 --mesh.fsdp 8 --training.batch-size 32 --data.documents-per-row 1",
                machines=("h100", 2, 8),
                networks=(10.0,),
            )
        },
        judge_network,
    ),
)  # fmt: skip

HEADER = f"{'claim':20} {'verdict':14} found"


def format_row(row: Mapping[str, Any]) -> str:
    return f"{row['case']:20} {row['verdict']:14} {row['says']}: {row['found']}"


def save(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    said = [f"jax {jax.__version__}", HEADER, *map(format_row, rows)]
    save_report(file, {"jax": jax.__version__, "rows": list(rows)}, "\n".join(said))


def main() -> int:
    return run_cases(__doc__, {claim.name: claim.settle for claim in CLAIMS}, HEADER, format_row, save)


if __name__ == "__main__":
    from jaxopt_llm.core import errors

    errors.run_command(main)
