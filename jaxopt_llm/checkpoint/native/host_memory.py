"""Copies of the training state in the memory of the hosts, for a restart after the loss of one host.

Each process writes its own parts of the state into files in memory (`/dev/shm`), which survive the process. If another
process holds the same parts, such as along `data`, that is all. Otherwise each process also keeps the parts of the next
process, which a permutation over the devices sends. A restart takes the newest step whose parts are all there: each
process has its own, or another process has them and sends them back in the same way.

USER/RUN/process-I/STEP/own.bin, next.bin   parts of process I, and of the next one
USER/RUN/process-I/STEP/index.json          their hashes, the layout and the record; written last
"""

import collections
import functools
import hashlib
import json
import math
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxopt_llm.core import json_files, tree
from jaxopt_llm.core.files import hash_file
from jaxopt_llm.distributed.process_group import Processes
from jaxopt_llm.parallel.mesh import group_devices

INDEX, OWN, NEXT = "index.json", "own.bin", "next.bin"
KEEP = 2  # steps; while one is written, the one before is whole

Pairs = tuple[tuple[int, int], ...]  # (source, destination), indices of devices in the mesh


class HostMemory:
    """Copies of the state of one run in the memory of the hosts.

    Attributes:
        step: the step that `find` found; None if there is none.
        record: what was saved with it.
    """

    def __init__(self, directory: Path, target: tree.Tree, processes: Processes) -> None:
        """Name the directory of the run, within one of the user.

        Args:
            target: the state as `jax.ShapeDtypeStruct`s with NamedShardings on the mesh.
        """
        self._directory = directory / f"process-{processes.index}"
        self._processes, self._channel = processes, processes.channel("host memory")
        self._target = dict(tree.leaves_with_path(target))
        self._structure = jax.tree.structure(target)
        self._mesh: Mesh = next(iter(self._target.values())).sharding.mesh
        self._owners = [device.process_index for device in self._mesh.devices.flat]
        self._layout = _describe_layout(self._target, self._owners)
        self._replicated = all(_is_on_two_processes(leaf, self._owners) for leaf in self._target.values())
        self.step: int | None = None
        self.record: dict[str, Any] = {}
        self._holders: list[int] = []  # the processes that have their own parts of `step`
        self._sealing: threading.Thread | None = None

    def save(self, step: int, state: tree.Tree, record: Mapping[str, Any]) -> None:
        """Write this process's parts, and those of the next process, into memory.

        Their hashes are computed in a thread, while the next steps run. Until then, the step before is the newest that
        `find` finds. A step that does not fit into memory is reported and has no copy: the run goes on.
        """
        self.wait()
        path, leaves = self._directory / str(step), tree.leaves_with_path(state)
        parts = {OWN: (leaf for _, leaf in leaves)}
        if not self._replicated:
            send = functools.partial(_permute, pairs=self._ring(-1))
            parts[NEXT] = (send(leaf) for _, leaf in leaves)
        try:
            shutil.rmtree(path, ignore_errors=True)
            self._directory.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # for this user only
            path.mkdir(parents=True)
            for name, each in parts.items():
                _write(path / name, each)
        except OSError as error:
            self._report(path, error)
        else:
            self._sealing = threading.Thread(target=self._seal, args=(path, [*parts], dict(record)))
            self._sealing.start()
        finally:
            for rest in parts.values():
                collections.deque(rest, maxlen=0)  # all processes take part in all permutations

    def wait(self) -> None:
        """Wait until the last step that was saved has its hashes."""
        if self._sealing is not None:
            self._sealing.join()

    def _seal(self, path: Path, names: Sequence[str], record: Mapping[str, Any]) -> None:
        """Write the index of a step, with which it is whole, and delete the oldest ones."""
        try:
            hashes = {name: hash_file(path / name) for name in names}
            index = {"layout": self._layout, "sha256": hashes, "record": record}
            (path / INDEX).write_text(json.dumps(index))
        except OSError as error:
            self._report(path, error)
        for old in sorted(self._steps())[:-KEEP]:
            shutil.rmtree(self._directory / str(old), ignore_errors=True)

    def _report(self, path: Path, error: OSError) -> None:
        shutil.rmtree(path, ignore_errors=True)
        print(
            f"process {self._processes.index} has no copy of step {path.name} in memory: {path}: {error.strerror}",
            file=sys.stderr,
            flush=True,
        )

    def find(self, after: int) -> int | None:
        """Return the newest step after `after` whose parts are all there."""
        valid = {step: self._verify(step) for step in self._steps()}
        answers = [json_files.parse(each) for each in self._channel.exchange(json.dumps(valid))]
        everywhere = sorted({int(step) for answer in answers for step in answer}, reverse=True)
        for step in everywhere:
            holds = [answer.get(str(step), {}) for answer in answers]
            if step > after and self._is_whole(holds):
                self._holders = [index for index, each in enumerate(holds) if OWN in each]
                self.step, self.record = step, holds[self._holders[0]]["record"]
                break
        return self.step

    def load(self) -> tree.Tree:
        """Return the state of `step`. Processes that have lost their parts receive them from others."""
        path, index = self._directory / str(self.step), self._processes.index
        own = path / OWN if index in self._holders else None
        pairs = self._find_pairs()
        sent_file = own if self._replicated else path / NEXT
        if sent_file is not None and not sent_file.exists():
            sent_file = None  # this process sends nothing
        leaves = []
        offsets, sent_offsets = collections.Counter[str](), collections.Counter[str]()
        for name, leaf in self._target.items():
            array = self._read(own, leaf, offsets)
            if pairs:
                sent = self._read(sent_file, leaf, sent_offsets)
                array = _replace_lost(array, sent, pairs[name])
            leaves.append(array)
        return jax.tree.unflatten(self._structure, leaves)

    def discard_after(self, step: int) -> None:
        """Delete what this process has of later steps."""
        self.wait()
        for each in self._steps():
            if each > step:
                shutil.rmtree(self._directory / str(each))

    def _steps(self) -> list[int]:
        return [int(path.name) for path in self._directory.glob("*") if path.name.isdigit()]

    def _verify(self, step: int) -> dict[str, Any]:
        """Return the files of a step that are intact, with their record; nothing if the layout is another one."""
        path = self._directory / str(step)
        try:
            index = json_files.parse((path / INDEX).read_text())
            if index["layout"] != self._layout:
                return {}
            found = {name: True for name, sha256 in index["sha256"].items() if hash_file(path / name) == sha256}
            return {**found, "record": index["record"]} if found else {}
        except (OSError, ValueError, KeyError):
            return {}

    def _is_whole(self, holds: list[dict[str, Any]]) -> bool:
        lost = [index for index, each in enumerate(holds) if OWN not in each]
        if len(lost) == len(holds):
            return False
        if not self._replicated:
            return all(NEXT in holds[index - 1] for index in lost)
        lost_devices = {device for device, owner in enumerate(self._owners) if owner in lost}
        return all(
            2 * len(lost_devices & {*group}) <= len(group)
            for leaf in self._target.values()
            for group in _group_devices(leaf)
        )

    def _ring(self, shift: int) -> Pairs:
        """Return the pairs that send the parts of each process to the one `shift` processes later."""
        by_owner = collections.defaultdict(list)
        for device, owner in enumerate(self._owners):
            by_owner[owner].append(device)
        count = len(by_owner)
        return tuple(
            pair
            for owner, devices in by_owner.items()
            for pair in zip(devices, by_owner[(owner + shift) % count], strict=True)
        )

    def _find_pairs(self) -> dict[str, Pairs]:
        """Return for each leaf which device sends to which one that has lost its part; nothing if none has."""
        lost = {device for device, owner in enumerate(self._owners) if owner not in self._holders}
        if not lost:
            return {}
        if not self._replicated:
            back = tuple(pair for pair in self._ring(1) if pair[1] in lost)
            return dict.fromkeys(self._target, back)

        def pair_up(leaf: jax.ShapeDtypeStruct) -> Pairs:
            groups = [([each for each in group if each not in lost], lost & {*group}) for group in _group_devices(leaf)]
            return tuple(pair for sources, wanting in groups for pair in zip(sources, sorted(wanting), strict=False))

        return {name: pair_up(leaf) for name, leaf in self._target.items()}

    def _read(self, path: Path | None, leaf: jax.ShapeDtypeStruct, offsets: collections.Counter[str]) -> jax.Array:
        """Return the next array of a file of parts; zeros if there is no file."""
        sharding, dtype = leaf.sharding, np.dtype(leaf.dtype)
        assert isinstance(sharding, NamedSharding)
        shape = sharding.shard_shape(leaf.shape)
        size = math.prod(shape) * dtype.itemsize
        arrays = []
        for device in _local_devices(self._mesh):
            part = np.zeros(shape, dtype)
            if path is not None:
                content = np.fromfile(path, np.uint8, size, offset=offsets[path.name])
                offsets[path.name] += size
                part = content.view(dtype).reshape(shape)
            arrays.append(jax.device_put(part, device))
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)


