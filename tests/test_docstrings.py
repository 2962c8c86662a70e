"""Every public docstring's example runs, and prints what it says."""

import doctest
import inspect

import jax
import jax.numpy as jnp
import pytest

import jaxquant
from jaxquant import export, forward_mode, ggml, observers

PUBLIC = {name: getattr(jaxquant, name) for name in jaxquant.__all__ if not inspect.ismodule(getattr(jaxquant, name))}
FORWARD_MODE = {f"forward_mode.{name}": getattr(forward_mode, name) for name in forward_mode.__all__}
GGML = {
    f"ggml.{name}": getattr(ggml, name)
    for name in ggml.__all__
    if callable(getattr(ggml, name)) and name not in ("BlockFormat", "Finding", "QTensor")
}
METHODS = ("from_bytes", "zeros", "__getitem__", "dequantize", "take", "prepare")
GGML_METHODS = {f"ggml.QTensor.{name}": getattr(ggml.QTensor, name) for name in METHODS}
EXPORT = {f"export.{name}": getattr(export, name) for name in export.__all__}
OBSERVERS = {f"observers.{name}": getattr(observers, name) for name in observers.__all__}


@pytest.mark.parametrize("name", [*PUBLIC, *FORWARD_MODE, *GGML, *GGML_METHODS, *EXPORT, *OBSERVERS])
def test_example(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    function = {**PUBLIC, **FORWARD_MODE, **GGML, **GGML_METHODS, **EXPORT, **OBSERVERS}[name]
    if name == "export.to_onnx":
        pytest.importorskip("onnx")
    names = {"jax": jax, "jnp": jnp, "jaxquant": jaxquant, "ggml": ggml, "observers": observers, **PUBLIC}
    if name in FORWARD_MODE:
        names |= {key.split(".")[1]: value for key, value in FORWARD_MODE.items()}
    if name in OBSERVERS:
        names |= {name.split(".")[1]: function}
    examples = [t for t in doctest.DocTestFinder(recurse=False).find(function, name, globs=names) if t.examples]
    assert examples, f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    output: list[str] = []
    for example in examples:
        runner.run(example, out=output.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(output)


@pytest.mark.parametrize("name", [*PUBLIC, *GGML, *EXPORT])
def test_names_its_arguments(name):
    """A docstring that leaves out a parameter is a promise nobody keeps."""
    function = {**PUBLIC, **GGML, **EXPORT}[name]
    text = inspect.getdoc(function) or ""
    parameters = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    assert all(parameter in text for parameter in parameters), [p for p in parameters if p not in text]
