"""Which optimizers can be sharded: those that update each element independently."""

from __future__ import annotations

from typing import Any

import keras

from tfdist._src.internals.optimizer import inner_optimizer, is_overwritten
from tfdist.errors import UnsupportedError

NAMES = (
    "SGD",
    "RMSprop",
    "Adam",
    "AdamW",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "Nadam",
    "Ftrl",
    "Lion",
)
_UPDATE_METHODS = (
    "build",
    "update_step",
    "apply",
    "apply_gradients",
    "_backend_apply_gradients",
    "_backend_update_step",
    "_clip_gradients",
)


def check_elementwise(optimizer: Any) -> None:
    """Checks that an optimizer's state can be sharded.

    Raises:
        UnsupportedError: the optimizer is not known to be elementwise.
    """
    kind = type(inner_optimizer(optimizer))
    if _is_elementwise(kind):
        return
    raise UnsupportedError(
        "shard_optimizer=True needs an optimizer that updates each element independently. "
        f"Received: {kind.__name__}, which is not known to do so. Use one of {', '.join(NAMES)}, "
        "set the class attribute `elementwise = True` on a custom optimizer that does, or omit "
        "`shard_optimizer`."
    )


def is_stateless(optimizer: Any) -> bool:
    """Whether an optimizer has no state to shard, as plain SGD."""
    optimizer = inner_optimizer(optimizer)
    state = ("momentum", "use_ema", "gradient_accumulation_steps")
    return type(optimizer) is keras.optimizers.SGD and not any(
        getattr(optimizer, name) for name in state
    )


def check_variables(variables: Any) -> None:
    """Checks that the optimizer state of variables can be sharded.

    Raises:
        UnsupportedError: a variable is overwritten with its gradient, as in float8 layers.
    """
    for variable in variables:
        if is_overwritten(variable):
            raise UnsupportedError(
                f"The variable {variable.path!r} is overwritten with its gradient, as in float8 "
                "layers, which shard_optimizer=True does not support. Omit one of the two."
            )


def _is_elementwise(kind: type) -> bool:
    known = {getattr(keras.optimizers, name) for name in NAMES}
    for owner in kind.__mro__:
        if owner in known or vars(owner).get("elementwise") is True:
            return True
        if any(name in vars(owner) for name in _UPDATE_METHODS):
            return False
    return False
