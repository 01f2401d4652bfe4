"""Tasks of the lm-evaluation-harness in `evaluate`, with a stand-in for the package."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import folders
import harness_standin
import jax
import numpy as np
import pytest
import standins
from commands import train
from harness_standin import Instance

from jaxopt_llm import evaluate, load_pretrained
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.execution.decode import Sampling
from jaxopt_llm.generate import generate
from jaxopt_llm.inference import models
from jaxopt_llm.inference.models import LoadedModel
from jaxopt_llm.observe.report import page, run_files

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def standin(monkeypatch: pytest.MonkeyPatch) -> None:
    harness_standin.install(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(folders.CONFIG, layers=1, pattern=("global",))
    return folders.folder_with_tokenizer(tmp_path_factory.mktemp("harness") / "model", config)


@pytest.fixture(scope="module")
def source(folder: Path) -> LoadedModel:
    """Return the model on all devices, as `evaluate` loads it."""
    return models.use_all_devices(models.load_model(folder))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("harness") / "run"
    done = train(directory, "--training.steps", 1)
    assert done.returncode == 0, done.stderr
    return directory


def make_model(source: LoadedModel, length: int = 64, batch_tokens: int = 128, **more: Any) -> Any:
    from jaxopt_llm.inference import harness

    return harness.HarnessModel(source, length, batch_tokens, **more)


def log_likelihood(folder: Path, ids: Sequence[int], count: int) -> float:
    """Return that of the last `count` ids, given those before them."""
    logits = np.asarray(load_pretrained(folder).logits([[*ids, *[0] * (20 - len(ids))]])[0], np.float64)
    normaliser = np.log(np.exp(logits).sum(axis=-1))
    return float(sum(logits[i - 1, ids[i]] - normaliser[i - 1] for i in range(len(ids) - count, len(ids))))


def evaluate_tasks(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["evaluate", *map(str, arguments)])
    return evaluate.main()


def test_contexts_are_cut_from_the_left_and_counted(source: LoadedModel, folder: Path) -> None:
    model, text = make_model(source, length=12), "the quick brown fox"
    ids = source.tokenizer.encode([text.encode()])[0].tolist()
    pairs = [(text[:10], text[10:]), (text[:3], text[3:6]), ("", text[:2])]
    found = model.loglikelihood([Instance(pair) for pair in pairs])
    empty = [source.tokenizer.eos, *ids[:2]]  # the tokenizer has no BOS
    expected = [(ids[-13:], 10), (ids[:6], 3), (empty, 2)]  # the space belongs to the continuation
    assert [each[0] for each in found] == pytest.approx([log_likelihood(folder, *each) for each in expected], rel=1e-5)
    assert model.cut == {"loglikelihood": 1}
    with pytest.raises(InputError, match="asks for the log-likelihood of 19 tokens, more than the context of 12"):
        model.loglikelihood([Instance(("x", text))])


def test_long_texts_are_scored_in_windows(source: LoadedModel, folder: Path) -> None:
    """Every token is scored once. Each window but the first has all inputs that fit."""
    text = "the quick brown fox"
    ids = [source.tokenizer.eos, *source.tokenizer.encode([text.encode()])[0].tolist()]
    assert len(ids) == 20
    windows = [(ids[:9], 8), (ids[8:17], 8), (ids[11:], 3)]
    found = make_model(source, length=8).loglikelihood_rolling([Instance((text,)), Instance(("",))])
    assert found == pytest.approx([sum(log_likelihood(folder, *each) for each in windows), 0], rel=1e-5)


def test_answers_are_those_of_generate_on_one_device(source: LoadedModel, folder: Path) -> None:
    on_one = models.load_model(folder)
    assert source.placement.mesh.size > on_one.placement.mesh.size == 1
    prompts = ["one", "one two three", "seven", "a longer prompt than the others"]
    plain = generate(on_one, prompts, 12, Sampling(), ())
    stop = plain[1][3]
    settings = [{"until": stop, "max_gen_toks": 12}] * 3 + [{"until": [stop, ""], "max_gen_toks": 5}]
    model = make_model(source)
    found = model.generate_until([Instance(each) for each in zip(prompts, settings, strict=True)])
    assert found == [text.split(stop)[0] for text in (*plain[:3], plain[3][:5])]
    assert model.cut == {"generate_until": 0}
    (cut,) = make_model(source, length=16).generate_until([Instance((prompts[3], settings[0]))])
    assert cut == generate(on_one, [prompts[3][-4:]], 12, Sampling(), (stop,))[0]
    with pytest.raises(InputError, match="a task generates 256 tokens, which leave no room"):
        model.generate_until([Instance(("x", {}))])


def test_answers_are_sampled_as_a_task_says(source: LoadedModel) -> None:
    from jaxopt_llm.inference.harness import Generation

    assert Generation.read({"temperature": 0.5, "top_p": 0.9}) == Generation(Sampling(0.5, 0, 0.9), (), 256)
    assert Generation.read({"do_sample": False, "temperature": 0.5, "num_beams": 1}).sampling == Sampling()
    settings = {"temperature": 5.0, "max_gen_toks": 12}
    first, second = make_model(source).generate_until([Instance(("one", settings))] * 2)
    assert first != second
    for wrong in ({"top_p": 0}, {"top_k": -1}, {"top_k": None}):
        with pytest.raises(InputError, match=rf"generation with {next(iter(wrong))}=.*, which must be"):
            Generation.read({"temperature": 0.5, "do_sample": True} | wrong)
    with pytest.raises(InputError, match="generation with num_beams=4, which is not supported"):
        Generation.read({"num_beams": 4})


def test_conversations_have_the_template_and_end_where_a_turn_does(tmp_path: Path) -> None:
    source = models.load_model(standins.write_llama(tmp_path / "llama"))
    source = replace(source, config=replace(source.config, data=replace(source.config.data, date="2026-01-31")))
    model = make_model(source, is_chat=True)
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = model.apply_chat_template(history)
    begin, turn, end = standins.SPECIAL[0], "<|start_header_id|>{}<|end_header_id|>\n\n", standins.SPECIAL[-1]
    system = turn.format("system") + f"Today Date: 31 Jan 2026\n\nBe brief.{end}"
    assert text == begin + system + turn.format("user") + "Hello" + end + turn.format("assistant")
    begun = [*history, {"role": "assistant", "content": "So"}]
    assert model.apply_chat_template(begun, add_generation_prompt=False) == text + "So"
    ids = model.tok_encode(text)
    assert ids.count(0) == 1 and model.tok_encode("Hello")[0] == 0  # BOS is there once
    assert model.tok_encode("Hello", add_special_tokens=False)[0] != 0 and model.prefix_token_id == 0
    assert model._ends == {1, 4} and model.chat_template(True) == standins.TEMPLATE


def test_a_template_without_system_messages_gets_none(tmp_path: Path) -> None:
    source = models.load_model(standins.write_llama(tmp_path / "llama"))
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    (tmp_path / "strict.jinja").write_text(strict)
    data = replace(source.config.data, chat_template=str(tmp_path / "strict.jinja"))
    model = make_model(replace(source, config=replace(source.config, data=data)))
    user = {"role": "user", "content": "Hello"}
    assert model.apply_chat_template([{"role": "system", "content": "Be brief."}, user]) == "Hello"


def test_results_of_a_run_are_printed_written_and_reported(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    reading = list[int]()
    run_on = harness_standin.simple_evaluate

    def note_devices(model: Any, **options: Any) -> Any:
        reading.append(model.source.placement.mesh.size)
        return run_on(model, **options)

    monkeypatch.setattr("lm_eval.simple_evaluate", note_devices)
    assert evaluate_tasks(monkeypatch, "--checkpoint", run, "--tasks", "choose,writ[e]", "--num-fewshot", 3) == 0
    assert reading == [jax.device_count()] and reading[0] > 1
    told = capsys.readouterr()
    assert told.out == "|choose|3|\n|write|1|\n"
    assert "1 requests were longer than the context of 32 tokens and lost their beginning" in told.err
    (file,) = (run / "evaluations").iterdir()
    results = json.loads(file.read_text())
    own = results["jaxopt_llm"]
    assert file.name.startswith("step-1-") and own["step"] == 1 and own["cut_requests"]["loglikelihood"] == 1
    assert (own["tasks"], own["checkpoint"], own["length"]) == (["choose", "writ[e]"], str(run), 32)

    output = tmp_path / "new" / "results.json"
    limited = ("--tasks", "choose", "--limit", 0.5, "--output", output)
    assert evaluate_tasks(monkeypatch, "--checkpoint", run, *limited) == 0
    assert json.loads(output.read_text())["jaxopt_llm"]["limit"] == 0.5 and len([*file.parent.iterdir()]) == 1

    results["jaxopt_llm"] |= {"step": 9, "limit": 5.0}
    results["results"]["choose"] |= {"answers,strict": 0.125, "answers_stderr,strict": "N/A"}
    results["group_subtasks"]["all"] = ["write"]  # a task of a group is not shown
    (file.parent / "step-9-x.json").write_text(json.dumps(results))
    (file.parent / "step-9-y.json").write_text("{}")
    (read,) = run_files.read_runs([run])
    shown = page.compare_task_results([read])
    assert shown["columns"] == [(0, "1"), (0, "9")]
    assert shown["rows"] == [
        (("choose", "3 examples", "answers"), ["3.0000 ± 0.2500", "–"]),
        (("choose", "3 examples, limit 5.0", "answers"), ["–", "3.0000 ± 0.2500"]),
        (("choose", "3 examples, limit 5.0", "answers (strict)"), ["–", "0.1250"]),
        (("write", "3 examples", "answers"), ["1.0000 ± 0.2500", "–"]),
    ]
    assert read.notes == ["evaluations/step-9-y.json is not what `evaluate` writes and left out"]
    assert "<th>answers (strict)</th>" in page.render_page([read], "")


def test_a_folder_has_its_own_context(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 5000}))
    output = tmp_path / "results.json"
    assert evaluate_tasks(monkeypatch, "--checkpoint", folder, "--tasks", "choose", "--output", output) == 0
    assert json.loads(output.read_text())["jaxopt_llm"]["length"] == 5000
    assert capsys.readouterr().err.endswith(f"results: {output}\n")
    shorter = ("--tasks", "write", "--training.sequence-length", 16)
    assert evaluate_tasks(monkeypatch, "--checkpoint", folder, *shorter) == 0
    assert "results:" not in capsys.readouterr().err  # of a folder they are only printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tasks", "chose"), "--tasks chose: there is no such task; did you mean choose?"),
        (("--tasks", "choose,q"), "--tasks q: there is no such task; `lm-eval ls tasks` lists them"),
        (
            ("--tasks", "write_code"),
            "--tasks write_code runs code that the model writes; run it by the command `evaluate` with",
        ),
        (("--tasks", "choose", "--batches", 2), "--batches applies to the loss of documents"),
        (("--tasks", "choose", "--data.paths", "x"), "--data.paths applies to the loss of documents"),
        (("--tasks", "choose", "--fewshot-as-multiturn"), "add --apply-chat-template"),
        (("--tasks", "choose", "--include-path", "none"), "--include-path none: there is no such folder"),
        (("--num-fewshot", 2), "--num-fewshot applies to tasks: add --tasks NAME, or leave it out"),
        (("--apply-chat-template",), "--apply-chat-template applies to tasks"),
    ],
)
def test_bad_input(run: Path, arguments: tuple[object, ...], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("it is said before the weights are read"))
    with pytest.raises(InputError) as refused:
        evaluate_tasks(monkeypatch, "--checkpoint", run, *arguments)
    assert said in str(refused.value)


def test_a_task_that_cannot_be_loaded_is_an_error_of_one_line(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(harness_standin.TaskManager, "load", load)
    with pytest.raises(
        InputError, match=r"--tasks choose: a task cannot be loaded \(ConnectionError: no network at all"
    ):
        evaluate_tasks(monkeypatch, "--checkpoint", run, "--tasks", "choose")


def test_without_the_package_it_says_how_to_install_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness_standin.hide(monkeypatch)
    with pytest.raises(InputError, match=r"--tasks requires the package lm_eval .*run: pip install .*\[lm-eval\]"):
        evaluate_tasks(monkeypatch, "--checkpoint", run, "--tasks", "choose")
