"""Compare the measured time of a step with the roofline that `plan` prints, part by part.

    python benchmarks/trace_parts.py FOLDER [--gpu h200] [--kernels 20]

FOLDER is the one of `train_step.py --profile`: a trace of two steps, and the compiled step as HLO text. XLA names the
kernel of a fusion after its instruction, and the instruction tells the part (planning/breakdown.py). Other kernels are
recognized by the name that their library gives them. Copies within a GPU are one part: as kernels they have no
instruction. No GPU is needed.
"""

import argparse
import collections
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from outcomes import save

from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.compiler.instructions import Module, parse_module
from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.planning import breakdown
from jaxopt_llm.planning.kernel_bytes import list_fused, walk_kernels

STEPS = 2  # in a trace
COPIES = "copies and fills"
COLLECTIVES = "collectives"
HOST = breakdown.HOST_COPIES
OTHER = "unknown kernels"
# Parts of kernels that libraries and XLA's runtime name, by a pattern at the start of the name. The first one decides.
LIBRARIES = {
    r"nvjet|cutlass|sm\d\d_xmma|gemm_fusion|cublas|void cublasLt": breakdown.MATMULS,
    r"cudnn_generated|void cudnn": breakdown.ATTENTION,
    r"nccl": COLLECTIVES,
    r"MemcpyH2D|MemcpyD2H": HOST,
    r"memcpy|Memcpy|Memset|memset|void cuda::": COPIES,
}
# Parts of the roofline that the trace does not tell apart.
JOINED = {breakdown.STACKS: COPIES, breakdown.COPIES: COPIES}


def read_trace(folder: Path) -> Mapping[str, tuple[float, float]]:
    """Return the milliseconds and the runs of each kernel in a step, by name."""
    from jax.profiler import ProfileData

    files = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))
    if not files:
        raise InputError(f"{folder} has no trace; make one with train_step.py --profile {folder}")
    milliseconds, runs = collections.defaultdict[str, float](float), collections.Counter[str]()
    planes = [plane for plane in ProfileData.from_file(str(files[-1])).planes if plane.name.startswith("/device:GPU")]
    if not planes:
        raise InputError(f"{files[-1]} has no kernels of a GPU; make the trace on a GPU")
    for line in planes[0].lines:
        for event in line.events:
            milliseconds[event.name] += event.duration_ns / 1e6 / STEPS
            runs[event.name] += 1
    return {name: (milliseconds[name], runs[name] / STEPS) for name in runs}


def classify_kernels(module: Module) -> Iterator[tuple[str, str]]:
    """Yield the name that XLA gives the kernel of each instruction, and its part."""
    for computation, instruction, _ in walk_kernels(module):
        part = breakdown.classify(computation, instruction, list_fused(module, instruction))
        yield re.sub(r"\W", "_", instruction.name), JOINED.get(part, part)


def find_part(kernel: str, of_instructions: Mapping[str, str]) -> str:
    """Return the part of a kernel."""
    known = (part for pattern, part in LIBRARIES.items() if re.match(pattern, kernel))
    return next(known, of_instructions.get(kernel, OTHER))


def compare(folder: Path, gpu: str) -> dict[str, Any]:
    """Return the milliseconds of each part of a step, measured and by the roofline, and all kernels."""
    text = (folder / "step.hlo.txt").read_text()
    of_instructions = dict(classify_kernels(parse_module(text)))
    kernels = read_trace(folder)
    measured, roofline = collections.defaultdict[str, float](float), collections.defaultdict[str, float](float)
    for name, (milliseconds, _) in kernels.items():
        measured[find_part(name, of_instructions)] += milliseconds
    for part in breakdown.break_down_step(text, (), CHIPS[gpu]):
        name = HOST if part.name.startswith(HOST) else JOINED.get(part.name, part.name)
        roofline[name] += 1e3 * (part.seconds + part.hidden_seconds * (name == HOST))
    rows = [{"part": part, "measured": measured[part], "roofline": roofline[part]} for part in measured | roofline]
    listed = [
        {"kernel": name, "part": find_part(name, of_instructions), "milliseconds": milliseconds, "runs": runs}
        for name, (milliseconds, runs) in sorted(kernels.items(), key=lambda item: -item[1][0])
    ]
    return {"gpu": gpu, "rows": sorted(rows, key=lambda row: -row["measured"]), "kernels": listed}


def format_report(report: dict[str, Any], most: int) -> str:
    lines = [f"{'milliseconds of a step':34} {'measured':>9} {'roofline':>9}"]
    lines += [f"{row['part']:34} {row['measured']:9.1f} {row['roofline']:9.1f}" for row in report["rows"]]
    measured, roofline = (sum(row[name] for row in report["rows"]) for name in ("measured", "roofline"))
    lines += [f"{'all':34} {measured:9.1f} {roofline:9.1f}", ""]
    for each in report["kernels"][:most]:
        lines.append(f"{each['milliseconds']:9.2f} {each['runs']:7.1f} × {each['part']:28} {each['kernel'][:90]}")
    return "\n".join(lines)


def main() -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of train_step.py --profile")
    parser.add_argument("--gpu", choices=sorted(CHIPS), default="h200", help="GPU of the roofline (default: h200)")
    parser.add_argument("--kernels", type=int, default=20, help="kernels to print (default: 20)")
    parser.add_argument("--json", type=Path, help="file for the figures; the table is written next to it as .txt")
    asked = parser.parse_args()
    report = compare(asked.folder, asked.gpu)
    said = format_report(report, asked.kernels)
    print(said)
    save(asked.json, json.loads(json.dumps(report)), said)
    return 0


if __name__ == "__main__":
    errors.run_command(main)
