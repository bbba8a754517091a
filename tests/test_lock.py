"""Tampered locks and patches: ci/check, offline, catches each kind and says what is wrong."""

import json
import os

import pytest
from deepep_ci import paths

NAME = "h100-site"


@pytest.fixture
def lock(clone):
    """Function: changes the lock of h100-site in the copy. change(document, node by name)."""
    path = clone / "environments" / NAME / "spack.lock"

    def apply(change):
        document = json.loads(path.read_text())
        nodes = {node["name"]: node for node in document["concrete_specs"].values()}
        change(document, nodes)
        path.write_text(json.dumps(document))

    return apply


def test_untouched_holds(offline):
    code, table = offline()
    assert code == 0
    # What needs Spack is told as skipped; all else passed
    skipped = {key for key, result in table.items() if result["status"] == "skip"}
    names = paths.environment_names()
    needs_spack = {(name, check) for name in names for check in ("concretize", "drift")}
    assert skipped == needs_spack | {("refusals", "solver")}
    assert {table[key]["status"] for key in table.keys() - skipped} == {"pass"}
    assert {environment for environment, _ in table} == {*paths.environment_names(), "refusals"}


def version(_, nodes):
    nodes["nvshmem"]["version"] = "3.8.0"


def variant(_, nodes):
    nodes["py-deep-ep"]["parameters"]["rc_layout_backport"] = False


def variant_absent(_, nodes):
    del nodes["py-deep-ep"]["parameters"]["hybrid_ep"]


def arch(_, nodes):
    nodes["py-deep-ep"]["parameters"]["cuda_arch"] = ["80"]


def target(_, nodes):
    nodes["rdma-core"]["arch"]["target"] = "x86_64_v4"


def patch_missing(_, nodes):
    nodes["py-deep-ep"]["patches"].pop()


def patch_order(_, nodes):
    nodes["py-deep-ep"]["patches"].reverse()


def patch_other(_, nodes):
    nodes["py-deep-ep"]["patches"][0] = "0" * 64


def namespace(_, nodes):
    nodes["nvshmem"]["namespace"] = "builtin"


def second_nvshmem(document, nodes):
    copy = {**nodes["nvshmem"], "hash": "a" * 32, "version": "3.4.5-cu13"}
    document["concrete_specs"][copy["hash"]] = copy


def external(_, nodes):
    del nodes["py-torch"]["external"]


def edge(_, nodes):
    node = nodes["nvshmem"]
    node["dependencies"] = [d for d in node["dependencies"] if d["name"] != "rdma-core"]


def forbidden(document, nodes):
    copy = {**nodes["rdma-core"], "hash": "b" * 32, "name": "openmpi"}
    document["concrete_specs"][copy["hash"]] = copy


def no_promise(_, nodes):
    nodes["py-nvidia-ml-py"]["version"] = "1.0"


TAMPERED = [
    (no_promise, "py-nvidia-ml-py@1.0 was edited by hand, its hash is not that of its content"),
    (version, "nvshmem: version is 3.8.0, 3.6.5 was expected"),
    (variant, "py-deep-ep: variant rc_layout_backport is off, on was expected"),
    (variant_absent, "py-deep-ep: variant hybrid_ep is absent, single_node was expected"),
    (arch, "py-deep-ep: variant cuda_arch is [80], [90] was expected"),
    (target, "rdma-core has target x86_64_v4, x86_64_v3 was expected"),
    (patch_missing, "patches are [deep-ep-564-rc-layout.patch, deep-ep-rc-bound.patch], "),
    (patch_order, "patches are [deep-ep-loading.patch, deep-ep-rc-bound.patch, deep-"),
    (patch_other, "patches are [000000000000..., deep-ep-rc-bound.patch, deep-ep-l"),
    (namespace, "nvshmem: namespace is builtin, deepep was expected"),
    (second_nvshmem, "one nvshmem was expected, the lock has 2: 3.4.5-cu13 (aaaaaaa), 3.6.5"),
    (external, "py-torch: is built by Spack, an external was expected"),
    (edge, "nvshmem: does not depend on rdma-core"),
    (forbidden, "openmpi@60.0 is in the lock: nothing here needs MPI"),
]


@pytest.mark.parametrize("change, said", TAMPERED, ids=lambda v: getattr(v, "__name__", ""))
def test_tampered_lock(lock, offline, change, said):
    lock(change)
    code, table = offline(NAME)
    assert code == 1
    result = table[NAME, "lock"]
    assert result["status"] == "fail"
    assert said in result["text"]


def lockfile_version(document, _):
    document["_meta"]["lockfile-version"] = 4


