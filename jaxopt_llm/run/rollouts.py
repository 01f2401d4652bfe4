"""Rollouts: answers that the model draws to prompts, with their rewards, and the batches of a step made of them.

The prompts of a step, the order of them and the random numbers of the sampler are functions of seed and step, so that a
run that continues draws what it would have drawn. rollouts.jsonl in the run directory keeps everything that was drawn.

Letters: P prompts of a step, G answers to each, S sequence.
"""

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import grain
import jax
import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.config import Config, RolloutsConfig
from jaxopt_llm.config.training import GRPO
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.rows.packing import BestFit
from jaxopt_llm.data.rows.prompts import Prompt
from jaxopt_llm.data.tokens.continuation import find_eos_ids
from jaxopt_llm.data.tokens.template import Renderer, find_template
from jaxopt_llm.execution.decode import MAX_ROWS, Request, TokenGenerator
from jaxopt_llm.execution.sampling import Sampling
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.observe.dashboards import MetricsLog
from jaxopt_llm.run.answer_server import Drawn
from jaxopt_llm.run.rewards import Rewards
from jaxopt_llm.run.samples import make_generator, make_sampling_placement
from jaxopt_llm.run.served_answers import ServedSampler
from jaxopt_llm.run.setup import Setup
from jaxopt_llm.step.state import TrainState, make_weight_reader
from jaxopt_llm.step.step import Metrics

ROLLOUTS = "rollouts"  # name of the log
STD_FLOOR = 1e-4  # added to the standard deviation of a group, as TRL does
HELD_OUT_STREAM = 1  # of random numbers; that of training is 0


@dataclass(frozen=True, eq=False)
class Answer:
    """An answer to a prompt.

    Attributes:
        ids: its tokens, with the one that ends it, int32 [N].
        log_probabilities: of these tokens by the sampler, float32 [N]; [0] of an answer that the row has.
        text: the text, without tokens that end it.
        ended: whether it ended by itself.
        rewards: by the name of the function; None where it does not apply.
        advantage: its reward compared with those of its group.
    """

    ids: NDArray[np.int32]
    log_probabilities: NDArray[np.float32]
    text: str
    ended: bool
    rewards: Mapping[str, float | None]
    advantage: float

    @property
    def reward(self) -> float:
        return sum(each for each in self.rewards.values() if each is not None)

    def to_record(self) -> dict[str, Any]:
        """Return the entry of a log."""
        lists = {"tokens": self.ids.tolist(), "log_probabilities": self.log_probabilities.tolist()}
        return {name: value for name, value in vars(self).items() if name not in ("ids", *lists)} | lists

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Answer":
        ids, found = np.array(record["tokens"], np.int32), np.array(record["log_probabilities"], np.float32)
        return cls(ids, found, *(record[name] for name in ("text", "ended", "rewards", "advantage")))


Group = tuple[Prompt, Sequence[Answer]]
MeasureLoss = Callable[[Iterable[Batch]], dict[str, float]]  # batches -> `eval_loss` and other metrics


def find_advantages(rewards: NDArray[np.float64], scale: str) -> NDArray[np.float64]:
    """Return the advantages of answers [P, G] by their rewards.

    Args:
        scale: see `grpo.scale_advantages`.
    """
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return centred / (rewards.std(axis=1, ddof=1, keepdims=True) + STD_FLOOR) if scale == "std" else centred


def choose_drawn(first: int, count: int, share: float) -> list[bool]:
    """Return whether the model answers each of `count` prompts itself, a share of them.

    first: number of prompts of the run before these. Of the first n prompts of a run it answers the whole part of
        n · share, so that no step depends on how the run was interrupted.
    """
    answered = [math.floor((first + place) * share + 1e-9) for place in range(count + 1)]
    return [after > before for before, after in itertools.pairwise(answered)]


