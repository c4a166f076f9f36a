"""One thing that the doctor looked at, and how it stands."""

from dataclasses import dataclass
from typing import Any, Literal

State = Literal["ok", "absent", "missing"]
Values = dict[str, Any]
"""What a probe found, as JSON has it; {"problem": text} where it did not come to an end."""


@dataclass(frozen=True)
class Finding:
    """`what` was looked at and `found`; `why` says what is not there, what for, and what helps.

    `missing` is what every deployment needs, one on CPU devices too; `absent` what some have.
    """

    subject: str
    what: str
    found: str
    state: State = "ok"
    why: str = ""


def problem(subject: str, what: str, values: Values, *, needed: bool) -> list[Finding]:
    """The one finding of a probe that came to nothing, or []."""
    if "problem" not in values:
        return []
    return [Finding(subject, what, "-", "missing" if needed else "absent", values["problem"])]
