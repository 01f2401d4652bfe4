"""Figures of a report, as Plotly's JSON: one colour for each run in all of them."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.observe.report.run_files import EVAL_LOSS, EVAL_TASKS, PLOTS, Curve, Plot, Run, to_number

MAX_POINTS = 4000  # of a curve
MARKED_POINTS = 60  # a curve of at most so many points shows each of them
COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#db2777", "#4b5563", "#65a30d")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
# The kinds of events, from bottom to top, with the symbol of each.
EVENTS = {
    "start": "triangle-right",
    "resume": "triangle-right-open",
    "checkpoint": "circle",
    "checkpoint_failed": "x",
    "skipped": "diamond",
    "rollback": "triangle-left",
    "corruption": "hexagram",
    "stop": "square-open",
    "fault": "x",
    "end": "square",
}
Figure = dict[str, Any]


def choose_points(values: NDArray[np.float64], most: int = MAX_POINTS) -> NDArray[np.int64]:
    """Return the indices of at most `most` (4 or more) points of a curve, in order.

    They are the ends of the curve, and the minimum and the maximum of each of equally long parts.
    """
    if values.size <= most:
        return np.arange(values.size)
    extremes = [
        part.start + each
        for part in split_evenly(values.size, (most - 2) // 2)
        for each in (values[part].argmin(), values[part].argmax())
    ]
    return np.unique([0, *extremes, values.size - 1])


def split_evenly(size: int, parts: int) -> list[slice]:
    """Return slices that divide a sequence into almost equally long parts; no more parts than there are elements."""
    edges = np.linspace(0, size, min(size, parts) + 1).astype(np.int64).tolist()
    return [slice(first, last) for first, last in pairwise(edges)]


def average(curve: Curve, parts: int = MAX_POINTS // 4) -> Curve:
    """Return the mean of each part of a curve, at the part's middle record."""
    pieces = split_evenly(curve.values.size, parts)
    middles = [(piece.start + piece.stop) // 2 for piece in pieces]
    return Curve(curve.records[middles], np.array([curve.values[piece].mean() for piece in pieces]))


def choose_colours(count: int) -> list[str]:
    """Return different colours: first the palette, then hues at the golden angle."""
    return [COLOURS[i] if i < len(COLOURS) else f"hsl({i * 137.5 % 360:.0f},65%,40%)" for i in range(count)]


def make_figures(runs: Sequence[Run]) -> list[Figure]:
    """Return the figures that have anything to show."""
    colours = choose_colours(len(runs))
    figures = [_plot_curves(plot, runs, colours) for plot in PLOTS]
    figures += [_plot_memory(runs, colours), _plot_events(runs, colours)]
    return [figure for figure in figures if figure["data"]]


def list_missing(runs: Sequence[Run]) -> list[str]:
    """Return the titles of the plots for which no run has numbers."""
    return [
        plot.title
        for plot in PLOTS
        if not any(f"{name}/".startswith(f"{plot.field}/") for run in runs for name in run.curves)
    ]


def list_shortened(runs: Sequence[Run]) -> list[str]:
    """Return the names of the runs that have more records than a curve has points."""
    return [run.name for run in runs if run.steps.size > MAX_POINTS]


def _find_curves(plot: Plot, run: Run) -> dict[str, Curve]:
    """Return the curves of a run in a plot by the name that tells them apart, "" for the only or main one."""
    if plot.field == "skipped" and plot.field in run.curves and not run.curves[plot.field].values.any():
        return {}
    names = {plot.field: ""} if plot.field in run.curves else {}
    if plot.field in (EVAL_LOSS, EVAL_TASKS):
        names |= {name: name.partition("/")[2] for name in run.curves if name.startswith(f"{plot.field}/")}
        if plot.field in names and len(names) == 2:  # one validation set: its loss is also that of all sets
            names = {name: label for name, label in names.items() if label}
    return {label: run.curves[name] for name, label in names.items()}


def _plot_curves(plot: Plot, runs: Sequence[Run], colours: Sequence[str]) -> Figure:
    labels = dict.fromkeys(label for run in runs for label in _find_curves(plot, run))
    dashes = {label: DASHES[index % len(DASHES)] for index, label in enumerate(labels)}
    data, tokens = [], []
    for run, colour in zip(runs, colours, strict=True):
        for label, curve in _find_curves(plot, run).items():
            name = f"{run.name} · {label}" if label else run.name
            for shown, look in _simplify(curve, colour):
                line = {"color": colour, "width": 1.8, "dash": dashes[label]}
                x, y = _to_list(run.steps[shown.records]), _to_list(shown.values)
                data.append({"type": "scatter", "name": _escape(name), "line": line, **look, "x": x, "y": y})
                tokens.append(_to_list(run.tokens[shown.records]))
            if plot.field == "loss" and run.faults:
                marks, steps = _mark_faults(run, curve, colour)
                data.append(marks)
                tokens.append(_to_list(_interpolate_tokens(run, steps)))
    axis = {"title": {"text": plot.unit, "standoff": 12}, "hoverformat": plot.format}
    axis |= {"tickformat": plot.format} if plot.format[-1] in "%g" else {}
    axis |= {"rangemode": "tozero"} if plot.from_zero else {}
    return {
        "id": plot.field.replace("_", "-").replace("/", "-"),
        "title": plot.title,
        "log": plot.log,
        "data": data,
        "tokens": tokens,
        "layout": {"yaxis": axis, "hovermode": "x unified"},
    }


def _mark_faults(run: Run, curve: Curve, colour: str) -> tuple[Figure, NDArray[np.float64]]:
    """Return crosses on a curve where faults interrupted the run, and their steps."""
    steps = np.array([float(fault["reached"]) for fault in run.faults])
    chosen = choose_points(steps)
    steps, heights = steps[chosen], np.interp(steps[chosen], run.steps[curve.records], curve.values)
    marker = {"color": colour, "size": 9, "symbol": "x-thin", "line": {"color": colour, "width": 2}}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": _escape(f"{run.name} · faults"),
        "marker": marker,
        "x": _to_list(steps),
        "y": _to_list(heights),
        "text": [_escape(f"{run.faults[i]['fault']} {run.faults[i].get('what', '')}"[:200]) for i in chosen],
        "hovertemplate": "%{text}",
    }, steps


