"""DeepSpeed configurations: reading a file as a `Config`, by the tables of deepspeed_keys.py.

An absent key has DeepSpeed's default, where that differs from ours in what the model learns. A key that the tables do
not have is an error: DeepSpeed itself ignores it at the top of a file.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxopt_llm.config import Config, fields
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.deepspeed_keys import (
    CONSTANT,
    FP16,
    KEYS,
    LAG,
    OPTIMIZER_NAMES,
    OPTIMIZERS,
    OTHER_OPTIMIZERS,
    REPLACES,
    SCHEDULE_KINDS,
    SCHEDULERS,
    TRAINER,
    Ignored,
    Keys,
    Maps,
    Refused,
)

# --- Keys, one after the other, and those that mean something only together


ABSENT = object()
AUTO = "auto"  # a value that Hugging Face's Trainer fills in
HINTS = {name: hint for name, hint, _ in fields.walk_fields(Config)}
TOTAL, EACH, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
RATE, PEAK, TOTAL_STEPS = "optimizer.params.lr", "scheduler.params.warmup_max_lr", "scheduler.params.total_num_steps"
KINDS = ("log", "linear")  # of the warm-up
AXES = {
    "mesh.tensor": "tensor_parallel.autotp_size",
    "mesh.context": "sequence_parallel_size",
    "mesh.pipeline": "pipeline.stages",
}


@dataclass(frozen=True)
class Mapped:
    """A key of DeepSpeed and a setting that it became.

    value: DeepSpeed's; `ABSENT` if the file does not have the key, and `AUTO` if it leaves it to the Trainer.
    """

    key: str
    value: Any
    setting: str
    ours: Any
    note: str = ""


def get_section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    found = settings.get(name)
    return found if isinstance(found, dict) else {}


def normalise_type(section: str, name: Any) -> str:
    """Return the type of a scheduler as it is, and of an optimizer in lower case, as DeepSpeed compares it."""
    return str(name).lower() if section == "optimizer" else str(name)


@dataclass
class Reader:
    """State of the reading of one file.

    Attributes:
        devices: number of devices, or None.
        rows: rows of the batch that will be given, or None. They are what batch sizes are that the file leaves open.
        values: the values of the keys that have an equivalent, by dotted name; also what "auto" became.
        automatic: the keys whose value is "auto", and where its value came from.
        problems: errors, in the order of the file.
    """

    keys: Keys
    devices: int | None
    rows: int | None = None
    values: dict[str, Any] = field(default_factory=dict)
    automatic: dict[str, str] = field(default_factory=dict)
    mapped: list[Mapped] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def walk(self, settings: dict[str, Any], prefix: str = "") -> None:
        """Sort the keys of a section into `values`, `ignored` and `problems`. null is an absent key."""
        switch = f"{prefix}enabled"
        off = switch in self.keys and not settings.get("enabled", False)
        for name, value in settings.items():
            key = prefix + name
            entry = self.keys.get(key)
            inner = any(each.startswith(f"{key}.") for each in self.keys)
            if value is None:
                continue
            if entry is None and inner and isinstance(value, dict):
                self.walk(value, f"{key}.")
            elif entry is None:
                self.problems.append(self._unknown(prefix, name, inner))
            elif off and key != switch:
                self.ignored[key] = f"{switch} is not true"
            else:
                self._sort(key, value, entry)

    def _sort(self, key: str, value: Any, entry: Maps | Ignored | Refused) -> None:
        match entry:
            case Ignored(reason):
                self.ignored[key] = reason
            case Refused(remedy, harmless):
                off = isinstance(value, dict) and value.get("enabled", bool(value)) in (False, AUTO)
                if off or value == AUTO or value in harmless:
                    self.ignored[key] = "as here"
                else:
                    self.problems.append(f"{_show(key, value)}: {remedy}")
            case Maps() if value == AUTO:
                self.automatic[key] = "the Trainer's default"
            case Maps(settings):
                self.values[key] = _make_whole(value, settings)

    def fill_automatic(self) -> None:
        """Give each "auto" the value that Hugging Face's Trainer puts in its place. Batch sizes follow later."""
        rates = {key: self.values[key] for key in (RATE, PEAK) if key in self.values}
        for key in [key for key in self.automatic if key not in (TOTAL, EACH, STEPS)]:
            other = PEAK if key == RATE else RATE
            if key in (RATE, PEAK) and other in rates:
                self.values[key], self.automatic[key] = rates[other], f"as {other}"
            elif key in TRAINER:
                self.values[key] = TRAINER[key]
            else:
                self.problems.append(f'{key}="auto": Hugging Face\'s Trainer has no default for it; give a value')

    def _unknown(self, prefix: str, name: str, section: bool) -> str:
        if section:
            return f"{prefix}{name}: must be an object of keys and values"
        known = sorted({each.removeprefix(prefix).split(".")[0] for each in self.keys if each.startswith(prefix)})
        near = difflib.get_close_matches(name, known, 1)
        remedy = f"did you mean {prefix}{near[0]}?" if near else "remove it"
        if not prefix and any(each.startswith(f"{name}.") for each in fields.FIELDS):
            remedy = f"settings of this package are given as Config({name}=...)"
        return f"{prefix}{name}: unknown key; {remedy}"

    def add(self, key: str, value: Any, settings: tuple[str, ...], ours: Any, note: str = "") -> None:
        """Record what a key became, if it has the type of the settings.

        ours: value of all settings, or a list with one entry for each.
        """
        value = AUTO if key in self.automatic else value
        note = ": ".join(filter(None, (self.automatic.get(key, ""), note)))
        several = len(settings) > 1 and isinstance(ours, list | tuple)
        each = list(ours) if several else [ours] * len(settings)
        if len(each) != len(settings):
            self.problems.append(f"{_show(key, value)}: must have {len(settings)} entries")
            return
        for setting, setting_value in zip(settings, each, strict=True):
            if fields.has_type(setting_value, HINTS[setting]):
                self.mapped.append(Mapped(key, value, setting, setting_value, note))
            else:
                self.problems.append(f"{_show(key, value)}: must be {fields.describe_type(HINTS[setting])}")

    def map_keys(self) -> None:
        """Map the keys that are read alone, and the defaults of those that are absent."""
        for key, entry in self.keys.items():
            if not isinstance(entry, Maps) or entry.joint:
                continue
            if key not in self.values:
                if entry.default is not None and key not in self.automatic:
                    self.add(key, ABSENT, entry.settings, entry.default, entry.default_note)
                continue
            value = ours = self.values[key]
            if entry.values is not None:
                known = [ours for theirs, ours in entry.values.items() if theirs == value]
                if not known:
                    self.problems.append(f"{_show(key, value)}: {entry.otherwise}")
                    continue
                (ours,) = known
            self.add(key, value, entry.settings, ours, entry.note)

    def _whole(self, key: str) -> int | None:
        """Return a number of at least 1, or None if the key is absent."""
        value = self.values.get(key)
        if value is None or (type(value) is int and value > 0):
            return value
        self.problems.append(f"{_show(key, value)}: must be a whole number of at least 1")
        return None

    def _note(self, key: str) -> str:
        entry = self.keys[key]
        assert isinstance(entry, Maps)
        return entry.note

    # --- Keys that are read together

    def read_parallelism(self) -> None:
        """Map the sizes of the mesh, and the batch sizes, which the number of data-parallel devices relates."""
        if self.values.get(AXES["mesh.tensor"]) == 0:  # DeepSpeed: off
            self.ignored[AXES["mesh.tensor"]] = "off"
            del self.values[AXES["mesh.tensor"]]
        split = 1
        for setting, key in AXES.items():
            if size := self._whole(key):
                self.add(key, size, (setting,), size, self._note(key))
                split *= size
        given = self._whole("data_parallel_size")
        if self.devices and self.devices % split:
            sizes = " × ".join(f"{key}={self.values[key]}" for key in AXES.values() if key in self.values)
            self.problems.append(f"{self.devices} devices are not divisible by {sizes}; change one of them")
            return
        replicas = self.devices // split if self.devices else given
        if given and replicas != given:
            self.problems.append(
                f"data_parallel_size={given}: {self.devices} devices are {split} × {replicas}; remove it"
            )
            return
        replicas = self._read_batch_sizes(replicas)
        within = self._read_group_size(replicas)
        if replicas and not within:
            note = "data-parallel devices, by the batch sizes" if not (self.devices or given) else ""
            key, value = ("devices", self.devices) if self.devices else ("data_parallel_size", given or ABSENT)
            self.add(key, value, ("mesh.fsdp",), replicas, note)

    def _read_group_size(self, replicas: int | None) -> int | None:
        """Map the number of devices within which parameters are divided; return None if it is all of them."""
        off = {"zero_optimization.zero_hpz_partition_size": (0, 1), "zero_optimization.mics_shard_size": (-1,)}
        for key, values in off.items():
            if key in self.values and (self.values[key] in values or self._in_lower_stage(key)):
                self.ignored.setdefault(key, "off")
                del self.values[key]
        hpz, mics = off
        given = [key for key in off if self._whole(key)]
        if len(given) == 2:
            self.problems.append(f"{hpz} and {mics}: keep one")
        if len(given) != 1:
            return None
        (key,), size = given, int(self.values[given[0]])
        if not replicas:
            self.problems.append(f"{key}={size}: the number of devices is unknown; give it (--devices)")
        elif replicas % size:
            self.problems.append(f"{key}={size} does not divide {replicas} data-parallel devices; change it")
        else:
            groups = replicas // size
            self.add(key, size, ("mesh.fsdp", "mesh.data"), (size, groups), self._note(key) if groups > 1 else "")
            if key == hpz and groups > 1:
                self.add(key, size, ("sharding.optimizer_over_data",), True, self._note(key))
        return size

    def read_codes(self) -> None:
        """Map the quantised collectives of ZeRO++."""
        mesh = {each.setting: each.ours for each in self.mapped if each.setting.startswith("mesh.")}
        over_data = any(each.setting == "sharding.optimizer_over_data" for each in self.mapped)
        replicas, divided = mesh.get("mesh.data", 1), mesh.get("mesh.fsdp", self.devices or "auto")
        weights, gradients = (f"zero_optimization.zero_quantized_{name}" for name in ("weights", "gradients"))
        for key in (weights, gradients):
            value = self.values.get(key)
            if value is None or self._in_lower_stage(key):
                continue
            if type(value) is not bool:
                self.problems.append(f"{_show(key, value)}: must be true or false")
            elif not value or (divided, replicas) == (1, 1):
                self.ignored[key] = "as here" if not value else "one device exchanges nothing"
            elif key == weights:
                axes = (*(("data",) if over_data else ()), *(("fsdp",) if divided != 1 else ()))
                self.add(key, value, ("sharding.int8_gathers",), axes, self._note(key))
            else:
                sizes = {"sharding.fsdp_gradients": divided, "sharding.data_gradients": replicas}
                for setting in (setting for setting, size in sizes.items() if size != 1):
                    self.add(key, value, (setting,), "int4", self._note(key))

    def _in_lower_stage(self, key: str) -> bool:
        """Return whether DeepSpeed does not read a key of stage 3, and say so."""
        if self.values.get("zero_optimization.stage", 0) == 3:
            return False
        self.ignored[key] = "DeepSpeed reads it in stage 3 only"
        return True

    def _read_batch_sizes(self, replicas: int | None) -> int | None:
        """Map the batch sizes. Return the number of data-parallel devices, which three sizes together determine."""
        total, each, steps = map(self._whole, (TOTAL, EACH, STEPS))
        self.automatic |= dict.fromkeys(self.automatic.keys() & {TOTAL, EACH}, "")
        if STEPS in self.automatic and total and each:
            self.automatic[STEPS] = ""
        if total and each and steps and not replicas:
            replicas = max(total // (each * steps), 1)
        is_open = not total and not each
        if is_open and not self.rows and {TOTAL, EACH} & self.automatic.keys():
            each, self.automatic[EACH] = TRAINER[EACH], "the Trainer's default"
        if each and not replicas:
            text = _show(EACH, self.values.get(EACH, AUTO))
            self.problems.append(f"{text}: the number of devices is unknown; give it (--devices)")
            return None
        if total and not steps:
            steps = total // (each * replicas) if each and replicas else 1
        steps = steps or 1
        rows = each * steps * replicas if each and replicas else total
        count = steps * (replicas or 1)
        if total and (rows != total or total % count):
            product = f"{EACH}={each} × " if each else ""
            found = f" = {rows}" if each else ""
            self.problems.append(
                f"{TOTAL}={total} is not {'' if each else 'divisible by '}{product}{STEPS}={steps} × {replicas or 1} "
                f"data-parallel devices{found}; change one of them"
            )
            return replicas
        note = f"{rows // count} × {steps} × {replicas}" if rows and replicas else self._note(TOTAL)
        if is_open and self.rows:
            rows, note = self.rows, "rows of the example"
        known = self.values.keys() | self.automatic.keys()
        for key in [key for key in (TOTAL, EACH) if key in known] or [TOTAL]:
            if rows:
                self.add(key, self.values.get(key, ABSENT), ("training.batch_size",), rows, note)
        if rows or STEPS in known:
            self.add(STEPS, self.values.get(STEPS, ABSENT), ("training.accumulation",), steps)
        return replicas

    def read_precision(self) -> None:
        chosen = {key: self.values.get(key, ABSENT) for key in ("fp16.enabled", "bf16.enabled")}
        fp16, bf16 = chosen.values()
        for key, value in chosen.items():
            if value not in (True, False, ABSENT):
                self.problems.append(f"{_show(key, value)}: must be true or false")
        dtype = ("precision.compute_dtype",)
        if fp16 is True and bf16 is True:
            self.problems.append("fp16.enabled and bf16.enabled are both true; keep one")
        elif fp16 is True:
            self.add("fp16.enabled", True, dtype, "float16", self._note("fp16.enabled"))
            power = self.values.get("fp16.initial_scale_power", 16)
            if type(power) is int and 0 <= power < 128:
                given = self.values.get("fp16.initial_scale_power", ABSENT)
                self.add("fp16.initial_scale_power", given, ("precision.initial_loss_scale",), 2.0**power)
            else:
                self.problems.append(f"fp16.initial_scale_power={power}: must be a whole number from 0 to 127")
            self.ignored |= {} if bf16 is ABSENT else {"bf16.enabled": "fp16 is enabled"}
        elif bf16 is True:
            self.add("bf16.enabled", True, dtype, "bfloat16")
            self.ignored |= {} if fp16 is ABSENT else {"fp16.enabled": "bf16 is enabled"}
        else:
            present = [key for key, value in chosen.items() if value is not ABSENT]
            for key in present or ["bf16.enabled"]:
                self.add(key, chosen[key], dtype, "float32", "neither fp16 nor bf16 is enabled")

    def read_optimizer(self) -> None:
        kind = self.values.get("optimizer.type")
        name = normalise_type("optimizer", kind)
        if kind is None:
            note = "our default; initialize(optimizer=...) replaces it"
            for setting in ("name", "learning_rate", "beta2", "weight_decay"):
                ours = fields.get_field(Config(), f"optimizer.{setting}")
                self.add("optimizer", ABSENT, (f"optimizer.{setting}",), ours, note)
        elif name not in OPTIMIZER_NAMES:
            remedy = OTHER_OPTIMIZERS.get(name, "an optax transformation")
            self.problems.append(f"optimizer.type={kind}: pass initialize(optimizer={remedy}) and remove it")
        else:
            self.add("optimizer.type", kind, ("optimizer.name",), OPTIMIZER_NAMES[name])
            self._check_decay(name)
        missing = {"optimizer.params.adam_lr"} - self.values.keys() - self.automatic.keys()
        if name == "muon" and missing:
            self.problems.append(
                "optimizer.params.adam_lr is absent: the step of Muon here has the size of Adam's, so DeepSpeed's rate "
                "of Muon does not fit; give the rate of Adam"
            )

    def _check_decay(self, name: str) -> None:
        """Refuse a weight decay that is added to the gradient, which differs from ours if the optimizer has moments."""
        key = "optimizer.params.weight_decay"
        decay = self.values.get(key, 0)
        modes = {
            mode: self.values[f"optimizer.params.{mode}"]
            for mode in ("adam_w_mode", "torch_adam", "momentum")
            if f"optimizer.params.{mode}" in self.values
        }
        coupled = {
            "adam": ("adam_w_mode=false", modes.get("adam_w_mode") is False),
            "sgd": ("momentum", bool(modes.get("momentum"))),
        }
        condition, applies = coupled.get(name, ("", False))
        if applies and decay:
            self.problems.append(
                f"{key}={decay} with {condition}: DeepSpeed adds it to the gradient (L2), and ours is decoupled; set "
                f"0, or pass initialize(optimizer=optax.chain(optax.add_decayed_weights({decay}), ...)) and remove it"
            )
        if modes.get("torch_adam") and key not in self.values.keys() | self.automatic.keys():
            self.problems.append(f"{key} is absent: PyTorch's AdamW takes 0.01 for it, DeepSpeed's 0; give it")
        for mode in modes.keys() - {"momentum"}:
            self.ignored[f"optimizer.params.{mode}"] = "weight decay is decoupled, and the update is fused"

    def read_scheduler(self) -> None:
        kind = self.values.get("scheduler.type")
        if kind is None:
            note = "a scheduler of the caller is not known here; set schedule.* in a Config"
            self.add("scheduler", ABSENT, ("schedule.kind", "schedule.warmup_steps"), ("constant", 0), note)
            return
        if kind not in SCHEDULERS:
            self.problems.append(f"scheduler.type={kind}: {CONSTANT}")
            return
        self.add("scheduler.type", kind, ("schedule.kind",), SCHEDULE_KINDS[kind])
        if TOTAL_STEPS in self.values:
            steps = self.values[TOTAL_STEPS]
            self.add(TOTAL_STEPS, steps, ("schedule.decay_steps", "training.steps"), steps)
        elif TOTAL_STEPS in self.keys and TOTAL_STEPS not in self.automatic:
            self.problems.append(f"{TOTAL_STEPS} is absent; give it")
        self._read_lower_rate(self._read_peak(), self._read_warmup())

    def _read_peak(self) -> Any:
        """Map the rate after the warm-up, and return it."""
        entry = self.keys.get(PEAK)
        default = entry.default if isinstance(entry, Maps) else None
        peak = self.values.get(PEAK, default)
        if peak is None:
            return self.values.get(RATE, 1e-3)
        for each in [each for each in self.mapped if each.setting == "optimizer.learning_rate" and each.ours != peak]:
            self.mapped.remove(each)
            self.ignored |= {} if each.value is ABSENT else {each.key: f"{PEAK} replaces it"}
        self.add(PEAK, self.values.get(PEAK, ABSENT), ("optimizer.learning_rate",), peak, REPLACES)
        return peak

    def _read_warmup(self) -> bool:
        """Map length and shape of the warm-up. Return whether there is one."""
        length, shape = "scheduler.params.warmup_num_steps", "scheduler.params.warmup_type"
        steps, kind = self.values.get(length, 1000), self.values.get(shape, "log")
        if type(steps) is not int or steps < 0:
            self.problems.append(f"{_show(length, steps)}: must be a whole number")
            return False
        if kind not in KINDS:
            self.problems.append(f'{_show(shape, kind)}: set "log" or "linear"')
        given = self.values.get(length, ABSENT)
        self.add(length, given, ("schedule.warmup_steps",), steps and max(steps, 2), LAG if steps else "no warm-up")
        if steps and kind in KINDS:
            self.add(shape, self.values.get(shape, ABSENT), ("schedule.warmup_kind",), kind)
        elif shape in self.values:
            self.ignored[shape] = "no warm-up"
        return steps > 0

    def _read_lower_rate(self, peak: Any, warms_up: bool) -> None:
        """Map the rate at which the warm-up begins, and at which WarmupDecayLR ends."""
        rate, share = "scheduler.params.warmup_min_lr", "scheduler.params.warmup_min_ratio"
        key = share if share in self.keys else rate
        low = self.values.get(key, 0)
        settings: tuple[str, ...] = ("schedule.initial_share",) if warms_up else ()
        if self.values["scheduler.type"] == "WarmupDecayLR":
            settings += ("schedule.final_share",)
        given = self.values.get(key, ABSENT)
        if not settings:
            self.ignored |= {} if given is ABSENT else {key: "no warm-up"}
            return
        limit = 1.0 if key == share else peak
        if any(type(each) not in (int, float) for each in (low, limit)) or not 0 <= low <= limit:
            self.problems.append(f"{_show(key, low)}: must be from 0 to {limit}")
        else:
            self.add(key, given, settings, low / limit if low else 0.0, f"of {limit}" if low else "")

    def read_wandb(self) -> None:
        enabled, project = self.values.get("wandb.enabled"), self.values.get("wandb.project", ABSENT)
        setting = ("logging.wandb_project",)
        if enabled:
            self.add("wandb.project", project, setting, "deepspeed" if project is ABSENT else project)
        if enabled is not None:
            self.ignored["wandb.enabled"] = "logging.wandb_project says it"


def _make_whole(value: Any, settings: tuple[str, ...]) -> Any:
    """Return 1e5 as 100000 where a setting counts, because JSON has one kind of numbers."""
    counts = any(HINTS[setting] is not float for setting in settings)
    return int(value) if counts and isinstance(value, float) and value.is_integer() else value


def _show(key: str, value: Any) -> str:
    text = json.dumps(value)
    return key if value is ABSENT or len(text) > 40 else f"{key}={text}"


# --- Files


@dataclass(frozen=True)
class Imported:
    """A DeepSpeed configuration as settings of this package.

    Attributes:
        source: name of the file.
        ignored: the reason by key.
    """

    source: str
    config: Config
    mapped: tuple[Mapped, ...]
    ignored: dict[str, str]

    def has(self, setting: str) -> bool:
        """Return whether the file gives a value to a setting."""
        return any(each.setting == setting and each.value not in (ABSENT, AUTO) for each in self.mapped)

    def lines(self) -> list[str]:
        """Return the mapping as a table, and the ignored keys by reason."""
        settings: dict[tuple[str, str], list[str]] = {}
        for each in self.mapped:
            settings.setdefault((_describe(each), each.note), []).append(f"{each.setting} = {_show_ours(each.ours)}")
        rows = [(key, ", ".join(ours), note) for (key, note), ours in settings.items()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        table = [f"  {key:<{widths[0]}}  {ours:<{widths[1]}}  {note}".rstrip() for key, ours, note in rows]
        by_reason: dict[str, list[str]] = {}
        for key, reason in self.ignored.items():
            by_reason.setdefault(reason, []).append(key)
        ignored = [f"  {', '.join(keys)}: {reason}" for reason, keys in by_reason.items()]
        return [f"{self.source}:", *table, *(["ignored:", *ignored] if ignored else [])]


def _describe(each: Mapped) -> str:
    return f"{each.key} absent" if each.value is ABSENT else f"{each.key} = {json.dumps(each.value)}"


def _show_ours(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def read_file(path: Path, devices: int | None = None, rows: int | None = None) -> Imported:
    """Read a DeepSpeed configuration from a JSON file. See read_deepspeed.

    Raises:
        InputError: the file is not JSON, or repeats a key.
    """
    settings = json_files.read(path, "give DeepSpeed's configuration without comments and repeated keys")
    return read_deepspeed(settings, path.name, devices, rows)


def read_dict(settings: Mapping[str, Any], devices: int | None = None, rows: int | None = None) -> Imported:
    """Read a DeepSpeed configuration from a dict, as a file with the same content. See read_deepspeed.

    Raises:
        InputError: a value cannot be written in JSON.
    """
    try:
        copied = json_files.parse_settings(json.dumps(dict(settings)))
    except (TypeError, ValueError) as error:
        raise InputError(f"config: {error}; give a dict of strings, numbers, lists and dicts") from error
    return read_deepspeed(copied, "config", devices, rows)


def read_deepspeed(settings: Any, source: str, devices: int | None = None, rows: int | None = None) -> Imported:
    """Read a DeepSpeed configuration.

    Args:
        settings: the parsed JSON.
        source: name of the file, for messages.
        devices: number of devices; those on no other axis become mesh.fsdp. None: mesh.fsdp stays 1.
        rows: rows of a batch, which stand for batch sizes that the file leaves open. None: not known.

    Raises:
        InputError: a key is unknown or has no equivalent, or values contradict each other. The message names all.
    """
    if not isinstance(settings, dict):
        raise InputError(f"{source}: not an object of keys and values; give DeepSpeed's configuration")
    settings = _replace_old_forms(settings)
    reader = Reader(_choose_keys(settings), devices, rows)
    reader.walk(settings)
    reader.fill_automatic()
    reader.read_parallelism()
    reader.read_codes()
    reader.read_precision()
    reader.read_optimizer()
    reader.read_wandb()
    reader.map_keys()
    reader.read_scheduler()  # after the optimizer, whose rate it replaces
    config = fields.replace_fields(Config(), {each.setting: each.ours for each in reader.mapped})
    if problems := reader.problems or config.problems():
        raise InputError(f"{source}: {'; '.join(dict.fromkeys(problems))}")
    return Imported(source, config, tuple(reader.mapped), reader.ignored)


def _replace_old_forms(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with old spellings replaced: `bfloat16`, and `zero_optimization` as a boolean."""
    replaced = {("bf16" if key == "bfloat16" else key): value for key, value in settings.items()}
    zero = replaced.get("zero_optimization")
    return {**replaced, "zero_optimization": {"stage": int(zero)}} if isinstance(zero, bool) else replaced


def _choose_keys(settings: dict[str, Any]) -> Keys:
    """Return the known keys: `KEYS`, and the keys of the file's optimizer, scheduler and precision."""
    keys = dict(KEYS)
    for section, kinds in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        parameters = kinds.get(normalise_type(section, get_section(settings, section).get("type")))
        unknown = {} if parameters is not None else {f"{section}.params": Ignored(f"the {section} is refused")}
        keys |= unknown | {f"{section}.params.{name}": entry for name, entry in (parameters or {}).items()}
    on = get_section(settings, "fp16").get("enabled") is True
    return keys | (FP16 if on else dict.fromkeys(FP16, Ignored("fp16 is off")))
