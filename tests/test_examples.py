"""The examples run, and do what they say, on a cut-down setting."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def needs_the_example_packages():
    pytest.importorskip("flax")


def test_qat_digits(tmp_path):
    plot = tmp_path / "plot.png"
    rows = load("qat_digits").main(["--quick", "--output", str(plot)])
    quantised = [row for row in rows if "same_logits" in row]
    assert [row["same_logits"] for row in quantised] == [True, True, True]
    float_bytes = next(row["bytes"] for row in rows if "same_logits" not in row)
    assert [round(float_bytes / row["bytes"]) for row in quantised] == [4, 7, 14]
    assert plot.stat().st_size > 10_000


@pytest.mark.parametrize("name", ["linen_layer", "equinox_layer"])
def test_layer(name):
    first, last = load(name).main(steps=40)
    assert last < 0.7 * first


def test_qat_transformer():
    rows = load("qat_transformer").main(["--quick"])
    by_name = {row["name"]: row for row in rows}
    for weights in ("W8A8", "W4A8"):
        ours = by_name[f"{weights}, jaxquant"]
        assert ours["same_logits"]
        assert abs(ours["loss"] / by_name["float"]["loss"] - 1) < 0.02
        assert ours["residuals"] < by_name["float"]["residuals"] < by_name["W8A8, jax.numpy"]["residuals"]
