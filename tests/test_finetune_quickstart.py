"""The conversations of scripts/finetune_quickstart. The script itself is run by .ci/run."""

import json
from pathlib import Path

from commands import ROOT, command, start_python

from jaxopt_llm.config import cli


def test_its_conversations_are_apart_and_their_answers_are_learnt(tmp_path: Path) -> None:
    process = start_python(ROOT / "scripts/summaries.py", tmp_path)
    _, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (0, "")
    train, held_out = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held_out")
    )
    assert len(train) > 2000 and len(held_out) > 100
    assert {row["completion"] for row in train}.isdisjoint(row["completion"] for row in held_out)

    data = cli.load_recipe("quickstart_lora.py").data
    shown = command(
        *("prepare", "--input", tmp_path / "train.jsonl", "--content", data.content, "--tokenizer", data.tokenizer),
        *("--chat-template", data.chat_template, "--preview", 1),
    )
    assert f"Q: {train[0]['prompt']}\nA: ⟦{train[0]['completion']}\n⟧" in shown.stdout, shown.stderr
