"""The pairing table says what the solver decides, and what a compile of the lookup shows."""

import json
import shutil
import subprocess
from functools import cache

import pytest
from deepep_ci import lockfile, pairing, patches, paths, refusals
from lookup.lookup import judge
from support import DEEPEP_COMMITS, recipe_wheels

CELLS = [
    pytest.param(row["deepep"], row["rc_layout_backport"], version, cell,
                 id=f"{row['deepep']}-{row['rc_layout_backport']}-{version}")
    for row in pairing.table()["rows"]
    for version, cell in row["nvshmem"].items()
]  # fmt: skip


def test_table_is_complete():
    rows = pairing.table()["rows"]
    assert {row["deepep"] for row in rows} == set(DEEPEP_COMMITS)
    for row in rows:
        assert set(row["nvshmem"]) == set(recipe_wheels())


def test_readme_prints_the_table():
    assert pairing.markdown() in (paths.TOP / "README.md").read_text()


@pytest.mark.spack
@pytest.mark.parametrize("deepep, backport, nvshmem, cell", CELLS)
def test_solver(pinned_spack, deepep, backport, nvshmem, cell):
    variant = {True: "+rc_layout_backport", False: "~rc_layout_backport", None: ""}[backport]
    spec = f"py-deep-ep@={deepep} {variant} cuda_arch=90 ^nvshmem@={nvshmem}"
    done = refusals.solve(pinned_spack, spec)
    if cell == "refused":
        assert done.returncode == 1, "was accepted"
        assert "internode dispatch times out (DeepEP#564)" in " ".join(done.stderr.split())
        return
    assert done.returncode == 0, done.stderr
    node = json.loads(done.stdout)["spec"]["nodes"][0]
    names = patches.names_by_digest()
    applied = [names[digest] for digest in node.get("patches", [])]
    assert [name for name in applied if name in pairing.LOOKUP] == cell


@pytest.fixture(scope="module")
def verdict(deepep_tree, nvshmem_include, cuda_home, verbs_include, tmp_path_factory):
    """Function: (header text, NVSHMEM version) -> Verdict. Equal lookups are compiled once."""
    folder = tmp_path_factory.mktemp("judge")

    @cache
    def compiled(header: str, nvshmem: str):
        tree = folder / str(hash(header))
        target = tree / "csrc" / "kernels" / "ibgda_device.cuh"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(header)
        return judge(tree, nvshmem_include(nvshmem), cuda_home, verbs_include, workdir=folder)

    return compiled


@pytest.fixture(scope="module")
def header_of(deepep_tree, tmp_path_factory):
    """Function: (version, patches) -> text of DeepEP's header with the lookup."""

    @cache
    def header(version: str, applied: tuple[str, ...]) -> str:
        tree = tmp_path_factory.mktemp("tree") / version
        shutil.copytree(deepep_tree(version) / "csrc", tree / "csrc")
        for name in applied:
            command = ["patch", "-s", "-p1", "--fuzz=0", "-d", str(tree)]
            subprocess.run([*command, "-i", str(paths.PATCHES / name)], check=True)
        return (tree / "csrc" / "kernels" / "ibgda_device.cuh").read_text()

    return header


@pytest.mark.sources
@pytest.mark.compile
@pytest.mark.xdist_group("lookup")
@pytest.mark.parametrize("deepep, backport, nvshmem, cell", CELLS)
def test_lookup(verdict, header_of, deepep, backport, nvshmem, cell):
    """What is refused looks up wrong queue pairs; what is accepted, as patched, none."""
    applied = () if cell == "refused" else tuple(cell)
    found = verdict(header_of(deepep, applied), nvshmem)
    assert found.ok == (cell != "refused"), str(found)
    if cell == "refused":
        # Nearly all, and never by an index outside of the table: it hangs, it does not crash
        assert found.totals.wrong_peer > found.totals.right
        assert found.totals.out_of_bounds == 0


@pytest.mark.sources
@pytest.mark.compile
@pytest.mark.xdist_group("lookup")
@pytest.mark.parametrize("deepep, applied", [
    ("1.2.1-4214430", ("deep-ep-564-rc-layout.patch",)),
    ("1.2.1-567632d", ()),
])  # fmt: skip
def test_564_alone_runs_out_of_bounds(verdict, header_of, deepep, applied):
    """Why the bound belongs in: the shapes are those of patches/README.md."""
    found = verdict(header_of(deepep, applied), "3.6.5")
    assert found.totals.wrong_peer == 0
    bad = {(shape.qps, shape.sms) for shape, counts in found.counts.items() if not counts.ok}
    assert bad == {(24, 48), (10, 20), (12, 24)}
    assert all(shape.devices == 1 for shape, counts in found.counts.items() if not counts.ok)


@pytest.mark.sources
@pytest.mark.compile
@pytest.mark.xdist_group("lookup")
def test_verdict_can_fail(verdict, header_of):
    good = header_of("1.2.1-4214430", tuple(pairing.LOOKUP))
    broken = good.replace(
        "rcs[pe + nvshmemi_device_state_d.npes", "rcs[(pe ^ 1) + nvshmemi_device_state_d.npes"
    )
    assert broken != good
    assert verdict(broken, "3.6.5").totals.wrong_peer > 0


def test_row_of_each_environment():
    rows = {}
    for name in paths.environment_names():
        lock = lockfile.read_lock(paths.ENVIRONMENTS / name / "spack.lock")
        rows[name] = pairing.row_of(lock)[1]
    both = ["deep-ep-564-rc-layout.patch", "deep-ep-rc-bound.patch"]
    assert rows == {
        "h100": both,
        "h100-site": both,
        "h100-hybridep": both,
        "h100-control": "refused",
    }
