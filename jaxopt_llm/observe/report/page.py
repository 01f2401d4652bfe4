"""Page of a report: one HTML file with the figures, the tables and Plotly, which loads nothing from the network."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from jaxopt_llm.config import Config, fields
from jaxopt_llm.core import json_files
from jaxopt_llm.observe.report import figures
from jaxopt_llm.observe.report.run_files import EVAL_LOSS, Run, to_number

FOLDER = Path(__file__).parent
GENERATOR = '<meta name="generator" content="jaxopt_llm report">'  # marks a page as a report


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
            for run, colour, summary in zip(runs, figures.choose_colours(len(runs)), summaries, strict=True)
        ],
        summary_names=list(dict.fromkeys(name for summary in summaries for name in summary)),
        figures=figures.make_figures(runs),
        missing=figures.list_missing(runs),
        shortened=figures.list_shortened(runs),
        max_points=figures.MAX_POINTS,
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
