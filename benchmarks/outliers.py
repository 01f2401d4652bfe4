"""Measure what outlier columns cost int8 products in loss, with and without `precision.outlier_threshold`.

    python benchmarks/outliers.py [--steps 200] [--more 60] [--seeds 0] [--json FILE]

A quickstart model of --steps steps gets outliers: in each norm before the matrices of a block, the scales of COLUMNS
columns are multiplied by FACTOR, and the rows of the matrices that read these columns are divided by it. That changes
nothing in exact arithmetic. The model is then trained for --more steps in bfloat16, with int8 products, and with int8
products and a threshold of 6.0.

Training loss: mean of the last half of these steps, by the products of the run. Held-out loss: after the last step, in
bfloat16, as evaluation is. Served: loss of the planted model before these steps on other text, a part of NumPy's source
code, in float32, without and with int8 products (`evaluate --quantise int8 --outlier-threshold`).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.data.reading.source import read_standard_library

COLUMNS, FACTOR = 6, 60.0
READ_BY = {  # norms of a block, and the matrices that read them
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
BF16 = ("--precision.compute-dtype", "bfloat16")
INT8 = ("--precision.matmul", "int8")
TRAINED = {"exact": (), "int8": INT8, "int8, threshold 6": (*INT8, "--precision.outlier-threshold", "6")}
NO_OUTLIER = "1e9"  # threshold that no column reaches: all products are of integers
SERVED = {
    "exact": (),
    "int8": ("--quantise", "int8", "--outlier-threshold", NO_OUTLIER),
    "int8, threshold 6": ("--quantise", "int8", "--outlier-threshold", "6"),
}
EVALUATION = ("--evaluation.batches", "40")
MODEL = ("--model.pattern", "global")  # a Llama model, which has a folder
OTHER_TEXT = f"{Path(np.__file__).parent}/fft/*.py"
RATE = "5e-4"  # of the further steps: a tenth of the recipe's, as for a model that is nearly trained


def write_byte_tokenizer(file: Path) -> None:
    """Write a tokenizer of bytes as a file, which a folder of a model requires."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(file))


def write_corpus(file: Path) -> None:
    """Write the source code of Python's standard library as a file, so that all runs hold out the same documents."""
    with file.open("w") as lines:
        for document in read_standard_library():
            lines.write(json.dumps({"text": document.content.decode(errors="replace")}) + "\n")


def plant_outliers(folder: Path, seed: int) -> None:
    """Plant outlier columns in a folder with one file of weights in place."""
    file = folder / "model.safetensors"
    arrays = {name: stored.array.copy() for name, stored in safetensors.open_file(file).items()}
    random = np.random.default_rng(seed)
    for name in [*arrays]:
        block, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm in READ_BY:
            columns = random.choice(arrays[name].size, COLUMNS, replace=False)
            arrays[name][columns] *= FACTOR
            for matrix in READ_BY[norm]:
                arrays[f"{block}.{matrix}.weight"][:, columns] /= FACTOR
    specs = {name: safetensors.TensorSpec(array.dtype, array.shape) for name, array in arrays.items()}
    safetensors.write_file(file, specs, arrays.__getitem__)


def run(command: str, *arguments: object) -> str:
    """Run a command of the package, and return what it printed."""
    words = [sys.executable, "-m", f"jaxopt_llm.{command}", *map(str, arguments)]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def train(directory: Path, steps: int, seed: int, settings: Sequence[str]) -> list[dict[str, Any]]:
    """Train the quickstart, and return its metrics."""
    length = ("--training.steps", steps, "--schedule.decay-steps", steps, "--schedule.warmup-steps", steps // 10)
    measured = ("--evaluation.every", steps, *EVALUATION, "--training.batch-size", 4)
    recipe = ("--config", "quickstart.py", "--run.directory", directory, "--run.seed", seed, "--logging.every", 1)
    run("train", *recipe, *length, *measured, *settings)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def measure(steps: int, more: int, seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return the losses of one seed."""
    served: dict[str, dict[str, float]] = {}
    trained: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        base, folder, tokenizer = (Path(scratch, name) for name in ("base", "planted", "tokenizer.json"))
        corpus = Path(scratch, "corpus.jsonl")
        write_byte_tokenizer(tokenizer)
        write_corpus(corpus)
        data = (*MODEL, "--data.paths", str(corpus))
        train(base, steps, seed, (*data, "--data.tokenizer", str(tokenizer)))
        run("convert", "export", "--checkpoint", base, "--to", folder)
        plant_outliers(folder, seed)
        for name, flags in SERVED.items():
            where = ("--checkpoint", folder, "--data.paths", OTHER_TEXT, "--data.format", "text")
            rows = ("--training.batch-size", 4, "--training.sequence-length", 256)
            printed = run("evaluate", *where, *rows, *flags)
            served[name] = {"loss": float(printed.split(": ")[-1].split()[0])}
            print(f"seed {seed}, served, {name}: {served[name]}", flush=True)
        start = (*data, "--model.pretrained", str(folder), "--optimizer.learning-rate", RATE, *BF16)
        for name, flags in TRAINED.items():
            records = train(Path(scratch, name), more, seed, (*start, *flags))
            losses = [each["loss"] for each in records[len(records) // 2 :]]
            trained[name] = {
                "training_loss": statistics.mean(losses),
                "held_out_loss": records[-1]["eval_loss"],
            }
            print(f"seed {seed}, trained, {name}: {trained[name]}", flush=True)
    return {"served": served, "trained": trained}


def format_losses(found: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Return the lines of the table of one seed, with ratios to the exact products."""
    lines = [f"{'precision':20} {'served':>16} {'training loss':>16} {'held-out loss':>16}"]
    for name in TRAINED:
        columns = [
            (case[name][key], case["exact"][key])
            for case, key in (
                (found["served"], "loss"),
                (found["trained"], "training_loss"),
                (found["trained"], "held_out_loss"),
            )
        ]
        lines.append(f"{name:20} " + " ".join(f"{loss:8.4f} ({loss / exact:.3f})" for loss, exact in columns))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--more", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path, help="file for the figures; the table goes to a .txt beside it")
    options = parser.parse_args()
    told = {"jax": jax.__version__, "columns": COLUMNS, "factor": FACTOR, "steps": options.steps, "more": options.more}
    losses = {seed: measure(options.steps, options.more, seed) for seed in options.seeds}
    lines = [f"{COLUMNS} columns × {FACTOR:g}, {options.steps} + {options.more} steps, jax {jax.__version__}"]
    for seed, found in losses.items():
        lines += [f"seed {seed}", *format_losses(found)]
    print("\n".join(lines))
    if options.json:
        options.json.write_text(json.dumps({**told, "losses": losses}, indent=2) + "\n")
        options.json.with_suffix(".txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
