"""Build caches, shared trees and repeated installs, with the packages of a real install."""

import ctypes
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import missing
from deepep_ci import paths
from deepep_ci import spack as spack_module
from deepep_ci.documents import load_json
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from host_site import Site

pytestmark = pytest.mark.build

#: What a run of DeepEP needs of the lock, and a cache therefore installs: no build tools
RUNTIME = {
    "gcc-runtime",
    "nvshmem",
    "py-deep-ep",
    "py-nvidia-ml-py",
    "python-venv",
    "rdma-core",
}

#: Small, with one dependency, python-venv
SMALL = "py-nvidia-ml-py"


def tree_beside(site: Site, folder: Path, **sections) -> Site:
    """A site's environment and lock with an install tree of its own; sections go to site.yaml."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(
        site.environment.parent,
        folder / "environments",
        ignore=shutil.ignore_patterns(".spack-env"),
    )
    (folder / "spack-repo").symlink_to((site.folder / "spack-repo").resolve())
    document = load_json(site.environment.parent / "h100-site" / "site.yaml")
    document["config"] |= {
        "install_tree": {"root": str(folder / "store")},
        "build_stage": str(folder / "stage"),
        # Else a blob of an earlier test would stand in for a damaged one
        "source_cache": str(folder / "source-cache"),
    }
    document |= sections
    (folder / "environments" / "h100-site" / "site.yaml").write_text(json.dumps(document))
    tree = Site(site.spack, folder, document, site.environment.name)
    assert tree.store == folder / "store"
    return tree


def run(tree: Site, keyring: Path, *arguments: str, **more) -> subprocess.CompletedProcess[str]:
    """spack -e <tree's environment> ARGUMENTS with a keyring of the test's."""
    return subprocess.run(
        tree.command(*arguments),
        env={**spack_module.environment(), "SPACK_GNUPGHOME": str(keyring)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        **more,
    )


def checked(tree: Site, keyring: Path, *arguments: str, **more) -> str:
    done = run(tree, keyring, *arguments, **more)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def installed(tree: Site) -> set[str]:
    """Names of the packages in a tree's own store."""
    prefixes = {path.name: name for name in tree.nodes() for path in [tree.prefix(name)]}
    return {prefixes[path.parent.name] for path in tree.store.glob("*/*/.spack")}


def state(folder: Path) -> dict[str, tuple]:
    """What a write below a folder changes; directories tell of files that came and went."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        found[str(path)] = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """What is in a folder: files, and where links lead."""
    entries = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return {
        str(path): os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()
        for path in entries
    }


def megabytes(folder: Path) -> int:
    return sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file()) // 1_000_000


@pytest.fixture(scope="module")
def report(record_testsuite_property):
    """Function: prints a measurement (pytest -s), and records it for --junit-xml."""

    def write(name: str, value: str) -> None:
        print(f"\n{name}: {value}")
        record_testsuite_property(name, value)

    return write


@pytest.fixture(scope="module")
def keyring() -> Iterator[Callable[[str], Path]]:
    """Function: name -> the folder of a keyring, empty at first. None of the user's is read."""
    if not shutil.which("gpg") and not shutil.which("gpg2"):
        missing("build", "no gpg on PATH")
    # Short: the agent's socket lies in it, and sockets' paths end at 107 characters
    top = Path(tempfile.mkdtemp(prefix="gpg"))
    rings: dict[str, Path] = {}

    def ring(name: str) -> Path:
        if name not in rings:
            rings[name] = top / str(len(rings))
            rings[name].mkdir(mode=0o700)
        return rings[name]

    yield ring
    for path in rings.values():
        subprocess.run(["gpgconf", "--homedir", str(path), "--kill", "all"], check=False)
    shutil.rmtree(top, ignore_errors=True)


@pytest.fixture(scope="module")
def signer(site, keyring) -> Path:
    """The keyring of the one who pushes, with a key of its own."""
    checked(site, keyring("signer"), "gpg", "create", "Site Cache", "cache@example.com")
    return keyring("signer")


@pytest.fixture(scope="module")
def cache(site, signer, tmp_path_factory, report) -> Path:
    """A signed build cache of the installed environment, with its index."""
    folder = tmp_path_factory.mktemp("cache")
    begin = time.monotonic()
    checked(site, signer, "buildcache", "push", "--update-index", folder.as_uri())
    seconds = time.monotonic() - begin
    report("buildcache push", f"{seconds:.0f} s, {megabytes(folder)} MB")
    return folder


@pytest.fixture(scope="module")
def reader(site, signer, keyring, tmp_path_factory) -> Path:
    """The keyring of the one who installs, and trusts the public key that was handed over."""
    key = tmp_path_factory.mktemp("key") / "cache.pub"
    checked(site, signer, "gpg", "export", str(key))
    assert "PRIVATE" not in key.read_text()
    checked(site, keyring("reader"), "gpg", "trust", "--yes", str(key))
    return keyring("reader")


