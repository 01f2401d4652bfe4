"""The picture of what each setting saves shows the committed results."""

import json
from pathlib import Path
from xml.etree import ElementTree

import memory_picture

SVG = "{http://www.w3.org/2000/svg}"
DOCS = Path(__file__).parent.parent / "docs"


def test_the_committed_picture_is_that_of_the_committed_results() -> None:
    table = json.loads(memory_picture.RESULTS.read_text())["tables"]["together"]
    rows = {name: row["memory"] for name, row in table.items()}
    text = memory_picture.picture(rows)
    assert (DOCS / "memory.svg").read_text() == text
    bars = ElementTree.fromstring(text).find(f"{SVG}g[@id='bars']")
    assert bars is not None
    shown = [each.text for each in bars.findall(f"{SVG}text[@class='peak']")]
    assert shown == [f"{row['peak'] / 2**30:.1f} GiB" for row in rows.values()]
    widths = sum(float(each.get("width", 0)) for each in bars.findall(f"{SVG}rect"))
    largest = max(row["peak"] for row in rows.values())
    kinds = sum(max(row[kind], 0) for row in rows.values() for kind in memory_picture.KINDS)
    assert abs(widths - kinds * memory_picture.WIDTH / largest) < 0.05 * len(rows) * len(memory_picture.KINDS)
