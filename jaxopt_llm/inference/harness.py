"""Tasks of EleutherAI's lm-evaluation-harness with a loaded model.

The harness builds the prompts, and computes the metrics from what the model answers. This module needs the package
`lm_eval`; only the commands `evaluate` and `train` import it, when they are given tasks.
"""

import contextlib
import difflib
import io
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window, make_table
from tqdm import tqdm

from jaxopt_llm.config import Config
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.files import replace_durably
from jaxopt_llm.core.pulse import UNWATCHED, Pulse
from jaxopt_llm.data.tokens.continuation import Continuation, extend_continuations, find_eos_ids
from jaxopt_llm.data.tokens.template import Renderer, find_template
from jaxopt_llm.execution import decode
from jaxopt_llm.execution.sampling import Sampling
from jaxopt_llm.inference.chat import open_template
from jaxopt_llm.inference.models import LoadedModel, choose_local_attention
from jaxopt_llm.observe.report.run_files import EVAL_TASKS, EVALUATIONS, list_metrics
from jaxopt_llm.run.log_probabilities import DocumentReader, LogLikelihood, Request
from jaxopt_llm.run.samples import make_sampling_model, make_sampling_placement
from jaxopt_llm.run.setup import Setup
from jaxopt_llm.step.state import TrainState, make_weight_reader

Message = dict[str, Any]
MAX_ANSWER_TOKENS = 256  # of a task that sets no limit, as in the harness
# Settings of generation that a task may repeat with the value that they have anyway.
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}


@dataclass(frozen=True)
class Options:
    """Options of the harness, named as in its own command.

    Attributes:
        tasks: names of tasks, groups and tags, which may have wildcards.
        num_fewshot: examples in each prompt; None for the number that each task sets.
        limit: number of documents of each task, or their share if it is below 1; None for all.
        include_path: folder with further tasks.
        apply_chat_template: whether prompts are conversations.
        fewshot_as_multiturn: whether examples are turns of the conversation.
        system_instruction: system message of the conversation, or text in front of the prompt; None for none.
        confirm_run_unsafe_code: whether tasks may run code that the model writes.
    """

    tasks: tuple[str, ...]
    num_fewshot: int | None = None
    limit: float | None = None
    include_path: Path | None = None
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = False
    system_instruction: str | None = None
    confirm_run_unsafe_code: bool = False

    @classmethod
    def of_run(cls, config: Config) -> "Options":
        """Return the options of a run that evaluates its model on tasks."""
        evaluation, is_chat = config.evaluation, config.data.content != "text"
        return cls(
            tasks=evaluation.tasks,
            limit=evaluation.task_limit or None,
            include_path=Path(evaluation.task_folder) if evaluation.task_folder else None,
            apply_chat_template=is_chat,
            fewshot_as_multiturn=is_chat,
        )