@pytest.fixture(scope="module")
def second(site, cache, reader, report) -> Iterator[Site]:
    """The environment installed from the signed cache into a tree of its own."""
    # No longer than the first tree: see test_longer_prefix_is_refused
    tree = tree_beside(site, site.folder.with_name("two"), mirrors={"cache": cache.as_uri()})
    assert len(str(tree.store)) <= len(str(site.store))
    begin = time.monotonic()
    checked(tree, reader, "install", "--use-buildcache", "only")
    seconds = time.monotonic() - begin
    report("install from file://", f"{seconds:.0f} s, {megabytes(tree.store)} MB")
    yield tree
    shutil.rmtree(tree.folder, ignore_errors=True)


IMPORT = """
import json, torch, deep_ep
maps = [line.split()[-1] for line in open("/proc/self/maps") if "/" in line]
print(json.dumps({"deep_ep": deep_ep.__file__, "maps": sorted(set(maps))}))
"""


def imported(tree: Site, keyring: Path) -> dict:
    """What `import deep_ep` loads in the environment that Spack sets up."""
    script = checked(tree, keyring, "load", "--sh", "py-deep-ep")
    done = subprocess.run(
        ["bash", "-c", f'{script}\npython3 -c "$1"', "bash", IMPORT],
        env=spack_module.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def run_paths(path: Path) -> list[str] | None:
    """RPATH or RUNPATH of a dynamic ELF file, None for any other file."""
    with path.open("rb") as stream:
        if stream.read(4) != b"\x7fELF":
            return None
        for section in ELFFile(stream).iter_sections():
            if isinstance(section, DynamicSection):
                found: list[str] = []
                for tag in section.iter_tags():
                    found += getattr(tag, "rpath", getattr(tag, "runpath", "")).split(":")
                return [entry for entry in found if entry]
    return None


@pytest.mark.slow
def test_signed_cache_installs_elsewhere(site, second, reader):
    assert (second.environment / "spack.lock").read_bytes() == (
        site.environment / "spack.lock"
    ).read_bytes()
    assert installed(second) == RUNTIME
    loaded = imported(second, reader)
    assert loaded["deep_ep"].startswith(f"{second.prefix('py-deep-ep')}/")
    names = [path for path in loaded["maps"] if "libnvshmem_host" in path]
    assert len(names) == 1, names
    verbs = [path for path in loaded["maps"] if re.search(r"/lib(ibverbs|mlx5)\.so", path)]
    assert len(verbs) == 2
    assert all(path.startswith(f"{second.prefix('rdma-core')}/") for path in verbs), verbs
    assert not [path for path in loaded["maps"] if path.startswith(f"{site.store}/")]


@pytest.mark.slow
def test_relocation_leaves_nothing_of_the_first_tree(site, second):
    first, seen = os.fsencode(site.store), 0
    for path in second.store.glob("*/*/**/*"):
        # Spack's records, code that Python compiles anew, archives that nothing here links with
        if path.is_symlink() or not path.is_file():
            continue
        if ".spack" in path.parts or path.suffix in (".pyc", ".a"):
            continue
        assert first not in path.read_bytes(), path
        entries = run_paths(path)
        if path.name.startswith("deep_ep_cpp"):
            assert f"{second.prefix('nvshmem')}/lib" in entries
            assert f"{second.prefix('rdma-core')}/lib" in entries
        seen += entries is not None
    assert seen > 20


@pytest.mark.slow
def test_longer_prefix_is_refused(site, cache, reader, tmp_path):
    """Paths in binaries cannot grow: README's reason for padded_length where caches are built."""
    long = tmp_path / ("x" * len(str(site.store)))
    tree = tree_beside(site, long, mirrors={"cache": cache.as_uri()})
    done = run(tree, reader, "install", "--use-buildcache", "only", "rdma-core")
    assert done.returncode != 0
    assert "the new prefix is longer" in done.stdout + done.stderr
    assert "padded_length" in done.stdout + done.stderr
    assert "rdma-core" not in installed(tree)


def manifest_of(cache: Path, name: str) -> Path:
    (path,) = (cache / "v3" / "manifests" / "spec" / name).glob("*.spec.manifest.json")
    return path


def archive_of(cache: Path, name: str) -> Path:
    """The blob with a package's files, by the manifest."""
    entries = json.loads(re.search(r"{.*}", manifest_of(cache, name).read_text(), re.DOTALL)[0])
    (digest,) = [d["checksum"] for d in entries["data"] if "tar" in d["mediaType"]]
    return cache / "blobs" / "sha256" / digest[:2] / digest


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, sentence",
    [
        ("intact", ""),
        ("foreign key", "Can't check signature: No public key"),
        ("unsigned", "Required signature was not found on manifest"),
        ("edited manifest", "BAD signature"),
        ("damaged blob", "sha256 checksum failed"),
    ],
)
def test_what_cannot_be_verified_is_refused(
    site, cache, signer, reader, keyring, tmp_path, case, sentence
):
    mirror = tmp_path / "mirror"
    shutil.copytree(cache, mirror)
    ring = reader
    if case == "foreign key":
        ring = keyring("stranger")
    elif case == "unsigned":
        shutil.rmtree(mirror)
        unsigned = ["--unsigned", "--without-build-dependencies", "--update-index"]
        checked(site, signer, "buildcache", "push", *unsigned, mirror.as_uri(), SMALL)
    elif case == "edited manifest":
        # As one would who also puts another file in the place of the blob
        digest = archive_of(mirror, SMALL).name
        manifest = manifest_of(mirror, SMALL)
        manifest.write_text(manifest.read_text().replace(digest, "0" * len(digest)))
    elif case == "damaged blob":
        blob = archive_of(mirror, SMALL)
        content = bytearray(blob.read_bytes())
        content[len(content) // 2] ^= 1
        blob.write_bytes(content)

    tree = tree_beside(site, tmp_path / "tree", mirrors={"cache": mirror.as_uri()})
    # -d: without it Spack says `no binary available`, and keeps most reasons to itself
    done = run(tree, ring, "-d", "install", "--use-buildcache", "only", SMALL)
    if case == "intact":
        assert done.returncode == 0, done.stderr[-3000:]
        assert SMALL in installed(tree)
    else:
        assert done.returncode != 0
        assert sentence in done.stdout + done.stderr
        assert SMALL not in installed(tree)


@pytest.fixture(scope="module")
def registry(tmp_path_factory) -> Iterator[tuple[str, Path]]:
    """(host:port, storage folder) of a registry on loopback: one on PATH, or Debian's package."""
    program = shutil.which("docker-registry") or shutil.which("registry")
    if not program:
        kept = paths.cache() / "tests" / "docker-registry"
        program = str(kept / "usr" / "bin" / "docker-registry")
        if not Path(program).is_file():
            folder = tmp_path_factory.mktemp("registry-package")
            script = f"apt-get download docker-registry && dpkg -x *.deb {shlex.quote(str(kept))}"
            try:
                subprocess.run(
                    ["sh", "-c", script], cwd=folder, check=True, capture_output=True, timeout=120
                )
            except (subprocess.SubprocessError, OSError):
                missing(
                    "build", "no registry: docker-registry is not on PATH, nor to be had by apt"
                )
    folder = tmp_path_factory.mktemp("registry")
    storage, log = folder / "storage", folder / "log"
    document = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(storage)}},
        "http": {"addr": "127.0.0.1:0"},
    }
    (folder / "config.yml").write_text(json.dumps(document))
    with log.open("w") as stream:
        process = subprocess.Popen(
            [program, "serve", str(folder / "config.yml")], stdout=stream, stderr=stream
        )
    try:
        match = None
        for _ in range(100):
            match = re.search(r"listening on (127\.0\.0\.1:\d+)", log.read_text())
            if match or process.poll() is not None:
                break
            time.sleep(0.1)
        if not match:
            missing("build", f"{program} does not serve: {log.read_text()[-300:]}")
        with urllib.request.urlopen(f"http://{match[1]}/v2/", timeout=10) as answer:
            assert answer.status == 200
        yield match[1], storage
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
def test_registry(site, signer, keyring, registry, report, tmp_path):
    """A cache in a registry: not signed, whatever is asked for; digests tell damage, nothing tells
    who pushed. README says so."""
    address, storage = registry
    url = f"oci+http://{address}/deepep/h100-site"
    begin = time.monotonic()
    blobs = ["-c", f"config:source_cache:{tmp_path}"]
    checked(site, signer, *blobs, "buildcache", "push", "--update-index", url)
    report("push to registry", f"{time.monotonic() - begin:.0f} s, {megabytes(storage)} MB")

    tree = tree_beside(
        site, site.folder.with_name("oci"), mirrors={"cache": {"url": url, "signed": True}}
    )
    try:
        begin = time.monotonic()
        # A keyring without any key: were manifests signed and verified, this would fail
        checked(tree, keyring("nobody"), "install", "--use-buildcache", "only")
        report("install from registry", f"{time.monotonic() - begin:.0f} s")
        assert installed(tree) == RUNTIME
        loaded = imported(tree, keyring("nobody"))
        assert loaded["deep_ep"].startswith(f"{tree.prefix('py-deep-ep')}/")

        (damaged,) = [
            blob / "data"
            for blob in (storage / "docker/registry/v2/blobs/sha256").glob("*/*")
            if blob.name == digest_in_registry(address, tree, SMALL)
        ]
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
        again = tree_beside(site, tree.folder, mirrors={"cache": url})
        done = run(again, keyring("nobody"), "install", "--use-buildcache", "only", SMALL)
        assert done.returncode != 0
        assert f"{SMALL}@" in done.stdout and "no binary available" in done.stdout
        assert installed(again) == {"python-venv"}
    finally:
        shutil.rmtree(tree.folder, ignore_errors=True)


