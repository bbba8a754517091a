"""tests/dispatch on a GPU, by the Python that has DeepEP.

That is $DEEPEP_TEST_PYTHON, or the one of the build tier's install.

With 8 GPUs a rank has one of its own, else ranks share them.
"""

import json
import os
import subprocess
from pathlib import Path

import jsonschema
import pytest
from deepep_ci import paths
from dispatch import cases, single_node
from dispatch.errors import UsageError

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("gpu")]

SCHEMA = json.loads((paths.TOP / "tests/dispatch/schemas/report.schema.json").read_text())


@pytest.fixture(scope="module")
def deep_ep_python(request):
    """(python, environment) that import deep_ep on a machine with a GPU."""
    try:
        single_node.find_gpus()
    except UsageError as error:
        pytest.skip(str(error))
    named = os.environ.get("DEEPEP_TEST_PYTHON")
    if named:
        return named, dict(os.environ)
    site = request.getfixturevalue("site")
    folders = [
        next(site.prefix(name).glob("lib/python3.*/site-packages"))
        for name in ("py-deep-ep", "py-torch")
    ]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, folders)))
    env["CUDA_HOME"] = str(site.prefix("cuda"))
    return str(site.prefix("python") / "bin" / "python3"), env


@pytest.fixture
def dispatch(deep_ep_python, tmp_path):
    """Function: python tests/dispatch ARGUMENTS -> (exit code, JSON, what it printed)."""
    python, env = deep_ep_python

    def call(*arguments):
        file = tmp_path / "report.json"
        done = subprocess.run(
            [python, str(Path(__file__).parent / "dispatch"), *arguments, "--json", str(file)],
            env=env,
            capture_output=True,
            text=True,
            timeout=580,
        )
        assert "Traceback" not in done.stdout + done.stderr
        document = json.loads(file.read_text())
        jsonschema.validate(document, SCHEMA)
        return done.returncode, document, done.stdout

    return call


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_intranode(dispatch, ranks):
    code, report, said = dispatch("single-node", "--kernels", "intranode", "--ranks", str(ranks))
    assert code == 0, said
    (job,) = report["facts"]["jobs"]
    assert [case["case"] for case in job["cases"]] == [case.name for case in cases.INTRANODE]
    assert all(case["ok"] and case["elements"] > 1000 for case in job["cases"])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_hybrid_ep(dispatch, ranks):
    code, report, said = dispatch("single-node", "--kernels", "hybrid-ep", "--ranks", str(ranks))
    assert code == 0, said
    (job,) = report["facts"]["jobs"]
    assert [case["case"] for case in job["cases"]] == [case.name for case in cases.HYBRID_EP]


def test_low_latency_runs_or_says_why_not(dispatch):
    code, report, said = dispatch("single-node", "--kernels", "low-latency", "--ranks", "2")
    if code == 2:
        (row,) = report["rows"]
        assert row["result"] == "skip" and "no active mlx5 HCA" in row["found"]
        assert report["verdict"] == "not made"
    else:
        assert code == 0, said


def test_other_seeds(dispatch):
    code, report, said = dispatch(
        "single-node", "--kernels", "intranode", "--ranks", "2", "--repeats", "2", "--case", "fp8"
    )
    assert code == 0, said
    seeds = [case["seed"] for case in report["facts"]["jobs"][0]["cases"]]
    assert len(seeds) == len(set(seeds)) == 2


def test_hang_is_killed(dispatch):
    """Ranks that have not even imported PyTorch: as good as a hang."""
    code, report, said = dispatch(
        "single-node", "--kernels", "intranode", "--ranks", "2", "--seconds", "1"
    )
    assert code == 1
    assert report["rows"][0]["found"].startswith("hung: killed after 1 s without a sign")


def test_shape_that_hybrid_ep_refuses(dispatch):
    """A refusal of the library ends the job at once, and is told by its own words."""
    code, report, said = dispatch(
        "single-node", "--kernels", "hybrid-ep", "--ranks", "2", "--case", "refused: one token"
    )
    assert code == 1
    (row,) = report["rows"]
    assert "TMA 16B alignment error" in row["evidence"]
    assert "does not take every number of tokens" in row["why"]


def test_doctor(dispatch):
    code, report, said = dispatch("doctor", "--for", "intranode")
    assert code == 0, said
    found = {row["check"]: row for row in report["rows"]}
    assert found["node: GPU"]["result"] == "pass"
    assert found["can work: intranode"]["result"] == "pass"