def _write(path: Path, leaves: Iterable[jax.Array]) -> None:
    """Write the parts of arrays on this process's devices."""
    with path.open("wb") as file:
        for leaf in leaves:
            assert isinstance(leaf.sharding, NamedSharding) and isinstance(leaf.sharding.mesh, Mesh)
            shards = {shard.device: shard.data for shard in leaf.addressable_shards}
            for device in _local_devices(leaf.sharding.mesh):
                file.write(np.ascontiguousarray(shards[device]).reshape(-1).view(np.uint8).data)


def _local_devices(mesh: Mesh) -> list[jax.Device]:
    return [device for device in mesh.devices.flat if device.process_index == jax.process_index()]


def _describe_layout(target: Mapping[str, jax.ShapeDtypeStruct], owners: list[int]) -> str:
    """Return a hash of the arrays, of their division over the devices, and of the devices of each process."""
    arrays = [
        f"{path} {leaf.dtype} {leaf.shape} {_group_devices(leaf)} {leaf.sharding.shard_shape(leaf.shape)}"
        for path, leaf in target.items()
    ]
    return hashlib.sha256("\n".join([*arrays, str(owners)]).encode()).hexdigest()


def _group_devices(leaf: jax.ShapeDtypeStruct) -> list[list[int]]:
    assert isinstance(leaf.sharding, NamedSharding)
    return group_devices(leaf.sharding, leaf.shape)


