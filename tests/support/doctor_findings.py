"""Findings of the doctor by what they are about."""

from jaxdisagg.doctor.finding import Finding


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    """Each finding by its `what`, which must differ."""
    found = {finding.what: finding for finding in findings}
    assert len(found) == len(findings)
    return found
