"""evidence.py on files made for the purpose; real extensions: test_install.py, test_gates.py."""

import os
import subprocess
import sys

import pytest
from spack_repo.deepep import evidence
from spack_repo.deepep.evidence import Lookup, classify

STATE, IBGDA = range(0, 776), 776
NPES, NUM_RC = evidence.NPES, IBGDA + evidence.NUM_RC_PER_PE
OTHER = IBGDA + 0x30


@pytest.mark.parametrize(
    "notify, combine, expected",
    [
        # Each kernel of a kind reads alike: what nvcc 13.0 makes of the three sources
        ([{NUM_RC, OTHER}] * 2, [{NUM_RC, OTHER}] * 2, Lookup("v1", True)),
        ([{NUM_RC, OTHER, NPES}] * 2, [{OTHER, NPES}] * 2, Lookup("v2", False)),
        ([{NUM_RC, OTHER, NPES}] * 2, [{NUM_RC, OTHER, NPES}] * 2, Lookup("v2", True)),
        # An inlined NVSHMEM function reads the number of PEs, and other fields with it
        ([{NUM_RC, NPES, 0x28}] * 2, [{NUM_RC}] * 2, None),
        # Kernels of a kind that differ
        ([{NUM_RC}, {NUM_RC, NPES}], [{NUM_RC}] * 2, None),
        ([{NUM_RC, NPES}] * 2, [{NUM_RC}, {NPES}], None),
        # Layout v1 without bound exists nowhere
        ([{NUM_RC}] * 2, [{OTHER}] * 2, None),
        # The kernel does not loop over the queue pairs
        ([{NPES}] * 2, [{NUM_RC}] * 2, None),
        ([set()] * 2, [set()] * 2, None),
    ],
)
def test_classify(notify, combine, expected):
    assert classify(notify, combine, STATE, IBGDA) == expected


@pytest.fixture
def library(tmp_path):
    """A shared library that needs libm, has a RPATH, and leaves cuInit and nvmlInit_v2 open."""
    source = tmp_path / "small.c"
    source.write_text(
        "double cos(double); int cuInit(int); int nvmlInit_v2(void); int custom(void);\n"
        "double f(double x) { return cos(x) + cuInit(0) + nvmlInit_v2() + custom(); }\n"
    )
    target = tmp_path / "libsmall.so"
    command = ["gcc", "-shared", "-fPIC", str(source), "-o", str(target), "-Wl,--no-as-needed"]
    try:
        subprocess.run([*command, "-lm", "-Wl,-rpath,/a/lib:/b/lib"], check=True)
    except FileNotFoundError:
        pytest.skip("no gcc on PATH")
    return target


def test_dynamic(library):
    found = evidence.dynamic(str(library))
    assert "libm.so.6" in found.needed
    assert found.rpath == ["/a/lib", "/b/lib"]


def test_undefined(library):
    assert evidence.undefined(str(library), "cu[A-Z]") == ["cuInit"]
    assert evidence.undefined(str(library), "nvml[A-Z]") == ["nvmlInit_v2"]


def test_not_an_elf_file(tmp_path):
    path = tmp_path / "text.so"
    path.write_text("no library")
    with pytest.raises(evidence.EvidenceError, match="readelf"):
        evidence.dynamic(str(path))


def test_no_cuobjdump(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        evidence.EvidenceError, match="install the toolkit's cuda-cuobjdump package"
    ):
        evidence.find_cuobjdump([str(tmp_path / "bin")])


def test_loaded_by_tells_what_a_process_maps():
    found = evidence.loaded_by([sys.executable], ["json"])
    assert found["modules"]["json"][0].endswith("json/__init__.py")
    assert found["nvshmem"] == {}


def test_loaded_by_says_why_an_import_fails():
    with pytest.raises(evidence.EvidenceError, match="No module named 'no_such_module'"):
        evidence.loaded_by([sys.executable], ["no_such_module"])


def test_runs_on_old_python():
    """Spack's Python may be that of RHEL 8: no syntax later than 3.6."""
    import ast

    with open(evidence.__file__, encoding="utf-8") as stream:
        ast.parse(stream.read(), feature_version=(3, 6))
    assert os.path.dirname(evidence.__file__).endswith("spack_repo/deepep")
