"""Tasks in the package lm_eval itself, next to its own model for `transformers`, on the same random weights.

The package is not among those that the tests install (harness_standin.py says why): pip install '.[lm-eval]'.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import standins

from jaxopt_llm import evaluate
from jaxopt_llm.inference import models

lm_eval = pytest.importorskip("lm_eval")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

QUESTIONS, SHARED = (
    12,
    "dataset_path: json\ndataset_kwargs: {data_files: {test: FILE}}\ntest_split: test\nfewshot_split: test",
)
TASKS = {
    "count_choose": """
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]""",
    "count_write": """
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match}]""",
    "count_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in float32, and the tasks next to it."""
    path = standins.write_llama(tmp_path_factory.mktemp("lm_eval") / "llama")
    transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).save_pretrained(path)
    questions = [
        {
            "question": f"What comes after {i}, {i + 1}, {i + 2}?",
            "choices": [str(i + 3), str(i), "x y"],
            "answer": i % 2,
        }
        for i in range(QUESTIONS)
    ]
    tasks = path.parent / "tasks"
    tasks.mkdir()
    (tasks / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    for name, text in TASKS.items():
        shared = SHARED.replace("FILE", str(tasks / "questions.jsonl"))
        (tasks / f"{name}.yaml").write_text(f"task: {name}\n{shared}{text}\n")
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.mark.parametrize(("length", "shots", "chat"), [(512, 0, False), (512, 2, True), (64, 3, False), (24, 0, False)])
def test_answers_are_those_of_the_model_for_transformers(length: int, shots: int, chat: bool, folder: Path) -> None:
    """With contexts that are cut, with windows over long texts, and with a chat template."""
    from lm_eval.models.huggingface import HFLM

    from jaxopt_llm.inference.harness import HarnessModel

    theirs = HFLM(pretrained=str(folder), dtype="float32", batch_size=4, max_length=length, device="cpu")
    theirs.tokenizer.chat_template = standins.TEMPLATE.replace("date_string or strftime_now('%d %b %Y')", "'now'")
    (folder / "now.jinja").write_text(theirs.tokenizer.chat_template)
    source = models.load_model(folder)
    data = replace(source.config.data, chat_template=str(folder / "now.jinja"))
    ours = HarnessModel(replace(source, config=replace(source.config, data=data)), length, 1024, chat)
    samples: list[dict[str, list[Any]]] = []
    for model in (theirs, ours):
        results = lm_eval.simple_evaluate(
            model=model,
            tasks=[*TASKS][: 2 if chat else 3],
            task_manager=lm_eval.tasks.TaskManager(include_path=folder.parent / "tasks", include_defaults=False),
            num_fewshot=shots,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            bootstrap_iters=0,
        )
        samples.append(results["samples"])
    for name in samples[0]:
        one, two = ([each for sample in found[name] for each in sample["filtered_resps"]] for found in samples)
        assert [each["arguments"] for each in samples[0][name]] == [each["arguments"] for each in samples[1][name]]
        if name == "count_write":
            assert one == two
        elif name == "count_text":
            assert two == pytest.approx(one, rel=1e-5)
        else:
            assert [each[0] for each in two] == pytest.approx([each[0] for each in one], rel=1e-5)
            assert [each[1] for each in two] == [each[1] for each in one]
    assert (ours.cut["loglikelihood"] > 0) == (length < 512 and not (shots == 0 and length > 24))


def test_the_command_prints_the_tables_of_the_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tasks = ("--tasks", "count_*", "--include-path", folder.parent / "tasks", "--limit", 5, "--num-fewshot", 1)
    arguments = ["evaluate", "--checkpoint", folder, *tasks, "--output", tmp_path / "results.json"]
    monkeypatch.setattr(sys, "argv", [*map(str, arguments)])
    assert evaluate.main() == 0
    told = capsys.readouterr().out
    assert told.startswith("|") and all(name in told for name in TASKS) and "bits_per_byte" in told
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["n-samples"]["count_choose"] == {"original": QUESTIONS, "effective": 5}
    assert results["jaxopt_llm"]["include_path"] == str(folder.parent / "tasks")
