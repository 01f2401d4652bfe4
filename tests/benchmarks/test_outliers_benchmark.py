"""The benchmark of outlier columns plants them without a change of the model."""

from dataclasses import replace
from pathlib import Path

import folders
import numpy as np
import outliers
import toy

from jaxopt_llm import load_pretrained

LLAMA = replace(
    toy.CONFIG, pattern=("global",), layers=2, width=32, vocabulary_size=64, tied_head=True, norm_epsilon=1e-5
)
IDS = np.arange(24).reshape(2, 12)


def test_planted_outliers_change_no_logits(tmp_path: Path) -> None:
    folder = folders.folder(tmp_path / "model", LLAMA, most=10**9)
    before = load_pretrained(folder)
    expected = before.logits(IDS)
    outliers.plant_outliers(folder, seed=0)
    planted = load_pretrained(folder)
    assert toy.distance(planted.logits(IDS), expected) < 1e-5
    for norm in ("attention_norm", "mlp_norm"):
        scales = [each.params["segment_0"]["block_0"][norm]["scale"] for each in (before, planted)]
        ratios = np.asarray(scales[1]) / np.asarray(scales[0])
        assert {*np.sum(np.isclose(ratios, outliers.FACTOR), axis=-1).tolist()} == {outliers.COLUMNS}
        assert np.sum(np.isclose(ratios, 1)) == ratios.size - LLAMA.layers * outliers.COLUMNS


def test_the_table_has_ratios_to_the_exact_products() -> None:
    served = {name: {"loss": loss} for name, loss in zip(outliers.SERVED, (2.0, 2.5, 2.1), strict=True)}
    trained = {
        name: {"training_loss": loss, "held_out_loss": loss / 2}
        for name, loss in zip(outliers.TRAINED, (1.0, 1.5, 1.1), strict=True)
    }
    header, *lines = outliers.format_losses({"served": served, "trained": trained})
    assert header.split() == ["precision", "served", "training", "loss", "held-out", "loss"]
    assert lines[1].split() == ["int8", "2.5000", "(1.250)", "1.5000", "(1.500)", "0.7500", "(1.500)"]
    assert lines[2].startswith("int8, threshold 6 ") and lines[0].endswith("0.5000 (1.000)")