@dataclass(frozen=True)
class Generation:
    """Settings with which a task generates answers.

    sampling: with the most likely tokens, or at random.
    stops: texts that end an answer.
    tokens: maximum number of tokens of an answer.
    """

    sampling: Sampling
    stops: tuple[str, ...]
    tokens: int

    @classmethod
    def read(cls, settings: dict[str, Any]) -> "Generation":
        """Read the settings of a request. Raises InputError for one that is not supported."""
        given = normalize_gen_kwargs(settings, MAX_ANSWER_TOKENS)
        stops = tuple(filter(None, given.pop("until")))
        tokens, is_random, temperature = (given.pop(name) for name in ("max_gen_toks", "do_sample", "temperature"))
        top_k, top_p, min_p = given.pop("top_k", 0), given.pop("top_p", 1.0), given.pop("min_p", 0.0)
        sampling = Sampling(repetition_penalty=given.pop("repetition_penalty", 1.0))
        if is_random and temperature > 0:
            sampling = replace(sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        if other := {name: value for name, value in given.items() if value != NEUTRAL.get(name)}:
            told = ", ".join(f"{name}={value!r}" for name, value in other.items())
            raise InputError(
                f"evaluation.tasks: a task asks for generation with {told}, which is not supported; give a copy of the "
                "task without it by --evaluation.task_folder"
            )
        for name, needed in sampling.problems().items():
            raise InputError(
                f"evaluation.tasks: a task asks for generation with {name}={getattr(sampling, name)!r}, which must be "
                f"{needed}; give a corrected copy of the task by --evaluation.task_folder"
            )
        return cls(sampling, stops, tokens)


class HarnessModel(TemplateLM):
    """Model with the interface that the harness calls.

    Args:
        source: the model.
        length: maximum number of tokens of a request.
        batch_tokens: tokens that are computed at once, as far as several requests have them.
        is_chat: whether prompts are conversations, so that an answer also ends where a turn does.
        pulse: notes the progress, in place of bars on the screen.

    Attributes:
        source: the model. Its parameters may be replaced by others of the same model.
        cut: number of requests of each kind that were longer than `length`, and lost their first tokens.
    """

    def __init__(
        self, source: LoadedModel, length: int, batch_tokens: int, is_chat: bool = False, pulse: Pulse = UNWATCHED
    ) -> None:
        super().__init__()
        self.source, self.max_length, self._batch_tokens, self._is_chat = source, length, batch_tokens, is_chat
        size = source.config.model.vocabulary_size
        self._reader = DocumentReader(source.model, source.placement, size, batch_tokens)
        self._generators: dict[tuple[int, int], decode.TokenGenerator] = {}  # by their rows and length, unloaded
        self._pulse = pulse
        self.cut = defaultdict[str, int](int)

    # --- Tokens

    @property
    def eot_token_id(self) -> int:
        return self.source.tokenizer.eos

    @property
    def prefix_token_id(self) -> int:
        """Id that stands for an empty context: BOS, also where texts do not begin with it, or else EOS."""
        tokenizer = self.source.tokenizer
        if tokenizer.bos is not None:
            return tokenizer.bos
        return tokenizer.vocabulary.get(tokenizer.named_tokens.get("bos_token", ""), tokenizer.eos)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text, with the tokens before it unless the text has them, as a chat template writes."""
        tokenizer = self.source.tokenizer
        try:
            (ids,) = tokenizer.encode([string.encode()])
        except UnicodeError as error:
            raise InputError(f"the tokenizer cannot encode a text of a task ({error}); leave the task out") from error
        begin = tokenizer.named_tokens.get("bos_token")
        if add_special_tokens is None:
            add_special_tokens = not (begin and string.startswith(begin))
        return [*(tokenizer.prefix if add_special_tokens else ()), *ids.tolist()]

    # --- Log-likelihoods

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[LogLikelihood]:
        return self._read([self._make_request(*request[1:]) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text. Longer ones are divided; a part sees one token of the part before."""
        windows = [
            [
                self._make_request(*make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
                )
            ]
            for request in requests
        ]
        found = iter(self._read([window for each in windows for window in each]))
        return [sum(next(found).value for _ in each) for each in windows]

    def _read(self, requests: Sequence[Request]) -> list[LogLikelihood]:
        total = sum(len(request.tokens) for request in requests)
        with self._follow(total, "log-likelihoods") as advance:
            return self._reader.read_requests(self.source.params, requests, self.max_length, advance)

    @contextlib.contextmanager
    def _follow(self, total: int, name: str) -> Iterator[Callable[[int], None]]:
        """Return a function that receives numbers of what has been done."""
        with tqdm(total=total, desc=name, disable=self._pulse is not UNWATCHED) as bar:

            def advance(count: int) -> None:
                bar.update(count)
                self._pulse.beat()

            yield advance

    def _make_request(self, context: list[int], continuation: list[int]) -> Request:
        """Return the request, cut from the left if it is too long."""
        if len(continuation) > self.max_length:
            raise InputError(
                f"a task asks for the log-likelihood of {len(continuation):,} tokens, more than the context of "
                f"{self.max_length:,}; increase --training.sequence-length"
            )
        tokens = (context + continuation)[-(self.max_length + 1) :]
        self.cut["loglikelihood"] += len(tokens) < len(context) + len(continuation)
        return Request(tokens, len(continuation))

    # --- Generation

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each prompt, up to a stop string. A prompt takes the row of one that has ended."""
        source, texts, drawn = self.source, list[Continuation](), list[decode.Request]()
        for number, (prompt, settings) in enumerate(request.args for request in requests):
            generation = Generation.read(settings)
            ids = self._cut_prompt(self.tok_encode(prompt) or [self.prefix_token_id], generation.tokens)
            texts.append(Continuation(source.tokenizer, ids, self._ends, generation.stops))
            prompt_ids = np.array(ids, np.int32)
            drawn.append(decode.Request(prompt_ids, generation.tokens, generation.sampling, number))
        drawn.sort(key=lambda request: -request.prompt.size)  # prompts of similar length are computed together
        length = max((request.prompt.size + request.count for request in drawn), default=1)
        rows = min(max(self._batch_tokens // length, 1), max(len(drawn), 1))
        generator = self._load_generator(rows, length)
        with self._follow(len(texts), "answers") as advance:

            def has_ended(request: decode.Request) -> bool:
                advance(texts[request.number].done)
                return texts[request.number].done

            tokens = generator.run(drawn, has_ended)
            extend_continuations(((each.request.number, each.token) for each in tokens), texts)
        generator.unload()
        return [text.text for text in texts]

    def _load_generator(self, rows: int, length: int) -> decode.TokenGenerator:
        """Return a generator with the parameters, compiled before if there was one of this size."""
        source = self.source
        if (generator := self._generators.get((rows, length))) is not None:
            generator.load(source.params)
            return generator
        size = source.config.model.vocabulary_size
        generator = decode.TokenGenerator(source.model, source.params, source.placement, size, rows, length)
        self._generators[rows, length] = generator
        return generator

    def _cut_prompt(self, ids: list[int], answer: int) -> list[int]:
        """Return the end of a prompt that leaves room for an answer of this number of tokens."""
        room = self.max_length - answer
        if room < 1:
            raise InputError(
                f"a task generates {answer:,} tokens, which leave no room for its prompts in the context of "
                f"{self.max_length:,}; increase --training.sequence-length"
            )
        self.cut["generate_until"] += len(ids) > room
        return ids[-room:]

    @cached_property
    def _ends(self) -> frozenset[int]:
        """Ids that end an answer."""
        source = self.source
        turn_end = self._renderer.find_turn_end() if self._is_chat else None
        return find_eos_ids(source.config.data, source.tokenizer, turn_end)

    # --- Chat template

    @cached_property
    def _renderer(self) -> Renderer:
        return open_template(self.source)

    def apply_chat_template(self, chat_history: list[Message], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text, up to the start of an answer, or with the start of one as its last message.

        As in the harness's own models, a template that rejects a system message gets the conversation without it.
        """
        history, begun = (
            (chat_history, "") if add_generation_prompt else (chat_history[:-1], chat_history[-1]["content"])
        )
        without_system = [message for message in history if message["role"] != "system"]
        try:
            return self._renderer.render_prompt(history) + begun
        except InputError:
            if len(without_system) == len(history):
                raise
        return self._renderer.render_prompt(without_system) + begun

    @property
    def tokenizer_name(self) -> str:
        return self.source.config.data.tokenizer.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the source of the template, which the harness notes in its results."""
        return find_template(self.source.config.data, self.source.tokenizer).source if chat_template else ""


class Tasks(TaskManager):
    """Tasks of the harness, loaded before the model is, so that a wrong name is reported at once.

    Attributes:
        options: how they are run.
    """

    def __init__(self, options: Options) -> None:
        """Load the tasks. Raises InputError if there is none with a name, or if one cannot be loaded."""
        self.options, folder = options, options.include_path
        if folder is not None and not folder.is_dir():
            raise InputError(
                f"evaluation.task_folder={folder}: there is no such folder; name one with YAML files of tasks"
            )
        super().__init__(include_path=folder)
        self.names = [name for pattern in options.tasks for name in self._find(pattern)]
        try:
            self._loaded = super().load(self.names)
        except Exception as error:  # reading a task runs code of its own, and may download its data
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(
                f"evaluation.tasks={','.join(options.tasks)}: a task cannot be loaded ({problem}); install what it "
                "needs, or leave it out"
            ) from error
        unsafe = [name for name, task in self._loaded["tasks"].items() if getattr(task, "UNSAFE_CODE", False)]
        if unsafe and not options.confirm_run_unsafe_code:
            raise InputError(
                f"evaluation.tasks={unsafe[0]} runs code that the model writes; run it by the command `evaluate` with "
                "--confirm-run-unsafe-code, on a machine that may do that"
            )

    def load(self, task_list: Any) -> Any:
        """Return the loaded tasks, for the harness."""
        assert task_list == self.names
        return self._loaded

    def _find(self, pattern: str) -> list[str]:
        if found := self.match_tasks([pattern]):
            return list(found)
        near = difflib.get_close_matches(pattern, self.all_tasks, n=3)
        remedy = f"did you mean {' or '.join(near)}?" if near else "`lm-eval ls tasks` lists them"
        raise InputError(f"evaluation.tasks={pattern}: there is no such task; {remedy}")


def run_tasks(model: HarnessModel, tasks: Tasks) -> dict[str, Any]:
    """Return the results of the harness for a model, with what it does not know of it."""
    own = asdict(tasks.options)
    model.cut.clear()
    with contextlib.redirect_stdout(sys.stderr):  # standard output has the results alone
        results: dict[str, Any] = lm_eval.simple_evaluate(
            model=model,
            tasks=tasks.names,
            task_manager=tasks,
            log_samples=False,
            **{name: value for name, value in own.items() if name not in ("tasks", "include_path")},
        )
    own |= {"step": model.source.step, "length": model.max_length, "cut_requests": dict(model.cut)}
    return results | {"jaxopt_llm": own}


class RunTasks:
    """Tasks on which a run evaluates its model, or the average of its parameters, as the command `evaluate` does.

    Every process of a job computes all results; the first one writes them to the run directory.
    """

    def __init__(self, setup: Setup, tasks: Tasks) -> None:
        """Nothing is compiled before the first call. tasks: with `Options.of_run`."""
        config, processes = setup.config, setup.processes
        placement, length = make_sampling_placement(setup), config.training.sequence_length
        model = make_sampling_model(setup, placement, choose_local_attention(config, length))
        source = LoadedModel(config, setup.data.tokenizer, model, {}, placement, 0)
        is_chat = tasks.options.apply_chat_template
        self._model = HarnessModel(source, length, config.training.batch_size * length, is_chat, processes.main)
        self._tasks = tasks
        self._read_weights = make_weight_reader(setup.program.specs, setup.placement, placement)
        self._folder = setup.directory / EVALUATIONS if processes.first else None

    def __call__(self, state: TrainState) -> dict[str, float]:
        """Return the metrics of the tasks by name, `eval_tasks/TASK/METRIC`. All processes of the job must call it."""
        source = self._model.source
        self._model.source = replace(source, params=self._read_weights(state), step=int(state.step))
        with contextlib.redirect_stderr(io.StringIO()):  # bars of the harness, which would break the line of the run
            results = run_tasks(self._model, self._tasks)
        self._model.source = source  # without parameters
        if self._folder is not None:
            write_results(results, self._folder / f"step-{int(state.step)}.json")
        plain = json_files.parse(to_json(results))  # without NumPy's numbers
        return {
            "/".join(
                (EVAL_TASKS, each.task, each.metric, *([each.filter] if each.filter != "none" else []))
            ): each.value
            for each in list_metrics(plain)
        }


def describe_results(results: dict[str, Any]) -> str:
    """Return the harness's tables of results."""
    return "\n".join(make_table(results, column).rstrip() for column in ("results", "groups") if column in results)


def write_results(results: dict[str, Any], file: Path) -> None:
    """Write the results as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(file, to_json(results) + "\n")


def to_json(results: dict[str, Any]) -> str:
    """Return the results as JSON."""
    return json.dumps(results, indent=2, ensure_ascii=False, default=handle_non_serializable)
