"""The suite's own wiring."""

import os
import subprocess
import sys

from deepep_ci import paths

CONFTEST = """
import pytest
from conftest_of_the_suite import pytest_collection_modifyitems


def pytest_configure(config):
    config.addinivalue_line("markers", "build: builds")
"""

TESTS = """
import os, time, pytest


@pytest.mark.build
@pytest.mark.parametrize("number", range(6))
def test_build(number):
    time.sleep(0.1)
    print("worker", os.environ["PYTEST_XDIST_WORKER"])
"""


def test_builds_share_a_worker(tmp_path):
    """Two workers in one install tree break each other's tests; pytest 9.2 hid the groups."""
    (tmp_path / "conftest_of_the_suite.py").symlink_to(paths.TOP / "tests" / "conftest.py")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    folders = [tmp_path, *(paths.TOP / name for name in ("ci", "tests", "spack-repo"))]
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-rP"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    workers = [line for line in done.stdout.splitlines() if line.startswith("worker ")]
    assert len(workers) == 6 and len(set(workers)) == 1, done.stdout