def digest_in_registry(address: str, tree: Site, name: str) -> str:
    """sha256 of the layer with a package's files."""
    node = tree.nodes()[name]
    tag = f"{name}-{node['version']}-{node['hash']}.spack"
    request = urllib.request.Request(
        f"http://{address}/v2/deepep/h100-site/manifests/{tag}",
        headers={"Accept": "application/vnd.oci.image.manifest.v1+json"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)["layers"][-1]["digest"].removeprefix("sha256:")


def without_override() -> None:
    """Drops what lets root write into read-only folders (PR_CAPBSET_DROP, CAP_DAC_OVERRIDE)."""
    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)


@pytest.mark.slow
def test_shared_tree_is_used_and_not_written(site, second, reader, tmp_path):
    """With upstreams: the packages of a read-only tree are used, and nothing is installed."""
    tree = tree_beside(
        site, tmp_path / "user", upstreams={"site": {"install_tree": str(second.store)}}
    )
    # Of folders only, as if another user's: Spack copies some files of a view, with their modes
    modes = {
        path: path.stat().st_mode
        for path in [second.store, *second.store.rglob("*")]
        if not path.is_symlink() and (path.is_dir() or path.parent.name == ".spack-db")
    }
    try:
        for path, mode in modes.items():
            path.chmod(mode & ~0o222)
        before = state(second.store)
        probe = ["touch", str(second.store / "probe")]
        assert subprocess.run(probe, preexec_fn=without_override, capture_output=True).returncode
        checked(tree, reader, "install", preexec_fn=without_override)
        assert state(second.store) == before
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert not installed(tree)
    prefix = checked(tree, reader, "location", "-i", "py-deep-ep").strip()
    assert prefix == str(second.prefix("py-deep-ep"))
    assert imported(tree, reader)["deep_ep"].startswith(f"{prefix}/")


