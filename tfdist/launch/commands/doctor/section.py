"""What one check of `tfdist doctor` is asked and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_NAME_WIDTH = 14


@dataclass(frozen=True)
class Question:
    """What every check is given.

    Attributes:
        environment: the variables of this process.
        timeout: seconds that the user gives a probe; None for each check's own limit.
    """

    environment: Mapping[str, str]
    timeout: float | None = None


@dataclass
class Section:
    """The answer of one check.

    Attributes:
        rows: names and values, in the order in which to show them.
        problems: what to mend, each with its remedy.
    """

    rows: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, value: str) -> None:
        """Appends one row."""
        self.rows.append((name, value))

    def text(self, title: str) -> str:
        """The section as aligned lines.

        Example:
            >>> print(Section([("Python", "3.11.2")]).text("versions"))
            versions
              Python          3.11.2
        """
        width = max([_NAME_WIDTH, *(len(name) for name, _ in self.rows)])
        return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in self.rows)])
