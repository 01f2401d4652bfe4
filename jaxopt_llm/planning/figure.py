"""Figure of a plan: memory by kind and the time of a step by part, as bars in an HTML page or an SVG file.

`make_charts` returns what the figure shows; one function for each format draws it. HTML is drawn by Plotly, whose
script is a part of the page, and SVG by Matplotlib, because Plotly draws SVG only with a browser.
"""

import dataclasses
import html
import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxopt_llm.core.errors import InputError, describe_install
from jaxopt_llm.core.files import replace_durably
from jaxopt_llm.planning import breakdown
from jaxopt_llm.planning.breakdown import Part
from jaxopt_llm.planning.free_memory import GIB
from jaxopt_llm.planning.memory import Memory

PACKAGES = {".html": "plotly", ".svg": "matplotlib"}  # package that draws each format
# Colours of Okabe and Ito, which readers with colour blindness distinguish, and two greys.
BLUE, ORANGE, GREEN, PURPLE, SKY, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
YELLOW, GREY, LIGHT = "#F0E442", "#999999", "#DDDDDD"
MEMORY_COLORS = {
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer": GREEN,
    "activations": PURPLE,
    "gathered_weights": SKY,
    "other": GREY,
}
KERNEL_COLORS = {
    breakdown.MATMULS: BLUE,
    breakdown.ATTENTION: PURPLE,
    breakdown.ELEMENTWISE: ORANGE,
    breakdown.CASTS: YELLOW,
    breakdown.STACKS: SKY,
    breakdown.COPIES: GREY,
    breakdown.OPTIMIZER: GREEN,
}


@dataclass(frozen=True)
class Bar:
    """Bar of a chart, in the unit of the chart.

    Attributes:
        value: length of the bar.
        hidden: length of a pale bar behind it, which does not add to the total.
        text: the numbers, next to the bar.
        color: hexadecimal RGB.
    """

    name: str
    value: float
    hidden: float
    text: str
    color: str


@dataclass(frozen=True)
class Chart:
    """Horizontal bars with a title. The longest bar comes first; what is free comes last."""

    title: str
    unit: str
    bars: tuple[Bar, ...]


def make_charts(memory: Memory, limit: int, parts: Sequence[Part]) -> tuple[Chart, Chart]:
    """Return the charts of memory and of time.

    Args:
        memory: bytes of each GPU by kind.
        limit: bytes of each GPU that XLA may use.
        parts: parts of a step.
    """
    return _chart_memory(memory, limit), _chart_time(parts)


def _chart_memory(memory: Memory, limit: int) -> Chart:
    sizes = sorted(dataclasses.asdict(memory).items(), key=lambda item: -item[1])
    bars = [
        _make_memory_bar(name.replace("_", " "), size, limit, MEMORY_COLORS[name]) for name, size in sizes if size > 0
    ]
    spare = limit - memory.peak
    bars.append(_make_memory_bar("free" if spare >= 0 else "lacking", abs(spare), limit, LIGHT if spare >= 0 else RED))
    verdict = "" if spare >= 0 else ": does not fit"
    title = f"Memory of each GPU at the peak: {memory.peak / GIB:.1f} of {limit / GIB:.1f} GiB{verdict}"
    return Chart(title, "GiB", tuple(bars))


def _make_memory_bar(name: str, size: int, limit: int, color: str) -> Bar:
    return Bar(name, size / GIB, 0.0, f"{size / GIB:.2f} GiB ({size / limit:.0%})", color)


def _chart_time(parts: Sequence[Part]) -> Chart:
    whole = sum(part.seconds for part in parts)
    bars = []
    for part in sorted(parts, key=lambda part: (-part.seconds, -part.hidden_seconds)):
        text = f"{part.seconds * 1e3:,.1f} ms ({part.seconds / whole:.1%})"
        text += f", {part.hidden_seconds * 1e3:,.1f} ms hidden" if part.hidden_seconds else ""
        color = KERNEL_COLORS.get(part.name, RED)  # all transfers have one colour
        bars.append(Bar(part.name, part.seconds * 1e3, part.hidden_seconds * 1e3, text, color))
    hidden = "; pale: transfers next to kernels, not counted" if any(part.hidden_seconds for part in parts) else ""
    return Chart(f"Time of a step by a roofline: {whole * 1e3:,.1f} ms{hidden}", "ms", tuple(bars))


# --- Files


