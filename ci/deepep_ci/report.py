"""The report of ci/check: a table for people, JSON and JUnit XML for machines."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .errors import SetupError

#: In this order
STATUSES = ("pass", "fail", "skip")


@dataclass(frozen=True)
class Result:
    """One check of one environment (or of "all")."""

    environment: str
    check: str
    status: str
    #: What was found, or why it was skipped
    text: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """All results of a run, and sentences about the run itself."""

    spack: str
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(result.status == "fail" for result in self.results)

    def add(self, *args: object, **kwargs: object) -> None:
        self.results.append(Result(*args, **kwargs))  # type: ignore[arg-type]


def print_table(report: Report) -> None:
    """Prints the results, one line a check; what failed in full below."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if os.isatty(1) else 120, highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("environment", "check", "", "found"):
        table.add_column(column, overflow="fold")
    styles = {"pass": "green", "fail": "bold red", "skip": "yellow"}
    previous = ""
    for result in report.results:
        name = result.environment if result.environment != previous else ""
        previous = result.environment
        text = result.text.splitlines() or [""]
        more = f" (+{len(text) - 1} more lines below)" if len(text) > 1 else ""
        status = Text(result.status, styles[result.status])
        table.add_row(Text(name), Text(result.check), status, Text(text[0] + more))
    console.print(table)
    for result in report.results:
        if len(result.text.splitlines()) > 1:
            console.print(f"\n{result.environment}: {result.check}:", style="bold")
            console.print(Text(result.text))
    counts = {s: sum(r.status == s for r in report.results) for s in STATUSES}
    console.print(
        f"\n{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped; "
        f"Spack: {report.spack}"
    )
    for note in report.notes:
        console.print(Text(note))


def write_json(report: Report, path: Path) -> None:
    """Writes the report as JSON (ci/schemas/report.schema.json)."""
    document = {
        "spack": report.spack,
        "holds": not report.failed,
        "notes": report.notes,
        "results": [asdict(result) for result in report.results],
    }
    _write(path, json.dumps(document, indent=2) + "\n")


def write_junit(report: Report, path: Path) -> None:
    """Writes the report as JUnit XML: a suite an environment, a case a check."""
    from junitparser import Failure, JUnitXml, Skipped, TestCase, TestSuite

    xml = JUnitXml("ci/check")
    suites: dict[str, TestSuite] = {}
    for result in report.results:
        suite = suites.setdefault(result.environment, TestSuite(result.environment))
        case = TestCase(result.check, classname=f"environments.{result.environment}")
        case.time = result.seconds
        if result.status == "fail":
            case.result = [Failure(result.text)]
        elif result.status == "skip":
            case.result = [Skipped(result.text)]
        suite.add_testcase(case)
    for suite in suites.values():
        xml.add_testsuite(suite)
    xml.update_statistics()
    _write(path, xml.tostring().decode())


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.new.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.rename(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise SetupError(f"cannot write {path}: {error.strerror}") from None
