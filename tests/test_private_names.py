"""Private attributes of Keras's and TensorFlow's objects are read in `tfdist/internals` alone."""

from __future__ import annotations

import ast
import pathlib

PACKAGE = pathlib.Path(__file__).parent.parent / "tfdist"

# What other files still read. None is to be added; one that is gone leaves this table.
DEBTS = {
    "pipeline/model.py": {"_compile_loss", "_compile_metrics"},
    "pipeline/steps.py": {"_loss_tracker"},
    "pipeline/strategy.py": {"_cluster_resolver"},
    "strategies/creation.py": {"_container_strategy", "_devices"},
    "strategies/data.py": {
        "_container_strategy",
        "_get_replica_id_in_sync_group",
        "_input_workers_with_options",
        "_num_replicas_in_sync",
    },
    "strategies/number_of_batches.py": {"_cardinality", "_enable_get_next_as_optional"},
    "strategies/extended.py": {"_initialize_single_worker"},
    "strategies/multi_worker.py": {"_cluster_resolver", "_retrace_functions_for_each_device"},
    "strategies/reduction.py": {"_replica_ctx_all_reduce"},
    "strategies/variables.py": {"_get_on_device_or_primary"},
    "trainer/calls.py": {"_distribute_strategy", "_flatten_layers"},
    "trainer/epochs.py": {"_distribute_strategy"},
    "trainer/loops.py": {
        "_distributed_dataset",
        "_maybe_symbolic_build",
        "_symbolic_build",
        "_value_specs",
    },
    "trainer/noise.py": {"_cast_seed", "_get_concrete_noise_shape"},
    "trainer/older_keras.py": {"_dtype", "_initialize"},
    "trainer/writers.py": {"_get_file_path", "_weights_path"},
}
# Python's own.
PUBLIC = {"_getframe", "_replace"}


def test_private_attributes_are_read_in_one_place():
    trees = {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    inherited = set().union(*map(_defined, trees.values()))
    found = {
        name: _read(tree, _defined(tree), inherited)
        for name, tree in trees.items()
        # The launcher and the cluster have nothing to do with either.
        if not name.startswith(("internals/", "launch/", "cluster/"))
    }
    assert {name: names for name, names in found.items() if names} == DEBTS


def _defined(tree: ast.Module) -> set[str]:
    """What the classes of a file have: methods, class attributes, what is set on `self`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Attribute) and _is_own(node) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def _read(tree: ast.Module, own: set[str], inherited: set[str]) -> set[str]:
    """Private attributes that a file reads of others, or that `self` has from elsewhere."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in PUBLIC
        and not _is_super(node.value)
        and node.attr not in (inherited if _is_own(node) else own)
    }


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "super"
