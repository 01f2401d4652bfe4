"""The pictures of a pipeline's schedules show their tables."""

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pipeline_pictures
import pytest

from jaxopt_llm.config import Schedule
from jaxopt_llm.execution.schedules import Table, make_table

DOCS = Path(__file__).parent.parent / "docs"
SVG = "{http://www.w3.org/2000/svg}"

every_schedule = pytest.mark.parametrize("schedule, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])


def busy(table: Table) -> Counter[tuple[str, str]]:
    """What a picture must say: (class, microbatch) of each half tick in which a stage has work."""
    return Counter(
        (f"{kind}-{chunk}", str(microbatch))
        for kind, half in (("forward", table.forward), ("backward", table.backward))
        for microbatch, chunk in zip(half.microbatch.flat, half.chunk.flat, strict=True)
        if microbatch >= 0
    )


@every_schedule
def test_a_picture_has_the_tables_cells(schedule: Schedule, chunks: int) -> None:
    table = make_table(schedule, 4, 8, chunks)
    root = ElementTree.fromstring(pipeline_pictures.picture(schedule, 4, 8, chunks))
    group = root.find(f"{SVG}g[@id='cells']")
    assert group is not None
    rectangles, numbers = group.findall(f"{SVG}rect"), group.findall(f"{SVG}text")
    said = Counter((each.get("class"), number.text) for each, number in zip(rectangles, numbers, strict=True))
    assert said == busy(table)
    rows: dict[str | None, list[tuple[float, float]]] = {}
    for each in rectangles:
        rows.setdefault(each.get("y"), []).append((float(each.attrib["x"]), float(each.attrib["width"])))
    assert len(rows) == table.stages
    for row in rows.values():
        begin, width = np.array(sorted(row)).T
        assert np.all(begin[1:] >= begin[:-1] + width[:-1]), "two cells lie over each other"
    area = sum(width for row in rows.values() for _, width in row)
    (whole,) = {float(each.attrib["width"]) for each in root.findall(f"{SVG}rect[@class='idle']")} - {12.0}  # legend
    assert 1 - area / (table.stages * whole) == pytest.approx(table.idle_share)


@every_schedule
def test_the_pictures_of_the_docs_are_what_is_drawn(schedule: Schedule, chunks: int) -> None:
    drawn = pipeline_pictures.picture(schedule, 4, 8, chunks)
    assert (DOCS / f"pipeline-{schedule}.svg").read_text() == drawn, "run benchmarks/pipeline_pictures.py"
