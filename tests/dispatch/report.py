"""What every command reports: rows for people as text, the whole as JSON for machines."""

import dataclasses
import datetime
import json
import os
import shutil
import socket
import textwrap
from pathlib import Path

from .errors import UsageError

#: Name and version of the JSON (schemas/report.schema.json)
FORMAT = "deepep-dispatch-report/1"

#: A check holds, does not hold, could not be made here, or is only told
RESULTS = ("pass", "fail", "skip", "info")


def _wrapped(text, width):
    """Lines of a text; paths and versions stay whole, to be copied."""
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


@dataclasses.dataclass(frozen=True)
class Row:
    """One check and its result (one of RESULTS).

    found: what was seen, a line. evidence: where it was seen (a path, a command, a log line).
    why, reference, action: for a finding, why it matters, upstream's issue, and what to do.
    data: figures for the JSON.
    """

    check: str
    result: str
    found: str
    evidence: str = ""
    why: str = ""
    reference: str = ""
    action: str = ""
    data: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.result not in RESULTS:
            raise ValueError("{} is no result of a check".format(self.result))


@dataclasses.dataclass
class Report:
    """Rows of one command; facts: what it measured beside them (JSON); notes: sentences."""

    command: str
    rows: list = dataclasses.field(default_factory=list)
    facts: dict = dataclasses.field(default_factory=dict)
    notes: list = dataclasses.field(default_factory=list)
    #: A command that has to show something fails if no row passes
    needs_pass: bool = True

    def add(self, *args, **kwargs):
        """Adds a Row of these fields, and returns it."""
        row = Row(*args, **kwargs)
        self.rows.append(row)
        return row

    @property
    def exit_code(self):
        """0 every check that was made holds, 1 one does not, 2 none could be made."""
        results = {row.result for row in self.rows}
        if "fail" in results:
            return 1
        return 2 if self.needs_pass and "pass" not in results else 0

    def document(self):
        """The report as JSON's types."""
        return {
            "format": FORMAT,
            "command": self.command,
            "verdict": {0: "pass", 1: "fail", 2: "not made"}[self.exit_code],
            "host": socket.gethostname(),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "facts": self.facts,
            "notes": self.notes,
        }

    def write(self, path):
        """Writes the JSON to a temporary name and renames it. Raises UsageError."""
        path = Path(path)
        fresh = path.with_name("{}.new.{}".format(path.name, os.getpid()))
        try:
            fresh.write_text(json.dumps(self.document(), indent=1) + "\n", encoding="utf-8")
            os.replace(fresh, path)
        except OSError as error:
            if fresh.exists():
                fresh.unlink()
            raise UsageError("cannot write {}: {}".format(path, error.strerror)) from None

    def show(self, stream):
        """Writes the rows as a table, then each finding in full, then the counts."""
        width = max(60, shutil.get_terminal_size((110, 24)).columns if stream.isatty() else 110)
        first = max([len(row.check) for row in self.rows] + [5])
        room = max(30, width - first - 8)
        for row in self.rows:
            lines = _wrapped(row.found, room) or [""]
            mark = row.result.upper() if row.result == "fail" else row.result
            stream.write("{:<{}}  {:<4}  {}\n".format(row.check, first, mark, lines[0]))
            for line in lines[1:]:
                stream.write("{}{}\n".format(" " * (first + 8), line))
        for row in self.rows:
            said = row.why or row.action or row.evidence
            # What was not checked may have to be installed first
            if (row.result == "fail" and said) or (row.result == "skip" and row.action):
                stream.write("\n{}: {}\n".format(row.check, row.found))
                parts = (
                    ("seen", row.evidence),
                    (
                        "why",
                        " ".join(
                            p
                            for p in (row.why, row.reference and "({})".format(row.reference))
                            if p
                        ),
                    ),
                    ("do", row.action),
                )
                for name, text in parts:
                    if text:
                        body = ("\n" + " " * 8).join(_wrapped(text, width - 8))
                        stream.write("  {:<4}  {}\n".format(name, body))
        counts = {r: sum(row.result == r for row in self.rows) for r in RESULTS}
        stream.write(
            "\n{}: {pass} passed, {fail} failed, {skip} skipped\n".format(self.command, **counts)
        )
        for note in self.notes:
            stream.write(textwrap.fill(note, width) + "\n")