@pytest.mark.slow
def test_only_what_a_shared_tree_lacks_is_installed(site, cache, reader, tmp_path):
    mirrors = {"cache": cache.as_uri()}
    shared = tree_beside(site, tmp_path / "shared", mirrors=mirrors)
    checked(shared, reader, "install", "--use-buildcache", "only", "python-venv")
    upstreams = {"site": {"install_tree": str(shared.store)}}
    tree = tree_beside(site, tmp_path / "user", mirrors=mirrors, upstreams=upstreams)
    checked(tree, reader, "install", "--use-buildcache", "only", SMALL)
    assert installed(shared) == {"python-venv"}
    assert installed(tree) == {SMALL}


def test_second_install_changes_nothing(site, report):
    """Not a file of the tree is touched; Spack writes the lock anew, with the same content."""
    # The first of this run, if an earlier one left the view to be made
    site.install()
    tree, environment = state(site.store), contents(site.environment)
    assert any(path.endswith("/bin/python3") for path in environment)
    seconds = site.install()
    report("install again", f"{seconds:.1f} s")
    assert state(site.store) == tree
    assert contents(site.environment) == environment
    assert seconds < 20


@pytest.mark.slow
def test_makefile_installs_from_the_cache(site, cache, reader, tmp_path, report):
    """`spack env depfile`: make installs, two packages at a time, and then finds nothing to do."""
    tree = tree_beside(site, site.folder.with_name("mk"), mirrors={"cache": cache.as_uri()})
    try:
        makefile = tmp_path / "Makefile"
        depfile = ["env", "depfile", "--use-buildcache", "only", "-o", str(makefile)]
        checked(tree, reader, *depfile)
        command = [
            "make",
            "-j2",
            "-f",
            str(makefile),
            f"SPACK={shlex.join(tree.spack.command([]))}",
        ]
        environment = {**spack_module.environment(), "SPACK_GNUPGHOME": str(reader)}
        kept = {"env": environment, "capture_output": True, "text": True, "timeout": 600}
        begin = time.monotonic()
        done = subprocess.run(command, **kept)
        report("make from file://", f"{time.monotonic() - begin:.0f} s")
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        assert installed(tree) == RUNTIME
        before = state(tree.store)
        done = subprocess.run(command, **kept)
        assert done.returncode == 0 and "install" not in done.stdout, done.stdout
        assert state(tree.store) == before
    finally:
        shutil.rmtree(tree.folder, ignore_errors=True)
