"""Draw docs/memory.svg: the memory of one GPU as settings are added, from the results of benchmarks/memory.py.

python benchmarks/memory_picture.py [--results FILE] [--table together] [--to docs/memory.svg]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from jaxopt_llm.core import errors

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "memory-llama2_7b.json"
TITLE = "Llama 2 7B on 8 GPUs: GiB of each GPU at the peak of a step, each row with one more setting"
KINDS = {  # kind of memory: (label, hue, saturation)
    "parameters": ("parameters", 215, 55),
    "gradients": ("gradients", 35, 80),
    "optimizer": ("optimizer state", 150, 40),
    "activations": ("activations", 340, 55),
    "gathered_weights": ("gathered weights", 265, 45),
    "other": ("other", 0, 0),
}
LEFT, TOP, ROW, WIDTH, RIGHT = 190, 62, 30, 560, 90  # pixels


def picture(rows: dict[str, dict[str, int]]) -> str:
    """Return an SVG file with one bar per row, divided by kind of memory. rows: bytes by kind, and the peak."""
    scale = WIDTH / max(row["peak"] for row in rows.values())
    width, height = LEFT + WIDTH + RIGHT, TOP + ROW * len(rows) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>{TITLE}</title>",
        "<style>",
        "text { font: 12px sans-serif; fill: #222; }",
        *(f".{kind} {{ fill: hsl({hue}, {saturation}%, 62%); }}" for kind, (_, hue, saturation) in KINDS.items()),
        "</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="8" y="20">{TITLE}</text>',
    ]
    x = 8
    for kind, (label, _, _) in KINDS.items():
        lines.append(
            f'<rect class="{kind}" x="{x}" y="32" width="12" height="12"/><text x="{x + 17}" y="43">{label}</text>'
        )
        x += 36 + 7 * len(label)
    lines.append('<g id="bars">')
    for index, (name, row) in enumerate(rows.items()):
        y, left = TOP + ROW * index, float(LEFT)
        label = name if index == 0 else f"+ {name}"
        lines.append(f'<text x="8" y="{y + 17}">{label}</text>')
        for kind in KINDS:
            size = scale * row[kind]
            if size > 0:
                lines.append(f'<rect class="{kind}" x="{left:.1f}" y="{y}" width="{size:.1f}" height="{ROW - 6}"/>')
            left += max(size, 0)
        lines.append(f'<text class="peak" x="{left + 8:.1f}" y="{y + 17}">{row["peak"] / 2**30:.1f} GiB</text>')
    return "\n".join([*lines, "</g>", "</svg>", ""])


def main() -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON of benchmarks/memory.py")
    parser.add_argument("--table", default="together", help="table to draw (default: together)")
    parser.add_argument("--to", type=Path, default=HERE.parent / "docs" / "memory.svg", help="file to write")
    asked = parser.parse_args()
    table: dict[str, Any] = json.loads(asked.results.read_text())["tables"][asked.table]
    asked.to.write_text(picture({name: row["memory"] for name, row in table.items()}))
    print(asked.to)
    return 0


if __name__ == "__main__":
    errors.run_command(main)
