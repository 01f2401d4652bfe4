"""The pages of docs/guides, run as a reader types them: each block in order, in one shell, in an empty folder."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import guides
import jax
import jinja2
import pytest
from commands import ROOT
from guides import RUN, Done, read_blocks, run
from standins import TEMPLATE

PAGES = sorted(path.stem for path in (ROOT / "docs/guides").glob("*.md"))
SHOWN = ("text", "console")


def follow(page: str, folder: Path, leave_out: tuple[str, ...] = ()) -> list[Done]:
    """Run a page, and check that its blocks print what it shows."""
    done = guides.follow(page, folder / "reader", leave_out)
    shown, wrong = guides.shown_outputs(page), []
    for block in done:
        text = shown.get(block.code)
        if text is not None and guides.is_of_this_jax(text):
            if guides.plans_the_model(block.code):
                block = block._replace(printed=guides.plan_of_the_model(block.code, folder))
            if missing := guides.find_differences(text, block):
                lines = "\n".join(missing)
                wrong.append(f"{block.code}prints\n{block.told}{block.printed}, without\n{lines}")
    assert not wrong, f"docs/guides/{page}.md; scripts/guide_outputs.py writes it:\n" + "\n\n".join(wrong)
    return done


def printed_by(done: list[Done], text: str) -> str:
    """Return the output of the one block that contains a text."""
    (found,) = (block.printed for block in done if text in block.code)
    return found


def losses(printed: str, pattern: str = r"loss ([0-9.]+)") -> list[float]:
    return [float(number) for number in re.findall(pattern, printed)]


NATS = r"([0-9.]+) nats per token"


@pytest.mark.slow
def test_finetune(tmp_path: Path) -> None:
    serves = importlib.util.find_spec("transformers") is not None  # only the older Python's test extra has it
    done = follow("finetune", tmp_path, () if serves else ("transformers",))
    assert "⟧" in printed_by(done, "--preview 1") and "fits, spare" in printed_by(done, " plan ")
    trained = printed_by(done, "llm train ")
    assert losses(trained)[0] > losses(trained)[-1]
    (before,), (after,) = (
        losses(printed_by(done, text), NATS) for text in ("evaluate --checkpoint models", "evaluate --checkpoint runs")
    )
    held_out = losses(trained, r"held-out ([0-9.]+)")
    assert len(held_out) > 2 and min(held_out) == pytest.approx(after, abs=2e-4) and before > after
    sample = json.loads(printed_by(done, "samples.jsonl"))
    assert sample["step"] > 20 and sample["reference"] in (tmp_path / "reader/val.jsonl").read_text()
    assert {"config.json", "model.safetensors", "tokenizer_config.json"} <= {
        *printed_by(done, "convert merge").splitlines()
    }
    if serves:
        serves_the_same_answer(tmp_path / "reader")


def serves_the_same_answer(folder: Path) -> None:
    """Compare the answer of transformers with ours, in float32: in 16 bits two tokens may be equally likely.

    The prompt is given as text, because `chat` with a folder has today's date, and the answer would depend on the day.
    """
    (page,) = (block for block in read_blocks("finetune") if 'from_pretrained("models/merged")' in block.code)
    served = page._replace(code=page.code.replace("models/merged", "models/exact"))
    (question,) = re.findall(r'"content": "(.*?)"', page.code)
    (day,) = re.findall(r'date_string="(.*?)"', page.code)
    messages = [{"role": "user", "content": question}]
    settings = {"messages": messages, "date_string": day, "add_generation_prompt": True}
    prompt = jinja2.Template(TEMPLATE).render(bos_token="", **settings)  # `generate` adds BOS
    merge = "jaxopt-llm convert merge --checkpoint runs/chats --to models/exact --dtype float32 >&2"
    ours = f"jaxopt-llm generate --checkpoint models/exact --tokens 40 --prompt {shlex.quote(prompt)}"
    both = run(folder, f"{merge}\n{served.command()}\nprintf '\\0'\n{ours}")
    assert both.returncode == 0, both.stderr
    theirs, found = both.stdout.split("\0")
    assert len(set(theirs)) > 3, "one token again and again would be right for a wrong model, too"
    assert found == prompt + theirs


@pytest.mark.slow
def test_prefer(tmp_path: Path) -> None:
    done = follow("prefer", tmp_path)
    tuned, preferring = (printed_by(done, f"generate --checkpoint models/{name}") for name in ("sft", "dpo"))
    assert "The sea" not in tuned and "The sea" in preferring
    prefers = dict(re.findall(r'"(\S+)": ([-0-9.]+)', printed_by(done, "grep eval_rewards")))
    assert float(prefers["eval_rewards/accuracy"]) > 0.9 and float(prefers["eval_rewards/margin"]) > 0.3
    before, after = losses(printed_by(done, "evaluate"), NATS)
    assert before < after


@pytest.mark.slow
def test_pretrain(tmp_path: Path) -> None:
    done = follow("pretrain", tmp_path)
    stopped = printed_by(done, "kill $!")
    assert stopped.endswith("exit code 75\n")
    (continued,) = (block.printed for block in done if block.code == "jaxopt-llm train --config small.py\n")
    (step,) = re.findall(r"continues from step (\d+)", continued)
    assert 10 <= int(step) < 150 and losses(stopped)[0] > losses(continued)[-1] < 6
    assert [line.split()[0] for line in printed_by(done, "checkpoint list").splitlines()[1:]] == [step, "150"]
    assert losses(printed_by(done, "evaluate"), NATS)[0] < 6
    assert printed_by(done, "generate").startswith("def get")
    assert "plotly" in (tmp_path / "reader/report.html").read_text().lower()


@pytest.mark.slow
def test_cluster(tmp_path: Path) -> None:
    done = follow("cluster", tmp_path)
    planned = printed_by(done, " plan ")
    assert "68,976,648,192 parameters on 16 × 8 NVIDIA H100" in planned and "days for 500,000 steps" in planned
    one, two = printed_by(done, "runs/one"), printed_by(done, "runs/two")
    assert "of 2 processes" in two and "of 2 processes" not in one
    assert len(losses(one)) == 4 and losses(one) == pytest.approx(losses(two), rel=1e-4)


@pytest.mark.slow
def test_several_gpus(tmp_path: Path) -> None:
    done = follow("several_gpus", tmp_path)
    two, one = printed_by(done, "runs/two"), printed_by(done, "runs/one")
    line = "2 devices: mesh.data 2 (4 rows of each device at a time)\n"
    shown = [block.code for block in read_blocks("several_gpus") if block.language == "text"]
    assert two.startswith(line) and all(text.startswith(line) for text in shown) and "devices: " not in one
    assert len(losses(one)) == 3 and losses(one) == pytest.approx(losses(two), rel=1e-4)
    planned = printed_by(done, " plan ")
    assert planned.startswith(line)
    if f"with jax {jax.__version__}" in shown[1]:  # another version needs other numbers of bytes
        for number in re.findall(r"^  (\w+ +[\d.]+)$", shown[1], re.MULTILINE):
            assert number in planned


@pytest.mark.slow
def test_deepspeed(tmp_path: Path) -> None:
    done = follow("deepspeed", tmp_path)
    first, sizes, habits = (printed_by(done, text) for text in ("held out:", "features", "class Network"))
    trained, (held_out,) = losses(first), losses(first, r"held out: ([0-9.]+)")
    assert trained[0] > 1 > 0.1 > trained[-1] and held_out < 1e-3
    begun, ended = losses(sizes, r"([0-9.]+(?=\n| ->))")
    assert begun > 1 and ended < 0.01 and "divided by tensor None" in sizes
    assert "restored at step 100" in habits and "'first/kernel': (10, 64)" in habits and "'worst':" in habits
    recipe = printed_by(done, "import-config")
    assert "devices = 8" in recipe and "mesh=MeshConfig(fsdp=8)" in recipe and "zero_stage=2" in recipe


@pytest.mark.slow
def test_any_model(tmp_path: Path) -> None:
    done = follow("any_model", tmp_path)
    alone, divided = printed_by(done, "nnx.Optimizer("), printed_by(done, "engine.model().layers[0]")
    assert losses(alone) == pytest.approx(losses(divided), abs=2e-4) and losses(alone)[0] > 1 > 0.1 > losses(alone)[-1]
    assert divided.endswith("P('fsdp', None) (64, 256)\n")
    planned = printed_by(done, "print(plan)")
    assert "25,772,703,745 parameters on 8 × 8 NVIDIA H100" in planned and "fits, spare" in planned
    assert "'skipped': 0.0" in printed_by(done, "# two replicas (HSDP)")
    stopped, continued = printed_by(done, "kill $!"), printed_by(done, "python train.py\n")
    (step,) = re.findall(r"exit code 75: preempted at step (\d+)", stopped)
    assert f"continues from step {step}\n" in continued
    assert losses(stopped + continued) == sorted(losses(stopped + continued), reverse=True)
    (held_out,) = losses(printed_by(done, 'print("step"'), r"'loss': ([0-9.]+)")
    assert held_out == pytest.approx(losses(continued, r"held-out ([0-9.]+)")[-1], abs=1e-4)
    assert "P('fsdp', 'tensor')" in printed_by(done, "rules=")
    before, after = losses(printed_by(done, "make_other_batch(step)"), r"'loss': ([0-9.]+)")
    assert before > 0.1 > 0.05 > after
    assert "['Dense_0', 'Dense_1']" in printed_by(done, "nn.compact")
    assert "'up': (16, 64)" in printed_by(done, '"up":')
    assert "'accuracy': 1.0" in printed_by(done, "LanguageModel(")
    assert (tmp_path / "reader/reward/model.safetensors").is_file()
    assert "\nattention: cudnn, the fastest at head_dim 64 in bfloat16" in printed_by(done, "import Transformer")
    recipe = losses(printed_by(done, "deep_recipe.py"))
    assert len(recipe) == 3 and recipe == sorted(recipe, reverse=True)
    together = printed_by(done, "RANK=1")
    assert "continues from step 400\n" in together and losses(together)[0] < losses(continued)[0]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_whether_it_is_run(page: str) -> None:
    blocks = read_blocks(page)
    assert {block.language for block in blocks} <= {*RUN, *SHOWN}
    fences = re.findall(r"^```", (ROOT / f"docs/guides/{page}.md").read_text(), re.MULTILINE)
    assert len(fences) == 2 * len(blocks)
    assert page in {name.removeprefix("test_") for name in globals()}, "no test follows this page"


def test_the_notebook_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/notebook.py", "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_notebook_has_every_block_that_is_run() -> None:
    notebook = json.loads((ROOT / "docs/guides/finetune.ipynb").read_text())
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    blocks = [block for block in read_blocks("finetune") if block.language in RUN]
    assert code == [("%%bash\n" * (block.language == "bash") + block.code).strip("\n") for block in blocks]
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