def _simplify(curve: Curve, colour: str) -> Iterator[tuple[Curve, Figure]]:
    """Yield the curves that show a curve, with their looks: itself, or for a long one its extremes and its means."""
    if curve.values.size <= MAX_POINTS:
        mode = "lines+markers" if curve.values.size <= MARKED_POINTS else "lines"
        yield curve, {"mode": mode, "marker": {"color": colour, "size": 5}}
        return
    shown = choose_points(curve.values)
    extremes = Curve(curve.records[shown], curve.values[shown])
    faint = {"mode": "lines", "opacity": 0.25, "showlegend": False, "hoverinfo": "skip"}
    yield extremes, {**faint, "line": {"color": colour, "width": 1}}
    yield average(curve), {"mode": "lines"}


def _plot_memory(runs: Sequence[Run], colours: Sequence[str]) -> Figure:
    """Return bars of the compiled step's memory by kind, beside the measured peak and the limit."""
    bars = [_list_memory(run) for run in runs]
    largest = max((size for sizes in bars for size in sizes.values()), default=0.0)
    unit, size = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    kinds = list(dict.fromkeys(kind for sizes in bars for kind in sizes))
    data = [
        {
            "type": "bar",
            "name": _escape(run.name),
            "marker": {"color": colour},
            "x": [_escape(kind) for kind in kinds if kind in sizes],
            "y": [float(f"{sizes[kind] / size:.5g}") for kind in kinds if kind in sizes],
            "texttemplate": "%{y:.3~g}",
            "hovertemplate": f"%{{x}}: %{{y:.4~g}} {unit}",
        }
        for run, sizes, colour in zip(runs, bars, colours, strict=True)
        if sizes
    ]
    axis = {"title": {"text": f"{unit} of each device", "standoff": 12}}
    categories = {"type": "category", "categoryorder": "array", "categoryarray": [_escape(kind) for kind in kinds]}
    layout = {"yaxis": axis, "xaxis": categories, "barmode": "group", "hovermode": "closest"}
    return {"id": "memory", "title": "Memory", "log": False, "data": data, "tokens": None, "layout": layout}