def pack_answers(groups: Sequence[Group], config: Config) -> Batch:
    """Pack the documents of a step, each a prompt with an answer, into rows: NumPy fields [batch size, S].

    Without rewards, the rows have neither advantages nor the sampler's log-probabilities.
    """
    training = config.training
    documents = [(prompt, answer) for prompt, answers in groups for answer in answers]
    lengths = np.array([prompt.ids.size + answer.ids.size - 1 for prompt, answer in documents])
    starts = np.cumsum(lengths) - lengths
    rows = BestFit(starts, lengths, training.sequence_length, config.data.documents_per_row)
    shape = (training.batch_size, training.sequence_length)
    integers = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "segment_ids", "positions")}
    reals = {name: np.zeros(shape, np.float32) for name in ("labels", "sampled")}
    batch = Batch(**integers, **reals, loss_mask=np.zeros(shape, np.bool_))
    for row in range(len(rows)):
        begin = 0
        for segment, start in enumerate(rows.find_documents(row, None)[0].tolist()):
            prompt, answer = documents[int(starts.searchsorted(start))]
            ids = np.concatenate([prompt.ids, answer.ids])
            place = slice(begin, begin + ids.size - 1)
            learned = slice(begin + prompt.ids.size - 1, place.stop)  # whose targets are tokens of the answer
            batch.tokens[row, place], batch.targets[row, place] = ids[:-1], ids[1:]
            batch.segment_ids[row, place], batch.positions[row, place] = segment + 1, np.arange(ids.size - 1)
            batch.labels[row, place], batch.loss_mask[row, learned] = answer.advantage, True
            if answer.log_probabilities.size:
                batch.sampled[row, learned] = answer.log_probabilities
            begin = place.stop
    return batch if training.objective == GRPO else replace(batch, labels=None, sampled=None)


