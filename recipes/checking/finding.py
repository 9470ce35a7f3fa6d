"""What a check of a machine or of a recipe found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from data.system.errors import visible


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        level: ok; warning: a run starts, but is slow or may end early; error: a run cannot start or cannot end.
        subject: what was checked, in one or two words.
        text: one line that says what was found and, unless all is well, what to do.
    """

    level: Literal["ok", "warning", "error"]
    subject: str
    text: str

    def __str__(self) -> str:
        return visible(f"{self.level + ':':9}{self.subject}: {self.text}")


def raise_errors(findings: Iterable[Finding]) -> list[Finding]:
    """The warnings among findings, if there is no error.

    Raises:
        ValueError: the first error.
    """
    warnings = []
    for finding in findings:
        if finding.level == "error":
            raise ValueError(f"{finding.subject}: {finding.text}")
        if finding.level == "warning":
            warnings.append(finding)
    return warnings