def no_meta(document, _):
    del document["_meta"]


def no_roots(document, _):
    document["roots"] = []


def dangling_root(document, _):
    document["roots"][0]["hash"] = "c" * 32


def dangling_edge(_, nodes):
    nodes["nvshmem"]["dependencies"][0]["hash"] = "d" * 32


def node_key(_, nodes):
    nodes["nvshmem"]["hash"] = "e" * 32


def not_a_digest(_, nodes):
    nodes["py-deep-ep"]["patches"][0] = "f75bf0a"


UNREADABLE = [
    (lockfile_version, "$._meta.lockfile-version is 4, 6 or 7 was expected"),
    (no_meta, "$._meta.lockfile-version is null, 6 or 7 was expected"),
    (no_roots, "$.roots"),
    (dangling_root, "is not among $.concrete_specs"),
    (dangling_edge, "is not among $.concrete_specs"),
    (node_key, "not its key"),
    (not_a_digest, "64 hexadecimal digits"),
]


@pytest.mark.parametrize("change, said", UNREADABLE, ids=lambda v: getattr(v, "__name__", ""))
def test_unreadable_lock(lock, offline, change, said):
    lock(change)
    code, table = offline(NAME)
    assert code == 1
    assert said in table[NAME, "lock"]["text"]
    assert "spack.lock" in table[NAME, "lock"]["text"]


def test_truncated_lock(clone, offline):
    path = clone / "environments" / NAME / "spack.lock"
    path.write_bytes(path.read_bytes()[:-1000])
    code, table = offline(NAME)
    assert code == 1
    assert "spack.lock:" in table[NAME, "lock"]["text"]
    assert "not JSON" in table[NAME, "lock"]["text"]


def test_missing_lock(clone, offline):
    (clone / "environments" / NAME / "spack.lock").unlink()
    code, table = offline(NAME)
    assert code == 1
    assert "no such file" in table[NAME, "lock"]["text"]


def test_changed_patch_file(clone, offline):
    path = clone / "patches" / "deep-ep-rc-bound.patch"
    path.write_text(path.read_text() + "\n")
    code, table = offline(NAME)
    assert code == 1
    assert table[NAME, "patches"]["status"] == "fail"
    assert "deep-ep-rc-bound.patch has sha256" in table[NAME, "patches"]["text"]


def test_changed_patch_file_and_index(clone, offline):
    """The lock still names the old file: that is caught too."""
    from deepep_ci import patches

    path = clone / "patches" / "deep-ep-rc-bound.patch"
    old = patches.sha256(path)
    path.write_text(path.read_text() + "\n")
    index = clone / "patches" / "index.json"
    index.write_text(index.read_text().replace(old, patches.sha256(path)))
    code, table = offline(NAME)
    assert code == 1
    assert "no file of patches/ has that sha256" in table[NAME, "patches"]["text"]


def test_missing_and_unlisted_patch(clone, offline):
    folder = clone / "patches"
    (folder / "deep-ep-rc-bound.patch").rename(folder / "renamed.patch")
    code, table = offline(NAME)
    assert code == 1
    assert "deep-ep-rc-bound.patch is missing" in table[NAME, "patches"]["text"]
    assert "renamed.patch has no entry" in table[NAME, "patches"]["text"]


def test_bad_expectations(clone, offline):
    path = clone / "environments" / NAME / "expect.json"
    document = json.loads(path.read_text())
    document["pakages"] = document.pop("packages")
    path.write_text(json.dumps(document, indent=2))
    code, table = offline(NAME)
    assert code == 1
    assert "'pakages' was unexpected" in table[NAME, "files"]["text"]
    assert "expect.json:" in table[NAME, "files"]["text"]


def test_known_bad_pair_is_no_environment(lock, offline):
    """Without the ugly variant the control's pair stands on a refused row."""

    def control(_, nodes):
        nodes["py-deep-ep"]["parameters"]["rc_layout_backport"] = False
        nodes["py-deep-ep"]["patches"] = []

    lock(control)
    code, table = offline(NAME)
    assert code == 1
    assert table[NAME, "pairing"]["status"] == "fail"
    assert "refused" in table[NAME, "pairing"]["text"]


def test_offline_check_is_quick(run):
    """All environments in under a second once set up, of processor time: others use it too."""
    run(paths.TOP, "check", "--spack", "off")
    before = os.times()
    assert run(paths.TOP, "check", "--spack", "off").returncode == 0
    after = os.times()
    used = sum(after[2:4]) - sum(before[2:4])  # of children, user and system
    assert 0 < used < 1.0
