"""benchmarks/trace_parts.py on a trace that is written here: each kernel goes to the part of its instruction."""

import json
import sys
from pathlib import Path

import pytest
import trace_parts
from jax.profiler import ProfileData

from jaxopt_llm.core.errors import InputError

PROGRAM = """HloModule step, is_scheduled=true

%twice (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  ROOT %y = f32[1024]{0} add(%x, %x)
}

%adam (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  ROOT %y = f32[1024]{0} multiply(%x, %x), metadata={op_name="jit(step)/update/mul"}
}

ENTRY %main (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  %loop_add_fusion.2 = f32[1024]{0} fusion(%x), kind=kLoop, calls=%twice
  ROOT %loop_multiply_fusion = f32[1024]{0} fusion(%loop_add_fusion.2), kind=kLoop, calls=%adam
}
"""
# Name of a kernel: its microseconds in two steps, and its part.
KERNELS = {
    "nvjet_sm90_tst_256x128_64x4": (400, "matmuls"),
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": (300, "attention"),
    "loop_add_fusion_2": (200, "norms and other elementwise"),
    "loop_multiply_fusion": (100, "optimizer"),
    "MemcpyH2D": (60, "copies to the host and back"),
    "memcpy128": (40, "copies and fills"),
    "ncclDevKernel_ReduceScatter": (20, "collectives"),
    "never_seen": (10, "unknown kernels"),
}


def write_trace(folder: Path, plane: str) -> Path:
    names, events = "", ""
    for number, (name, (microseconds, _)) in enumerate(KERNELS.items(), 1):
        names += f'event_metadata {{ key: {number} value {{ id: {number} name: "{name}" }} }} '
        events += f"events {{ metadata_id: {number} offset_ps: 0 duration_ps: {microseconds * 10**6} }} "
    text = f'planes {{ id: 1 name: "{plane}" {names} lines {{ id: 1 name: "Stream #1" {events} }} }}'
    file = folder / "plugins" / "profile" / "now" / "host.xplane.pb"
    file.parent.mkdir(parents=True)
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    (folder / "step.hlo.txt").write_text(PROGRAM)
    return folder


def test_kernels_go_to_the_parts_of_their_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "report.json"
    folder = write_trace(tmp_path / "trace", "/device:GPU:0")
    monkeypatch.setattr(sys, "argv", ["trace_parts.py", str(folder), "--json", str(report)])
    assert trace_parts.main() == 0
    found = json.loads(report.read_text())
    measured = {row["part"]: row["measured"] for row in found["rows"]}
    assert measured == {part: pytest.approx(microseconds / 2000) for microseconds, part in KERNELS.values()}
    roofline = {row["part"]: row["roofline"] for row in found["rows"] if row["roofline"]}
    assert roofline.keys() == {"norms and other elementwise", "optimizer"}
    assert [(each["kernel"], each["runs"]) for each in found["kernels"]] == [(name, 0.5) for name in KERNELS]
    assert "nvjet" in report.with_suffix(".txt").read_text()


def test_a_folder_without_a_trace_of_a_gpu_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no trace; make one with train_step.py --profile"):
        trace_parts.read_trace(tmp_path / "empty")
    with pytest.raises(InputError, match="no kernels of a GPU; make the trace on a GPU"):
        trace_parts.read_trace(write_trace(tmp_path / "cpu", "/host:CPU"))
