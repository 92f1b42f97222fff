"""A user's callback may define the methods of `Callback`, whether it derives from it or not."""

from __future__ import annotations

import ast

import keras
import pytest

import tfdist
from tests.test_architecture import FILES, PACKAGE
from tfdist._src.cluster import Topology
from tfdist._src.keras.fit.call_checks import compared_arguments
from tfdist._src.keras.fit.callback import protocol_of, saves_before_waits
from tfdist._src.recovery.next_group import tell_of_change
from tfdist._src.snapshots.worker_state import load_states, states_of

DEFINED_IN = PACKAGE / "_src" / "keras" / "fit" / "callback.py"
NAMES = {name for name in vars(tfdist.callbacks.Callback) if not name.startswith("_")}


class Losses:
    """What both kinds of callbacks define."""

    same_on_all_workers = True
    communicates_in = ("on_epoch_begin",)

    def __init__(self):
        super().__init__()
        self.losses, self.sizes = [], []

    def __repr__(self):
        return "Losses"

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(float(logs["loss"]))

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state):
        self.losses = state["losses"]

    def on_group_change(self, old, new):
        self.sizes.append((old.size, new.size))

    def on_group_wait(self, epoch, batches):
        return True


class Derived(Losses, tfdist.callbacks.Callback):
    pass


class OfKeras(Losses, keras.callbacks.Callback):
    pass


@pytest.mark.parametrize("kind", [Derived, OfKeras])
def test_a_callback_that_defines_them(kind):
    callback, other = kind(), kind()
    callback.losses = [0.5]
    states, arrays = states_of([callback])
    load_states([other], states, arrays.__getitem__)
    assert other.losses == [0.5]
    tell_of_change([callback], Topology(), Topology())
    assert callback.sizes == [(Topology().size, Topology().size)]
    assert saves_before_waits(callback) and protocol_of(callback).on_group_wait(0, 1)
    assert protocol_of(callback).communicates_in == ("on_epoch_begin",)
    assert compared_arguments({"callbacks": [callback]}) == {"callbacks": ["Losses"]}


@pytest.mark.parametrize("kind", [tfdist.callbacks.Callback, keras.callbacks.Callback])
def test_a_callback_that_defines_none_of_them(kind):
    callback = kind()
    states, arrays = states_of([callback])
    assert states == {"Callback 1": {"attributes": {}}} and not arrays
    load_states([callback], states, arrays.__getitem__)
    tell_of_change([callback], Topology(), Topology())
    assert not saves_before_waits(callback) and not protocol_of(callback).on_group_wait(0, 1)
    assert compared_arguments({"callbacks": [callback]}) == {}


def test_it_may_define_some_of_them_only():
    class Saved(keras.callbacks.Callback):
        same_on_all_workers = True

        def state_dict(self):
            return 3

    states, _ = states_of([Saved()])
    assert states["Saved 1"]["own"] == 3
    load_states([Saved()], states, {}.__getitem__)
    assert protocol_of(Saved()).communicates_in is None


def test_a_training_that_goes_on(tmp_path):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    def train(*more):
        keras.utils.set_random_seed(1)
        callbacks = [Derived(), OfKeras()]
        with tfdist.MirroredStrategy(["CPU:0"]).scope():
            model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        x, y = keras.ops.ones([8, 2]), keras.ops.ones([8, 1])
        backup = tfdist.callbacks.BackupAndRestore(tmp_path / "snapshots", save_every=1)
        model.fit(x, y, 4, epochs=3, verbose=0, callbacks=[*callbacks, backup, *more])
        return [callback.losses for callback in callbacks]

    undisturbed = train()
    with pytest.raises(KeyboardInterrupt):
        train(Interrupt())
    assert train() == undisturbed
    assert all(len(losses) == 3 for losses in undisturbed)


def test_its_names_are_looked_up_in_one_place():
    """Code that reads them of callbacks by name would miss the defaults."""
    assert {"state_dict", "load_state_dict", "on_group_change", "on_group_wait"} < NAMES
    assert not [
        f"{path}:{node.lineno} {node.value}"
        for path in FILES
        if path != DEFINED_IN
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in NAMES
    ]


def test_our_callbacks_derive_from_it():
    assert not [
        str(path)
        for path in FILES
        if path != DEFINED_IN
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith("callbacks.Callback") for base in node.bases)
    ]
    for name in tfdist.callbacks.__all__:
        assert issubclass(getattr(tfdist.callbacks, name), tfdist.callbacks.Callback)
