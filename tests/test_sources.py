"""ci/sources: the files the locks need, through pip and git, held against their checksums."""

import pytest
from deepep_ci import environments, paths, sources
from support import recipe_wheels


@pytest.fixture(scope="module")
def needed(pinned_spack):
    return sources.needed(pinned_spack, environments.Environment("h100-site"))


@pytest.mark.spack
@pytest.mark.slow
def test_needed(needed):
    by_package = {source.package: source for source in needed}
    wheel = by_package["nvshmem@3.6.5"]
    assert wheel.pypi and wheel.sha256 == recipe_wheels()["3.6.5"]["x86_64"][0]
    deepep = by_package["py-deep-ep@1.2.1-4214430"]
    assert deepep.commit == "42144303752422ade37f24bca9e2dde12df70e09" and not deepep.pypi
    assert by_package["rdma-core@60.0"].commit
    # Everything is pinned, by checksum or by commit
    assert all(source.sha256 or source.commit for source in needed)


@pytest.mark.spack
@pytest.mark.sources
@pytest.mark.slow
def test_fill_damage_and_refill(run, tmp_path, needed):
    mirror = tmp_path / "mirror"
    done = run(paths.TOP, "sources", str(mirror), "h100-site")
    assert done.returncode in (0, 1), done.stderr
    states = {source.package: source.state(mirror) for source in needed}
    if states["nvshmem@3.6.5"] != "ok":
        pytest.skip(f"no package index can be reached: {done.stdout[-300:]}")
    if states["rdma-core@60.0"] != "ok":
        pytest.skip(f"no git server can be reached: {done.stdout[-300:]}")
    assert states["py-deep-ep@1.2.1-4214430"] == "ok"
    for source in needed:
        if source.pypi:
            assert source.state(mirror) == "ok", source
    # What cannot be had is named, with its address, and the exit code says so
    failed = [source for source in needed if source.state(mirror) != "ok"]
    assert done.returncode == int(bool(failed))
    for source in failed:
        assert f"not fetched: {source.url}" in done.stdout
    assert not list(mirror.glob(".pip-*"))

    wheel = next(source for source in needed if source.package == "nvshmem@3.6.5")
    with open(mirror / wheel.path, "r+b") as stream:
        stream.seek(1000)
        stream.write(b"damage")
    again = run(paths.TOP, "sources", str(mirror), "h100-site")
    assert again.returncode == 1
    assert f"does not have sha256 {wheel.sha256}" in again.stdout.replace("\n", " ")


def test_wrong_checksum_is_refused(tmp_path):
    source = sources.Source(
        package="iniconfig@2.3.0",
        hash="",
        path="_source-cache/archive/00/00",
        url="https://example/iniconfig-2.3.0-py3-none-any.whl",
        sha256="0" * 64,
        commit=None,
        pypi=True,
    )
    reason = sources.fetch_by_pip(source, tmp_path)
    if "No matching distribution" in reason or "Could not find" in reason:
        pytest.skip(f"no package index can be reached: {reason[-200:]}")
    assert "DO NOT MATCH THE HASHES" in reason
    assert not (tmp_path / source.path).exists()
