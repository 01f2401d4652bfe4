"""Page of a report: one HTML file with the figures, the tables and Plotly, which loads nothing from the network."""

from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from jaxopt_llm.observe.report import figures, tables
from jaxopt_llm.observe.report.run_files import Run

FOLDER = Path(__file__).parent
GENERATOR = '<meta name="generator" content="jaxopt_llm report">'  # by which a page is recognised as a report


def render_page(runs: Sequence[Run], plotly: str) -> str:
    """Return the page. Everything that comes from the runs is escaped.

    plotly: the source of Plotly's JavaScript library.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    headings, rows = tables.compare_settings(runs)
    summaries = [tables.summarise(run) for run in runs]
    page = environment.get_template("page.html").render(
        runs=[
            {
                "name": run.name,
                "directory": str(run.directory),
                "colour": colour,
                "summary": summary,
                "events": tables.list_events(run),
                "event_count": len(run.events),
                "faults": tables.list_faults(run),
                "empty": not run.steps.size,
                "notes": run.notes,
            }
            for run, colour, summary in zip(runs, figures.choose_colours(len(runs)), summaries, strict=True)
        ],
        summary_names=list(dict.fromkeys(name for summary in summaries for name in summary)),
        figures=figures.make_figures(runs),
        missing=figures.list_missing(runs),
        shortened=figures.list_shortened(runs),
        max_points=figures.MAX_POINTS,
        headings=headings,
        settings=rows,
        samples=tables.list_samples(runs),
        generator=Markup(GENERATOR),
        style=_read_trusted("page.css"),
        script=_read_trusted("page.js"),
        plotly=Markup(plotly),
    )
    # JSON can hold halves of surrogate pairs, which no encoding of a file can.
    return page.encode("utf-8", "replace").decode()


def is_report(file: Path) -> bool:
    """Return whether a file is a page that `render_page` made."""
    with file.open("rb") as page:
        return GENERATOR.encode() in page.read(1024)


def _read_trusted(name: str) -> str:
    return Markup((FOLDER / name).read_text(encoding="utf-8"))
