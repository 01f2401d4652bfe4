"""Page of a report: one HTML file with the figures, the tables and Plotly, which loads nothing from the network.

Figures of a report, as Plotly's JSON: one colour for each run in all of them.
"""

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from jaxopt_llm.config import Config, fields
from jaxopt_llm.core import json_files
from jaxopt_llm.observe.report.run_files import EVAL_LOSS, Curve, Run, to_number

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


@dataclass(frozen=True)
class Plot:
    """Plot of a field of the records over the steps.

    Attributes:
        format: of the numbers, in d3's notation.
        log: whether the reader can choose a logarithmic axis.
        from_zero: whether the axis begins at 0.
    """

    field: str
    title: str
    unit: str
    format: str
    log: bool = False
    from_zero: bool = False


PLOTS = (
    Plot("loss", "Training loss", "nats per token, or of the objective per pair", ".4f", log=True),
    Plot(EVAL_LOSS, "Held-out loss", "nats per token, or of the objective per pair", ".4f", log=True),
    Plot("rewards/accuracy", "Pairs whose chosen answer is preferred", "share", ".1%", from_zero=True),
    Plot("eval_rewards/accuracy", "Held-out pairs whose chosen answer is preferred", "share", ".1%", from_zero=True),
    Plot("rewards/margin", "Margin of rewards", "chosen - rejected", ".4~g"),
    Plot("eval_rewards/margin", "Held-out margin of rewards", "chosen - rejected", ".4~g"),
    Plot("accuracy", "Documents of the right class", "share", ".1%", from_zero=True),
    Plot("eval_accuracy", "Held-out documents of the right class", "share", ".1%", from_zero=True),
    Plot("divergence", "Divergence from the teacher", "nats per token", ".4f", from_zero=True),
    Plot("eval_divergence", "Held-out divergence from the teacher", "nats per token", ".4f", from_zero=True),
    Plot("grad_norm", "Gradient norm", "before the clip", ".4~g", log=True),
    Plot("learning_rate", "Learning rate", "", ".3~g", from_zero=True),
    Plot("tokens_per_second", "Throughput", "tokens per second", ",.0f", from_zero=True),
    Plot("mfu", "Model FLOP utilisation", "share of the peak", ".1%", from_zero=True),
    Plot("data_wait", "Wait for data", "share of the step", ".1%", from_zero=True),
    Plot("loss_scale", "Loss scale", "", ",.6~g", log=True),
    Plot("skipped", "Skipped steps", "so far", ",d", from_zero=True),
)


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
    """Return different colours: those of the palette, then hues at the golden angle."""
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
        plot.title for plot in PLOTS if not any(name.split("/")[0] == plot.field for run in runs for name in run.curves)
    ]


def list_shortened(runs: Sequence[Run]) -> list[str]:
    """Return the names of the runs that have more records than a curve has points."""
    return [run.name for run in runs if run.steps.size > MAX_POINTS]


