"""Bad input: one line that says what, where and how to mend it; exit code 2."""

import sys
from pathlib import Path

import pytest
from commands import command, tiny, train

import jaxopt_llm.train
from jaxopt_llm import errors
from jaxopt_llm.checkpoint.lock import sole_owner

pytestmark = pytest.mark.core

RECIPE = "from jaxopt_llm.config import TrainConfig\n"
CASES = {
    "misspelt field": (["--model.widht", "3"], ["--model.widht", "--model.width"]),
    "misspelt section": (["--modle.width=3"], ["--modle.width", "--model.width"]),
    "wrong type": (["--training.steps", "many"], ["--training.steps", "many"]),
    "not a choice": (["--sharding.zero-stage", "5"], ["zero-stage", "5"]),
    "no value": (["--training.steps"], ["--training.steps"]),
    "nothing by halves": (["--training.steps", "0"], ["training.steps=0", "at least 1"]),
    "indivisible batch": (
        ["--mesh.fsdp", "3", "--training.accumulation", "2"],
        ["training.batch_size=4", "mesh.fsdp=3", "training.accumulation=2", "nearest", "6"],
    ),
    "indivisible sizes, all named": (
        ["--mesh.tensor", "3", "--mesh.data", "3"],
        ["heads of size 2", "mlp of size 16", "mesh.tensor=3", "training.batch_size=4", "mesh.data=3"],
    ),
    "heads and groups": (["--model.heads", "3", "--model.kv-heads", "2"], ["model.heads=3", "model.kv_heads=2"]),
    "sequences longer than the positions": (
        ["--model.positions", "learned", "--model.max-positions", "8"],
        ["training.sequence_length=32", "--model.max-positions", "8"],
    ),
    "rotary kinds and factors without rotary": (
        ["--model.positions", "learned", "--model.pattern", "global_nope", "--model.rope-factor", "8"],
        ["model.pattern", "write global", "model.rope_factor=8"],
    ),
    "frequencies upside down": (
        ["--model.rope-low-frequency-factor", "5"],
        ["model.rope_high_frequency_factor=4", "above model.rope_low_frequency_factor=5"],
    ),
    "switches below their range": (
        ["--model.attention-softcap=-1", "--model.logit-softcap=-1", "--model.rope-factor", "0.5"],
        ["model.attention_softcap=-1", "model.logit_softcap=-1", "model.rope_factor=0.5"],
    ),
    "no such norm": (["--model.norm", "batch"], ["--model.norm", "rms"]),
    "no directory": (["--run.directory="], ["run.directory is empty"]),
    "rank above the matrix": (["--lora.rank", "100"], ["lora.rank=100", "attention"]),
    "pattern given twice": (
        ["--lora.rank", "2", "--lora.targets", "*/mlp/*", "*/mlp/*"],
        ["lora.targets", "*/mlp/* comes after"],
    ),
    "what no resume can change": (["--run.allow-change", "lora.rank"], ["lora.rank", "no resume can change it"]),
    "more stages than layers": (["--mesh.pipeline", "3"], ["mesh.pipeline=3", "model.layers=2"]),
    "no ring yet": (["--mesh.context", "2"], ["mesh.context=2"]),
    "larger than the host": (["--model.width", "100000000"], ["GiB", "this host has"]),
    "not finite": (["--optimizer.learning-rate", "inf"], ["optimizer.learning_rate=inf", "float32"]),
    "not in float32": (["--optimizer.epsilon", "1e-320"], ["optimizer.epsilon=1e-320", "float32"]),
    "more layers than can be named": (["--model.layers", "2147483647"], ["model.layers=2147483647", "10,000"]),
    "best of what nobody measured": (
        ["--checkpoint.keep-best", "1", "--evaluation.every", "200"],
        ["checkpoint.keep_best=1", "checkpoint.every=500", "evaluation.every=200"],
    ),
    "a profile after the end": (["--profile.start-step", "9", "--training.steps", "5"], ["profile.start_step=9"]),
    "beyond a word": (["--run.seed", "99999999999999999999"], ["run.seed=99999999999999999999"]),
    "vocabulary too small": (["--model.vocabulary-size", "100"], ["model.vocabulary_size=100", "258"]),
    "held-out share": (["--data.held-out", "1.5"], ["data.held_out", "1.5"]),
    "adapters of nothing": (
        ["--lora.rank", "2", "--lora.targets", "*/atention/*", "*_norm/*", "*/mlp/*", "*/mlp/up"],
        [
            "*/atention/* fits no parameter",
            "*_norm/* fits no matrix, only outer/final_norm/scale",
            "*/mlp/up comes after",
            "segment_0/block_0/attention/query",
        ],
    ),
    "adapters of less than nothing": (["--lora.rank=-2", "--lora.alpha", "0"], ["lora.rank=-2", "lora.alpha=0"]),
    "codes that nothing trains": (["--lora.base", "int8"], ["lora.base=int8", "lora.rank"]),
    "groups that leave a parameter out": (
        ["--optimizer.decay-groups", "*/mlp/*=1", "*_norm/*=0"],
        ["optimizer.decay_groups: no pattern fits outer/embedding/table"],
    ),
    "a group of nothing": (
        ["--lora.rank", "2", "--optimizer.rate-groups", "*/lora_a=2", "*/scale=1", "*=1"],
        ["optimizer.rate_groups: */scale fits no parameter", "segment_0/block_0/attention/key/lora_a"],
    ),
    "no group": (["--optimizer.rate-groups", "*"], ["optimizer.rate_groups: *: must be PATTERN=NUMBER"]),
    "another optimizer's moments": (["--run.allow-change", "optimizer.name"], ["optimizer.name", "no resume"]),
    "a rule that skips what is usual": (["--training.skip-outliers", "0.5"], ["training.skip_outliers=0.5"]),
    "schedule": (["--schedule.warmup-steps", "5000"], ["schedule.warmup_steps=5000"]),
}