def check_figure_file(file: Path) -> None:
    """Check that a figure can be written to this file, before the compilation, which takes long.

    Raises:
        InputError: the format is unknown, the folder does not exist, or the package that draws it is not installed.
    """
    if file.suffix not in PACKAGES:
        raise InputError(f"--save {file}: a figure is an HTML or an SVG file; write to {file.with_suffix('.html')}")
    if file.is_dir():
        raise InputError(f"--save {file}: is a folder; give the name of a file")
    if not file.parent.is_dir():
        raise InputError(f"--save {file}: the folder {file.parent} does not exist; create it first")
    package = PACKAGES[file.suffix]
    if importlib.util.find_spec(package) is None:
        raise InputError(f"--save {file}: requires {package}; run: {describe_install('report')}")


def save_figure(charts: Sequence[Chart], heading: str, file: Path) -> None:
    """Write the charts under a heading to a file whose name passed `check_figure_file`. Replace an existing file."""
    draw = {".html": draw_html, ".svg": draw_svg}[file.suffix]
    replace_durably(file, draw(charts, heading))


def draw_html(charts: Sequence[Chart], heading: str) -> str:
    """Return an HTML page that loads nothing from the network."""
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    heights = [_count_rows(chart) for chart in charts]
    figure = make_subplots(
        rows=len(charts),
        cols=1,
        row_heights=heights,
        vertical_spacing=0.16,
        subplot_titles=[each.title for each in charts],
    )
    for row, chart in enumerate(charts, 1):
        names, colors = [bar.name for bar in chart.bars], [bar.color for bar in chart.bars]
        hover = {"customdata": [bar.text for bar in chart.bars], "hovertemplate": "%{y}: %{customdata}<extra></extra>"}
        for pale, lengths in ((False, [bar.value for bar in chart.bars]), (True, [bar.hidden for bar in chart.bars])):
            texts = [bar.text if bool(bar.hidden) is pale else "" for bar in chart.bars]  # at the end of the last bar
            marker = {"color": colors, "opacity": 0.35 if pale else 1.0}
            bars: dict[str, Any] = {"x": lengths, "y": names, "text": texts, "marker": marker, **hover}
            figure.add_trace(
                graph_objects.Bar(orientation="h", textposition="outside", cliponaxis=False, **bars), row, 1
            )
        figure.update_yaxes(autorange="reversed", ticksuffix="  ", automargin=True, row=row, col=1)
        # An axis has room for the text at the end of the longest bar.
        longest = max(bar.value + bar.hidden for bar in chart.bars)
        figure.update_xaxes(title=chart.unit, range=[0, 1.35 * longest], tickformat=",", row=row, col=1)
    figure.update_layout(
        title={"text": heading, "font": {"size": 16}}, template="plotly_white", barmode="stack", showlegend=False,
        height=230 + 34 * sum(heights), bargap=0.3,
    )  # fmt: skip
    figure.update_annotations(x=0, xanchor="left")  # titles of the charts
    settings = {"displaylogo": False, "plotlyServerURL": "", "responsive": True}
    body = figure.to_html(full_html=False, include_plotlyjs=True, config=settings, div_id="plan")
    head = f'<meta charset="utf-8">\n<title>{html.escape(heading)}</title>'
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def draw_svg(charts: Sequence[Chart], heading: str) -> str:
    """Return an SVG image. The same charts give the same text."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    heights = [_count_rows(chart) for chart in charts]
    styles = {"svg.hashsalt": "jaxopt_llm", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}
    with matplotlib.rc_context(styles):
        figure = Figure(figsize=(10, 1.9 + 0.34 * sum(heights)))
        figure.set_layout_engine("constrained", h_pad=0.12, w_pad=0.12)
        FigureCanvasSVG(figure)
        figure.suptitle(heading, fontsize=12, x=0.01, ha="left")
        for chart, axes in zip(charts, figure.subplots(len(charts), 1, height_ratios=heights), strict=True):
            names, colors = [bar.name for bar in chart.bars], [bar.color for bar in chart.bars]
            values = [bar.value for bar in chart.bars]
            axes.barh(names, values, color=colors, height=0.7)
            pale = axes.barh(
                names, [bar.hidden for bar in chart.bars], left=values, color=colors, alpha=0.35, height=0.7
            )
            axes.bar_label(pale, [bar.text for bar in chart.bars], padding=5)
            axes.set_title(chart.title, loc="left", fontsize=11)
            axes.set_xlabel(chart.unit)
            axes.set_xlim(0, 1.35 * max(bar.value + bar.hidden for bar in chart.bars))
            axes.xaxis.set_major_formatter("{x:,.6g}")
            axes.xaxis.grid(color=LIGHT, linewidth=0.6)
            axes.set_axisbelow(True)
            axes.tick_params(axis="y", length=0)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.invert_yaxis()
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _count_rows(chart: Chart) -> int:
    """Return the height of a chart in bars, with room for its title and its axis."""
    return len(chart.bars) + 2
