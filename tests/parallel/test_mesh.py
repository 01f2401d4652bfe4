"""The mesh is over exactly the visible devices."""

from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxopt_llm.config import AXES, MeshConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.parallel import mesh
from jaxopt_llm.parallel.mesh import disable_compilation_cache, make_mesh

pytestmark = pytest.mark.core

CACHE = "jax_enable_compilation_cache"
MINIMUM = "jax_persistent_cache_min_compile_time_secs"


@pytest.mark.parametrize("fsdp", [3, 16])
def test_a_wrong_number_of_devices_is_refused_with_both_numbers(fsdp: int) -> None:
    with pytest.raises(InputError, match=rf"fsdp {fsdp} needs {fsdp} .* 8 cpu device"):
        make_mesh(MeshConfig(fsdp=fsdp), jax.devices("cpu"))


def test_an_open_axis_counts_as_one_device() -> None:
    with pytest.raises(InputError, match=r"^mesh: tensor 4 needs 4 device\(s\) but 2 cpu"):
        make_mesh(MeshConfig(tensor=4), jax.devices("cpu")[:2])


def test_axes_are_named_and_tensor_is_innermost() -> None:
    made = make_mesh(MeshConfig(data=2, tensor=4), jax.devices("cpu"))
    assert made.axis_names == AXES
    neighbours = made.devices.reshape(2, 4)[0]
    assert [device.id for device in neighbours] == [0, 1, 2, 3]


def test_a_machine_without_a_usable_device_is_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[jax.Device]:
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", fail)
    with pytest.raises(InputError, match="no device to run on.*'cuda'"):
        make_mesh(MeshConfig())


@pytest.mark.parametrize(("count", "calls"), [(1, 0), (2, 1)])
def test_programs_for_several_cpu_devices_are_never_restored(
    count: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    devices = jax.devices("cpu")[:count]
    monkeypatch.setattr(mesh, "disable_compilation_cache", lambda: called.append(True))
    monkeypatch.setattr(jax, "devices", lambda: devices)
    mesh.visible_devices()
    assert len(called) == calls


def test_with_the_cache_disabled_no_program_is_kept(tmp_path: Path) -> None:
    values = jax.config.values
    before = {name: values[name] for name in (CACHE, "jax_compilation_cache_dir", MINIMUM)}
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        jax.config.update(MINIMUM, 0.0)
        compilation_cache.reset_cache()
        jax.jit(lambda x: x * 2)(1.0)
        assert (kept := set(tmp_path.iterdir()))
        disable_compilation_cache()
        jax.jit(lambda x: x * 3)(1.0)
        assert set(tmp_path.iterdir()) == kept
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
