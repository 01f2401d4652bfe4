"""Breakdown of a step, on programs whose kernels, bytes and FLOPs are known by construction."""

from dataclasses import replace

import pytest

from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.compiler.instructions import parse_module
from jaxopt_llm.planning import kernel_bytes
from jaxopt_llm.planning.breakdown import Part, break_down_step, format_breakdown, sum_by_cause
from jaxopt_llm.planning.links import Traffic
from jaxopt_llm.planning.search.roofline import (
    COPY_OVERLAP,
    LINK_EFFICIENCY,
    MATMUL_EFFICIENCY,
    MEMORY_EFFICIENCY,
    PCIE_EFFICIENCY,
)

CHIP = CHIPS["h100"]
MEMORY = MEMORY_EFFICIENCY * CHIP.memory_bytes_per_second
PROGRAM = """HloModule step, is_scheduled=true

%write (stack: f32[4,1024], layer: f32[1,1024], i: s32[]) -> f32[4,1024] {
  %stack = f32[4,1024]{1,0} parameter(0)
  %layer = f32[1,1024]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %written = f32[4,1024]{1,0} dynamic-update-slice(%stack, %layer, %i, %zero)
}

%read (stack: f32[4,1024], i: s32[]) -> bf16[1024] {
  %stack = f32[4,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %layer = f32[1,1024]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,1024}
  %flat = f32[1024]{0} bitcast(%layer)
  ROOT %narrow = bf16[1024]{0} convert(%flat)
}

%scale (x: bf16[1024]) -> bf16[1024] {
  %x = bf16[1024]{0} parameter(0)
  ROOT %twice = bf16[1024]{0} add(%x, %x)
}

%score (x: bf16[1024]) -> bf16[1024] {
  %x = bf16[1024]{0} parameter(0)
  ROOT %e = bf16[1024]{0} exponential(%x), metadata={op_name="jit(step)/transpose(jvp(attention))/while/body/exp"}
}

%adam (x: f32[4,1024]) -> f32[4,1024] {
  %x = f32[4,1024]{1,0} parameter(0)
  ROOT %y = f32[4,1024]{1,0} multiply(%x, %x), metadata={op_name="jit(step)/while/body/closed_call/update/mul"}
}

%product (a: bf16[2048,2048], b: bf16[2048,2048]) -> bf16[2048,2048] {
  %a = bf16[2048,2048]{1,0} parameter(0)
  %b = bf16[2048,2048]{1,0} parameter(1)
  ROOT %dot = bf16[2048,2048]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (s: (s32[], f32[4,1024])) -> (s32[], f32[4,1024]) {
  %s = (s32[], f32[4,1024]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %stack = f32[4,1024]{1,0} get-tuple-element(%s), index=1
  %layer = bf16[1024]{0} fusion(%stack, %i), kind=kLoop, calls=%read
  %scaled = bf16[1024]{0} fusion(%layer), kind=kLoop, calls=%scale, metadata={op_name="jit(step)/jvp()/attention_norm/mul"}
  %scored = bf16[1024]{0} fusion(%scaled), kind=kLoop, calls=%score
  %one = f32[1,1024]{1,0} constant({...})
  %new = f32[4,1024]{1,0} fusion(%stack, %one, %i), kind=kLoop, calls=%write
  ROOT %next = (s32[], f32[4,1024]) tuple(%i, %new)
}

%condition (s: (s32[], f32[4,1024])) -> pred[] {
  %s = (s32[], f32[4,1024]) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (a: bf16[2048,2048], stack: f32[4,1024]) -> f32[4,1024] {
  %a = bf16[2048,2048]{1,0} parameter(0)
  %stack = f32[4,1024]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %large = bf16[2048,2048]{1,0} fusion(%a, %a), kind=kCustom, calls=%product
  %copied = bf16[2048,2048]{0,1} copy(%large)
  %start = (s32[], f32[4,1024]) tuple(%zero, %stack)
  %loop = (s32[], f32[4,1024]) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %trained = f32[4,1024]{1,0} get-tuple-element(%loop), index=1
  ROOT %updated = f32[4,1024]{1,0} fusion(%trained), kind=kLoop, calls=%adam
}
"""  # noqa: E501
KIB = 1024


def parts_of(text: str = PROGRAM, *transfers: Traffic) -> dict[str, Part]:
    return {part.name: part for part in break_down_step(text, transfers, CHIP)}