def measure_answers(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the metrics of the answers of a step."""
    answers = [answer for _, of_prompt in groups for answer in of_prompt]
    rewards = np.array([[answer.reward for answer in of_prompt] for _, of_prompt in groups])
    names = answers[0].rewards if len(answers[0].rewards) > 1 else ()
    by_name = {name: [value for each in answers if (value := each.rewards[name]) is not None] for name in names}
    of_all = {
        "rewards/mean": rewards.mean(),
        "rewards/std": rewards.std(),
        "rewards/equal_groups": np.mean(np.ptp(rewards, axis=1) == 0),
    }
    return {
        **(of_all if answers[0].rewards else {}),
        **{f"rewards/{name}": np.mean(found) for name, found in by_name.items() if found},
        "answers/length": np.mean([answer.ids.size for answer in answers]),
        "answers/truncated": np.mean([not answer.ended for answer in answers]),
    }


class Sampler(Protocol):
    """Source of answers: the devices of the run, or a server.

    Attributes:
        difference: see `ServedSampler`; None if the run draws the answers itself.
    """

    @property
    def difference(self) -> float | None: ...

    def identify(self, state: TrainState) -> str:
        """Return what tells the weights of a state from others, if their answers may differ when drawn again."""

    def draw(
        self, state: TrainState, prompts: Sequence[NDArray[np.int32]], count: int, key: tuple[int, int]
    ) -> list[Drawn]:
        """Return this number of answers to each prompt. key: of the random numbers, besides the seed of the run."""

    def close(self) -> None:
        """Free what it has."""


class OwnSampler:
    """Sampler on the devices of the run. Nothing is compiled before the first call."""

    difference = None

    def __init__(self, setup: Setup, ends: frozenset[int]) -> None:
        """Take over the setup of a run. ends: ids that end an answer."""
        self._setup, self._ends = setup, ends
        self._placement = make_sampling_placement(setup)
        self._read_weights = make_weight_reader(setup.program.specs, setup.placement, self._placement)
        self._generator: TokenGenerator | None = None

    def identify(self, state: TrainState) -> str:
        return ""  # the same weights draw the same answers

    def draw(
        self, state: TrainState, prompts: Sequence[NDArray[np.int32]], count: int, key: tuple[int, int]
    ) -> list[Drawn]:
        seed = int(np.random.SeedSequence([self._setup.config.run.seed, *key]).generate_state(1)[0])
        sampling, most = Sampling(temperature=1.0, seed=seed), self._setup.config.rollouts.max_new_tokens
        requests = [
            Request(ids, most, sampling, number)
            for number, ids in enumerate(ids for ids in prompts for _ in range(count))
        ]
        generator = self._load(state)
        drawn: list[Drawn] = [[] for _ in requests]
        for each in generator.run(requests, lambda request: drawn[request.number][-1][0] in self._ends):
            drawn[each.request.number].append((each.token, each.log_probability))
        generator.unload()
        return drawn

    def _load(self, state: TrainState) -> TokenGenerator:
        assert self._setup.prompts is not None
        weights, settings = self._read_weights(state), self._setup.config.rollouts
        if self._generator is None:
            rows = min(settings.prompts * settings.group_size, MAX_ROWS)
            length = self._setup.prompts.longest + settings.max_new_tokens
            self._generator = make_generator(self._setup, weights, self._placement, rows, length)
        else:
            self._generator.load(weights)
        return self._generator

    def close(self) -> None:
        self._generator = None


class Rollouts:
    """Maker of the batches of a run whose model draws the answers that it trains on."""

    def __init__(self, setup: Setup) -> None:
        """Start the process of the rewards, if there are any. Nothing is compiled before the first call.

        Raises:
            InputError: the functions cannot be used.
        """
        assert setup.prompts is not None
        config, self._setup, self._prompts = setup.config, setup, setup.prompts
        self._settings: RolloutsConfig = config.rollouts
        self._order = grain.MapDataset.range(len(self._prompts.training)).seed(config.run.seed).shuffle().repeat()
        tokenizer, turn_end = setup.data.tokenizer, None
        if any(prompt.is_chat for prompt in (*self._prompts.training, *self._prompts.held_out)):
            turn_end = Renderer(find_template(config.data, tokenizer)).find_turn_end()
        self._ends = find_eos_ids(config.data, tokenizer, turn_end)
        self._sampler: Sampler = (ServedSampler if config.rollouts.server else OwnSampler)(setup, self._ends)
        self._kept: list[dict[str, Any]] = []  # records of steps after the start
        self._groups: list[Group] = []  # of the last step that drew
        # Process 0 rewards the answers, and has the log.
        self._share = setup.processes.channel("rollouts").share
        self._log: MetricsLog | None = None
        self._rewards: Rewards | None = None
        if setup.processes.first and self._settings.rewards:
            self._rewards = Rewards(self._settings.rewards, self._settings.reward_seconds)

    def read_steps(self, start: int, say: Callable[[str], None] = print) -> Generator[tuple[int, float], None, None]:
        """Yield the steps after `start`, counted from 0. Rollouts of later steps are removed from the log.

        Those that a server drew are kept: it may draw others from the same weights.
        """
        if self._setup.processes.first:
            if self._setup.config.rollouts.server:
                self._kept = [record for record in self._read_records() if record["step"] > start]
            self._log = MetricsLog(self._path, start, say)
        step = start
        while True:
            yield step, 0.0
            step += 1

    def make_batch(self, state: TrainState, step: int) -> tuple[Batch, Metrics]:
        """Return this process's rows of the batch of a step, counted from 0, and metrics of the answers of all.

        Most steps draw them with the state.

        Raises:
            InputError: a function that rewards answers fails, or a server that draws them.
        """
        first = step - step % self._settings.updates
        clock, seconds = time.perf_counter(), 0.0
        if step == first:
            prompts, weights = self._choose_prompts(first), self._sampler.identify(state)
            kept = self._find_kept(first + 1, prompts, weights)
            self._groups = kept or self._answer(state, prompts, first)
            self._write(first + 1, weights)
            seconds = time.perf_counter() - clock
        elif not self._groups:
            self._groups = self._read(first + 1)
        batch = self._pack(self._groups)
        found = measure_answers(self._groups) | {"rollout_seconds": np.float64(seconds)}
        difference = self._sampler.difference
        return batch, found if difference is None else found | {"probe_difference": np.float64(difference)}

    def _choose_prompts(self, step: int) -> list[Prompt]:
        """Return the prompts of a step that draws. Every epoch has each prompt once, in another order."""
        begin = step // self._settings.updates * self._settings.prompts
        return [self._prompts.training[self._order[begin + place]] for place in range(self._settings.prompts)]

    def _answer(self, state: TrainState, prompts: Sequence[Prompt], step: int) -> list[Group]:
        """Return answers to the prompts of a step. Some are drawn, others are read from the rows."""
        begin = step // self._settings.updates * self._settings.prompts
        drawn = choose_drawn(begin, len(prompts), self._settings.share)
        asked = [prompt for prompt, is_drawn in zip(prompts, drawn, strict=True) if is_drawn]
        found = iter(self._draw(state, asked, self._settings.group_size, (step, 0)) if asked else ())
        stored = (self._take_answer(prompt) for prompt, is_drawn in zip(prompts, drawn, strict=True) if not is_drawn)
        given = iter(self._reward([(prompt, [answer]) for prompt, answer in stored]))
        return [next(found if is_drawn else given) for is_drawn in drawn]

    def _take_answer(self, prompt: Prompt) -> tuple[Prompt, Answer]:
        """Return a prompt with the answer of its row, as long as one that is drawn can be."""
        assert prompt.answer is not None
        ids = prompt.answer[: self._settings.max_new_tokens]
        answer = self._make_answer([(int(token), 0.0) for token in ids])
        return prompt, replace(answer, log_probabilities=np.zeros(0, np.float32))

    def measure(self, state: TrainState, measure_loss: MeasureLoss) -> dict[str, float]:
        """Return the metrics of one answer to each held-out prompt, and the loss of the run.

        Of GRPO the loss is minus the mean reward. Otherwise `measure_loss` returns it of batches of the answers.
        """
        count = self._setup.config.evaluation.batches * self._settings.prompts
        groups = self._draw(state, self._prompts.held_out[:count], 1, (0, HELD_OUT_STREAM))
        found = {f"eval_{name}": float(value) for name, value in measure_answers(groups).items()}
        of_groups = "eval_rewards/std", "eval_rewards/equal_groups"  # not of single answers
        of_answers = {name: value for name, value in found.items() if name not in of_groups}
        if self._setup.config.training.objective == GRPO:
            return {"eval_loss": 0.0 - found["eval_rewards/mean"]} | of_answers
        size = self._settings.prompts * self._settings.group_size  # answers that fit into a batch
        parts = (groups[first : first + size] for first in range(0, len(groups), size))
        return measure_loss(map(self._pack, parts)) | of_answers

    def _pack(self, groups: Sequence[Group]) -> Batch:
        """Return this process's rows of a batch of answers."""
        rows = self._setup.local_rows.indices
        return jax.tree.map(lambda field: field[rows], pack_answers(groups, self._setup.config))

    def sync(self) -> None:
        """Wait until all rollouts are on disk."""
        if self._log is not None:
            self._log.sync()

    def close(self) -> None:
        """End the process of the rewards and the sampler, and bring the rollouts to the disk."""
        if self._rewards is not None:
            self._rewards.close()
        self._sampler.close()
        if self._log is not None:
            self._log.close()

    def _draw(self, state: TrainState, prompts: Sequence[Prompt], count: int, key: tuple[int, int]) -> list[Group]:
        """Draw this number of answers to each prompt, and reward them. key: of the random numbers, besides the seed."""
        drawn = self._sampler.draw(state, [prompt.ids for prompt in prompts], count, key)
        answers = [self._make_answer(tokens) for tokens in drawn]
        groups = [(prompt, answers[i * count : (i + 1) * count]) for i, prompt in enumerate(prompts)]
        return self._reward(groups)

    def _make_answer(self, drawn: Sequence[tuple[int, float]]) -> Answer:
        """Return an answer of tokens and their log-probabilities, without rewards."""
        ids, found = zip(*drawn, strict=True)
        ended = ids[-1] in self._ends
        text = self._setup.data.tokenizer.decode(ids[:-1] if ended else ids)
        return Answer(np.array(ids, np.int32), np.array(found, np.float32), text, ended, {}, 0.0)

    def _reward(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with rewards, if there are any, and the advantages of these."""
        if not self._settings.rewards or not groups:
            return list(groups)
        pairs = [(prompt, answer) for prompt, answers in groups for answer in answers]
        names = dict.fromkeys(name for prompt, _ in groups for name in prompt.row if name != "prompt")

        def compute() -> dict[str, Any]:
            assert self._rewards is not None
            return self._rewards.compute(
                [prompt.row["prompt"] for prompt, _ in pairs],
                [[{"role": "assistant", "content": a.text}] if p.is_chat else a.text for p, a in pairs],
                completion_ids=[answer.ids.tolist() for _, answer in pairs],
                **{name: [prompt.row.get(name) for prompt, _ in pairs] for name in names},
            )

        rewards = self._share(compute)
        rewarded = [
            replace(answer, rewards={name: found[index] for name, found in rewards.items()})
            for index, (_, answer) in enumerate(pairs)
        ]
        if (size := len(groups[0][1])) < 2:
            return [(prompt, rewarded[i : i + 1]) for i, (prompt, _) in enumerate(groups)]
        sums = np.array([answer.reward for answer in rewarded]).reshape(-1, size)
        advantages = find_advantages(sums, self._setup.config.grpo.scale_advantages).ravel().tolist()
        rewarded = [replace(answer, advantage=value) for answer, value in zip(rewarded, advantages, strict=True)]
        return [(prompt, rewarded[i * size : (i + 1) * size]) for i, (prompt, _) in enumerate(groups)]

    @property
    def _path(self) -> Path:
        return self._setup.directory / f"{ROLLOUTS}.jsonl"

    def _write(self, step: int, weights: str) -> None:
        """Write what was drawn for a step, counted from 1, one line for each prompt.

        weights: see `Sampler.identify`.
        """
        if self._log is None:
            return
        for prompt, answers in self._groups:
            record = {"step": step, "row": prompt.row, "prompt_tokens": prompt.ids.tolist()}
            record |= {"weights": weights} if weights else {}
            self._log.write(record | {"answers": [answer.to_record() for answer in answers]})

    def _read(self, step: int) -> list[Group]:
        """Return what was drawn for a step.

        Raises:
            InputError: the log does not hold it.
        """

        def find() -> list[dict[str, Any]]:
            found = [record for record in self._read_records() if record["step"] == step]
            if len(found) != (count := self._settings.prompts):
                raise InputError(f"{self._path}: it holds {len(found)} of {count} prompts of step {step}; restore it")
            return found

        return [_make_group(record) for record in self._share(find)]

    def _find_kept(self, step: int, prompts: Sequence[Prompt], weights: str) -> list[Group]:
        """Return what an earlier start drew with the same weights for a step, counted from 1; nothing if it did not."""

        def find() -> list[dict[str, Any]]:
            found = [each for each in self._kept if each["step"] == step and each.get("weights") == weights]
            answers = [answer for each in found for answer in each["answers"]]
            same_prompts = [each["prompt_tokens"] for each in found] == [prompt.ids.tolist() for prompt in prompts]
            names = self._rewards.names if self._rewards else []
            same_rewards = all([*answer["rewards"]] == names for answer in answers)
            is_whole = all(len(each["answers"]) == self._settings.group_size for each in found)
            return found if same_prompts and same_rewards and is_whole else []

        return [_make_group(record) for record in self._share(find)]

    def _read_records(self) -> list[dict[str, Any]]:
        """Return the whole lines of the log; nothing if there is none."""
        if not self._path.exists():
            return []
        lines = self._path.read_text().splitlines(keepends=True)
        return [json_files.parse(line) for line in lines if line.endswith("\n")]


def _make_group(record: Mapping[str, Any]) -> Group:
    """Return the prompt and the answers of a line of the log."""
    answers = [Answer.from_record(each) for each in record["answers"]]
    return Prompt(np.array(record["prompt_tokens"], np.int32), record["row"]), answers
