"""Hooks are put into Keras once, in order, and only into a Keras that is known."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
import types
import warnings

import keras
import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.internals import contract
from tfdist._src.internals.contract import TARGETS, Target, check_targets
from tfdist._src.internals.optimizer import overrides
from tfdist._src.keras import patching
from tfdist._src.keras.patching import LAYERS, layers_of, patch, patch_target
from tfdist.errors import UnsupportedError


def all_layers():
    return {name: layers_of(target.function) for name, target in TARGETS.items()}


@pytest.fixture
def target():
    def double(value):
        return 2 * value

    double.__module__ = "keras.made_up"
    return Target(types.SimpleNamespace(double=double), "double", ("value",))


def layer(name, around):
    """What a module of the trainer gives `patch`."""

    def wrap(original):
        return lambda value: around(original(value))

    wrap.__module__ = f"tfdist._src.keras.{name}"
    return wrap


def test_each_is_there_once():
    patching.install()
    before = all_layers()
    assert before["BaseOptimizer.apply"] == [
        "optimizers.sharded_optimizers",
        "optimizers.summing",
    ]
    functions = {name: target.function for name, target in TARGETS.items()}
    for name in LAYERS:
        importlib.import_module(f"tfdist._src.keras.{name}").install()
    assert all_layers() == before
    assert functions == {name: target.function for name, target in TARGETS.items()}


def test_all_that_is_replaced_is_known_and_the_other_way_round():
    patching.install()
    names = {name for name, layers in all_layers().items() if not layers}
    # Those of an older Keras are left alone in a newer one.
    assert names <= {"Variable._initialize"}


def test_newer_versions_give_one_warning(monkeypatch):
    monkeypatch.setattr(keras, "__version__", "99.0.0")
    contract._warn_of_newer_versions.cache_clear()
    with pytest.warns(UserWarning, match=r"tested with Keras up to .* Received: Keras 99\.0\.0"):
        check_targets(TARGETS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_targets(TARGETS)


def test_a_layer_is_not_put_around_itself(target):
    patch_target(target, layer("fit.compilation", lambda v: v + 1))
    patch_target(target, layer("fit.compilation", lambda v: v + 1))
    assert target.function(1) == 3
    patch_target(target, layer("saving.callbacks", lambda v: 10 * v))
    patch_target(target, layer("fit.compilation", lambda v: v + 1))
    assert target.function(1) == 30
    assert layers_of(target.function) == ["fit.compilation", "saving.callbacks"]


def test_layers_have_an_order(target):
    patch_target(target, layer("fit.call_checks", lambda v: v))
    with pytest.raises(RuntimeError, match=r"'fit\.compilation' must go inside those of"):
        patch_target(target, layer("fit.compilation", lambda v: v))


def test_around_what_another_package_has_put_there(target):
    patch_target(target, layer("fit.compilation", lambda v: v + 1))
    ours = target.function
    target.owner.double = lambda value: -ours(value)
    patch_target(target, layer("optimizers.summing", lambda v: 10 * v))
    assert target.function(1) == -30


def test_modules_imported_anew_replace_their_own(target):
    module = types.ModuleType("tfdist._src.keras.fit.compilation")
    exec("def wrap(original):\n    return lambda value: original(value) + 1", vars(module))
    patch_target(target, module.wrap)
    assert target.function(1) == 3
    patch_target(target, layer("fit.compilation", lambda v: v + 5))
    assert target.function(1) == 7


@exhaustive
def test_threads_install_once():
    code = """
        import os, sys, threading
        import tfdist
        from tfdist._src.internals.contract import TARGETS
        begin = threading.Barrier(4)

        def use():
            begin.wait()
            tfdist.MirroredStrategy

        threads = [threading.Thread(target=use) for _ in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        functions = {n: t.function for n, t in TARGETS.items()}
        import importlib
        for name in sorted(n for n in sys.modules if n.startswith("tfdist._src.keras.")):
            if name != "tfdist._src.keras.batch_statistics":  # A gradient can be registered once.
                importlib.reload(sys.modules[name])
        sys.modules["tfdist._src.keras.patching"].install()
        sys.exit(functions != {n: t.function for n, t in TARGETS.items()})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert done.returncode == 0


def test_the_installed_versions_are_known():
    check_targets(TARGETS)


@pytest.mark.parametrize("change", [lambda value, more: 0, None], ids=["another", "missing"])
def test_another_keras_is_refused(target, change):
    if change is not None:
        change.__module__ = "keras.made_up"
    target.owner.double = change
    with pytest.raises(UnsupportedError, match=r"double\(value\). Received: .*Keras"):
        check_targets({"made_up.double": target})


def test_what_another_package_replaces_is_its_own(target):
    target.owner.double = lambda *args: 0
    check_targets({"made_up.double": target})


def test_keras_overrides_nothing_that_is_given_sums():
    """A new optimizer of Keras that does is looked at here first."""
    patching.install()
    names = ("apply", "apply_gradients", "_backend_apply_gradients", "_clip_gradients")
    for kind in vars(keras.optimizers).values():
        if isinstance(kind, type) and issubclass(kind, keras.Optimizer):
            assert not [name for name in names if overrides(_made(kind), name)], kind


def _made(kind):
    return object.__new__(kind)


def test_unknown_names_are_not_replaced():
    with pytest.raises(KeyError):
        patch("BaseOptimizer.made_up", layer("fit.compilation", lambda v: v))
