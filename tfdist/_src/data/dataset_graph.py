"""The graphs of datasets, and the order in which their stages yield elements."""

import itertools
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from tfdist._src import native
from tfdist._src.internals import datasets
from tfdist.errors import UnsupportedError


def graph_of(dataset: Any) -> tuple[graph_pb2.GraphDef, str, Any]:
    """Returns a dataset's graph, the name of its last node, and the values of its placeholders.

    Raises:
        tf.errors.ResourceExhaustedError: the constants in the graph are too large.
    """
    graph, node, inputs = native.load_ops().tfdist_dataset_graph(datasets.variant_of(dataset))
    return graph_pb2.GraphDef.FromString(graph.numpy()), node.numpy().decode(), inputs


def variant_from_graph(graph: graph_pb2.GraphDef, node: str, inputs: Any) -> Any:
    """Creates a dataset from a graph.

    Args:
        graph: a graph from `graph_of`, which may have been changed.
        node: the name of the node that yields the dataset.
        inputs: the values of the placeholders, from `graph_of`.

    Returns:
        The variant tensor of the dataset.
    """
    return native.load_ops().tfdist_dataset_from_graph(graph.SerializeToString(), node, inputs)


def make_graph_deterministic(graph: graph_pb2.GraphDef) -> bool:
    """Makes all stages of a dataset yield their elements in a deterministic order.

    Args:
        graph: the graph of the dataset, which is changed.

    Returns:
        Whether the order of any stage was not deterministic.
    """
    changed = False
    functions = (function.node_def for function in graph.library.function)
    for node in itertools.chain(graph.node, *functions):
        if "deterministic" in node.attr:
            changed |= node.attr["deterministic"].s == b"false"
            node.attr["deterministic"].s = b"true"
        if "sloppy" in node.attr:
            changed |= node.attr["sloppy"].b
            node.attr["sloppy"].b = False
    return changed


def with_deterministic_option(dataset: Any) -> Any:
    """Returns a dataset whose stages are deterministic unless they have `deterministic=False`."""
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


def make_deterministic(dataset: Any) -> Any:
    """Returns a dataset whose elements have the same order on all workers.

    Some stages may yield elements as soon as they are ready: `map` and `interleave` with
    `deterministic=False`, and all parallel stages of a dataset with this option.

    Raises:
        UnsupportedError: a stage has this argument, and the dataset cannot be changed.
    """
    dataset = with_deterministic_option(dataset)
    reorders = datasets.may_reorder(dataset)
    if reorders is False:
        return dataset
    problem = ""
    if not native.has_ops() or not tf.executing_eagerly():
        problem = "tfdist can change this only with the native collectives, and outside functions"
        if reorders is None and tf.executing_eagerly():
            known = datasets.serialized_graph(dataset)
            if known is not None:
                reorders = make_graph_deterministic(graph_pb2.GraphDef.FromString(known))
    else:
        try:
            graph, node, inputs = graph_of(dataset)
            reorders = make_graph_deterministic(graph)
        except tf.errors.ResourceExhaustedError:
            problem = "tfdist cannot change this, because the constants in its graph are too large"
    if reorders and problem:
        raise UnsupportedError(
            "A stage of the dataset may yield elements in any order (`deterministic=False`), so "
            f"each worker would split other batches; {problem}. Remove the argument."
        )
    if problem or not reorders:
        return dataset
    variant = variant_from_graph(graph, node, inputs)
    return datasets.dataset_with_graph(dataset, variant, dataset.element_spec)
