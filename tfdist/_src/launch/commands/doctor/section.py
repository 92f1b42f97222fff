"""The input and output of one check of `tfdist doctor`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

_NAME_WIDTH = 14


@dataclass(frozen=True)
class Context:
    """The input of every check.

    Attributes:
        environment: the environment variables of this process.
        timeout: the value of `--timeout`, in seconds. None means that the user has not set it; each
            check then uses its own default.
    """

    environment: Mapping[str, str]
    timeout: float | None = None


@dataclass
class Section:
    """The result of one check.

    Attributes:
        rows: pairs of a name and a value, in the order in which they are shown.
        problems: the problems that the check has found, each with its remedy.
    """

    rows: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, value: str) -> None:
        """Appends one row."""
        self.rows.append((name, value))

    def text(self, title: str) -> str:
        """Formats the section as aligned lines.

        Example:
            >>> print(Section([("Python", "3.11.2")]).text("versions"))
            versions
              Python          3.11.2
        """
        width = max([_NAME_WIDTH, *(len(name) for name, _ in self.rows)])
        return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in self.rows)])