def test_each_kernel_counts_once_with_the_bytes_that_it_moves() -> None:
    found = {name: (part.runs, part.bytes) for name, part in parts_of().items()}
    assert found == {
        "matmuls": (1, 3 * 8 * KIB * KIB),
        "attention": (4, 4 * 4 * KIB),
        "norms and other elementwise": (4, 4 * 4 * KIB),
        "casts": (4, 4 * (4 + 4 * KIB + 2 * KIB)),  # of the stack only one layer is read
        "copies into stacks": (4, 4 * (4 + 4 * KIB + 4 * KIB)),  # only one layer is written
        "other copies and fills": (1, 2 * 8 * KIB * KIB),
        "optimizer": (1, 2 * 16 * KIB),
    }


def test_a_kernel_takes_the_longer_of_matmuls_and_memory() -> None:
    found = parts_of()
    flops = 2 * 2048**3
    assert found["matmuls"].flops == flops
    assert found["matmuls"].seconds == pytest.approx(flops / (MATMUL_EFFICIENCY * CHIP.peak_flops["bfloat16"]))
    thin = PROGRAM.replace("bf16[2048,2048]", "bf16[2048,1]")
    thin = thin.replace("rhs_contracting_dims={0}", "rhs_contracting_dims={1}")
    few = parts_of(thin)["matmuls"]
    assert few.seconds == pytest.approx(few.bytes / MEMORY) and few.flops > 0
    others = [part for name, part in found.items() if name != "matmuls"]
    assert [part.seconds for part in others] == pytest.approx([part.bytes / MEMORY for part in others])


def test_a_matmul_of_attention_is_attention() -> None:
    scope = 'rhs_contracting_dims={0}, metadata={op_name="jit(step)/jvp()/attention/while/body/dot_general"}'
    found = parts_of(PROGRAM.replace("rhs_contracting_dims={0}", scope))
    assert "matmuls" not in found and found["attention"].flops == 2 * 2048**3


def test_workspace_is_not_traffic() -> None:
    text = """HloModule m
ENTRY %main (a: bf16[64,64]) -> bf16[64,64] {
  %a = bf16[64,64]{1,0} parameter(0)
  %gemm = (bf16[64,64]{1,0}, s8[4194304]{0}) custom-call(%a, %a), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %out = bf16[64,64]{1,0} get-tuple-element(%gemm), index=0
}
"""  # noqa: E501
    assert parts_of(text)["matmuls"].bytes == 3 * 64 * 64 * 2
    assert parts_of(text)["matmuls"].flops == 2 * 64**3


def transfer(seconds: float, *axes: str, overlapped: float = 1.0, link: str = "nvlink") -> Traffic:
    """Return a transfer that takes this long at the rate that its link attains."""
    full_rate = seconds * LINK_EFFICIENCY[link]
    return Traffic(axes, link, "all-gather", 1000, full_rate, overlapped, ("bf16",), 3)


def test_a_slice_of_a_cast_reads_only_the_slice() -> None:
    """XLA writes the cast of one layer like this where layers are unrolled."""
    text = """HloModule m

%cast (stack: f32[4,1024]) -> bf16[1024] {
  %stack = f32[4,1024]{1,0} parameter(0)
  %narrow = bf16[4,1024]{1,0} convert(%stack)
  %layer = bf16[1,1024]{1,0} slice(%narrow), slice={[2:3], [0:1024]}
  ROOT %flat = bf16[1024]{0} bitcast(%layer)
}

ENTRY %main (stack: f32[4,1024]) -> bf16[1024] {
  %stack = f32[4,1024]{1,0} parameter(0)
  ROOT %layer = bf16[1024]{0} fusion(%stack), kind=kLoop, calls=%cast
}
"""
    module = parse_module(text)
    (found,) = kernel_bytes.walk_kernels(module)
    assert kernel_bytes.count_kernel_bytes(module, *found[:2]) == (4 + 2) * 1024


def test_collectives_are_parts_by_axis_and_link() -> None:
    short = 1e-6
    found = parts_of(
        PROGRAM,
        transfer(short, "fsdp", overlapped=0.75),
        transfer(short, "tensor", overlapped=0),
        transfer(short, "data", overlapped=0, link="network"),
    )
    links = {name: (part.seconds, part.hidden_seconds) for name, part in found.items() if "collectives" in name}
    assert links == {
        "collectives over fsdp (nvlink)": pytest.approx((short / 4, 3 * short / 4)),
        "collectives over tensor (nvlink)": pytest.approx((short, 0)),
        "collectives over data (network)": pytest.approx((short, 0)),
    }
    assert found["collectives over fsdp (nvlink)"].runs == 3


