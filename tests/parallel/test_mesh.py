"""The mesh is over exactly the devices that there are."""

import jax
import pytest

from jaxopt_llm.errors import InputError
from jaxopt_llm.parallel.mesh import AXES, MeshConfig, make_mesh

pytestmark = pytest.mark.core


@pytest.mark.parametrize("fsdp", [3, 16])
def test_another_number_of_devices_is_refused_with_both_numbers(fsdp: int) -> None:
    with pytest.raises(InputError, match=rf"fsdp {fsdp} needs {fsdp} .* 8 cpu device"):
        make_mesh(MeshConfig(fsdp=fsdp), jax.devices("cpu"))


def test_axes_are_named_and_tensor_is_innermost() -> None:
    mesh = make_mesh(MeshConfig(data=2, tensor=4), jax.devices("cpu"))
    assert mesh.axis_names == AXES
    neighbours = mesh.devices.reshape(2, 4)[0]
    assert [device.id for device in neighbours] == [0, 1, 2, 3]


def test_a_machine_without_a_usable_device_is_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[jax.Device]:
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", fail)
    with pytest.raises(InputError, match="no device to run on.*'cuda'"):
        make_mesh(MeshConfig())
