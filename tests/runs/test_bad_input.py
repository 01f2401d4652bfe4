"""Bad input: one line that says what is wrong, where, and how to fix it; exit code 2."""

import contextlib
import re
import shutil
import sys
from pathlib import Path

import pytest
from commands import assert_one_line, command, tiny, train

import jaxopt_llm.train
from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.files import lock_directory

RECIPE = "from jaxopt_llm.config import Config\n"
INTERLEAVED = ("--pipeline.schedule", "interleaved", "--pipeline.virtual-stages")
CASES = {
    "misspelt field": (["--model.widht", "3"], ["--model.widht", "--model.width"]),
    "misspelt section": (["--modle.width=3"], ["--modle.width", "--model.width"]),
    "name of another trainer": (["--lr", "1e-4"], ["--lr: no such field; did you mean --optimizer.learning_rate?"]),
    "wrong type": (["--training.steps", "many"], ["--training.steps many: must be a whole number"]),
    "a whole number as a float": (
        ["--training.steps=1e3"],
        ["--training.steps 1e3: must be a whole number below 2**31, such as 1000"],
    ),
    "no number": (["--optimizer.learning_rate", "low"], ["--optimizer.learning-rate low: must be 0 or a normal float"]),
    "not a policy, and the policies in order": (
        ["--remat.policy", "all"],
        [
            "remat.policy: all is no intermediate of this model: set --remat.policy to one of auto, none, full, dots, "
            "save_attention, save_qkv, or to some of block_input, attention_input, query, key, value, attention, "
            "attention_output, mlp_input, mlp_gate, mlp_up, mlp_output"
        ],
    ),
    "not a choice": (["--sharding.zero-stage", "5"], ["zero-stage", "5"]),
    "no value": (["--training.steps"], ["--training.steps"]),
    "zero steps": (["--training.steps", "0"], ["training.steps=0 and training.epochs=0", "give one of them"]),
    "indivisible batch": (
        ["--mesh.fsdp", "3", "--training.accumulation", "2"],
        ["training.batch_size=4", "mesh.fsdp=3", "training.accumulation=2", "nearest", "6"],
    ),
    "indivisible sizes, all named": (
        ["--mesh.tensor", "3", "--mesh.data", "3", "--sharding.sequence-parallel", "True"],
        [
            "training.batch_size=4 is not divisible by mesh.data=3",
            *("model.heads=2", "model.mlp_width=16", "training.sequence_length=32", "mesh.tensor=3 (nearest"),
        ],
    ),
    "heads and groups": (["--model.heads", "3", "--model.kv-heads", "2"], ["model.heads=3", "model.kv_heads=2"]),
    "heads of global layers": (
        ["--model.heads", "4", "--model.global-kv-heads", "3", "--model.global-head-dim", "7"],
        ["model.heads=4: must be a multiple of model.global_kv_heads=3", "model.global_head_dim=7: must be even"],
    ),
    "a norm of values beside LayerNorm": (
        ["--model.norm", "layer", "--model.value-norm", "True"],
        ["model.norm=layer: must be rms with model.value_norm=True"],
    ),
    "shared keys of a kind that no layer has": (
        ["--model.pattern", "global", "sliding", "--model.layers", "2", "--model.shared-key-layers", "1"],
        ["model.shared_key_layers=1: no earlier layer that is sliding has keys; set a smaller --model.shared-key"],
    ),
    "layer inputs without a gate": (
        ["--model.mlp", "gelu", "--model.layer-input-size", "4"],
        ["model.mlp=gelu: must be one of swiglu, geglu, clamped_swiglu with model.layer_input_size"],
    ),
    "wide experts": (
        [
            "--model.moe.experts",
            "4",
            "--model.wide-mlp",
            "True",
            "--model.layers",
            "2",
            "--model.shared-key-layers",
            "1",
        ],
        ["model.wide_mlp=True: does not support experts; set --model.wide-mlp False"],
    ),
    "a pipeline beside shared keys": (
        ["--mesh.pipeline", "2", "--model.layers", "4", "--model.shared-key-layers", "2"],
        ["mesh.pipeline=2 does not support model.shared_key_layers=2, because", "to the next: set --mesh.pipeline 1"],
    ),
    "updates in the backward beside layer inputs": (
        ["--optimizer.in-backward", "True", "--model.layer-input-size", "4"],
        ["in_backward=True does not support model.layer_input_size=4, because", "set --optimizer.in-backward False"],
    ),
    "inputs that tensor does not divide": (
        ["--mesh.tensor", "2", "--model.layer-input-size", "5"],
        ["model.layer_input_size=5 is not divisible by mesh.tensor=2"],
    ),
    "more pairs than a head has": (
        ["--model.head-dim", "8", "--model.rope.rotated-pairs", "5"],
        ["model.rope.rotated_pairs=5: a head has 4 pairs"],
    ),
    "norms of a shared expert that is not there": (
        ["--model.moe.experts", "4", "--model.moe.own-norms", "True"],
        ["model.moe.own_norms=True: there is no shared expert; set --model.moe.shared-expert-width"],
    ),
    "norms of their own without a norm of the MLP": (
        [
            *("--model.moe.experts", "4", "--model.moe.own-norms", "True", "--model.moe.shared-expert-width", "8"),
            *("--model.norm-placement", "post"),
        ],
        ["model.norm_placement=post: must be pre or both with model.moe.own_norms=True"],
    ),
    "a gate of a shared expert with a norm of its own": (
        [
            *("--model.moe.experts", "4", "--model.moe.own-norms", "True", "--model.moe.shared-expert-width", "8"),
            *("--model.moe.shared-expert-gate", "True"),
        ],
        ["model.moe.shared_expert_gate=True: must be False with model.moe.own_norms=True"],
    ),
    "sequences longer than the positions": (
        ["--model.positions", "learned", "--model.max-positions", "31"],
        ["training.sequence_length=32", "--model.max-positions", "31"],
    ),
    "rotary kinds and factors without rotary": (
        ["--model.positions", "learned", "--model.pattern", "global_nope", "--model.rope.factor", "8"],
        ["model.pattern", "write global", "model.rope.factor=8"],
    ),
    "frequencies upside down": (
        ["--model.rope.low-frequency-factor", "5"],
        ["model.rope.high_frequency_factor=4", "must be at least model.rope.low_frequency_factor=5"],
    ),
    "switches below their range": (
        ["--model.attention-softcap=-1", "--model.logit-softcap=-1", "--model.rope.factor", "0.5"],
        ["model.attention_softcap=-1", "model.logit_softcap=-1", "model.rope.factor=0.5"],
    ),
    "loss below its range": (
        ["--training.loss-chunk=-1", "--training.z-loss=-0.1"],
        ["training.loss_chunk=-1", "training.z_loss=-0.1"],
    ),
    "no such norm": (["--model.norm", "batch"], ["--model.norm", "rms"]),
    "missing package, before data is read": (
        ["--logging.wandb-project", "x", "--data.paths", "missing.jsonl"],
        ["logging.wandb_project=x requires wandb", "pip install wandb", '--logging.wandb-project ""'],
    ),
    "no directory": (["--run.directory="], ["run.directory is empty"]),
    "rank above the matrix": (["--lora.rank", "100"], ["lora.rank=100", "attention"]),
    "pattern given twice": (
        ["--lora.rank", "2", "--lora.targets", "*/mlp/*", "*/mlp/*"],
        ["lora.targets", "*/mlp/* has no effect, because earlier patterns match all its parameters"],
    ),
    "what no resume can change": (["--run.allow-change", "lora.rank"], ["lora.rank", "no resume can change it"]),
    "more stages than layers": (
        ["--mesh.pipeline", "3"],
        ["mesh.pipeline=3 exceeds the 2 layers of model.layers=2: set --mesh.pipeline to at most 2"],
    ),
    "more chunks than layers": (
        [*INTERLEAVED, "3", "--mesh.pipeline", "2", "--model.layers", "4"],
        [
            "mesh.pipeline=2 × pipeline.virtual_stages=3 exceeds the 4 layers of model.layers=4",
            "set --pipeline.virtual-stages 2, or --pipeline.schedule 1f1b with --pipeline.virtual-stages 1",
        ],
    ),
    "more chunks than periods": (
        [*INTERLEAVED, "2", "--mesh.pipeline", "2", "--model.layers", "6", "--model.pattern", "sliding", "global"],
        [
            "exceeds the 3 periods of model.pattern of model.layers=6: set --pipeline.schedule 1f1b with "
            "--pipeline.virtual-stages 1"
        ],
    ),
    "chunks that do not divide a stage": (
        [*INTERLEAVED, "4", "--mesh.pipeline", "2", "--model.layers", "12"],
        [
            "pipeline.virtual_stages=4 does not divide the 6 layers of a stage with mesh.pipeline=2",
            "set --pipeline.virtual-stages 2 or 3 or 6, or --pipeline.split to the numbers of layers of the 8 chunks",
        ],
    ),
    "no such schedule": (
        ["--pipeline.schedule", "zigzag"],
        ["--pipeline.schedule", "zigzag", "'gpipe', '1f1b', 'interleaved'"],
    ),
    "a kernel for GPUs on a CPU": (
        ["--training.attention", "pallas"],
        ["training.attention=pallas runs on GPUs only, not on cpu; set --training.attention auto or xla"],
    ),
    "an unknown kernel": (
        ["--training.attention", "flash"],
        ["--training.attention flash: must be one of 'auto', 'xla', 'cudnn', 'pallas', 'triton'"],
    ),
    "interleaved with one chunk": (
        ["--mesh.pipeline", "2", "--pipeline.schedule", "interleaved"],
        ["pipeline.schedule=interleaved with pipeline.virtual_stages=1: set --pipeline.virtual-stages to at least 2"],
    ),
    "chunks without interleaved": (
        ["--mesh.pipeline", "2", "--pipeline.virtual-stages", "2"],
        [
            "pipeline.virtual_stages=2 with pipeline.schedule=1f1b: set --pipeline.schedule interleaved, or "
            "--pipeline.virtual-stages 1"
        ],
    ),
    "a chunk without layers": (
        ["--mesh.pipeline", "2", "--pipeline.split", "2", "0"],
        ["pipeline.split=(2, 0): each chunk needs at least 1 layer"],
    ),
    "a split with commas": (
        ["--mesh.pipeline", "2", "--pipeline.split", "1,1"],
        ["--pipeline.split", "; separate the values of one field by spaces"],
    ),
    "a split of another number of chunks": (
        [*INTERLEAVED, "2", "--mesh.pipeline", "2", "--model.layers", "8", "--pipeline.split", "3", "5"],
        [
            "pipeline.split=(3, 5) has 2 numbers: give 4, one for each chunk of "
            "mesh.pipeline=2 × pipeline.virtual_stages=2"
        ],
    ),
    "a split of another number of layers": (
        ["--mesh.pipeline", "2", "--model.layers", "8", "--pipeline.split", "4", "3"],
        ["pipeline.split=(4, 3) adds up to 7 layers: make it add up to model.layers=8"],
    ),
    "a split within a period": (
        [
            *("--mesh.pipeline", "2", "--pipeline.split", "3", "4"),
            *("--model.layers", "7", "--model.pattern", "sliding", "global"),
        ],
        ["pipeline.split=(3, 4): chunk 1 ends after 3 layers", "end it after 2 or 4 layers"],
    ),
    "devices that do not divide": (
        ["--mesh.fsdp", "1", "--distributed.processes", "2", "--distributed.coordinator", "127.0.0.1:7000"],
        ["mesh: 1 device(s) do not divide over 2 processes", "--distributed.processes"],
    ),
    "no address": (
        ["--distributed.coordinator", "here", "--distributed.timeout-seconds", "0"],
        ["distributed.coordinator=here: must be host:port", "distributed.timeout_seconds=0"],
    ),
    "a sequence that context does not divide": (
        ["--mesh.context", "5", "--training.sequence-length", "64"],
        ["training.sequence_length=64 is not divisible by 2 × mesh.context=5 (nearest that are: 60 and 70)"],
    ),
    "more devices than heads to exchange": (
        ["--mesh.context", "8", "--sharding.context-exchange", "all_to_all", "--model.heads", "4"],
        [
            "sharding.context_exchange=all_to_all",
            "model.heads=4 is not divisible by mesh.context=8",
            "set --sharding.context-exchange ring",
        ],
    ),
    "experts that do not divide": (
        ["--model.moe.experts", "6", "--mesh.expert", "4", "--training.batch-size", "4"],
        ["model.moe.experts=6 is not divisible by mesh.expert=4 (nearest that are: 4 and 8)"],
    ),
    "more experts than there are": (
        ["--model.moe.experts", "2", "--model.moe.experts-per-token", "3"],
        ["model.moe.experts_per_token=3: must be at most model.moe.experts=2"],
    ),
    "one expert with a weight of 1": (
        ["--model.moe.experts", "2", "--model.moe.experts-per-token", "1"],
        [
            "model.moe.router_renormalises=True: with model.moe.experts_per_token=1 every weight is 1",
            "set --model.moe.router-renormalises False",
        ],
    ),
    "latents with shared heads": (
        ["--model.mla.kv-rank", "8", "--model.heads", "4", "--model.kv-heads", "2"],
        ["model.kv_heads=2: with model.mla.kv_rank each query head has its own keys; set --model.kv-heads 4"],
    ),
    "less than an even share": (
        ["--model.moe.experts", "4", "--model.moe.capacity-factor", "0.5"],
        ["capacity_factor=0.5", "1"],
    ),
    "no room for experts": (
        ["--model.moe.experts", "4", "--sharding.expert-room", "0.5"],
        ["sharding.expert_room=0.5: must be at least 1"],
    ),
    "experts in no layer": (
        ["--model.moe.experts", "4", "--model.moe.expert-every", "99"],
        ["model.moe.experts=4: no layer has experts", "model.moe.expert_every=99", "--model.moe.expert-every"],
    ),
    "a negative load-balancing loss": (
        ["--model.moe.experts", "4", "--model.moe.balance-loss", "-1"],
        ["model.moe.balance_loss=-1.0: must be at least 0"],
    ),
    "groups that experts do not fill": (
        ["--model.moe.experts", "6", "--model.moe.router-groups", "4"],
        ["model.moe.experts=6: must be a multiple of model.moe.router_groups=4"],
    ),
    "more groups than there are": (
        ["--model.moe.experts", "4", "--model.moe.router-groups", "2", "--model.moe.router-groups-per-token", "3"],
        ["model.moe.router_groups_per_token=3: must be at most model.moe.router_groups=2"],
    ),
    "groups with too few experts": (
        ["--model.moe.experts", "8", "--model.moe.router-groups", "4", "--model.moe.experts-per-token", "3"],
        ["experts_per_token=3: exceeds the 2 experts of model.moe.router_groups_per_token=1 of 4 groups"],
    ),
    "groups without two experts": (
        [
            *("--model.moe.experts", "4", "--model.moe.router-groups", "4", "--model.moe.router-groups-per-token", "2"),
            *("--model.moe.router", "sigmoid"),
        ],
        [
            "model.moe.router_groups=4: with model.moe.router=sigmoid",
            "two best",
            "--model.moe.router-groups to at most 2",
        ],
    ),
    "a negative rate of the router bias": (
        ["--model.moe.experts", "4", "--model.moe.router-bias-rate", "-1"],
        ["model.moe.router_bias_rate=-1.0: must be at least 0"],
    ),
    "not finite": (["--optimizer.learning-rate", "inf"], ["optimizer.learning_rate=inf", "float32"]),
    "not in float32": (["--optimizer.epsilon", "1e-320"], ["optimizer.epsilon=1e-320", "float32"]),
    "too many layers": (["--model.layers", "2147483647"], ["model.layers=2147483647", "10,000"]),
    "keep_best without evaluations": (
        ["--checkpoint.keep-best", "1", "--evaluation.every", "200"],
        ["checkpoint.keep_best=1", "checkpoint.every=500", "evaluation.every=200"],
    ),
    "a profile after the end": (["--profile.start-step", "9", "--training.steps", "5"], ["profile.start_step=9"]),
    "a seed out of range": (["--run.seed", "99999999999999999999"], ["run.seed=99999999999999999999"]),
    "vocabulary too small": (["--model.vocabulary-size", "100"], ["model.vocabulary_size=100", "258"]),
    "held-out share": (["--data.held-out", "1.5"], ["data.held_out", "1.5"]),
    "targets that match nothing": (
        ["--lora.rank", "2", "--lora.targets", "*/atention/*", "*_norm/*", "*/mlp/*", "*/mlp/up"],
        [
            "*/atention/* matches no parameter",
            "*_norm/* matches no matrix, only non_layer/final_norm/scale",
            "*/mlp/up has no effect",
            "segment_0/block_0/attention/query",
        ],
    ),
    "a negative rank": (["--lora.rank=-2", "--lora.alpha", "0"], ["lora.rank=-2", "lora.alpha=0"]),
    "a quantised base without adapters": (["--lora.base", "int8"], ["lora.base=int8", "lora.rank"]),
    "groups that leave a parameter out": (
        ["--optimizer.decay-groups", "*/mlp/*=1", "*_norm/*=0"],
        ["optimizer.decay_groups: no pattern matches non_layer/embedding/table"],
    ),
    "a group that matches nothing": (
        ["--lora.rank", "2", "--optimizer.rate-groups", "*/lora_a=2", "*/scale=1", "*=1"],
        ["optimizer.rate_groups: */scale matches no parameter", "segment_0/block_0/attention/key/lora_a"],
    ),
    "a group without a number": (
        ["--optimizer.rate-groups", "*"],
        ["optimizer.rate_groups: *: must be PATTERN=NUMBER"],
    ),
    "another optimizer's moments": (["--run.allow-change", "optimizer.name"], ["optimizer.name", "no resume"]),
    "moments in another dtype": (
        ["--run.allow-change", "optimizer.state_dtype"],
        ["optimizer.state_dtype", "no resume"],
    ),
    "int8 moments of adafactor": (
        ["--optimizer.name", "adafactor", "--optimizer.state-dtype", "int8"],
        [
            "optimizer.state_dtype=int8 is not supported with optimizer.name=adafactor",
            "--optimizer.state-dtype float32",
        ],
    ),
    "int8 blocks across devices": (
        ["--optimizer.state-dtype", "int8", "--model.mlp-width", "64", "--mesh.tensor", "2"],
        ["optimizer.state_dtype=int8: each device would hold 32 of the 64", "mlp/gate", "block size 64"],
    ),
    "settings that in_backward excludes": (
        [
            *("--optimizer.in-backward", "True", "--training.accumulation", "2", "--training.skip-outliers", "4"),
            *("--precision.compute-dtype", "float16", "--mesh.pipeline", "2"),
            *("--remat.policy", "dots"),
        ],
        [
            "optimizer.in_backward=True",
            "--optimizer.clip-norm 0 (it is 1.0)",
            "--training.skip-outliers 0 (it is 4.0)",
            "--training.accumulation 1",
            "--precision.compute-dtype bfloat16 (it is float16)",
            "--mesh.pipeline 1",
            "--remat.policy full (it is dots)",
            "or --optimizer.in-backward False",
        ],
    ),
    "an outlier limit below 1": (["--training.skip-outliers", "0.5"], ["training.skip_outliers=0.5"]),
    "two kinds of 16 bits": (
        ["--precision.compute-dtype", "bfloat16", "--precision.reduce-dtype", "float16"],
        ["precision.reduce_dtype=float16", "precision.compute_dtype=bfloat16", "--precision.reduce-dtype float32"],
    ),
    "a loss scale that is not on": (
        ["--precision.initial-loss-scale", "8"],
        ["precision.initial_loss_scale=8", "--precision.compute-dtype float16"],
    ),
    "what no resume changes": (["--run.allow-change", "model.width"], ["model.width", "no resume"]),
    "a loss scale out of range": (
        [
            *("--precision.compute-dtype", "float16"),
            *("--precision.initial-loss-scale", "0.5", "--precision.loss-scale-growth-interval", "0"),
        ],
        [
            "precision.initial_loss_scale=0.5: must be at least 1",
            "precision.loss_scale_growth_interval=0: must be at least 1",
        ],
    ),
    "no such intermediate": (["--remat.policy", "query", "atention"], ["atention", "--remat.policy", "mlp_gate"]),
    "nothing such to offload": (["--remat.offload", "logits"], ["logits", "--remat.offload", "block_input"]),
    "a list of no intermediates": (["--remat.policy"], ["remat.policy", "full"]),
    "groups that do not divide": (
        ["--remat.every", "4", "--model.layers", "6"],
        ["remat.every=4 does not divide the 6 layers: choose one of 1, 2, 3, 6"],
    ),
    "groups that do not divide a stage": (
        ["--remat.every", "4", "--model.layers", "12", "--mesh.pipeline", "2"],
        ["remat.every=4 does not divide the 6 layers in each of 2 stages"],
    ),
    "groups that do not divide a chunk of a stage": (
        ["--remat.every", "2", "--model.layers", "12", "--mesh.pipeline", "2", *INTERLEAVED, "2"],
        ["remat.every=2 does not divide the 3 layers in each of the 2 chunks of 2 stages: choose one of 1, 3"],
    ),
    "groups of partial periods": (
        ["--remat.every", "3", "--model.layers", "6", "--model.pattern", "sliding", "global"],
        ["remat.every=3 does not divide into periods", "set --remat.every to a multiple of 2"],
    ),
    "groups that leave nothing to offload": (
        ["--remat.every", "2", "--remat.offload", "block_input"],
        ["remat.every=2", "remat.offload"],
    ),
    "schedule": (["--schedule.warmup-steps", "5000"], ["schedule.warmup_steps=5000"]),
}