def _list_memory(run: Run) -> dict[str, float]:
    """Return bytes by kind as compiled, their peak, the measured peak, and the limit, as far as they are known."""
    memory = run.memory or {"kinds": {}}
    sizes = {kind.replace("_", " "): to_number(size) for kind, size in memory["kinds"].items()}
    sizes["planned peak"] = to_number(memory.get("peak"))
    if measured := run.curves.get("peak_bytes"):
        sizes["measured peak"] = float(measured.values.max())
    sizes["limit"] = to_number(memory.get("limit"))
    sizes["host"] = to_number(memory.get("host") or None)
    return {kind: size for kind, size in sizes.items() if np.isfinite(size)}


def _plot_events(runs: Sequence[Run], colours: Sequence[str]) -> Figure:
    """Return a timeline with a line for each kind of event, on which the runs lie one above the other."""
    kinds = [kind for kind in EVENTS if any(event["event"] == kind for run in runs for event in run.events)]
    data, tokens = [], []
    for number, (run, colour) in enumerate(zip(runs, colours, strict=True)):
        events = [event for event in run.events if event["event"] in kinds]
        if not events:
            continue
        events = [events[i] for i in choose_points(np.array([float(event["step"]) for event in events]))]
        steps = np.array([float(event["step"]) for event in events])
        shift = 0.6 * ((number + 0.5) / len(runs) - 0.5)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": _escape(run.name),
                "marker": {"color": colour, "size": 9, "symbol": [EVENTS[event["event"]] for event in events]},
                "x": _to_list(steps),
                "y": [round(kinds.index(event["event"]) - shift, 3) for event in events],
                "text": [_escape(str(event.get("detail", ""))[:200]) for event in events],
                "hovertemplate": "step %{x} %{text}",
            }
        )
        tokens.append(_to_list(_interpolate_tokens(run, steps)))
    ticks = {"tickvals": list(range(len(kinds))), "ticktext": [kind.replace("_", " ") for kind in kinds]}
    axis = {"tickmode": "array", **ticks, "range": [-0.6, len(kinds) - 0.4], "zeroline": False}
    layout = {"yaxis": axis, "hovermode": "closest"}
    return {"id": "events", "title": "Events", "log": False, "data": data, "tokens": tokens, "layout": layout}


def _interpolate_tokens(run: Run, steps: NDArray[np.float64]) -> NDArray[np.float64]:
    known = np.isfinite(run.tokens)
    if not known.any():
        return np.full(steps.size, np.nan)
    # No step has no token; between two records the number grows evenly.
    return np.interp(steps, np.append(0.0, run.steps[known]), np.append(0.0, run.tokens[known]))


def _to_list(values: NDArray[np.float64]) -> list[float | int | None]:
    """Return numbers for JSON: short, and None for those that are not finite."""
    return list(_shorten(values.tolist()))


def _shorten(values: list[float]) -> Iterator[float | int | None]:
    for value in values:
        if not np.isfinite(value):
            yield None
        else:
            yield int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.7g}")


def _escape(text: str) -> str:
    """Return a text that Plotly shows as it is, although Plotly reads some tags and entities.

    Halves of surrogate pairs, which JSON can hold, become question marks: Chromium crashes when it saves such a page.
    """
    text = text.encode("utf-8", "replace").decode()
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
