"""What the rows of a test bed are compared with."""

from typing import Any

# Shares of the line rate and speed-ups over one NIC, for pages of BAR_PAGE.
BAR_PAGE = 64 << 10
BAR_ONE_NIC = 0.90
BAR_SPEED_UP = {2: 1.8, 4: 3.4}


def add_speed_ups(rows: list[dict[str, Any]]) -> None:
    """Each row's rate over that of one NIC with the same page size, where that was measured."""
    one = {r["page_bytes"]: r["gbps"] for r in rows if (r["nics"], r["peer_nics"]) == (1, 1)}
    for row in rows:
        row["speed_up"] = row["gbps"] / one[row["page_bytes"]] if row["page_bytes"] in one else None


def missed_bars(rows: list[dict[str, Any]]) -> list[str]:
    """The bars that a row of BAR_PAGE misses, in words."""
    missed = []
    for row in rows:
        if row["page_bytes"] != BAR_PAGE or row["nics"] != row["peer_nics"]:
            continue
        if row["nics"] == 1 and row["of_line"] < BAR_ONE_NIC:
            missed.append(f"1 NIC: {row['of_line']:.1%} of the line rate, below {BAR_ONE_NIC:.0%}")
        bar = BAR_SPEED_UP.get(row["nics"])
        if bar is not None and row["speed_up"] is not None and row["speed_up"] < bar:
            missed.append(f"{row['nics']} NICs: {row['speed_up']:.2f} times one, below {bar}")
    return missed
