"""single-node finds what is wrong, and nothing else: on a model of DeepEP, on the CPU.

The model (tests/model) does what DeepEP's documentation says, token by token; each defect of it
has to be seen by the comparison that is there for it.
"""

import json
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "model" / "run.py"

#: Defect -> comparison (or the start of its name) that has to find it, by family of kernels
DEFECTS = {
    "intranode": {
        "layout counts one too many": "layout: tokens per rank",
        "two rows swapped": "dispatch: rows' values",
        "end of a row not written": "dispatch: rows' values",
        "handle ignored": "dispatch by handle: rows' values",
        "scales of the first token": "dispatch: scales",
        "unused rows keep indices": "dispatch: indices of unused rows",
        "alignment ignored": "dispatch: tokens per expert",
        "source token wrong": "dispatch: source token",
        "weights of other ranks' experts": "dispatch: top-k weights",
        "expert of another rank": "dispatch: top-k indices",
        "last rank left out of the sum": "combine",
        "sum kept in bfloat16": "combine",
        "sum truncated": "combine",
        "bias left out": "combine",
        "top-k weights not combined": "combine: top-k weights",
    },
    "hybrid-ep": {
        "two rows swapped": "dispatch: rows' values",
        "weights of other ranks' experts": "dispatch: weights",
        "padding not written": "dispatch: rows' values by expert",
        "handle ignored": "dispatch: rows' values",
        "last rank left out of the sum": "combine",
    },
    "low-latency": {
        "two rows swapped": "dispatch: rows' values of expert",
        "scales of the first token": "dispatch: rows' values of expert",
        "weights left out of the sum": "combine",
    },
}


@pytest.fixture(scope="module")
def run_model(pytorch):
    """Function (family, ranks, defect, cases) -> {case: set of comparisons that do not hold}."""
    python = pytorch("3.6.5") / "bin" / "python3"

    def call(family, ranks, defect="", cases=()):
        done = subprocess.run(
            [str(python), str(RUN), family, str(ranks), defect, *cases],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        return {case: {n for rank in ranks for n in rank} for case, ranks in found.items()}

    return call


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("family", DEFECTS)
def test_right(run_model, family, ranks):
    found = run_model(family, ranks)
    assert len(found) > 5
    assert not any(found.values()), found


@pytest.mark.parametrize(
    "family,defect", [(family, defect) for family, table in DEFECTS.items() for defect in table]
)
def test_defect_is_found(run_model, family, defect):
    expected = DEFECTS[family][defect]
    found = set().union(*run_model(family, 4, defect).values())
    assert any(name == expected or name.startswith(f"{expected} ") for name in found), found
