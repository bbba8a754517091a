"""What counts as drift of an environment, and what only says on which machine it was made."""

import copy

from deepep_ci import documents, paths
from deepep_ci.drift import drift
from deepep_ci.lockfile import lock_from

PATH = paths.ENVIRONMENTS / "h100-site" / "spack.lock"


def changed(change):
    """Kinds and texts of the drift after a change to the nodes (by name) of the lock."""
    document = documents.load_json(PATH)
    other = copy.deepcopy(document)
    change({node["name"]: node for node in other["concrete_specs"].values()}, other)
    found = drift(lock_from(document, PATH), lock_from(other, PATH))
    return [(item.kind, item.package, item.text) for item in found]


def test_none():
    assert changed(lambda nodes, _: None) == []


def test_version():
    def change(nodes, _):
        nodes["nvshmem"]["version"] = "3.8.0"

    assert changed(change) == [("spec", "nvshmem", "version 3.6.5 -> 3.8.0")]


def test_flipped_variant():
    def change(nodes, _):
        nodes["rdma-core"]["parameters"]["pyverbs"] = True

    assert changed(change) == [("spec", "rdma-core", "variant pyverbs False -> True")]


def test_patches():
    def change(nodes, _):
        nodes["py-deep-ep"]["patches"] = []

    ((kind, name, text),) = changed(change)
    assert (kind, name) == ("spec", "py-deep-ep")
    assert text.endswith("-> []")


def test_recipe():
    def change(nodes, _):
        nodes["nvshmem"]["package_hash"] = "x" * 52

    expected = [("spec", "nvshmem", "recipe, source or patch file changed")]
    assert changed(change) == expected


def test_compiler_and_os_are_the_hosts():
    def change(nodes, _):
        nodes["gcc"]["version"] = nodes["gcc-runtime"]["version"] = "14.2.0"
        for node in nodes.values():
            node["arch"]["platform_os"] = "rhel9"

    found = changed(change)
    assert {kind for kind, _, _ in found} == {"host"}
    assert ("host", "gcc", "version 12.2.0 -> 14.2.0") in found
    assert ("host", "nvshmem", "os debian12 -> rhel9") in found


def test_externals_are_the_sites():
    def change(nodes, _):
        nodes["cuda"]["version"] = "13.0.2"
        nodes["cuda"]["external"]["path"] = "/opt/cuda"

    assert changed(change) == [
        ("site", "cuda", "version 13.0.88 -> 13.0.2"),
        ("site", "cuda", "prefix /usr/local/cuda-13.0 -> /opt/cuda"),
    ]


def test_external_that_spack_now_builds():
    def change(nodes, _):
        del nodes["cmake"]["external"]

    assert changed(change) == [("spec", "cmake", "prefix /usr -> built")]


def test_new_package():
    def change(nodes, document):
        node = {**nodes["rdma-core"], "name": "openmpi", "hash": "f" * 32}
        document["concrete_specs"][node["hash"]] = node

    assert changed(change) == [("spec", "openmpi", "absent -> 60.0")]
