"""Record what the commands do, or compare it with an earlier record: for changes that must not change behaviour.

    .venv/bin/python scripts/behaviour.py record FILE
    .venv/bin/python scripts/behaviour.py compare FILE [LATER]

A record holds what the commands report:

- memory, collectives and FLOPs of 23 settings, compiled for GPUs; no GPU is needed
- losses and gradient norms, bit by bit, of the first three steps of 13 toy settings, and the identity of their data
- the resolved configuration of every recipe
- exit codes of bad command lines

A record is valid for one version of JAX and one type of CPU. `compare` prints the differences between a record and
what the commands do now, or between a record and a LATER record. It exits with 1 if there are differences.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxopt_llm.config import MoEConfig, RopeConfig
from jaxopt_llm.core.errors import DoesNotFit

ROOT = Path(__file__).parent.parent

PROGRAMS = {  # name: (recipe, hosts, GPUs per host, flags)
    "dense on one GPU": ("llama3_8b.py", 1, 1, "--mesh.fsdp 1 --training.batch-size 2"),
    "dense, ZeRO-0": ("10b.py", 1, 8, "--mesh.fsdp 1 --mesh.data 8 --sharding.zero-stage 0"),
    "dense, ZeRO-1": ("10b.py", 1, 8, "--sharding.zero-stage 1 --training.accumulation 2"),
    "dense, ZeRO-2": ("llama2_7b.py", 1, 8, "--sharding.zero-stage 2"),
    "dense, ZeRO-3": ("llama2_7b.py", 1, 8, ""),
    "hybrid sharding": ("10b.py", 2, 8, "--mesh.data 2"),
    "tensor and sequence": ("10b.py", 1, 8, "--mesh.fsdp 2 --mesh.tensor 4 --sharding.sequence-parallel True"),
    "context, ring": ("llama3_8b.py", 1, 8, "--mesh.fsdp 2 --mesh.context 4 --training.batch-size 2"),
    "context, exchange": (
        "llama3_8b.py",
        1,
        8,
        "--mesh.fsdp 4 --mesh.context 2 --training.batch-size 4 --sharding.context-exchange all_to_all",
    ),
    "pipeline": (
        "10b.py",
        1,
        8,
        "--mesh.fsdp 2 --mesh.pipeline 4 --training.accumulation 8",
    ),
    "interleaved pipeline": (
        "10b.py",
        1,
        8,
        "--mesh.fsdp 4 --mesh.pipeline 2 --training.accumulation 4 --pipeline.schedule interleaved "
        "--pipeline.virtual-stages 2",
    ),
    "GPipe and tensor": (
        "10b.py",
        1,
        8,
        "--mesh.fsdp 2 --mesh.pipeline 2 --mesh.tensor 2 --training.accumulation 4 --pipeline.schedule gpipe",
    ),
    "MoE": ("qwen3_30b_a3b.py", 1, 8, ""),
    "MoE, tensor": ("mixtral_8x7b.py", 1, 8, "--mesh.expert 4 --mesh.fsdp 1 --mesh.tensor 2"),
    "MLA": ("deepseek_v2_lite.py", 1, 8, ""),
    "LoRA": ("llama3_8b_lora.py", 1, 1, ""),
    "QLoRA": ("llama3_8b_qlora.py", 1, 1, ""),
    "QLoRA over 8 GPUs, full": ("llama2_70b_qlora.py", 1, 8, "--mesh.fsdp 8 --training.batch-size 16"),
    "fp8": ("10b.py", 1, 8, "--precision.matmul fp8"),
    "int8, dots kept": ("10b.py", 1, 8, "--precision.matmul int8 --remat.policy dots"),
    "float16": (
        "10b.py",
        1,
        8,
        "--precision.compute-dtype float16 --precision.loss-scaling dynamic --precision.reduce-dtype float16",
    ),
    "offload": ("10b.py", 1, 8, "--offload.optimizer True --offload.parameters True"),
    "in the backward": (
        "llama2_7b.py",
        1,
        1,
        "--mesh.fsdp 1 --training.batch-size 1 --optimizer.in-backward True --optimizer.clip-norm 0 "
        "--optimizer.state-dtype int8",
    ),
}

SMALL = "--training.steps 3 --evaluation.every 3 --evaluation.batches 1 --logging.every 1 --training.sequence-length 64"
TOYS = {  # name: flags of the quickstart recipe, on simulated devices
    "one device": "",
    "ZeRO-1 and tensor": "--mesh.fsdp 2 --mesh.tensor 2 --model.kv-heads 2 --sharding.zero-stage 1",
    "ZeRO-2, accumulation": "--mesh.fsdp 4 --sharding.zero-stage 2 --training.accumulation 2 --remat.policy full",
    "ZeRO-3, context": "--mesh.fsdp 2 --mesh.context 2 --precision.compute-dtype bfloat16",
    "sequence": "--mesh.tensor 2 --model.kv-heads 2 --sharding.sequence-parallel True --remat.policy dots",
    "pipeline": "--mesh.pipeline 2 --training.accumulation 4",
    "interleaved": (
        "--mesh.pipeline 2 --training.accumulation 2 --model.layers 8 --pipeline.schedule interleaved "
        "--pipeline.virtual-stages 2"
    ),
    "MoE": "--model.moe.experts 4 --model.moe.expert-width 64 --mesh.expert 2 --model.moe.dense-layers 1",
    "MLA": (
        "--model.mla.kv-rank 32 --model.mla.query-rank 24 --model.kv-heads 2 --model.head-dim 32 "
        "--model.pattern global --model.rope.scaling yarn --model.rope.factor 4"
    ),
    "LoRA": "--lora.rank 4 --lora.dropout 0.1 --mesh.fsdp 2",
    "QLoRA": "--lora.rank 4 --lora.base nf4 --lora.targets *up* *down* --lora.dora True",
    "float16, int8, Muon": (
        "--precision.compute-dtype float16 --precision.loss-scaling dynamic --precision.matmul int8 --optimizer.name "
        "muon --optimizer.state-dtype int8"
    ),
    "GPT": (
        "--model.positions learned --model.norm layer --model.biases all --model.mlp gelu --model.pattern global "
        "--optimizer.name sgd --schedule.kind wsd --training.z-loss 0.001"
    ),
}

BAD = {
    "unknown field": "train --config quickstart.py --training.stepz 3",
    "unknown recipe": "train --config no_such.py",
    "no recipe": "train",
    "bad value": "train --config quickstart.py --training.steps many",
    "bad mesh": "train --config quickstart.py --mesh.fsdp 0",
    "heads": "train --config quickstart.py --model.heads 3 --model.kv-heads 2",
    "batch": "train --config quickstart.py --mesh.fsdp 3 --print-config",
    "pipeline": "train --config quickstart.py --mesh.pipeline 3 --print-config",
    "no checkpoint": "generate --checkpoint nowhere --prompt x",
    "no run": "evaluate --checkpoint nowhere",
    "unknown GPU": "plan --config 10b.py --gpu abacus",
    "mesh and GPUs": "plan --config 10b.py --gpu h100 --hosts 1 --gpus-per-host 4",
    "no data": "train --config quickstart.py --data.paths nowhere.txt",
    "in backward": "train --config quickstart.py --optimizer.in-backward True",
    "convert": "convert export --checkpoint nowhere --to there",
}
MEASURED = {"compile_seconds"}
RENAMED = {  # settings that were renamed after a record that is still in use: old -> new
    "data.beginning": "data.bos",
    "data.end": "data.eos",
    "training.expert_products": "training.grouped_matmul",
    "model.latent_rank": "model.mla.kv_rank",
    "model.expert_capacity": "model.moe.capacity_factor",
    **{f"model.{name}": f"model.mla.{name}" for name in ("query_rank", "rotary_head_dim", "value_head_dim")},
    **{f"model.{field.name}": f"model.moe.{field.name}" for field in dataclasses.fields(MoEConfig)},
    **{f"model.rope_{field.name}": f"model.rope.{field.name}" for field in dataclasses.fields(RopeConfig)},
}


def run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    line = [sys.executable, "-m", f"jaxopt_llm.{command}", *arguments]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)


def succeed(command: str, *arguments: str) -> str:
    done = run(command, *arguments)
    if done.returncode not in (0, DoesNotFit.exit_code):
        sys.exit(f"{command} {' '.join(arguments)}\n{done.stdout}{done.stderr}")
    return done.stdout


def programs() -> Iterator[tuple[str, Any]]:
    for name, (recipe, hosts, gpus, flags) in PROGRAMS.items():
        cluster = ("--gpu", "h200", "--hosts", str(hosts), "--gpus-per-host", str(gpus))
        plan = json.loads(succeed("plan", "--config", recipe, *cluster, "--json", *flags.split()))
        yield f"program: {name}", {key: value for key, value in plan.items() if key not in MEASURED}


def toys() -> Iterator[tuple[str, Any]]:
    for name, flags in TOYS.items():
        with tempfile.TemporaryDirectory() as folder:
            directory = f"{folder}/run"
            succeed("train", "--config", "quickstart.py", "--run.directory", directory, *SMALL.split(), *flags.split())
            steps = [json.loads(line) for line in Path(directory, "metrics.jsonl").read_text().splitlines()]
            timed = {"tokens_per_second", "step_seconds", "mfu", "peak_bytes", "time", "data_seconds"}
            kept = [{key: value for key, value in step.items() if key not in timed} for step in steps]
            yield f"toy: {name}", {"steps": kept, "corpus": json.loads(Path(directory, "corpus.json").read_text())}


def recipes() -> Iterator[tuple[str, Any]]:
    for file in sorted((ROOT / "configs").glob("*.py")):
        done = run("train", "--config", file.name, "--print-config")
        yield f"recipe: {file.name}", json.loads(done.stdout) if not done.returncode else done.returncode


def errors() -> Iterator[tuple[str, Any]]:
    for name, line in BAD.items():
        done = run(*line.split())
        yield f"error: {name}", done.returncode


def record() -> dict[str, Any]:
    found = {}
    for part in (errors, recipes, toys, programs):
        for name, value in part():
            print(name, file=sys.stderr, flush=True)
            found[name] = value
    return found


def renamed(record: dict[str, Any]) -> dict[str, Any]:
    """Replace old names of settings in a record by their current names."""
    for name, recipe in record.items():
        for old, new in RENAMED.items():
            section, field = old.split(".")
            if name.startswith("recipe: ") and isinstance(recipe, dict) and field in recipe[section]:
                *parents, last = new.split(".")
                target = functools.reduce(lambda values, parent: values.setdefault(parent, {}), parents, recipe)
                target[last] = recipe[section].pop(field)
    return record


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{path}/{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{path}/{index}")
    elif old != new:
        yield f"{path}: {old!r} became {new!r}"


def main() -> int:
    match sys.argv[1:]:
        case ["record", file]:
            Path(file).write_text(json.dumps(record(), indent=1) + "\n")
            return 0
        case ["compare", file, *later] if len(later) <= 1:
            old = renamed(json.loads(Path(file).read_text()))
            new = json.loads(Path(later[0]).read_text()) if later else json.loads(json.dumps(record()))
            found = list(differences(old, new))
            print("\n".join(found) or "no difference")
            return bool(found)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main())
