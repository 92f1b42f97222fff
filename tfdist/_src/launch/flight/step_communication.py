"""Collects and describes the values that a job's training steps communicate, from flight logs."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from tfdist._src.global_view.transfer import REMEDIES, Transfer, remedies, totals_text
from tfdist._src.launch.flight.findings import CommunicatedValue, StepCommunication, workers
from tfdist._src.launch.flight.log import LoggedTransfer, Step
from tfdist._src.launch.flight.merge import Job

_MAX_LINES = 10


def communicated(job: Job) -> tuple[StepCommunication, ...]:
    """Returns what the training step of each model communicates.

    If workers have traced different steps for a model, the result contains each of these steps. The
    step that most workers have traced is first.
    """
    found: dict[str, dict[str, list[tuple[str, Step]]]] = defaultdict(lambda: defaultdict(list))
    for worker in job.workers:
        for step in worker.log.training_steps:
            found[step.model][step.program].append((worker.log.worker, step))
    return tuple(
        _step(same, differs=bool(i))
        for programs in found.values()
        # The sort is stable: of several groups of equal size, the group with the lowest rank is
        # first.
        for i, same in enumerate(sorted(programs.values(), key=lambda same: -len(same)))
    )


def _step(same: Sequence[tuple[str, Step]], *, differs: bool) -> StepCommunication:
    # Until a worker has ended its first step, it may not know the number of rows of the batch.
    step = next((step for _, step in same if step.rows is not None), same[0][1])
    return StepCommunication(
        model=step.model,
        workers=tuple(worker for worker, _ in same),
        differs=differs,
        rows=step.rows,
        reduced_bytes=step.reduced_bytes,
        gathered_bytes=step.gathered_bytes,
        sent_bytes=step.sent_bytes,
        unknown=step.unknown,
        transfers=tuple(map(_value, step.transfers)),
        more=step.more,
    )


def _value(one: LoggedTransfer) -> CommunicatedValue:
    remedy = REMEDIES.get(one.reason, "")
    return CommunicatedValue(
        one.kind, one.operation, one.bytes, tuple(one.shape), one.where, one.reason, remedy
    )


def describe(found: Sequence[StepCommunication]) -> Iterator[str]:
    """Yields the lines of a section about the steps; no lines if no step is known."""
    if found:
        yield "\nWhat a step communicates:"
    usual: dict[str, StepCommunication] = {}
    for step in found:
        if step.differs:
            yield from _differing(step, usual[step.model])
        else:
            usual[step.model] = step
            yield from _usual(step)


def _usual(step: StepCommunication) -> Iterator[str]:
    rows = "" if step.rows is None else f" of {step.rows} rows"
    yield f"  A step of {step.model!r}{rows} {_totals(step)}:"
    values = list(map(_transfer, step.transfers))
    yield from _first(values, step.more)
    yield from (f"    {line}" for line in remedies(values))


def _differing(step: StepCommunication, usual: StepCommunication) -> Iterator[str]:
    yield (
        f"  The step of {step.model!r} on {workers(step.workers)} differs from that on "
        f"{workers(usual.workers)}: it {_totals(step)}. All workers must run the same program; a "
        "worker that has just traced another step also differs. Only there:"
    )
    others = {_without_name(one) for one in usual.transfers}
    apart = [one for one in step.transfers if _without_name(one) not in others]
    if apart:
        yield from _first(list(map(_transfer, apart)), 0)
    else:
        yield "    none of the largest values"


def _first(values: Sequence[Transfer], more: int) -> Iterator[str]:
    yield from (f"    {value}" for value in values[:_MAX_LINES])
    more += len(values[_MAX_LINES:])
    if more:
        yield f"    and {more} more"


def _totals(step: StepCommunication) -> str:
    return totals_text(step.reduced_bytes, step.gathered_bytes, step.sent_bytes, step.unknown)


def _transfer(one: CommunicatedValue) -> Transfer:
    return Transfer(one.kind, one.operation, one.bytes, one.shape, one.where, one.reason)


def _without_name(one: CommunicatedValue) -> tuple[object, ...]:
    return one.kind, one.operation, one.shape, one.reason