# Errors that need the data, the devices or the compiled step; all others are reported before JAX is initialised.
LATE = ("vocabulary too small", "a kernel for GPUs on a CPU")


@pytest.mark.parametrize("case", [case for case in CASES if case not in LATE])
def test_overrides(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the command's main in this process. A case that passed the checks would fail, because devices cannot be
    simulated twice in a process."""
    overrides, parts = CASES[case]
    monkeypatch.setattr(sys, "argv", ["train", *map(str, tiny(tmp_path / "run")), *overrides])
    with pytest.raises(SystemExit) as stop:
        errors.run_command(jaxopt_llm.train.main)
    stderr = capsys.readouterr().err
    assert stop.value.code == 2, stderr
    assert_one_line(stderr, *parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("case", ["misspelt field", "indivisible sizes, all named", *LATE])
def test_overrides_of_the_real_command(case: str, tmp_path: Path) -> None:
    overrides, parts = CASES[case]
    refused = train(tmp_path / "run", *overrides)
    assert refused.returncode == 2, refused.stderr
    assert_one_line(refused.stderr, *parts)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (None, ["no such file", "quickstart.py"]),
        ("def get_config(:\n", ["SyntaxError"]),
        (RECIPE, ["get_config"]),
        (RECIPE + "def get_config():\n    return 3\n", ["int", "Config"]),
        (
            RECIPE + "def get_config():\n    return Config(modle=3)\n",
            ["line 3: config: there is no section modle; did you mean model?"],
        ),
        (
            "from jaxopt_llm.config import *\ndef get_config():\n    return Config(\n        lora=LoraConfig(1),\n"
            "        model=ModelConfig(widht=3))\n",
            ["recipe.py, line 5: config: model has no setting widht; did you mean width?"],
        ),
        (
            "from jaxopt_llm.config import *\ndef get_config():\n    return Config(training=TrainingConfig(lr=1e-4))\n",
            ["recipe.py, line 3: config: training has no setting lr; did you mean optimizer.learning_rate?"],
        ),
        ("\nx = y\n", ["recipe.py, line 2: NameError: name 'y' is not defined"]),
        (RECIPE + "def get_config():\n    raise SystemExit(0)\n", ["SystemExit"]),
        (
            "from jaxopt_llm import config as c\n"
            "def get_config():\n"
            "    return c.Config(remat=c.RematConfig('fulll'), training=c.TrainingConfig(steps='ten'),\n"
            "        model=c.ModelConfig(pattern='global', rope=c.RopeConfig(theta=float('nan'))), mesh=3,\n"
            "        pipeline=c.PipelineConfig('zigzag', split=[3, 2]))\n",
            [
                "pipeline.schedule='zigzag': must be one of 'gpipe', '1f1b', 'interleaved'",
                "pipeline.split=[3, 2]: must be a tuple",
                "remat.policy='fulll'",
                "'none', 'full'",
                "training.steps='ten'",
                "model.pattern='global'",
                "nan",
                "mesh=3",
            ],
        ),
    ],
    ids=[
        "missing",
        "broken",
        "no get_config",
        "not a config",
        "misspelt section",
        "misspelt field",
        "other name",
        "no name",
        "exits",
        "wrong types",
    ],
)
def test_config_files(text: str | None, parts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "recipe.py"
    if text is not None:
        file.write_text(text)
    refused = command("train", "--config", file, "--run.directory", tmp_path / "run")
    assert refused.returncode == 2
    assert_one_line(refused.stderr, "recipe.py", *parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("where", ["a file/run", "/proc/run"])
def test_a_run_directory_that_cannot_be_written(where: str, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("kept")
    refused = train(tmp_path / where)  # an absolute path stays as it is
    assert refused.returncode == 2
    assert_one_line(refused.stderr, "run.directory", where, "cannot be written")
    assert (tmp_path / "a file").read_text() == "kept"


def test_two_processes_do_not_share_a_run_directory(tmp_path: Path) -> None:
    with lock_directory(tmp_path):
        refused = train(tmp_path)
    assert refused.returncode == 2
    assert_one_line(refused.stderr, str(tmp_path), "in use")
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_an_empty_directory_is_removed_only_if_the_lock_created_it(tmp_path: Path) -> None:
    for name in ("new", "written", "old", "deleted"):
        directory = tmp_path / name
        if name == "old":
            directory.mkdir()
        with contextlib.suppress(InputError), lock_directory(directory):
            if name == "written":
                (directory / "config.json").touch()
            if name == "deleted":
                shutil.rmtree(directory)  # another error must not hide the one that follows
            raise InputError("refused")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "written"]


def test_larger_than_the_host(tmp_path: Path) -> None:
    """Check the lines below the message: the largest arrays, and advice."""
    refused = train(tmp_path, "--model.width", "100000000", "--remat.policy", "none")
    assert refused.returncode == 2
    first, *rest = refused.stderr.splitlines()
    needs = r"error: the step needs [\d,.]+ GiB on the simulated devices together, but .* GiB too much"
    assert re.fullmatch(needs, first)
    assert len(rest) < 25
    table = r"  parameters +[\d.]+ +master weights of non_layer/embedding/table: .*"
    assert any(re.fullmatch(table, line) for line in rest)
    assert "--remat.policy full: about 26% more FLOPs" in refused.stderr
    assert "--offload" not in refused.stderr  # simulated devices have no memory of their own


def test_no_config() -> None:
    refused = command("train")
    assert refused.returncode == 2
    assert_one_line(refused.stderr, "--config quickstart.py")


def test_a_folder_of_runs_names_one(tmp_path: Path) -> None:
    write_run = tmp_path / "runs" / "small"
    write_run.mkdir(parents=True)
    (write_run / "corpus.json").write_text("{}")
    for arguments in (("checkpoint", "list"), ("report",), ("evaluate", "--checkpoint")):
        refused = command(*arguments, tmp_path / "runs")
        assert refused.returncode == 2
        assert_one_line(refused.stderr, f"not a run directory (it holds runs: name one of them, such as {write_run})")
        assert_one_line(
            command(*arguments, tmp_path / "none").stderr, f"(there is no file {tmp_path / 'none' / 'config.json'})"
        )


def test_generate_requires_a_run(tmp_path: Path) -> None:
    refused = command("generate", "--checkpoint", tmp_path, "--prompt", "x")
    assert refused.returncode == 2
    assert_one_line(refused.stderr, str(tmp_path))
    refused = command("generate", "--prompt", "x")
    assert refused.returncode == 2
    assert_one_line(refused.stderr, "--checkpoint")