def _find_curves(plot: Plot, run: Run) -> dict[str, Curve]:
    """Return the curves of a run in a plot by the name that tells them apart, "" for the only or main one."""
    if plot.field == "skipped" and plot.field in run.curves and not run.curves[plot.field].values.any():
        return {}
    names = {plot.field: ""} if plot.field in run.curves else {}
    if plot.field == EVAL_LOSS:
        names |= {name: name.partition("/")[2] for name in run.curves if name.startswith(f"{EVAL_LOSS}/")}
        if len(names) == 2:  # one validation set: its loss is also that of all sets
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
    headings, rows = compare_settings(runs)
    summaries = [summarise(run) for run in runs]
    page = environment.get_template("page.html").render(
        runs=[
            {
                "name": run.name,
                "directory": str(run.directory),
                "colour": colour,
                "summary": summary,
                "events": list_events(run),
                "event_count": len(run.events),
                "faults": list_faults(run),
                "empty": not run.steps.size,
                "notes": run.notes,
            }
            for run, colour, summary in zip(runs, choose_colours(len(runs)), summaries, strict=True)
        ],
        summary_names=list(dict.fromkeys(name for summary in summaries for name in summary)),
        figures=make_figures(runs),
        missing=list_missing(runs),
        shortened=list_shortened(runs),
        max_points=MAX_POINTS,
        headings=headings,
        settings=rows,
        samples=list_samples(runs),
        evaluations=compare_task_results(runs),
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


MAX_EVENTS = 200  # of each run, the last ones
MAX_PROMPTS = 50
MAX_EVALUATED_STEPS = 8  # of each run, the last ones
MAX_EARLIER = 20  # earlier answers after a prompt, spread evenly
MISSING = "–"
ENDS = {"end": "finished", "stop": "stopped", "fault": "fault"}


def summarise(run: Run) -> dict[str, str]:
    """Return the figures of a run that one looks for first, by name."""
    loss, held_out, speed = (run.curves.get(name) for name in ("loss", EVAL_LOSS, "tokens_per_second"))
    settings = flatten(run.config)
    row = {
        "state": _describe_state(run),
        "step": f"{run.steps[-1]:,.0f} of {settings.get('training.steps', '?')}" if run.steps.size else "0",
        "tokens": f"{run.tokens[-1]:,.0f}" if run.steps.size and np.isfinite(run.tokens[-1]) else MISSING,
        "last loss": MISSING if loss is None else f"{loss.values[-1]:.4f}",
        "best held-out loss": MISSING,
        "tokens/s (median)": MISSING if speed is None else f"{np.median(speed.values):,.0f}",
    }
    if held_out is not None:
        best = int(held_out.values.argmin())
        row["best held-out loss"] = f"{held_out.values[best]:.4f} at step {run.steps[held_out.records[best]]:,.0f}"
    if mfu := run.curves.get("mfu"):
        row["MFU (median)"] = f"{np.median(mfu.values):.1%}"
    if wait := run.curves.get("data_wait"):
        row["wait for data (median)"] = f"{np.median(wait.values):.1%}"
    if run.faults:
        away = np.nansum([fault["away"] for fault in run.faults])
        steps = sum(lost_steps(fault) for fault in run.faults)
        row["faults"] = f"{len(run.faults):,}: away for {away / 60:,.1f} minutes, {steps:,} steps repeated"
    return row


def lost_steps(fault: Mapping[str, Any]) -> int:
    """Return the steps that a run repeats after a fault, because they are not in its checkpoint."""
    return max(int(fault["reached"]) - int(fault["checkpoint"]), 0)


def list_faults(run: Run) -> list[dict[str, str]]:
    """Return the last faults, the newest first: what, who, where and how long it cost."""
    return [
        {
            "time": _format_time(fault["time"]),
            "step": f"{int(fault['reached']):,}",
            "fault": fault["fault"],
            "process": f"{fault.get('process', MISSING)} ({fault.get('host', MISSING)})",
            "what": str(fault.get("what", "")),
            "away": f"{fault['away']:,.1f} s" if np.isfinite(fault["away"]) else MISSING,
            "repeated": f"{lost_steps(fault):,}",
        }
        for fault in reversed(run.faults[-MAX_EVENTS:])
    ]


def _describe_state(run: Run) -> str:
    """Return how the run ended. A run that was killed leaves the same events as one that still goes on."""
    last = next((event["event"] for event in reversed(run.events) if not event["event"].startswith("checkpoint")), None)
    return MISSING if last is None else ENDS.get(last, "running, or killed")


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return settings by dotted name, their values as JSON."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    return flat


def compare_settings(runs: Sequence[Run]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return the headings and the rows of the settings that differ: between runs, or from the defaults for one run.

    A row has the name of the setting and its values.
    """
    columns = [(run.name, flatten(run.config)) for run in runs]
    if len(runs) == 1:
        columns.insert(0, ("default", flatten(json_files.parse(fields.to_json(Config())))))
    names = dict.fromkeys(name for _, settings in columns for name in settings)
    rows = [(name, [settings.get(name, MISSING) for _, settings in columns]) for name in names]
    return [heading for heading, _ in columns], [(name, values) for name, values in rows if len(set(values)) > 1]


def list_events(run: Run) -> list[dict[str, str]]:
    """Return the last events, the newest first."""
    return [
        {
            "time": _format_time(event["time"]),
            "step": f"{event['step']:,}",
            "event": event["event"].replace("_", " "),
            "detail": str(event.get("detail", "")),
        }
        for event in reversed(run.events[-MAX_EVENTS:])
    ]


def _format_time(seconds: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # not a time of this millennium
        return MISSING


def compare_task_results(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the steps of each run in which it was evaluated on tasks, and a row for each metric.

    Of several results of a step, the newest is shown.
    """
    values: dict[tuple[str, str, str], dict[tuple[int, float], str]] = {}
    for number, run in enumerate(runs):
        for each in run.task_results:
            error = f" ± {each.error:.4f}" if np.isfinite(each.error) else ""
            row = values.setdefault((each.task, each.setup, each.metric), {})
            row[number, each.step] = f"{each.value:.4f}{error}"
    columns = []
    for number, run in enumerate(runs):
        steps = sorted({each.step for each in run.task_results})[-MAX_EVALUATED_STEPS:]
        columns += [(number, step) for step in steps]
    return {
        "columns": [(number, f"{step:,.0f}") for number, step in columns],
        "rows": [(key, [row.get(column, MISSING) for column in columns]) for key, row in sorted(values.items())],
    }


def list_samples(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return an entry for each prompt with the answers of each run, the newest first."""
    prompts: dict[tuple[str, str], dict[str, Any]] = {}
    for number, run in enumerate(runs):
        for sample in run.samples:
            name, prompt = sample.get("set", ""), sample["prompt"]
            entry = prompts.setdefault((name, prompt), {"set": name, "prompt": prompt, "runs": {}})
            entry["reference"] = sample.get("reference", "")
            entry["runs"].setdefault(number, []).append((f"{to_number(sample['step']):,.0f}", sample["answer"]))
    return [
        {**entry, "runs": {number: _thin_out(answers) for number, answers in entry["runs"].items()}}
        for entry in list(prompts.values())[:MAX_PROMPTS]
    ]


def _thin_out(answers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the newest answer, and some of the earlier ones."""
    newest, earlier = answers[-1], answers[-2::-1]
    if len(earlier) > MAX_EARLIER:
        earlier = [earlier[i] for i in np.linspace(0, len(earlier) - 1, MAX_EARLIER).astype(int)]
    return [newest, *earlier]
