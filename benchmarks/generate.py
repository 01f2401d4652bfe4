"""Measure greedy generation of a random Llama next to transformers' `generate`, on the CPU.

    python benchmarks/generate.py [--batch 1 8] [--prompt 16] [--tokens 128] [--runs 5] [--json FILE]

The model is written once with our export, as a Hugging Face folder, and both sides load it. Every run is a pair of
processes, ours and then the peer, so that other load on the machine affects both. Each process generates once without a
clock, which compiles, then `--turns` times with one. A figure is the best of these turns, whole calls with the
prompt; the ratio is taken within each run, and the median over the runs is reported. All tokens must be equal. Both use
all cores and float32.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxopt_llm.config import ModelConfig, PrecisionConfig
from jaxopt_llm.core import errors
from jaxopt_llm.core.files import replace_durably

ROLES = ("ours", "transformers")
RUNS_BY_ITSELF = "--as"  # first argument when this file starts itself; the role, the folder and the work follow
SEED = 0  # of weights and prompts
SMALL = ModelConfig(
    vocabulary_size=8192, width=512, layers=8, heads=8, kv_heads=4, head_dim=64, mlp_width=1408, tied_head=False
)
MODELS = {"32m": SMALL, "0.2b": dataclasses.replace(SMALL, width=1024, layers=14, heads=16, kv_heads=8, mlp_width=2816)}


def write_model(path: Path, model: str) -> int:
    """Write a folder of a model with random weights. Return their number."""
    import jax

    from jaxopt_llm.checkpoint.huggingface.model_folder import write_model_folder
    from jaxopt_llm.inference.models import make_placement
    from jaxopt_llm.model import param
    from jaxopt_llm.model.decoder import Decoder

    config = MODELS[model]
    specs = Decoder(config).specs
    params = jax.jit(
        lambda: param.initialize(specs, SEED), out_shardings=make_placement(0, PrecisionConfig()).replicated
    )()
    write_model_folder(path, params, config)
    return param.count_parameters(specs)


def make_ours(folder: Path, rows: int, length: int) -> tuple[Callable[[Any, int], list[Any]], str]:
    """Return a function (prompts, count) -> tokens [rows, count], and versions."""
    import jax

    from jaxopt_llm.checkpoint.huggingface.model_folder import open_model_folder
    from jaxopt_llm.execution.by_layer import split_layers
    from jaxopt_llm.execution.decode import Request, TokenGenerator
    from jaxopt_llm.inference.models import read_folder

    opened = open_model_folder(folder)
    model, params, placement = read_folder(opened, PrecisionConfig(compute_dtype="float32"), tensor=1)
    params, size = split_layers(params), opened.config.vocabulary_size
    generator = TokenGenerator(model, params, placement, size, rows, length)

    def generate(prompts: Any, count: int) -> list[Any]:
        generator.load(params)  # an empty cache
        requests = [Request(prompt, count, number=number) for number, prompt in enumerate(prompts)]
        drawn = [(each.request.number, each.token) for each in generator.run(requests, lambda request: False)]
        return [[token for number, token in drawn if number == row] for row in range(len(requests))]

    return generate, f"jax {jax.__version__}"


def make_peer(folder: Path, rows: int, length: int) -> tuple[Callable[[Any, int], list[Any]], str]:
    """Return the same of transformers, with its default cache and attention."""
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count() or 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(prompts: Any, count: int) -> list[Any]:
        ids = torch.tensor(prompts, dtype=torch.int64)
        settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **settings)
            return found[:, ids.shape[1] :].tolist()

    return generate, f"torch {torch.__version__}, transformers {transformers.__version__}"


def measure(role: str, folder: Path, work: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one process: seconds of whole calls, and the tokens."""
    import numpy as np

    random = np.random.default_rng(SEED)
    prompts = random.integers(3, work["vocabulary_size"], (work["batch"], work["prompt"])).astype(np.int32)
    make = make_ours if role == "ours" else make_peer
    generate, versions = make(folder, work["batch"], work["prompt"] + work["tokens"])
    began = time.perf_counter()
    tokens = generate(prompts, work["tokens"])
    first, seconds = time.perf_counter() - began, []
    for _ in range(work["turns"]):
        began = time.perf_counter()
        generate(prompts, work["tokens"])
        seconds.append(time.perf_counter() - began)
    return {"versions": versions, "tokens": tokens, "seconds": seconds, "first_seconds": first}


