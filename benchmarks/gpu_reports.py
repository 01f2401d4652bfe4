"""Reports of the parts of gpu_check.py: readers of their files, and descriptions in one line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

GIB = 2**30


def read_step(path: Path) -> dict[str, Any]:
    """Read the report of train_step.py without its command, which names a temporary file."""
    report = json.loads(path.read_text())
    return {name: value for name, value in report.items() if name != "command"}


def read_figures(path: Path) -> dict[str, Any]:
    """Read the report of the only case of gpu_figures.py."""
    (row,) = json.loads(path.read_text())["rows"]
    return {name: value for name, value in row.items() if name != "command"}


def read_json(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def read_junit(path: Path) -> dict[str, Any]:
    """Read by name the seconds of passed tests and the messages of the others."""
    report: dict[str, dict[str, Any]] = {"passed": {}, "failed": {}, "skipped": {}}
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if outcome is None:
            report["passed"][name] = float(case.get("time", 0))
        else:
            report["skipped" if outcome.tag == "skipped" else "failed"][name] = outcome.get("message")
    return report


def describe_tests(report: dict[str, Any]) -> str:
    return ", ".join(f"{len(tests)} {outcome}" for outcome, tests in report.items() if tests)


def describe_attention(report: dict[str, Any]) -> str:
    said = []
    for row in report["rows"]:
        name = f"{row['name']} at head_dim {row['head_dim']}, {row['documents']} documents"
        why = row.get("unavailable") or row.get("untimed")
        said.append(
            f"{name} {why or format(row['forward_tflops'], '.0f') + '/' + format(row['backward_tflops'], '.0f')}"
        )
    return "TFLOP/s forward/backward: " + ", ".join(said)


def describe_grouped(report: dict[str, Any]) -> str:
    said = []
    for row in report["rows"]:
        figures = "unavailable" if "unavailable" in row else f"{row['tflops']['all']:.0f}"
        said.append(f"{row['name']} of {row['groups']} groups {figures}")
    return "TFLOP/s of three legs: " + ", ".join(said)


def describe_experts(report: dict[str, Any]) -> str:
    rates = [
        f"{name} {row['measured'].get('unavailable') or format(row['measured']['tokens_per_second'], ',.0f')}"
        for name, row in report["rows"].items()
    ]
    verdicts = [f"{'PASS' if bar['holds'] else 'FAIL'} {bar['said']}: {bar['found']}" for bar in report["bars"]]
    return "; ".join([*verdicts, "tokens/s: " + ", ".join(rates)])


def describe_hot_path(report: dict[str, Any]) -> str:
    rates = (f"{row['name']} {row['bytes_per_second'] / 1e9:.0f}" for row in report["rows"])
    return "GB/s of the least bytes: " + ", ".join(rates)


def describe_figures(report: dict[str, Any]) -> str:
    planned = report["predicted"].get("peak_bytes")
    predicted = "nothing" if planned is None else f"{planned / GIB:.2f} GiB"
    if "step_seconds" not in report:
        why = report.get("unavailable") or report.get("failed") or "no run has finished"
        return f"{why}; predicted without the GPU {predicted}"
    first = report["first_step_seconds"]
    return (
        (f"MFU {report['mfu']:.1%}, attention whole {report['mfu_full_attention']:.1%}; " if "mfu" in report else "")
        + f"attention {report['attention']}; {describe_step(report)}; predicted without the GPU {predicted}; "
        + f"first step after {first['cold']:.0f} s"
        + ("" if first["warm"] is None else f", warm {first['warm']:.0f}")
    )


def describe_step(report: dict[str, Any]) -> str:
    planned, measured = report["planned_peak_bytes"], report["measured_peak_bytes"]
    share = report["share_of_peak_flops"]
    return (
        f"{report['step_seconds']:.3f} s, {report['tokens_per_second']:,.0f} tokens/s"
        + ("" if share is None else f", {share:.0%} of peak")
        + f"; peak {measured / GIB:.2f} GiB, {measured / planned:.2f} × the planned {planned / GIB:.2f}; "
        f"compiled in {report['compile_seconds']:.0f} s"
    )


def describe_filled(report: dict[str, Any]) -> str:
    planned, limit = report["planned_peak_bytes"], report["limit_bytes"]
    return f"{report['layers']} layers, planned for {planned / limit:.0%} of the memory: {describe_step(report)}"


def describe_peer(report: dict[str, Any]) -> str:
    said = [f"ours {report['tokens_per_second']:,.0f} tokens/s"]
    for mode, peer in report["peer"].items():
        why = peer.get("unavailable")
        said.append(f"{mode} {why or format(peer['tokens_per_second'], ',.0f')}")
    return "; torch ".join(said)


def unavailable(report: Any, name: str) -> Iterator[str]:
    """Yield the names of everything that a report marks as "unavailable", because it does not run here."""
    if isinstance(report, list):
        for row in report:
            yield from unavailable(row, name)
    elif isinstance(report, dict):
        own = f"{name} {report['name']}" if "name" in report else name
        own += f" at head_dim {report['head_dim']}" if "head_dim" in report else ""
        if "unavailable" in report:
            yield own
        for key, value in report.items():
            yield from unavailable(value, own if key == "rows" else f"{own} {key}")
