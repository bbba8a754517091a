"""prove: the three commands' results together."""

import argparse
import json

import jsonschema
import pytest
from deepep_ci import paths
from dispatch import prove
from dispatch.errors import UsageError
from dispatch.report import Report

SCHEMA = json.loads((paths.TOP / "tests/dispatch/schemas/report.schema.json").read_text())

DOCTOR = [("node: GPU", "pass", "1"), ("can work: intranode", "pass", "nothing against it")]
LAYOUT = [
    ("control: 24 QPs, 20 SMs", "info", "2 wrong peer"),
    ("control: all", "pass", "2 wrong peer, as expected"),
    ("treatment: all", "pass", "all right"),
]
JOBS = [
    ("intranode, 2 ranks", "pass", "21 cases"),
    ("intranode, 2 ranks, 128 tokens", "info", "x"),
]

GOOD = {"doctor": DOCTOR, "qp_layout": LAYOUT, "single_node": JOBS}


def answer(command, rows):
    report = Report(command)
    for row in rows:
        report.add(*row)
    return report


@pytest.fixture
def run(monkeypatch):
    """Function (rows of each command, or an error) -> the summary, held against the schema."""

    def call(**given):
        for name, rows in {**GOOD, **given}.items():

            def command(options, name=name, rows=rows):
                if isinstance(rows, Exception):
                    raise rows
                return answer(name.replace("_", "-"), rows)

            monkeypatch.setattr(getattr(prove, name), "run", command)
        parser = argparse.ArgumentParser()
        prove.add_arguments(parser)
        report = prove.run(parser.parse_args([]))
        jsonschema.validate(report.document(), SCHEMA)
        return report

    return call


def test_together(run, capsys):
    report = run()
    assert report.exit_code == 0
    assert [(row.check, row.result) for row in report.rows] == [
        ("doctor", "pass"),
        ("qp-layout, control: all", "pass"),
        ("qp-layout, treatment: all", "pass"),
        ("intranode, 2 ranks", "pass"),
    ]
    # The parts are shown as they come, and kept
    assert "control: 24 QPs, 20 SMs" in capsys.readouterr().out
    assert list(report.facts) == ["doctor", "qp-layout", "single-node"]
    for part in report.facts.values():
        jsonschema.validate(part, SCHEMA)


@pytest.mark.parametrize(
    "part,rows,check",
    [
        ("doctor", [("node: GPU", "fail", "none"), ("can work: x", "fail", "no")], "doctor"),
        ("qp_layout", [("treatment: all", "fail", "3 wrong peer")], "qp-layout, treatment: all"),
        ("qp_layout", [("control", "fail", "does not compile")], "qp-layout, control"),
        ("single_node", [("intranode, 2 ranks", "fail", "hung")], "intranode, 2 ranks"),
        ("qp_layout", UsageError("no nvcc: name it"), "qp-layout"),
        ("single_node", UsageError("no GPU here"), "single-node"),
    ],
)
def test_one_that_fails(run, part, rows, check):
    report = run(**{part: rows})
    assert report.exit_code == 1
    (row,) = [row for row in report.rows if row.result == "fail"]
    assert row.check == check
    if isinstance(rows, Exception):
        assert row.found == f"not made: {rows}"
