"""Draw docs/pipeline-NAME.svg from the tables of the pipeline schedules: one row per stage, time from left to right.

python benchmarks/pipeline_pictures.py [--stages 4] [--microbatches 8] [--chunks 2] [--folder docs]
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from jaxopt_llm.config.parallel import WITH_CHUNKS, Schedule
from jaxopt_llm.core import errors
from jaxopt_llm.execution.schedules import Table, make_table

# Time of the layers of a stage for one microbatch. The backward runs the layers again and computes two gradients per
# matmul.
FORWARD, BACKWARD = 1.0, 3.0

UNIT, ROW, LEFT, TOP = 20, 26, 62, 54  # pixels: width of a forward of a whole stage, height of a stage, margins
HUES = {"forward": 210, "backward": 30}


@dataclass(frozen=True)
class Cell:
    """One chunk of one microbatch. start, width: in units of a forward of a whole stage."""

    kind: str
    stage: int
    start: float
    width: float
    microbatch: int
    chunk: int


def cells(table: Table) -> Iterator[Cell]:
    """Yield the cells. A tick lasts as long as the work of any stage in it: first forwards, then backwards."""
    start = 0.0
    for tick in range(len(table.forward.active)):
        for kind, half, time in (("forward", table.forward, FORWARD), ("backward", table.backward, BACKWARD)):
            if not half.active[tick]:
                continue
            width = time / table.chunks
            for stage in range(table.stages):
                microbatch, chunk = int(half.microbatch[tick, stage]), int(half.chunk[tick, stage])
                if microbatch >= 0:
                    yield Cell(kind, stage, start, width, microbatch, chunk)
            start += width


def picture(schedule: Schedule, stages: int, microbatches: int, chunks: int) -> str:
    """Return an SVG file."""
    table = make_table(schedule, stages, microbatches, chunks)
    drawn = list(cells(table))
    length = max(cell.start + cell.width for cell in drawn)
    width, height = round(LEFT + UNIT * length + 8), TOP + ROW * stages + 8
    of_chunks = f", {chunks} chunks each" if chunks > 1 else ""
    title = (
        f"{schedule}: {stages} stages{of_chunks}, {microbatches} microbatches; {table.idle_share:.0%} idle, at most "
        f"{table.buffers} inputs wait on a stage"
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>{title}</title>",
        "<style>",
        "text { font: 11px sans-serif; fill: #222; }",
        "#cells text { text-anchor: middle; font-size: 9px; }",
        "#cells rect { stroke: #fff; }",
        *(
            f".{kind}-{chunk} {{ fill: hsl({hue}, 75%, {85 - 20 * chunk / max(chunks - 1, 1):.0f}%); }}"
            for kind, hue in HUES.items()
            for chunk in range(chunks)
        ),
        ".idle { fill: #eee; }",
        "</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="8" y="18">{title}</text>',
        *legend(chunks),
    ]
    for stage in range(stages):
        y = TOP + ROW * stage
        lines.append(f'<text x="8" y="{y + 17}">stage {stage}</text>')
        lines.append(f'<rect x="{LEFT}" y="{y}" width="{UNIT * length:g}" height="{ROW - 2}" class="idle"/>')
    lines.append('<g id="cells">')
    for cell in drawn:
        x, y = LEFT + UNIT * cell.start, TOP + ROW * cell.stage
        lines.append(
            f'<rect class="{cell.kind}-{cell.chunk}" x="{x:g}" y="{y}" width="{UNIT * cell.width:g}" '
            f'height="{ROW - 2}"/><text x="{x + UNIT * cell.width / 2:g}" y="{y + 15}">{cell.microbatch}</text>'
        )
    return "\n".join([*lines, "</g>", "</svg>", ""])


def legend(chunks: int) -> Iterator[str]:
    x = 8
    later = ", darker where of the later chunk" if chunks > 1 else ""
    for classes, said in (
        ([f"forward-{chunk}" for chunk in range(chunks)], "forward"),
        ([f"backward-{chunk}" for chunk in range(chunks)], f"backward, which runs its chunk again first{later}"),
        (["idle"], "idle"),
    ):
        for name in classes:
            yield f'<rect class="{name}" x="{x}" y="28" width="12" height="12"/>'
            x += 14
        yield f'<text x="{x + 4}" y="38">{said}</text>'
        x += 30 + 6 * len(said)


def main() -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=2, help="chunks per stage, if interleaved (default: 2)")
    parser.add_argument("--folder", type=Path, default=Path("docs"), help="folder to write to (default: docs)")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    for schedule in get_args(Schedule):
        chunks = asked.chunks if schedule in WITH_CHUNKS else 1
        file = asked.folder / f"pipeline-{schedule}.svg"
        file.write_text(picture(schedule, asked.stages, asked.microbatches, chunks))
        print(file)
    return 0


if __name__ == "__main__":
    errors.run_command(main)
