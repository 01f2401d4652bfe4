"""Modules of multi-token prediction against the layers of transformers, put together as vLLM and SGLang do it."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from test_families_hf_torch import LENGTH, ROWS, Case

from jaxopt_llm.checkpoint.huggingface.model_folder import open_model_folder
from jaxopt_llm.config import RematConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import tree
from jaxopt_llm.execution import mtp, scan
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import OBJECTIVE
from jaxopt_llm.parallel.zero import parameter_sharding

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
files = pytest.importorskip("safetensors.torch")

WEIGHT = 0.3


class Published:
    """A model of theirs whose last layer is the block of a module, and the folder of the shorter model with it."""

    def __init__(self, name: str, folder: Path) -> None:
        case = Case(name, folder)
        self.model, self.tokens, self.folder = case.model, case.tokens, folder
        whole = self.model.model
        self.layers, self.norm = whole.layers, whole.norm
        width, count = self.model.config.hidden_size, len(whole.layers) - 1
        random = torch.Generator().manual_seed(1)
        self.own = {
            name: torch.randn(shape, generator=random).requires_grad_()
            for name, shape in (
                *(("enorm", (width,)), ("hnorm", (width,)), ("shared_head.norm", (width,))),
                ("eh_proj", (width, 2 * width)),
            )
        }
        tensors = {f"model.layers.{count}.{name}.weight": each.detach() for name, each in self.own.items()}
        for file in [*folder.glob("*.safetensors")]:
            tensors |= files.load_file(file)
            file.unlink()
        (folder / "model.safetensors.index.json").unlink()
        files.save_file(tensors, folder / "model.safetensors")
        settings = json.loads((folder / "config.json").read_text())
        settings |= {"num_hidden_layers": count, "num_nextn_predict_layers": 1}
        settings.pop("layer_types", None)
        (folder / "config.json").write_text(json.dumps(settings))

    def normalise(self, name: str, x: Any) -> Any:
        norm = type(self.norm)(x.shape[-1], eps=self.model.config.rms_norm_eps)
        del norm.weight
        norm.weight = self.own[name]
        return norm(x)

    def run(self, layers: Any, norm: Any, x: Any) -> Any:
        whole = self.model.model
        whole.layers, whole.norm = torch.nn.ModuleList(layers), norm
        whole.config.num_hidden_layers = len(layers)
        return whole(inputs_embeds=x, use_cache=False).last_hidden_state

    def losses(self) -> tuple[Any, Any]:
        """Return the sums of the cross-entropy of the model and of the module."""
        ids = torch.tensor(self.tokens)
        embedded = self.model.model.embed_tokens(ids)
        hidden = self.run(self.layers[:-1], self.norm, embedded)
        both = torch.cat([self.normalise("enorm", embedded[:, 1:]), self.normalise("hnorm", hidden[:, :-1])], dim=-1)
        after = self.run(self.layers[-1:], torch.nn.Identity(), both @ self.own["eh_proj"].T)
        of_module = self.model.lm_head(self.normalise("shared_head.norm", after))

        def cross_entropy(logits: Any, ahead: int) -> Any:
            return torch.nn.functional.cross_entropy(
                logits[:, : LENGTH - ahead].flatten(0, 1), ids[:, ahead:].flatten(), reduction="sum"
            )

        return cross_entropy(self.model.lm_head(hidden), 1), cross_entropy(of_module, 2)


@pytest.mark.parametrize("name", ["deepseek 3", "glm 4.5", "glm 4.7 flash"])
def test_losses_and_gradients_are_those_of_published_modules(name: str, tmp_path: Path) -> None:
    published = Published(name, tmp_path / "folder")
    expected = published.losses()
    (expected[0] + WEIGHT * expected[1]).backward()

    folder, placement = open_model_folder(tmp_path / "folder", mtp_layers=1), toy.placement()
    model = Decoder(replace_fields(folder.config, {"moe.balance_loss": 0.0}), mtp_weight=WEIGHT)
    params = tree.map_with_path(
        lambda path, spec: folder.read(path, spec, parameter_sharding(spec, placement)), model.specs
    )
    ids, places = published.tokens.astype(np.int32), np.arange(LENGTH, dtype=np.int32)
    batch = Batch(
        tokens=ids,
        targets=np.roll(ids, -1, axis=1),
        loss_mask=np.broadcast_to(places < LENGTH - 1, ids.shape),
        segment_ids=np.ones_like(ids),
        positions=np.broadcast_to(places, ids.shape),
    )
    nothing, remat = jax.tree.map(lambda leaf: None, params), RematConfig("none")

    @jax.jit
    def run(params: Any, batch: Batch) -> Any:
        return scan.loss_and_gradients(model, params, nothing, batch, jnp.float32(1), placement, remat)

    sums, gradients = run(params, toy.microbatches(batch, 1))
    found = [float(sums[OBJECTIVE]), float(sums[mtp.LOSSES][0])]
    np.testing.assert_allclose(found, [each.item() for each in expected], rtol=1e-5)
    assert sums[mtp.TOKENS][0] == ROWS * (LENGTH - 2)
    block = gradients["mtp_0"]["block_0"]
    for ours, theirs in (
        (block["mtp"]["projection"][0].T, published.own["eh_proj"].grad),
        (block["mtp_embedding_norm"]["scale"][0], published.own["enorm"].grad),
        (block["mtp_hidden_norm"]["scale"][0], published.own["hnorm"].grad),
        (block["mtp_output_norm"]["scale"][0], published.own["shared_head.norm"].grad),
        (block["attention_norm"]["scale"][0], published.layers[-1].input_layernorm.weight.grad),
        (gradients["non_layer"]["embedding"]["table"][:250], published.model.model.embed_tokens.weight.grad),
        (gradients["non_layer"]["final_norm"]["scale"], published.norm.weight.grad),
    ):
        wanted = theirs.numpy()
        np.testing.assert_allclose(ours, wanted, atol=1e-4 * np.abs(wanted).max())
