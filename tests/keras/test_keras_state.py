"""A replica's thread has Keras's global state as its caller would have it."""

from __future__ import annotations

import collections
import fnmatch
import pathlib
import re
import threading

import keras
import pytest
from keras.src.backend.common import global_state

from tfdist._src.internals.keras import SHARED, in_callers_state

SOURCES = pathlib.Path(keras.src.__file__).parent
OTHER_BACKENDS = {"jax", "numpy", "openvino", "torch"}
CALL = re.compile(r"[gs]et_global_attribute\(\s*([^,)\s]+)")


def sources():
    """Keras's modules for the TensorFlow backend: their paths and texts."""
    for path in SOURCES.rglob("*.py"):
        folders = set(path.relative_to(SOURCES).parts)
        of_other_backend = "backend" in folders and folders & OTHER_BACKENDS
        if not (path.stem.endswith("_test") or of_other_backend):
            yield path, path.read_text()


def attributes_of_installed_keras():
    """The names of attributes in Keras's sources; `*` stands for text that is inserted."""
    texts = [text for _, text in sources()]
    found = collections.defaultdict(set)
    for file, text in sources():
        for name in CALL.findall(text) if file.name != "global_state.py" else ():
            if constant := re.fullmatch(r"(?:\w+\.)*([A-Z_]+)", name):
                defined = rf"^{constant[1]} = (.*)$"
                (name,) = {n for t in texts for n in re.findall(defined, t, re.MULTILINE)}
            prefix, literal = re.fullmatch(r'(f?)"(.*)"', name).groups()
            found[re.sub(r"{.*?}", "*", literal) if prefix else literal].add(file.name)
    return found


def test_every_attribute_of_keras_is_known():
    found = attributes_of_installed_keras()
    assert len(found) > 15
    unknown = {
        name: files
        for name, files in found.items()
        # The tensors' attributes have one name each.
        if name != "*_dict" and not any(fnmatch.fnmatch(name, known) for known in SHARED)
    }
    assert not unknown, "add them to SHARED of tfdist/_src/internals/keras.py"


def test_every_attribute_of_tensors_is_known():
    text = "".join(text for _, text in sources())
    names = set(re.findall(r'[gs]et_tensor_attr\(\w+, "(\w+)"', text))
    assert names == {"_keras_mask"}
    assert {f"{name}_dict" for name in names} <= set(SHARED)


@pytest.fixture(autouse=True)
def state():
    """The calling thread's state, which is restored after a test."""
    state = vars(global_state.GLOBAL_STATE_TRACKER)
    before = dict(state)
    yield state
    after = vars(global_state.GLOBAL_STATE_TRACKER)  # Clearing the session makes another one.
    after.clear()
    after.update(before)


def replicas(*functions):
    """Starts the functions in turn, each in a thread; they may end in any order."""
    errors = []

    def thread_of(function):
        function = in_callers_state(function)
        started = threading.Event()

        def run():
            try:
                function(started.set)
            except BaseException as error:
                errors.append(error)
            finally:
                started.set()

        return threading.Thread(target=run), started

    threads = [thread_of(function) for function in functions]
    for thread, started in threads:
        thread.start()
        assert started.wait(60)
    for thread, _ in threads:
        thread.join(60)
    if errors:
        raise errors[0]


class Waiting:
    """A variable that gets its value at the end of a `StatelessScope`."""

    _value = None

    def _deferred_initialize(self):
        assert self._value is None, "is already initialized"
        self._value = 1


def test_variables_are_initialized_once(state):
    state["uninitialized_variables"] = waiting = [Waiting()]
    made = [*waiting]

    def build(started):
        with keras.StatelessScope():
            made.append(Waiting())
            global_state.get_global_attribute("uninitialized_variables").append(made[-1])
        started()

    replicas(build, build)
    assert state["uninitialized_variables"] is waiting == []
    assert [variable._value for variable in made] == [1, 1, 1]
    with keras.StatelessScope():  # initializes what waits for it
        pass


def test_variables_of_the_callers_scope_wait_for_its_end(state):
    made = []

    def build(started):
        made.append(Waiting())
        global_state.get_global_attribute(
            "uninitialized_variables", [], set_to_default=True
        ).append(made[-1])
        with keras.StatelessScope():
            pass
        started()

    with keras.StatelessScope():
        state["uninitialized_variables"] = []
        replicas(build, build)
        assert [variable._value for variable in made] == [None, None]
    assert [variable._value for variable in made] == [1, 1]


def test_names_are_of_scopes_around_and_inside(state):
    paths = []
    entered, other_done = threading.Event(), threading.Event()

    def first(started):
        with keras.name_scope("first"):
            started()
            entered.set()
            assert other_done.wait(60)
            paths.append(keras.Variable(0.0, name="v").path)

    def second(started):
        started()
        assert entered.wait(60)
        with keras.name_scope("second"):
            paths.append(keras.Variable(0.0, name="v").path)
            other_done.set()

    with keras.name_scope("around"):
        replicas(first, second)
        paths.append(keras.Variable(0.0, name="v").path)
    assert paths == ["around/second/v", "around/first/v", "around/v"]


def test_settings_and_counters_are_those_of_the_caller(state):
    keras.utils.clear_session()
    state = vars(global_state.GLOBAL_STATE_TRACKER)  # It is another one.
    keras.config.disable_traceback_filtering()
    names = [keras.layers.Dense(1).name]

    def run(started):
        assert not keras.config.is_traceback_filtering_enabled()
        names.append(keras.layers.Dense(1).name)
        keras.config.enable_traceback_filtering()
        keras.config.set_dtype_policy("mixed_float16")
        started()

    replicas(run)
    names.append(keras.layers.Dense(1).name)
    assert names == ["dense", "dense_1", "dense_2"]
    assert keras.config.is_traceback_filtering_enabled()
    assert keras.config.dtype_policy().name == "mixed_float16"
    assert set(state) <= set(SHARED)


def test_contexts_end_with_the_replica(state):
    def run(started):
        assert keras.src.backend.in_stateless_scope()
        global_state.set_global_attribute("tracking_on", False)
        global_state.set_global_attribute("current_call_ctx", object())
        started()

    with keras.StatelessScope():
        replicas(run)
    assert state.get("tracking_on", True)
    assert state.get("current_call_ctx") is None


def test_a_replica_that_fails_gives_back_what_it_has_left():
    def run(started):
        keras.config.set_dtype_policy("mixed_float16")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replicas(run)
    assert keras.config.dtype_policy().name == "mixed_float16"
