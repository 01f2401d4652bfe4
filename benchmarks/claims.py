"""Settle published claims about memory and speed, each by its own criterion.

    python benchmarks/claims.py [--only NAME ...] [--json FILE]

A claim is judged by programs that `plan` compiles for GPUs that need not be present: bytes and FLOPs are exact, times
are of the roofline. `checkpointing` also measures steps on this machine, in alternation. With --only, the other claims
keep their rows of FILE, if these are of the same version of JAX. scripts/claims_page.py writes docs/claims.md from
benchmarks/results/claims.json.
"""

import functools
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import jax
import memory
import train_step
from cases import run_cases
from claim_verdicts import (
    FLOAT32,
    GATHERS_16,
    GRADIENTS_16,
    Finding,
    Measured,
    Rows,
    judge_checkpointing,
    judge_experts,
    judge_flash,
    judge_gpt3,
    judge_lora,
    judge_mixed_precision,
    judge_network,
    judge_offload,
    judge_zero,
    judge_zero_3,
    judge_zero_280,
)
from memory import (
    BF16,
    BF16_GRADIENTS,
    CHUNKS,
    FULL,
    IN_BACKWARD,
    INT8_MOMENTS,
    LORA,
    OFF,
    OFFLOAD_ALL,
    OFFLOAD_PARAMETERS,
    ONE_GPU,
    QLORA,
    ZERO_3,
    Row,
    adding_up,
)
from outcomes import save as save_report
from train_step import HUGE_PAGES, Contender, run_alternating

from jaxopt_llm.config import cli
from jaxopt_llm.step.validation import validate

EIGHT, SIXTY_FOUR, ONE = ("h200", 1, 8), ("h100", 8, 8), ("h200", 1, 1)
LLAMA = "llama2_7b.py"
PAIRS = 15  # of measured steps
ATTENTION = Path(__file__).parent / "results" / "nvidia-h200-attention.json"


@dataclass(frozen=True)
class Case:
    """Recipe with settings, compiled for (GPU, hosts, GPUs of each). plain, network: see `memory.compile_step`."""

    settings: str
    recipe: str = LLAMA
    machines: tuple[str, int, int] = EIGHT
    plain: bool = False
    network: float | None = None

    def compile(self) -> Row:
        config = cli.override_config(cli.load_recipe(self.recipe), shlex.split(self.settings), "benchmarks/claims.py")
        validate(config)
        return memory.compile_step(config, *self.machines, plain=self.plain, network=self.network)


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
    judge: Callable[[Rows, Measured], Finding]
    measure: Callable[[], Measured] = field(default=lambda: {})

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


def measure_checkpointing() -> Measured:
    """Measure seconds of a step with and without recomputation on this machine, in alternation."""
    model = "--model.width 256 --model.heads 4 --model.kv-heads 4 --model.layers 8 --model.mlp-width 768"
    common = ["--config", "quickstart.py", *model.split(), "--evaluation.batches", "1"]
    without_profile = ""
    contenders: dict[str, Contender] = {
        policy: (train_step.__file__, [without_profile, *common, "--remat.policy", policy], HUGE_PAGES)
        for policy in ("none", "full")
    }
    *_, results = run_alternating(PAIRS, 10, contenders)
    ratios = [full["step_seconds"] / none["step_seconds"] for none, full in zip(*results, strict=True)]
    first, middle, third = quantiles(ratios, method="inclusive")
    told = {"full / none, step seconds": middle, "first quartile": first, "third quartile": third}
    return told | {"pairs": float(len(ratios))}


def read_attention() -> Measured:
    """Return the measurement of attention on an H200, which benchmarks/attention.py has made."""
    found = json.loads(ATTENTION.read_text())["rows"]
    seconds = {
        row["name"]: row["forward_seconds"] + row["backward_seconds"]
        for row in found
        if row["head_dim"] == 128 and row["documents"] == 1
    }
    return {"xla / cudnn, kernel seconds": seconds["xla"] / seconds["cudnn"]}


# ---- Claims.

PLAIN_FLOAT32 = "--precision.compute-dtype float32 --remat.policy none --training.loss-chunk 0"
FP16 = "--precision.compute-dtype float16"
FAST = f"{BF16.settings} --sharding.zero-stage 3 --data.documents-per-row 1 --training.batch-size 8"
SMALL_GPU = f"{OFF} {ONE_GPU}"
ON_64 = (
    f"{FULL.settings} {CHUNKS.settings} --mesh.fsdp 64 --training.batch-size 64 --training.accumulation 1 "
    "--sharding.zero-stage"
)
IN_16_BITS = f"{BF16.settings} {BF16_GRADIENTS.settings}"
STAGES = {f"ZeRO-{stage}": Case(f"{IN_16_BITS} {ON_64} {stage}", machines=SIXTY_FOUR) for stage in range(3)}
FORMATS = {
    GATHERS_16: BF16.settings,
    GRADIENTS_16: IN_16_BITS,
    FLOAT32: "--precision.compute-dtype float32",
}
ZERO_PAPER = "ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054)"
DENSE = "--model.moe.experts 0 --model.mlp-width 114688 --mesh.expert 1 --mesh.fsdp 8"
BF16_FULL_CHUNKS = adding_up(BF16, FULL, CHUNKS)[-1].settings