HOST = """HloModule m, is_scheduled=true
%twice (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  ROOT %y = f32[1024]{0} add(%x, %x)
}

%many (x: f32[1048576]) -> f32[1048576] {
  %x = f32[1048576]{0} parameter(0)
  ROOT %y = f32[1048576]{0} add(%x, %x)
}
ENTRY %main (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0:S(5)} parameter(0)
  %start = (f32[1024]{0}, f32[1024]{0:S(5)}, u32[]) copy-start(%x)
  BETWEEN
  %here = f32[1024]{0} copy-done(%start)
  ROOT %out = f32[1024]{0} fusion(%here), kind=kLoop, calls=%twice
}
"""


KERNEL = "%c = f32[1048576]{0} constant({...})\n  %other = f32[1048576]{0} fusion(%c), kind=kLoop, calls=%many"


def test_parts_have_causes_that_add_up_to_the_step() -> None:
    parts = parts_of(PROGRAM, transfer(0.25, "fsdp", overlapped=0.0))
    found = sum_by_cause(tuple(parts.values()), idle=0.25)
    kernels = sum(part.seconds for name, part in parts.items() if not name.startswith("collectives"))
    assert found.total == pytest.approx(kernels + 0.25) and found.links == pytest.approx(0.25)
    assert found.compute == pytest.approx(0.75 * (parts["matmuls"].seconds + parts["attention"].seconds))
    assert (found.idle, found.pcie) == (pytest.approx(0.25 * kernels), 0)
    copies = Part("copies to the host and back (PCIe)", 2.0, 0.0, 1, 0, 1)
    assert sum_by_cause((copies,), idle=0.0).pcie == sum_by_cause((copies,), idle=0.0).total == 2


def test_copies_to_the_host_are_half_hidden_next_to_a_kernel() -> None:
    name, seconds = "copies to the host and back (PCIe)", 4096 / (PCIE_EFFICIENCY * CHIP.host_bytes_per_second)
    alone = parts_of(HOST.replace("BETWEEN", "%zero = s32[] constant(0)"))[name]
    assert (alone.seconds, alone.hidden_seconds, alone.bytes) == (pytest.approx(seconds), 0, 4096)
    half = parts_of(HOST.replace("BETWEEN", KERNEL))[name]
    assert half.hidden_seconds == pytest.approx(COPY_OVERLAP * seconds)
    assert half.seconds == pytest.approx(seconds - half.hidden_seconds)


def test_copies_to_the_host_in_a_loop_are_not_hidden() -> None:
    """XLA captures the loop into a CUDA graph, in which they run alone."""
    head, entry = HOST.replace("BETWEEN", KERNEL).split("ENTRY %main (x: f32[1024])")
    body = f"%body (x: f32[1024]){entry}"
    loop = (
        "%condition (x: f32[1024]) -> pred[] {\n"
        "  %x = f32[1024]{0:S(5)} parameter(0)\n  ROOT %y = pred[] constant(true)\n}\n"
        "ENTRY %main (x: f32[1024]) -> f32[1024] {\n  %x = f32[1024]{0:S(5)} parameter(0)\n"
        "  ROOT %loop = f32[1024]{0} while(%x), condition=%condition, body=%body, "
        'backend_config={"known_trip_count":{"n":"4"}}\n}\n'
    )
    part = parts_of(head + body + loop)["copies to the host and back (PCIe)"]
    assert (part.runs, part.bytes, part.hidden_seconds) == (4, 4 * 4096, 0)


def test_a_loop_of_unknown_length_counts_once() -> None:
    text = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"4"}}', "")
    module = parse_module(text)
    assert {times for _, _, times in kernel_bytes.walk_kernels(module)} == {1}


def test_the_table_has_no_names_of_xla_and_adds_up() -> None:
    parts = break_down_step(PROGRAM, [transfer(1e-6, "fsdp", overlapped=0.5)], CHIP)
    lines = format_breakdown(parts)
    assert len(lines) == len(parts) + 2 and not any("fusion" in line or "%" in line.split()[0] for line in lines)
    assert sum(float(line.split("%")[0].split()[-1]) for line in lines[1:-1]) == pytest.approx(100, abs=0.5)
    assert float(lines[-1].split()[-1]) == round(1e3 * sum(part.seconds for part in parts), 2)


def test_another_chip_has_other_rates() -> None:
    slow = replace(CHIP, memory_bytes_per_second=CHIP.memory_bytes_per_second / 2)
    casts = [next(part for part in break_down_step(PROGRAM, [], chip) if part.name == "casts") for chip in (CHIP, slow)]
    assert casts[1].seconds == pytest.approx(2 * casts[0].seconds)
