"""Which optimizers can work on parts of variables: those that treat each element by itself."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.errors import UnsupportedError
from tfdist.internals.optimizer import inner_optimizer, is_overwritten

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
_RULES = (
    "build",
    "update_step",
    "apply",
    "apply_gradients",
    "_backend_apply_gradients",
    "_backend_update_step",
    "_clip_gradients",
)


def check_elementwise(optimizer: Any) -> None:
    """Checks that an optimizer's state can be shared out.

    Raises:
        UnsupportedError: its rule needs whole variables, or is not known not to.
    """
    kind = type(inner_optimizer(optimizer))
    if _is_elementwise(kind):
        return
    raise UnsupportedError(
        "With shard_optimizer=True a worker has parts of variables, so the optimizer must treat "
        f"each element by itself. Received: {kind.__name__}, which is not known to. Choose one of "
        f"{', '.join(NAMES)}, or leave `shard_optimizer` out; a class of your own that does can "
        "say so by the class attribute `elementwise = True`."
    )


def keeps_nothing(optimizer: Any) -> bool:
    """Whether an optimizer has no state that could be shared out: plain SGD."""
    optimizer = inner_optimizer(optimizer)
    state = ("momentum", "use_ema", "gradient_accumulation_steps")
    return type(optimizer) is keras.optimizers.SGD and not any(
        getattr(optimizer, name) for name in state
    )


def check_variables(variables: Any) -> None:
    """Checks that variables can be shared out.

    Raises:
        UnsupportedError: one is overwritten with its gradient, as those of float8 layers are.
    """
    for variable in variables:
        if is_overwritten(variable):
            raise UnsupportedError(
                f"The variable {variable.path!r} is overwritten with its gradient, as float8 "
                "layers have them, which shard_optimizer=True cannot do. Leave one of them out."
            )


def _is_elementwise(kind: type) -> bool:
    known = {getattr(keras.optimizers, name) for name in NAMES}
    for owner in kind.__mro__:
        if owner in known or vars(owner).get("elementwise") is True:
            return True
        if any(name in vars(owner) for name in _RULES):
            return False
    return False