def assert_one_line(stderr: str, *parts: str) -> None:
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1 and stderr.endswith("\n"), stderr
    for part in parts:
        assert part in stderr


# What only the data or the compiled step can tell; all else is refused before JAX is touched.
LATE = ("vocabulary too small", "larger than the host")


@pytest.mark.parametrize("case", [case for case in CASES if case not in LATE])
def test_overrides(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command's main, in this process: what got past it would fail at simulating devices a second time."""
    overrides, parts = CASES[case]
    monkeypatch.setattr(sys, "argv", ["train", *map(str, tiny(tmp_path / "run")), *overrides])
    with pytest.raises(SystemExit) as stop:
        errors.run(jaxopt_llm.train.main)
    said = capsys.readouterr().err
    assert stop.value.code == 2, said
    assert_one_line(said, *parts)
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
        (RECIPE + "def get_config():\n    return 3\n", ["int", "TrainConfig"]),
        (RECIPE + "def get_config():\n    return TrainConfig(modle=3)\n", ["modle"]),
        (RECIPE + "def get_config():\n    raise SystemExit(0)\n", ["SystemExit"]),
        (
            "from jaxopt_llm import config as c\n"
            "def get_config():\n"
            "    return c.TrainConfig(remat=c.RematConfig('fulll'), training=c.TrainingConfig(steps='ten'),\n"
            "        model=c.ModelConfig(pattern='global', rope_theta=float('nan')), mesh=3)\n",
            [
                "remat.policy='fulll'",
                "'none', 'full'",
                "training.steps='ten'",
                "model.pattern='global'",
                "nan",
                "mesh=3",
            ],
        ),
    ],
    ids=["missing", "broken", "no get_config", "not a config", "misspelt inside", "exits", "wrong types"],
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
    with sole_owner(tmp_path):
        refused = train(tmp_path)
    assert refused.returncode == 2
    assert_one_line(refused.stderr, str(tmp_path), "in use")
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_no_config() -> None:
    refused = command("train")
    assert refused.returncode == 2
    assert_one_line(refused.stderr, "--config quickstart.py")


def test_generate_wants_a_run(tmp_path: Path) -> None:
    refused = command("generate", "--checkpoint", tmp_path, "--prompt", "x")
    assert refused.returncode == 2
    assert_one_line(refused.stderr, str(tmp_path))
    refused = command("generate", "--prompt", "x")
    assert refused.returncode == 2
    assert_one_line(refused.stderr, "--checkpoint")
