"""Graphs that know something of a former group of workers."""

from __future__ import annotations

import keras

from tfdist.cluster.net.wait_messages import say


def trace_anew_if_needed(model: keras.Model, *, divided: bool) -> None:
    """Has a model's steps be traced again if they may know ranks or the number of workers.

    Args:
        model: in training; its group has changed.
        divided: whether the workers hold stages of it, whose functions follow the group.
    """
    extended = model.distribute_strategy.extended
    if not (divided or extended.traces_know_group):
        return
    extended.traces_know_group = False
    if not divided:
        model.make_train_function(force=True)  # of a newcomer, whose `fit` has made it already
        model.test_function = model.predict_function = None
    if extended.group.session.rank == 0:
        use = "a pipeline's graph uses" if divided else "the model's code uses"
        say(
            f"tfdist: {use} the number of workers or a rank, so the steps are traced anew for the "
            "new group."
        )
