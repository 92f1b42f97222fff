"""Turns a Keras model into a list of calls.

If a call may create masks or read variables of other layers, it is traced once, with symbolic
inputs. The trace neither reads nor writes the value of any variable.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfdist._src.internals.keras import (
    Functional,
    Sequential,
    compute_output_spec,
    get_keras_mask,
    graph_of,
    is_transparent,
    nodes_of,
    set_keras_mask,
    sublayers_of,
    unchanged_state,
)
from tfdist._src.pipeline.partition.graph import (
    Call,
    Graph,
    Key,
    Placeholder,
    Spec,
    keys_in,
    mask_of,
)
from tfdist.errors import PartitionError


def nested_graph(node: Any, around: keras.Model) -> Functional | None:
    """Returns the graph of the nested model that a call runs, or None if it cannot be inlined.

    A call can be inlined if it calls a nested model and has the same effect as the calls in that
    model's graph.

    Args:
        node: the Keras node of the call.
        around: the outermost model, which contains the call.
    """
    nested = node.operation
    graph = graph_of(nested)
    if graph is None or not is_transparent(nested, around) or len(node.arguments.args) != 1:
        return None
    (inputs,) = node.arguments.args
    flat = keras.tree.flatten(inputs)
    if not _fits(inputs, flat, graph) or not _passes_nothing_else(node.arguments.kwargs, flat):
        return None
    return graph


def _fits(inputs: Any, flat: list[Any], graph: Functional) -> bool:
    if len(flat) != len(graph.inputs):
        return False
    if len(flat) > 1:
        try:
            keras.tree.assert_same_structure(
                keras.tree.lists_to_tuples(inputs), keras.tree.lists_to_tuples(graph.input)
            )
        except (TypeError, ValueError):
            return False
    # Keras adds or removes an axis of an input if its rank differs from the model's. Such a call
    # is not inlined.
    return all(
        isinstance(argument, keras.KerasTensor) and len(argument.shape) == len(expected.shape)
        for argument, expected in zip(flat, graph.inputs, strict=True)
    )


def _passes_nothing_else(kwargs: dict[str, Any], flat: list[Any]) -> bool:
    for name, value in kwargs.items():
        if value is None or name == "training":
            continue
        # Keras may also pass the inputs' masks as the `mask` argument. This changes nothing if the
        # inputs already carry these masks.
        masks = keras.tree.flatten(value)
        if name != "mask" or len(masks) != len(flat):
            return False
        if any(
            get_keras_mask(tensor) is not mask for tensor, mask in zip(flat, masks, strict=True)
        ):
            return False
    return True


class Convert(keras.Operation):  # type: ignore[misc]
    """Converts an input to the dtype that a nested model expects, and keeps the input's mask.

    Args:
        dtype: the dtype as a Keras name, such as `"float32"`.
        name: the operation's name.
    """

    def __init__(self, dtype: str, name: str) -> None:
        super().__init__(name=name)
        self._to = dtype

    def call(self, value: Any) -> Any:
        """Returns the converted value."""
        mask = get_keras_mask(value)
        value = keras.ops.convert_to_tensor(value, dtype=self._to)
        if mask is not None:
            set_keras_mask(value, mask)
        return value


_ROWS = 2


def needs_trace(operation: keras.Operation) -> bool:
    """Whether a call must be traced to find out which masks and variables it uses.

    This is the case if the call may create a mask, or may use a variable that its layer does not
    own. Most layers of Keras do neither. The exceptions compute a mask from the values of their
    inputs (`Embedding`, `Masking`) or run a user's function (`Lambda`).
    """
    if not isinstance(operation, keras.layers.Layer):
        return not _is_from_keras(operation)
    makers = (keras.layers.Embedding, keras.layers.Masking, keras.layers.Lambda)
    return any(isinstance(s, makers) or not _is_from_keras(s) for s in sublayers_of(operation))


def trace(
    call: Call, specs: Mapping[Key, Spec], masks: Mapping[Key, Spec | None]
) -> tuple[dict[Key, Spec | None], list[keras.Variable]]:
    """Traces a call.

    Args:
        call: the call.
        specs: specs by key, for at least the call's inputs.
        masks: the specs of the inputs' Keras masks, by key.

    Returns:
        The specs of the Keras masks of the inputs and outputs after the call, by key, and the
        variables that the call reads, without duplicates. The variables include the variables of
        the call's own layer.
    """
    found: dict[Key, Spec | None] = {}
    reads = _Reads()

    def run(values: dict[Key, Any], masks: dict[Key, Any]) -> list[Any]:
        for key, mask in masks.items():
            set_keras_mask(values[key], mask)
        with reads:
            values = {**values, **call(values, None)}
        for key in (*call.inputs, *call.outputs):
            mask = mask_of(values[key])
            found[key] = None if mask is None else Spec((None, *mask.shape[1:]), mask.dtype)
        return []

    inputs = {key: _symbol(specs[key]) for key in call.inputs}
    masked = {key: _symbol(mask) for key in call.inputs if (mask := masks.get(key)) is not None}
    with unchanged_state():
        compute_output_spec(run, inputs, masked)
    return found, list(reads.variables.values())


class _Reads(keras.StatelessScope):  # type: ignore[misc]
    """Records the variables that are read inside the scope, including variables without values."""

    def __init__(self) -> None:
        super().__init__()
        self.variables: dict[int, keras.Variable] = {}

    def get_current_value(self, variable: keras.Variable) -> Any:
        self.variables[id(variable)] = variable
        return super().get_current_value(variable)


def _symbol(spec: Spec) -> keras.KerasTensor:
    # Some layers cannot run without a known number of rows, such as TimeDistributed before Keras
    # 3.9.
    return keras.KerasTensor(spec.with_rows(_ROWS).shape, dtype=spec.dtype)


def _is_from_keras(operation: keras.Operation) -> bool:
    return type(operation).__module__.split(".")[0] == "keras"


def linearize(model: keras.Model) -> Graph:
    """Turns a model into a list of calls, in the order in which Keras runs them.

    A nested Functional or Sequential model is replaced by its own calls. A layer or a subclassed
    model with a custom `call` becomes a single call. The function does not read the values of the
    model's variables, so the variables need not have values yet.

    Args:
        model: a Functional model, or a Sequential model that is built.

    Returns:
        The calls.

    Raises:
        PartitionError: the model has no graph of layers.

    Example:

        >>> [call.name for call in linearize(model).calls]
        ['embedding', 'encoder/dense', 'encoder/dense_1', 'add']
    """
    graph = graph_of(model)
    if graph is None:
        raise PartitionError(_why_no_graph(model))
    walk = _Walk(model)
    tensors = {id(tensor): walk.new_value(Spec.of(tensor)) for tensor in graph.inputs}
    inputs = tuple(tensors.values())
    walk.follow(graph, tensors, path="", training=None)
    return Graph(
        model,
        calls=tuple(walk.calls),
        inputs=inputs,
        outputs=tuple(tensors[id(tensor)] for tensor in graph.outputs),
        specs=walk.specs,
        functional=graph,
    )


class _Walk:
    """Collects the calls in the graphs of a model and its nested models."""

    def __init__(self, model: keras.Model) -> None:
        self.calls: list[Call] = []
        self.specs: dict[Key, Spec] = {}
        self._model = model
        self._masks: dict[Key, Spec | None] = {}
        self._variables = {id(v) for v in model.variables}
        self._names: collections.Counter[str] = collections.Counter()

    def new_value(self, spec: Spec) -> Key:
        key = len(self.specs)
        self.specs[key] = spec
        return key

    def follow(
        self, graph: Functional, tensors: dict[int, Key], path: str, training: bool | None
    ) -> None:
        """Adds the calls of a graph to `self.calls`.

        Args:
            graph: the graph of the model or of a nested model.
            tensors: a mapping from the `id` of a symbolic tensor to the tensor's key. It must
                contain the inputs of the graph. The outputs of the graph's calls are added to it.
            path: the names of the nested models that contain the graph, as in
                `"model/encoder/"`.
            training: the `training` argument that was passed to these nested models; None if it
                was not passed.
        """
        for node in nodes_of(graph):
            if any(id(tensor) not in tensors for tensor in node.input_tensors):
                continue  # The node belongs to another model that contains the same layer.
            nested = nested_graph(node, self._model)
            if nested is not None and self._has_its_masks(node, tensors):
                self._enter(node, nested, tensors, path, training)
                continue

            def value(argument: Any) -> Any:
                if isinstance(argument, keras.KerasTensor):
                    return Placeholder(tensors[id(argument)])
                return argument

            args, kwargs = node.arguments.convert(value)
            call = self._add(node.operation, args, kwargs, node.outputs, path, training)
            tensors.update(zip(map(id, node.outputs), call.outputs, strict=True))

    def _enter(
        self,
        node: Any,
        nested: Functional,
        tensors: dict[int, Key],
        path: str,
        training: bool | None,
    ) -> None:
        name = node.operation.name
        arguments = [tensors[id(tensor)] for tensor in keras.tree.flatten(node.arguments.args)]
        # If both an outer and an inner model were called with `training`, the outer value counts.
        inner = training if training is not None else node.arguments.kwargs.get("training")
        values = {
            id(tensor): self._convert(key, Spec.of(tensor).dtype, name, path)
            for key, tensor in zip(arguments, nested.inputs, strict=True)
        }
        self.follow(nested, values, f"{path}{name}/", inner)
        for tensor, inner_tensor in zip(node.outputs, nested.outputs, strict=True):
            tensors[id(tensor)] = values[id(inner_tensor)]

    def _has_its_masks(self, node: Any, tensors: dict[int, Key]) -> bool:
        """Whether the inputs of a call still carry the masks that were passed to the call.

        An earlier call, such as an attention layer's, may have removed them.
        """
        inputs = keras.tree.flatten(node.arguments.args)
        masks = keras.tree.flatten(node.arguments.kwargs.get("mask"))
        return all(
            mask is None or self._masks.get(tensors[id(tensor)]) is not None
            for tensor, mask in zip(inputs, masks, strict=False)
        )

    def _convert(self, key: Key, dtype: str, name: str, path: str) -> Key:
        if self.specs[key].dtype == dtype:
            return key
        converted = keras.KerasTensor(self.specs[key].shape, dtype=dtype)
        operation = Convert(dtype, name=f"{name}_input")
        return self._add(operation, (Placeholder(key),), {}, [converted], path).outputs[0]

    def _add(
        self,
        operation: keras.Operation,
        args: Any,
        kwargs: Any,
        outputs: Sequence[keras.KerasTensor],
        path: str,
        training: bool | None = None,
    ) -> Call:
        name = path + operation.name
        self._names[name] += 1
        call = Call(
            operation,
            name=name if self._names[name] == 1 else f"{name}#{self._names[name]}",
            args=args,
            kwargs=kwargs,
            inputs=keys_in((args, kwargs)),
            outputs=tuple(self.new_value(Spec.of(tensor)) for tensor in outputs),
            training=training,
        )
        call = self._with_effects(call, outputs)
        self.calls.append(call)
        return call

    def _with_effects(self, call: Call, outputs: Sequence[keras.KerasTensor]) -> Call:
        flat = keras.tree.flatten((call.args, call.kwargs))
        read = [leaf for leaf in flat if isinstance(leaf, keras.Variable)]
        masked = any(self._masks.get(key) is not None for key in call.inputs)
        masks: dict[Key, Spec | None] = {}
        if masked or needs_trace(call.operation):
            try:
                masks, more = trace(call, self.specs, self._masks)
                read += more
            except Exception:  # Some custom layers cannot run on symbolic tensors.
                masks = {k: mask_of(t) for k, t in zip(call.outputs, outputs, strict=True)}
        self._masks.update(masks)
        owned = {id(v) for v in call.variables}
        reads = {id(v): v for v in read if id(v) in self._variables - owned}
        return dataclasses.replace(call, masks=masks, reads=tuple(reads.values()))


def _why_no_graph(model: Any) -> str:
    rule = "A model is divided along its graph of layers, so it must have one. "
    kind = type(model).__name__
    if isinstance(model, Sequential) and type(model).call is Sequential.call:
        return (
            f"{rule}Received: the Sequential model '{model.name}', which is not built. Give it a "
            "keras.Input as its first layer, or call model.build(shape)."
        )
    if isinstance(model, keras.Model):
        return (
            f"{rule}Received: '{model.name}', a {kind} with a custom call(). Write it as a "
            "Functional model, keras.Model(inputs, outputs); layers with a custom call() are "
            "allowed and stay in one stage."
        )
    return f"{rule}Received: {model!r}, a {kind}. Pass a keras.Model."
