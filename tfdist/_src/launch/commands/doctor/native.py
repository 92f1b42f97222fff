"""Whether the native collectives are built or can be compiled."""

from __future__ import annotations

from tfdist._src import native
from tfdist._src.launch.commands.doctor.section import Context, Section
from tfdist._src.options import NativeOptions

_NAME = "native"


def check(context: Context) -> Section:
    """Looks for the libraries and a compiler; nothing is compiled or loaded."""
    try:
        status = native.status(NativeOptions.from_environment(dict(context.environment)))
    except ValueError as error:
        return Section([(_NAME, "a setting is invalid")], [str(error)])
    section = Section([(_NAME, str(status))])
    if status.problem:
        section.problems.append(f"{status.problem} Or set TFDIST_NATIVE=0 to disable them")
    return section
