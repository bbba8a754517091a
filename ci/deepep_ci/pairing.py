"""The pairing table: DeepEP revision x NVSHMEM release (ci/pairing.json)."""

from typing import Any

from .documents import validated
from .lockfile import Lock
from .paths import CI

PATH = CI / "pairing.json"

#: The patches of the queue-pair lookup, and what the table calls them; others do not touch it
LOOKUP = {"deep-ep-564-rc-layout.patch": "#564", "deep-ep-rc-bound.patch": "bound"}


def table() -> dict[str, Any]:
    """The table: {"rows": [{"deepep", "rc_layout_backport", "nvshmem": {version: cell}}]}.

    A cell is "refused", or the list of the lookup's patches that the solver applies ([]: nothing
    needed).
    """
    return validated(PATH, "pairing")


def cell_text(cell: Any) -> str:
    """A cell in words."""
    if cell == "refused":
        return "refused"
    return " + ".join(LOOKUP.get(name, name) for name in cell) or "nothing needed"


def row_of(lock: Lock) -> tuple[str, Any] | None:
    """The row and cell an environment stands on: (sentence, cell), None without DeepEP."""
    deepep, nvshmem = lock.one("py-deep-ep"), lock.one("nvshmem")
    if deepep is None or nvshmem is None:
        return None
    backport = deepep.variants.get("rc_layout_backport")
    pair = f"DeepEP {deepep.version} x NVSHMEM {nvshmem.version}"
    if backport is False:
        pair += " ~rc_layout_backport"
    for row in table()["rows"]:
        if row["deepep"] == deepep.version and row["rc_layout_backport"] == backport:
            cell = row["nvshmem"].get(nvshmem.version)
            return (f"{pair}: {cell_text(cell)}", cell) if cell is not None else None
    return None


def markdown() -> str:
    """The table as README prints it."""
    rows = table()["rows"]
    versions = list(rows[0]["nvshmem"])
    lines = [
        "| DeepEP | " + " | ".join(versions) + " |",
        "|---|" + "---|" * len(versions),
    ]
    for row in rows:
        name = row["deepep"] + (
            " `~rc_layout_backport`" if row["rc_layout_backport"] is False else ""
        )
        lines.append(
            f"| {name} | " + " | ".join(cell_text(row["nvshmem"][v]) for v in versions) + " |"
        )
    return "\n".join(lines)
