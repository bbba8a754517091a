"""The checks of an install: a wrong build must not get installed, for the stated reason."""

import json
import re

import pytest
from deepep_ci import paths
from spack_repo.deepep import evidence

pytestmark = [pytest.mark.build, pytest.mark.slow]

SPEC = "py-deep-ep@=1.2.1-4214430 {} hybrid_ep={} ~aggressive_ptx cuda_arch={}"
PATCHED = "+rc_layout_backport"


def environment(site, name, specs, repos=()):
    """An environment beside h100-site, of specs that do not unify; concretized if it is new."""
    folder = site.environment.parent / name
    names = ("repos", "concretizer", "packages", "external-pytorch")
    include = ["../h100-site/site.yaml", *(f"../common/{name}.yaml" for name in names)]
    document = {
        "specs": specs,
        "include": include,
        "concretizer": {"unify": False},
        "repos": dict(repos),
        "view": False,
    }
    text = json.dumps({"spack": document}, indent=1)
    if not (folder / "spack.lock").is_file() or (folder / "spack.yaml").read_text() != text:
        folder.mkdir(exist_ok=True)
        (folder / "spack.lock").unlink(missing_ok=True)
        (folder / "spack.yaml").write_text(text)
        done = site.spack.run(["-e", str(folder), "concretize", "--fresh"], timeout=900)
        assert done.returncode == 0, done.stderr[-3000:]
    return folder


def installed(site, folder):
    """Dag hashes of what Spack has as installed of the environment."""
    done = site.spack.run(["-e", str(folder), "find", "--json"])
    records = json.loads(done.stdout or "[]")
    return {record["hash"] for record in records}


def roots(folder):
    """{spec of spack.yaml: dag hash}."""
    lock = json.loads((folder / "spack.lock").read_text())
    return {root["spec"]: root["hash"] for root in lock["roots"]}


@pytest.fixture(scope="module")
def arms(site):
    """The two arms that are broken on purpose, really built: {"control", "no_bound": prefix}."""
    specs = {
        "control": SPEC.format("~rc_layout_backport broken_on_purpose=control", "none", 90),
        "no_bound": SPEC.format(f"{PATCHED} broken_on_purpose=no_bound", "none", 90),
    }
    folder = environment(site, "arms", list(specs.values()))
    done = site.spack.run(["-e", str(folder), "install"], timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    store = site.prefix("py-deep-ep").parent
    hashes = list(roots(folder).values())
    prefixes = [next(store.glob(f"py-deep-ep-*-{digest}")) for digest in hashes]
    return dict(zip(specs, prefixes, strict=True))


#: {damage: what the failing install says}
SENTENCES = {
    "control": "indexes RC queue pairs by layout v1 for sm_90; with NVSHMEM 3.6.5 and this spec "
    "it must be v2",
    "no_bound": "indexes RC queue pairs by layout v2 without bound for sm_90; with NVSHMEM "
    "3.6.5 and this spec it must be v2",
    "not_linked": "is not linked with libmlx5.so.1",
    "other_nvshmem": r"finds libnvshmem_host.so.3 in \S*nvidia/nvshmem/lib, not in ",
    "other_rdma_core": "finds libmlx5.so.1 in no folder of its RPATH, not in ",
    "stage_in_rpath": "has /tmp/spack-stage/spack-stage-x/lib in its RPATH",
    "ptx": r"small_ep_cpp.abi.so holds device code \{.*'ptx_90': 1.*\}, asked was for sm_90",
    "no_nvshmem": r"has no internode kernels: built without NVSHMEM \(DISABLE_NVSHMEM\)\?",
    "source_left": "share/deep_ep/internode.cu is left over from the build",
    "stage_path": "deep_ep/note.txt contains the path of the stage",
    "no_import": "import deep_ep fails: ModuleNotFoundError: No module named 'deep_ep.utils'",
    "nvshmem_twice": r"import deep_ep loads \{.*3.6.5.*3.6.5.*\}, not one of 3.6.5",
}


@pytest.fixture(scope="module")
def sabotaged(site, arms):
    """What one `spack install` of all damaged packages said, and what is installed after it."""
    specs = {
        damage: "sabotage." + SPEC.format(f"{PATCHED} damage={damage}", "single_node", 90)
        for damage in ["none", *SENTENCES]
    }
    # Undamaged, but the spec asks for an architecture that it was not built for
    specs["arch"] = "sabotage." + SPEC.format(f"{PATCHED} damage=none", "single_node", "90,100")
    repo = paths.TOP / "tests" / "sabotage" / "spack_repo" / "sabotage"
    folder = environment(site, "sabotage", list(specs.values()), {"sabotage": str(repo)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPEP_TEST_BUILT", str(site.prefix("py-deep-ep")))
        patch.setenv("DEEPEP_TEST_CONTROL", str(arms["control"]))
        patch.setenv("DEEPEP_TEST_NO_BOUND", str(arms["no_bound"]))
        done = site.spack.run(["-e", str(folder), "install"], timeout=1800)
    hashes = dict(zip(specs, roots(folder).values(), strict=True))
    yield done, hashes, installed(site, folder)
    site.spack.run(["-e", str(folder), "uninstall", "--all", "-y", "sabotage.py-deep-ep"])


def test_undamaged_copy_is_installed(sabotaged):
    """So that it is the damage, and not the copying, that the others fail for."""
    _, hashes, have = sabotaged
    assert hashes["none"] in have


@pytest.mark.parametrize("damage", [*SENTENCES, "arch"])
def test_damaged_is_refused(sabotaged, damage):
    done, hashes, have = sabotaged
    assert done.returncode != 0
    assert hashes[damage] not in have
    said = re.sub(r"\s+", " ", done.stdout + done.stderr)
    expected = SENTENCES.get(
        damage, r"holds device code \{'sm_90': 1\}, asked was for sm_100, sm_90"
    )
    assert re.search(expected, said), said[-6000:]


def test_broken_arms_are_what_they_say(arms, cuobjdump):
    """Read here, not only by the gate: unpatched, and #564 without the bound."""
    found = {}
    for name, prefix in arms.items():
        extension = next(prefix.glob("lib/python3.*/site-packages/deep_ep_cpp.*.so"))
        found[name] = evidence.rc_lookups(str(extension), cuobjdump)
    assert found == {
        "control": {"sm_90": evidence.Lookup("v1", bounded=True)},
        "no_bound": {"sm_90": evidence.Lookup("v2", bounded=False)},
    }
