"""Private APIs of Keras optimizers: building one again, for other variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.internals.keras import Variable


def knows(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Whether an optimizer was built for these variables."""
    return all(optimizer._var_key(v) in optimizer._trainable_variables_indices for v in variables)


def has_updated(optimizer: Any) -> bool:
    """Whether an optimizer has counted an update, also before it was restored."""
    return bool(int(optimizer._iterations.value) > 0)


def build_again(optimizer: Any, variables: Sequence[Any], unbuilt: Sequence[Any]) -> None:
    """Builds an optimizer once more, with new slots; its other variables keep their values.

    Args:
        optimizer: one that updates variables.
        variables: as for its `build`.
        unbuilt: the variables that it had before it was built.
    """
    single = {name: v for name, v in vars(optimizer).items() if isinstance(v, Variable)}
    tracked, kept = ({id(v) for v in some} for some in (optimizer.variables, unbuilt))
    for variable in optimizer.variables:
        if id(variable) not in kept:
            optimizer._tracker.untrack(variable)
    optimizer._trainable_variables_indices.clear()
    optimizer.built = False
    optimizer.build(variables)
    for name, old in single.items():
        new = vars(optimizer)[name]
        if new is not old:
            new.assign(old)
            if id(old) not in tracked:  # as inside an optimizer that scales the loss
                optimizer._tracker.untrack(new)
