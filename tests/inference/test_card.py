"""Model cards: what they say of the base and of the data, and what they leave out."""

import json
from pathlib import Path
from typing import get_args

import pytest

from jaxopt_llm.config import Config
from jaxopt_llm.config.fields import get_field, replace_fields, walk_fields
from jaxopt_llm.inference import card

pytestmark = pytest.mark.core


def describe(tmp_path: Path, settings: dict[str, object], library: str = "transformers") -> str:
    config = replace_fields(Config(), settings)
    return card.describe_run(tmp_path, config, 3, "mine", ["A note."], library)


def test_data_sets_of_the_hub_are_named_and_files_only_by_their_names(tmp_path: Path) -> None:
    paths = (
        "hf://datasets/org/chats@main/train.parquet",
        "/home/someone/private/mine.jsonl",
        "s3://bucket/key/a*.jsonl",
    )
    text = describe(tmp_path, {"data.paths": paths, "evaluation.paths": ("held=/home/someone/held.jsonl",)})
    assert "datasets:\n- org/chats\n" in text
    assert "mine.jsonl, a*.jsonl |" in text and "| held-out data | held |" in text and "\nA note.\n" in text
    assert not any(hidden in text for hidden in ("someone", "bucket", "private"))


def test_settings_of_machines_are_left_out(tmp_path: Path) -> None:
    settings = {
        "training.batch_size": 7,
        "training.trainable": ("*/scale",),
        "run.directory": "/home/someone/runs",
        "run.seed": 5,
        "distributed.coordinator": "10.0.0.1:80",
        "logging.wandb_project": "hidden",
        "data.chat_template": "/home/someone/a.jinja",
        "distillation.teacher": "/home/someone/teacher",
        "distillation.temperature": 2.0,
        "preference.beta": 0.5,
    }
    found = card.list_changes(replace_fields(Config(), settings))
    assert found == {
        "run.seed": "5",
        "training.batch_size": "7",
        "training.trainable": '["*/scale"]',
        "preference.beta": "0.5",
        "distillation.temperature": "2.0",
    }


def test_a_text_that_a_user_writes_is_published_only_if_it_names_no_place() -> None:
    """A new setting of this kind is listed here, or has `is_place`."""
    texts = [
        name
        for name, hint, _ in walk_fields(Config)
        if name.split(".")[0] in card.SECTIONS and str in (hint, *get_args(hint))
    ]
    secret = {name: "/home/someone/x" if isinstance(get_field(Config(), name), str) else ("x",) for name in texts}
    published = card.list_changes(replace_fields(Config(), secret)).keys()
    of_data = "separator text_field bos eos columns label_field label_names template_arguments date"
    others = {"training.trainable", "optimizer.decay_groups", "optimizer.rate_groups", "lora.targets"}
    assert published == {f"data.{name}" for name in of_data.split()} | others
    assert {"data.paths", "rollouts.server", "preference.function"} <= {*texts} - published


def test_values_that_the_start_of_a_run_sets_are_left_out() -> None:
    """Nobody asked for them, and they say how fast and where the run computed."""
    resolved = {
        "mesh.fsdp": 4,
        "training.loss_chunk": 8192,
        "training.unroll": "none",
        "training.attention": "triton",
        "training.grouped_matmul": "pallas",
        "training.steps": 70,
        "schedule.warmup_steps": 3,
        "schedule.decay_steps": 70,
    }
    config = replace_fields(Config(), resolved)
    assert card.list_changes(config) == {"training.steps": "70", "schedule.warmup_steps": "3"}
    longer = replace_fields(config, {"schedule.decay_steps": 90})
    assert card.list_changes(longer)["schedule.decay_steps"] == "90"


@pytest.mark.parametrize(
    ("front", "expected"),
    [
        ("license: apache-2.0", {"license": "apache-2.0"}),
        (
            'license: other\nlicense_name: "a-licence"\r\nlicense_link: https://x.org/LICENSE',
            {"license": "other", "license_name": "a-licence", "license_link": "https://x.org/LICENSE"},
        ),
        ("tags:\n- license: no", {}),
        ("license:\n- a\n- b", {}),
        ("", {}),
    ],
)
def test_the_license_is_that_of_the_base(front: str, expected: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n\nlicense: mit\n")
    lines = card.describe_merge(str(tmp_path), tmp_path, "x/adapter", "mine").split("---\n")[1].splitlines()
    found = dict(line.split(": ", 1) for line in lines if line.startswith("license"))
    assert {name: json.loads(value) for name, value in found.items()} == expected


def test_the_base_is_named_by_its_id(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--Model-1B" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    text = card.describe_merge(str(snapshot), snapshot, "adapters/mine", "mine")
    assert "\nbase_model: org/Model-1B\n" in text and "- base_model:finetune:org/Model-1B\n" in text
    local = card.describe_merge(str(tmp_path), tmp_path, "/home/someone/adapter", "mine")
    assert "base_model" not in local and f"| base | {tmp_path.name} |" in local and "| adapters | adapter |" in local