def make_zero_claim(stage: int, says: str, factor: float) -> Claim:
    """Return the claim on stage 1 or 2. factor: of the state, by the paper's formula for 64 GPUs."""
    return Claim(
        f"zero-{stage}",
        f"ZeRO-{stage}: {says}, with no more communication",
        ZERO_PAPER,
        f"{LLAMA}, 8 hosts of 8 H100s, bf16 with gradients in bf16",
        {name: STAGES[name] for name in ("ZeRO-0", f"ZeRO-{stage}")},
        functools.partial(judge_zero, stage, factor, 0.05),
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
        f"{LLAMA}, 8 H200s, float32 and ZeRO-0 against 16 bits and ZeRO-3",
        {
            "off": Case(OFF),
            "off, 7 rows": Case(f"{OFF} --training.batch-size 56"),
            "ZeRO-3, bf16": Case(f"{OFF} {BF16.settings} {ZERO_3.settings}"),
            "ZeRO-3, fp16": Case(f"{OFF} {FP16} {ZERO_3.settings}"),
        },
        judge_zero_280,
    ),
    Claim(
        "gpt3-checkpointing",
        "checkpointing saves 78% of memory on GPT-3",
        "repeated in reviews; no source found",
        "gpt3_175b.py, 12 hosts of 8 H100s",
        {
            "none": Case(PLAIN_FLOAT32, "gpt3_175b.py", ("h100", 12, 8)),
            "plain autodiff": Case(PLAIN_FLOAT32, "gpt3_175b.py", ("h100", 12, 8), plain=True),
            "both": Case(f"{PLAIN_FLOAT32} {BF16.settings} {FULL.settings}", "gpt3_175b.py", ("h100", 12, 8)),
            "checkpointing alone": Case(f"{PLAIN_FLOAT32} {FULL.settings}", "gpt3_175b.py", ("h100", 12, 8)),
        },
        judge_gpt3,
    ),
    Claim(
        "experts",
        "sparse experts save 80% of memory",
        "repeated in reviews; no source found",
        "mixtral_8x7b.py with remat full, against a dense model with one MLP as wide as all experts, 8 H200s",
        {
            "experts": Case(FULL.settings, "mixtral_8x7b.py"),
            "dense": Case(f"{FULL.settings} {DENSE}", "mixtral_8x7b.py"),
        },
        judge_experts,
    ),
    Claim(
        "lora",
        "LoRA saves 70% of memory",
        "Hu et al. 2021, arXiv:2106.09685: GPT-3 from 1.2 TB to 350 GB",
        f"{LLAMA}, one H200, rank 16; alone: in float32 without remat",
        {
            "all parameters alone": Case(SMALL_GPU, machines=ONE),
            "LoRA alone": Case(f"{SMALL_GPU} {LORA.settings}", machines=ONE),
            "all parameters": Case(f"{SMALL_GPU} {BF16_FULL_CHUNKS}", machines=ONE),
            "LoRA": Case(f"{SMALL_GPU} {BF16_FULL_CHUNKS} {LORA.settings}", machines=ONE),
            "LoRA over int8": Case(f"{SMALL_GPU} {BF16_FULL_CHUNKS} {QLORA.settings}", machines=ONE),
        },
        judge_lora,
    ),
    make_zero_claim(1, "4 times less memory for the state on many GPUs (3.8 on 64)", 16 / (4 + 12 / 64)),
    make_zero_claim(2, "8 times less memory for the state on many GPUs (7.2 on 64)", 16 / (2 + 14 / 64)),
    Claim(
        "zero-3",
        "ZeRO-3: 1/N of the state on each of N GPUs, for 30% more communication",
        f"{ZERO_PAPER} for the state; the 30% are repeated in reviews",
        f"{LLAMA}, 8 hosts of 8 H100s, in three formats",
        {
            f"ZeRO-{stage}, {name}": Case(f"{settings} {ON_64} {stage}", machines=SIXTY_FOUR)
            for name, settings in FORMATS.items()
            for stage in (0, 3)
        },
        functools.partial(judge_zero_3, 64),
    ),
    Claim(
        "offload",
        "offload pays only below 1.5 times the bytes of the parameters of GPU memory",
        "repeated in reviews; no source found",
        f"{LLAMA}, one H200, bf16, remat full, loss in chunks, the optimizer in the backward",
        {
            name: Case(f"{SMALL_GPU} {BF16_FULL_CHUNKS} {IN_BACKWARD.settings} {more}", machines=ONE)
            for name, more in (
                ("on the GPU", INT8_MOMENTS.settings),
                ("offloaded", f"{OFFLOAD_ALL.settings} {OFFLOAD_PARAMETERS.settings}"),
            )
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
        read_attention,
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
                network=10.0,
            )
        },
        judge_network,
    ),
)  # fmt: skip

HEADER = f"{'claim':20} {'verdict':14} found"


def format_row(row: Mapping[str, Any]) -> str:
    lines = [
        f"{row['case']:20} {row['verdict']:14} {row['says']}: {row['found']}",
        f"{'':35} {row['setting']}; python benchmarks/claims.py --only {row['case']}",
    ]
    return "\n".join(lines)


def save(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    said = [f"jax {jax.__version__}", HEADER, *map(format_row, rows)]
    save_report(file, {"jax": jax.__version__, "rows": list(rows)}, "\n".join(said))


def main() -> int:
    return run_cases(__doc__, {claim.name: claim.settle for claim in CLAIMS}, HEADER, format_row, save)


if __name__ == "__main__":
    from jaxopt_llm.core import errors

    errors.run_command(main)
