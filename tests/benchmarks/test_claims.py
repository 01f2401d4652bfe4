"""benchmarks/claims.py: its settings, its judgements, and the page that shows its result."""

import dataclasses
import json
import shlex
import subprocess
import sys
from typing import Any

import claim_verdicts as verdicts
import claims
import pytest
from claim_verdicts import HOLDS, PARTLY, REFUTED, holds_under
from commands import ROOT

from jaxopt_llm.config import cli
from jaxopt_llm.step.validation import validate

pytestmark = pytest.mark.core
RESULT = ROOT / "benchmarks" / "results" / "claims.json"


def row(peak: float = 100, flops: float = 100, seconds: float = 1, sent: float = 0, **kinds: float) -> claims.Row:
    memory = {"parameters": 0, "gradients": 0, "optimizer": 0, "activations": 0} | kinds | {"peak": peak}
    return {"memory": memory, "flops": flops, "step_seconds": seconds, "sent": sent, "parameters": 10}


def test_the_page_is_up_to_date() -> None:
    script = ROOT / "scripts" / "claims_page.py"
    done = subprocess.run([sys.executable, script, "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_result_has_every_claim_with_its_settings() -> None:
    rows = json.loads(RESULT.read_text())["rows"]
    assert [each["case"] for each in rows] == [claim.name for claim in claims.CLAIMS]
    for found, claim in zip(rows, claims.CLAIMS, strict=True):
        cases = {name: dataclasses.asdict(case) for name, case in claim.cases.items()}
        assert found["cases"] == json.loads(json.dumps(cases)), claim.name
        assert (found["says"], found["setting"], found["source"]) == (claim.says, claim.setting, claim.source)
        finding = claim.judge(found["rows"], found["measured"])
        assert (found["verdict"], found["found"]) == (finding.verdict, finding.found), claim.name


def test_the_settings_are_valid() -> None:
    for claim in claims.CLAIMS:
        for case in claim.cases.values():
            config = cli.override_config(cli.load_recipe(case.recipe), shlex.split(case.settings), "claims.py")
            validate(config)
            assert config.mesh.devices == case.machines[1] * case.machines[2], (claim.name, case.settings)


@pytest.mark.parametrize(("peak", "divided", "verdict"), [(50, 90, HOLDS), (90, 50, HOLDS), (90, 51, REFUTED)])
def test_mixed_precision(peak: float, divided: float, verdict: str) -> None:
    rows = {"off": row(100, activations=10), "bf16": row(peak, activations=5)}
    rows |= {"ZeRO-3": row(100), "bf16, ZeRO-3": row(divided)}
    assert verdicts.judge_mixed_precision(rows, {}).verdict == verdict


@pytest.mark.parametrize(
    ("kept", "roofline", "clock", "verdict"),
    [
        (40, 1.29, 1.29, HOLDS),
        (40, 1.31, 1.2, PARTLY),
        (40, 1.2, 1.31, PARTLY),
        (41, 1.2, 1.2, PARTLY),
        (41, 2, 1, REFUTED),
    ],
)
def test_checkpointing(kept: float, roofline: float, clock: float, verdict: str) -> None:
    rows = {
        "off": row(peak=140, optimizer=50),
        "plain autodiff": row(peak=150, optimizer=50),
        "full": row(peak=50 + kept, optimizer=50),
        "none, bf16": row(seconds=1),
        "full, bf16": row(seconds=roofline),
    }
    measured = {"full / none, step seconds": clock, "first quartile": clock, "third quartile": clock, "pairs": 5}
    assert verdicts.judge_checkpointing(rows, measured).verdict == verdict


@pytest.mark.parametrize(
    ("before", "after", "verdict"), [(280e9, 35e9, HOLDS), (134e9, 16.75e9, REFUTED), (280e9, 60e9, REFUTED)]
)
def test_from_280_to_35(before: float, after: float, verdict: str) -> None:
    rows = {"off": row(before, optimizer=80), "off, 7 rows": row(), "ZeRO-3, bf16": row(optimizer=10)}
    rows["ZeRO-3, fp16"] = row(after)
    assert verdicts.judge_zero_280(rows, {}).verdict == verdict


@pytest.mark.parametrize(("state", "sent", "verdict"), [(20, 100, HOLDS), (20, 120, PARTLY), (40, 120, REFUTED)])
def test_a_stage_of_zero(state: float, sent: float, verdict: str) -> None:
    rows = {"ZeRO-0": row(sent=100, optimizer=80), "ZeRO-1": row(sent=sent, optimizer=state)}
    assert verdicts.judge_zero(1, 4, 0.05, rows, {}).verdict == verdict


@pytest.mark.parametrize(("share", "verdict"), [(0.5, HOLDS), (0.4, REFUTED)])
def test_a_slow_network(share: float, verdict: str) -> None:
    times = {"step_seconds": 2.0, "network_seconds": 2 * share}
    assert verdicts.judge_network({"two hosts": row() | times}, {}).verdict == verdict


@pytest.mark.parametrize(
    ("sent", "state", "verdict"),
    [
        ((100, 100, 129), 1, HOLDS),
        ((100, 149, 148), 1, holds_under("16-bit gathers with float32 gradients")),
        ((131, 149, 148), 1, PARTLY),
        ((131, 100, 148), 1, PARTLY),  # under another format than the one that the verdict would name
        ((100, 100, 100), 2, REFUTED),
    ],
)
def test_stage_3_of_zero(sent: tuple[float, ...], state: float, verdict: str) -> None:
    formats = (verdicts.GATHERS_16, verdicts.GRADIENTS_16, verdicts.FLOAT32)
    rows = {f"ZeRO-0, {name}": row(sent=100, optimizer=64) for name in formats}
    rows |= {f"ZeRO-3, {name}": row(sent=each, optimizer=state) for name, each in zip(formats, sent, strict=True)}
    assert verdicts.judge_zero_3(64, rows, {}).verdict == verdict


PLAIN = "plain autodiff as the baseline"
GPT3 = ("both", "checkpointing alone", "plain autodiff", "none")
LORA = ("LoRA", "LoRA over int8", "all parameters", "LoRA alone", "all parameters alone")


@pytest.mark.parametrize(
    ("judge", "names", "figures", "verdict"),
    [
        (verdicts.judge_gpt3, GPT3, (22, 22, 100, 100), HOLDS),
        (verdicts.judge_gpt3, GPT3, (22, 22, 100, 99), holds_under(PLAIN)),
        (verdicts.judge_gpt3, GPT3, (22, 23, 100, 50), REFUTED),  # only together with 16 bits
        (verdicts.judge_experts, ("experts", "dense"), (20, 100), HOLDS),
        (verdicts.judge_experts, ("experts", "dense"), (21, 100), REFUTED),
        (verdicts.judge_lora, LORA, (30, 20, 100, 30, 100), HOLDS),
        (verdicts.judge_lora, LORA, (30, 20, 100, 31, 100), holds_under("16 bits, remat `full` and a loss in chunks")),
        (verdicts.judge_lora, LORA, (31, 20, 100, 30, 100), REFUTED),
        (verdicts.judge_offload, ("on the GPU", "offloaded"), (30, 10), HOLDS),
        (verdicts.judge_offload, ("on the GPU", "offloaded"), (31, 10), REFUTED),
    ],
)
def test_peaks(judge: Any, names: tuple[str, ...], figures: tuple[float, ...], verdict: str) -> None:
    rows = {name: row(peak, activations=1) for name, peak in zip(names, figures, strict=True)}
    assert judge(rows, {}).verdict == verdict


@pytest.mark.parametrize(("seconds", "verdict"), [(1.3, HOLDS), (1.29, REFUTED)])
def test_attention(seconds: float, verdict: str) -> None:
    measured = {"xla / cudnn, kernel seconds": 4.0}
    assert verdicts.judge_flash({"xla": row(seconds=seconds), "cudnn": row()}, measured).verdict == verdict