def _is_on_two_processes(leaf: jax.ShapeDtypeStruct, owners: list[int]) -> bool:
    return all(len({owners[device] for device in group}) > 1 for group in _group_devices(leaf))


@functools.cache
def _make_permutation(sharding: NamedSharding, rank: int, pairs: Pairs) -> Callable[[jax.Array], jax.Array]:
    """Return the program that sends each source's part of an array to its destination; zeros elsewhere."""
    mesh = sharding.mesh
    spec = PartitionSpec(*sharding.spec, *(None,) * (rank - len(sharding.spec)))
    send = jax.shard_map(
        lambda part: jax.lax.ppermute(part, mesh.axis_names, pairs),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return jax.jit(send, in_shardings=sharding, out_shardings=sharding)


def _permute(array: jax.Array, pairs: Pairs) -> jax.Array:
    assert isinstance(array.sharding, NamedSharding)
    return _make_permutation(array.sharding, array.ndim, pairs)(array)


def _replace_lost(array: jax.Array, sent: jax.Array, pairs: Pairs) -> jax.Array:
    """Return the array with the parts that its destinations receive."""
    received, destinations = _permute(sent, pairs), {destination for _, destination in pairs}
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    index = {device: number for number, device in enumerate(sharding.mesh.devices.flat)}
    news = {shard.device: shard.data for shard in received.addressable_shards}
    parts = [
        news[shard.device] if index[shard.device] in destinations else shard.data for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)