def run_process(role: str, folder: Path, work: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, RUNS_BY_ITSELF, role, str(folder), json.dumps(work)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if finished.returncode:
        sys.exit(finished.returncode)
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return result


def compare(folder: Path, work: Mapping[str, Any], runs: int) -> dict[str, Any]:
    """Run both sides in turn. Return the row of a batch."""
    results: dict[str, list[dict[str, Any]]] = {role: [] for role in ROLES}
    for _ in range(runs):
        for role in ROLES:
            results[role].append(run_process(role, folder, work))
        if (found := results["ours"][-1].pop("tokens")) != results["transformers"][-1].pop("tokens"):
            raise errors.InputError(f"batch {work['batch']}: the two sides write other tokens, such as {found[-1]}")
    written = work["batch"] * work["tokens"]
    rates = {role: [written / min(each["seconds"]) for each in results[role]] for role in ROLES}
    ratios = [ours / peer for ours, peer in zip(*rates.values(), strict=True)]
    return {
        **work,
        "tokens_per_second": {role: statistics.median(each) for role, each in rates.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "first_seconds": {role: statistics.median(each["first_seconds"] for each in results[role]) for role in ROLES},
        "versions": {role: results[role][0]["versions"] for role in ROLES},
        "runs": results,
    }


HEADER = f"{'model':>5} {'batch':>5} | {'ours, tokens/s':>14} {'transformers':>12} | {'ratio':>5} {'of the runs':>12}"


def format_row(row: Mapping[str, Any]) -> str:
    ours, peer = (row["tokens_per_second"][role] for role in ROLES)
    spread = f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}"
    return f"{row['model']:>5} {row['batch']:5} | {ours:14,.1f} {peer:12,.1f} | {row['ratio']:5.2f} {spread:>12}"


def describe_processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())


def save(file: Path, report: Mapping[str, Any]) -> None:
    replace_durably(file, json.dumps(report, indent=2) + "\n")
    rows = report["rows"]
    first = rows[0]
    lines = [
        f"greedy generation in float32 on {report['cores']} cores ({report['processor']}); measured",
        f"{first['prompt']} tokens of prompt and {first['tokens']} new ones a row, the same from both",
        *(f"{role}: {first['versions'][role]}" for role in ROLES),
        HEADER,
    ]
    replace_durably(file.with_suffix(".txt"), "\n".join([*lines, *map(format_row, rows), ""]))


def main() -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", nargs="+", choices=MODELS, default=["32m"], help="sizes of the model (default: 32m)")
    add("--batch", type=int, nargs="+", default=[1, 8], metavar="N", help="prompts at once (default: 1 8)")
    add("--prompt", type=int, default=16, metavar="N", help="tokens of a prompt (default: 16)")
    add("--tokens", type=int, default=128, metavar="N", help="new tokens of each prompt (default: 128)")
    add("--runs", type=int, default=5, metavar="N", help="pairs of processes (default: 5)")
    add("--turns", type=int, default=3, metavar="N", help="timed calls of a process (default: 3)")
    add("--json", type=Path, metavar="FILE", help="file for the figures; the table is written next to it as .txt")
    options = parser.parse_args()
    if min(*options.batch, options.prompt, options.tokens, options.runs, options.turns) < 1:
        parser.error("--batch, --prompt, --tokens, --runs and --turns must be at least 1")
    report: dict[str, Any] = {"command": sys.argv, "python": platform.python_version(), "cores": os.cpu_count()}
    report |= {"processor": describe_processor(), "rows": []}
    print(HEADER, flush=True)
    for model in options.model:
        with tempfile.TemporaryDirectory() as directory:
            parameters = write_model(folder := Path(directory, "model"), model)
            for batch in options.batch:
                work = {"model": model, "parameters": parameters, "batch": batch}
                work |= {name: getattr(options, name) for name in ("prompt", "tokens", "turns")}
                work |= {"vocabulary_size": MODELS[model].vocabulary_size}
                report["rows"].append(compare(folder, work, options.runs))
                print(format_row(report["rows"][-1]), flush=True)
                if options.json:
                    save(options.json, report)
    return 0


def measure_and_print() -> int:
    _, _, role, folder, work = sys.argv
    print(json.dumps(measure(role, Path(folder), json.loads(work))))
    return 0


if __name__ == "__main__":
    errors.run_command(measure_and_print if sys.argv[1:2] == [RUNS_BY_ITSELF] else main)
