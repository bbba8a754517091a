"""ci/airgap: damaged, cut and hostile archives are refused before anything is written; a real one
is enough on a machine with no network."""

import ast
import copy
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from conftest import missing
from deepep_ci import airgap_pack, airgap_unpack, documents, paths, sources, spack
from deepep_ci.airgap_pack import Member
from deepep_ci.errors import DocumentError, SetupError
from host_site import Unavailable, site_document

UNPACKER = Path(airgap_unpack.__file__)
HEAD = {
    "format": airgap_unpack.FORMAT,
    "environment": "h100-site",
    "created": "2026-01-31T12:00:00Z",
    "project": {"commit": "1" * 40, "dirty": False},
    "spack": {"git": "https://github.com/spack/spack.git", "commit": "2" * 40},
    "spack_packages": {"git": "https://github.com/spack/spack-packages.git", "commit": "3" * 40},
    "wheels": {"python": ["3.10", "3.12"], "machine": "x86_64"},
}


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """A small archive of the real writer; do not write into it."""
    top = tmp_path_factory.mktemp("archive")
    tree = top / "tree"
    contents = {
        "README.md": b"read me\n",
        "ci/check": b"#!/bin/sh\n",
        "patches/one.patch": b"--- a\n+++ b\n",
        "airgap/wheels/one.whl": bytes(range(256)) * 5,
        "airgap/git/empty": b"",
        "airgap/mirror/whole-block": b"x" * 512,
    }
    for name, content in contents.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(content)
    (tree / "ci/check").chmod(0o755)
    (tree / "spack-repo").mkdir()
    (tree / "spack-repo/one.patch").symlink_to("../patches/one.patch")
    members = [
        Member(f"deepep/{path.relative_to(tree)}", path)
        for path in tree.rglob("*")
        if path.is_symlink() or path.is_file()
    ]
    file = top / "small.tar"
    digest = airgap_pack.write(file, HEAD, members)
    assert digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert sorted(p.name for p in top.iterdir()) == ["small.tar", "small.tar.sha256", "tree"]
    return file


@pytest.fixture
def refused(tmp_path):
    """Function (content of FILE, words): unpack refuses it in these words, and writes nothing."""

    def call(content: bytes, *words: str, code: int = 1):
        file = tmp_path / "file.tar"
        file.write_bytes(content)
        done = unpack(file, tmp_path / "below" / "out")
        assert done.returncode == code, done.stdout + done.stderr
        for word in words:
            assert word in done.stderr
        assert "Traceback" not in done.stderr and not done.stdout
        assert [path.name for path in tmp_path.iterdir()] == ["file.tar"]

    return call


def unpack(file: Path, folder: Path, *python: str) -> subprocess.CompletedProcess[str]:
    """What the archive brings, run by a bare Python: no package, no environment variable."""
    command = [sys.executable, "-I", *(python or [str(UNPACKER)]), str(file), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def forged(manifest: object, contents: dict[str, bytes], checksum: bytes | None = None) -> bytes:
    """An archive with a right checksum of whatever manifest."""
    text = json.dumps(manifest).encode()
    first = {"MANIFEST.json": text}
    first["MANIFEST.sha256"] = checksum or airgap_unpack.checksum_line(text)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in {**first, **contents}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def entry(path: str, content: bytes = b"evil\n") -> dict:
    digest = hashlib.sha256(content).hexdigest()
    return {"path": path, "size": len(content), "sha256": digest, "executable": False}


# What is whole


def test_unpack(archive, tmp_path):
    out = tmp_path / "a folder" / "out"
    done = unpack(archive, out)
    assert done.returncode == 0, done.stderr
    assert "ci/check --spack require h100-site" in done.stdout
    tree = archive.parent / "tree"
    expected = {str(path.relative_to(tree)) for path in tree.rglob("*")}
    found = {str(path.relative_to(out)) for path in out.rglob("*")}
    assert found == expected | {"airgap/MANIFEST.json"}
    for path in tree.rglob("*"):
        if path.is_file():
            assert (out / path.relative_to(tree)).read_bytes() == path.read_bytes()
    assert os.access(out / "ci/check", os.X_OK) and not os.access(out / "README.md", os.X_OK)
    assert os.readlink(out / "spack-repo/one.patch") == "../patches/one.patch"
    documents.validated(out / "airgap/MANIFEST.json", "airgap")
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_unpack_with_nothing_but_the_file(archive, tmp_path):
    """README's line for a machine that has FILE, tar and Python."""
    line = f"tar -xOf {archive} unpack.py | {sys.executable} -I - {archive} {tmp_path}/out"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/README.md").read_text() == "read me\n"
    checked = subprocess.run(
        ["sha256sum", "-c", f"{archive.name}.sha256"], cwd=archive.parent, capture_output=True
    )
    assert checked.returncode == 0


def test_unpack_by_the_door_needs_no_virtual_environment(run, archive, tmp_path):
    cache = tmp_path / "cache"
    arguments = ["unpack", str(archive), str(tmp_path / "out")]
    done = run(paths.TOP, "airgap", *arguments, DEEPEP_CACHE=str(cache), DEEPEP_SITE_YAML="/no")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/README.md").is_file() and not cache.exists()


def test_unpack_into_an_empty_folder_and_through_a_link(archive, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    assert unpack(archive, tmp_path / "link").returncode == 0
    assert (tmp_path / "empty/README.md").is_file() and (tmp_path / "link").is_symlink()


def test_any_python_of_such_systems_can_read_the_unpacker():
    ast.parse(UNPACKER.read_text(), feature_version=(3, 6))


# What is damaged


def test_every_byte_is_held(archive):
    """One flipped bit anywhere, in a header, the manifest, a member, the padding or the end."""
    content = bytearray(archive.read_bytes())
    with tarfile.open(archive) as tar:
        unpacker = tar.getmember("unpack.py")
        inner = range(unpacker.offset_data + 9, unpacker.offset_data + unpacker.size - 9)
        headers = {n for m in tar for n in range(m.offset, m.offset_data)}
    # Of what is alike (zeros, the manifest's text) a part will do; of the unpacker its ends
    for offset, byte in enumerate(content):
        if offset in inner or (offset % 7 and (byte == 0 or offset not in headers)):
            continue
        for bit in (0x01, 0x10):
            content[offset] = byte ^ bit
            with pytest.raises(airgap_unpack.Refused) as caught:
                airgap_unpack.verify(io.BytesIO(content), archive)
            assert caught.value.code == 1 and "small.tar" in str(caught.value), offset
        content[offset] = byte
    airgap_unpack.verify(io.BytesIO(content), archive)


@pytest.mark.parametrize(
    "member, words",
    [
        ("MANIFEST.json", "its manifest is damaged"),
        ("MANIFEST.sha256", "its manifest is damaged"),
        ("deepep/airgap/wheels/one.whl", "one.whl is damaged (sha256)"),
    ],
)
def test_flipped_byte(archive, refused, member, words):
    content = bytearray(archive.read_bytes())
    with tarfile.open(archive) as tar:
        content[tar.getmember(member).offset_data + 20] ^= 1
    refused(bytes(content), words, "nothing was written", "sha256sum -c file.tar.sha256")


@pytest.mark.parametrize("where", ["1", "511", "512", "manifest", "member", "last", "end", "-1"])
def test_truncated(archive, refused, where):
    with tarfile.open(archive) as tar:
        members = tar.getmembers()
    length = {
        "manifest": members[0].offset_data + 100,
        "member": members[-3].offset_data + 3,
        "last": members[-1].offset,
        "end": members[-1].offset_data + 512,
    }.get(where) or int(where)
    whole = archive.read_bytes()
    early = where in ("1", "511", "512", "manifest")
    words = "damaged at its beginning" if where in ("1", "511") else "it ends early"
    refused(whole[:length], words, *([] if early else [f"of {len(whole)} bytes"]))


@pytest.mark.parametrize(
    "content",
    [b"", b"text\n" * 500, b"\x1f\x8b" + b"\0" * 2000, b"\0" * 20480],
    ids=["empty", "text", "gzip", "zeros"],
)
def test_not_an_archive(refused, content):
    refused(content, "it is not an archive of ci/airgap")


def test_another_tar(refused):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        tar.add(UNPACKER, "some.py")
    refused(stream.getvalue(), "it is not an archive of ci/airgap")


def test_extra_missing_and_other_members(refused):
    manifest = {**HEAD, "files": [entry("deepep/a"), entry("deepep/b")]}
    evil = {"deepep/a": b"evil\n", "deepep/b": b"evil\n"}
    refused(forged(manifest, {"deepep/x": b"", **evil}), "'deepep/x' is in the place of deepep/a")
    # These fit into the padding of the archive's last record
    refused(forged(manifest, {**evil, "deepep/x": b""}), "something follows the files")
    refused(forged(manifest, {"deepep/a": b"evil\n"}), "deepep/b is missing")
    refused(forged(manifest, {**evil, "deepep/b": b"longer\n"}), "deepep/b is not the file")
    refused(forged(manifest, {**evil, "deepep/b": b"devil"}), "deepep/b is damaged (sha256)")
    refused(forged(manifest, {**evil, "deepep/x": b"0" * 20000}), "it is longer than its manifest")
    refused(forged(manifest, evil, b"0" * 64), "its manifest is damaged")


# What is hostile, or of another version


BAD_FILES = {
    "above": [entry("deepep/../../evil")],
    "beside": [entry("../evil")],
    "absolute": [entry("/tmp/evil")],
    "not below the tree": [entry("evil")],
    "dot": [entry("deepep/./evil")],
    "folder": [entry("deepep/evil/")],
    "manifest": [entry("deepep/airgap/MANIFEST.json")],
    "twice": [entry("deepep/a"), entry("deepep/a")],
    "below a file": [entry("deepep/a"), entry("deepep/a/b")],
    "link away": [{"path": "deepep/evil", "link": "/etc/passwd"}],
    "link up": [{"path": "deepep/evil", "link": "../../etc/passwd"}],
    "link to nothing": [{"path": "deepep/evil", "link": "nothing"}],
    "link to a link": [
        entry("deepep/a"),
        {"path": "deepep/b", "link": "a"},
        {"path": "deepep/c", "link": "b"},
    ],
    "below a link": [
        entry("deepep/a"),
        {"path": "deepep/evil", "link": "a"},
        entry("deepep/evil/b"),
    ],
}


@pytest.mark.parametrize("files", BAD_FILES.values(), ids=BAD_FILES)
def test_hostile_manifest(refused, files):
    contents = {item["path"]: b"evil\n" for item in files}
    refused(forged({**HEAD, "files": files}, contents), "refused for its manifest: ")


def test_link_in_the_place_of_a_file(refused):
    """The manifest is right, the tar is not."""
    stream = io.BytesIO(forged({**HEAD, "files": [entry("deepep/a")]}, {}))
    with tarfile.open(fileobj=stream) as tar:
        offset = tar.getmembers()[-1].offset_data + 512
    info = tarfile.TarInfo("deepep/a")
    info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
    content = bytearray(stream.getvalue())
    content[offset : offset + 512] = info.tobuf(tarfile.USTAR_FORMAT)
    refused(bytes(content), "deepep/a is not the file its manifest lists")


def changes():
    """(what, a manifest that is wrong in it)."""
    good = {**HEAD, "files": [entry("deepep/a")]}
    values = {
        "format": ["deepep-airgap-2", None],
        "environment": ["", "../x", 3],
        "created": ["yesterday", "2026-01-31", None],
        "project": [{}, {"commit": "1", "dirty": True}, {"commit": None, "dirty": 1.5}, []],
        "spack": [
            {"git": "file:///x", "commit": "2" * 40},
            {"git": "https://example/x", "commit": None},
        ],
        "wheels": [{"python": [], "machine": "x"}, {"python": ["2.7"], "machine": "x"}],
        "files": [
            [],
            {},
            ["deepep/a"],
            [{**entry("deepep/a"), "size": -1}],
            [{**entry("deepep/a"), "size": "5"}],
            [{**entry("deepep/a"), "sha256": "5"}],
            [{**entry("deepep/a"), "executable": 1}],
            [{**entry("deepep/a"), "more": 1}],
            [{"path": "deepep/a"}],
        ],
        "more": [1],
    }
    for key, wrong in values.items():
        for number, value in enumerate(wrong):
            yield f"{key}-{number}", {**copy.deepcopy(good), key: value}
    for key in good:
        yield f"no {key}", {k: v for k, v in good.items() if k != key}
    yield "a list", []


def test_schema_and_unpacker_agree(tmp_path):
    """The unpacker has no JSON schema at hand; it must refuse all that the schema refuses."""
    good = {**HEAD, "files": [entry("deepep/a"), {"path": "deepep/b", "link": "a"}]}
    cases = [("good", good), *changes()]
    for what, manifest in cases:
        path = tmp_path / "manifest.json"
        path.write_text(json.dumps(manifest))
        try:
            documents.validated(path, "airgap")
            holds = True
        except DocumentError:
            holds = False
        assert holds == (what == "good"), what
        assert (airgap_unpack.problem_of(manifest) == "") == holds, what


# The folder


def test_folder_that_cannot_be_taken(archive, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("mine")
    for folder, words in {
        full: "is not empty: name a new folder",
        full / "mine": "is not a folder",
        full / "mine" / "below": "name a",
        Path("/proc/no/out"): "name a",
    }.items():
        done = unpack(archive, folder)
        assert done.returncode == 2 and words in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "mine"]


def test_file_that_cannot_be_read(tmp_path):
    for file, words in {tmp_path / "no": "No such file", tmp_path: "Is a directory"}.items():
        done = unpack(file, tmp_path / "out")
        assert done.returncode == 2 and words in done.stderr
        assert "Traceback" not in done.stderr


def test_no_room(archive, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=5 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert airgap_unpack.run(archive, tmp_path / "out") == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(airgap_unpack.Refused, match="0 MB left, 1 MB are needed") as caught:
        airgap_unpack.unpack(archive, tmp_path / "other")
    assert caught.value.code == 2 and not (tmp_path / "other").exists()


@pytest.mark.parametrize("call", ["symlink", "rename"])
def test_killed_while_it_writes(archive, tmp_path, call):
    """No DIR, or all of it: nothing takes half a tree for a whole one."""
    code = (
        "import os, runpy, sys\n"
        f"os.{call} = lambda *arguments: os.kill(os.getpid(), 9)\n"
        f"sys.argv[0] = {str(UNPACKER)!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    out = tmp_path / "out"
    done = unpack(archive, out, "-c", code)
    assert done.returncode == -signal.SIGKILL
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 1 and left[0].startswith(".out.unpacking-")
    done = unpack(archive, out)
    assert done.returncode == 0
    assert f"{left[0]} is left of an interrupted unpack" in done.stderr
    assert (out / "spack-repo/one.patch").is_file()


def test_full_disk(archive, tmp_path, monkeypatch, capsys):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "symlink", full)
    assert airgap_unpack.run(archive, tmp_path / "out") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# Packing


def test_usage(run, tmp_path):
    file = tmp_path / "mine.tar"
    file.write_text("mine")
    for arguments, words in [
        ([], "the following arguments are required: pack | unpack"),
        (["pck"], "invalid choice: 'pck'"),
        (["pack", "h100-site"], "the following arguments are required: FILE"),
        (["unpack", "x"], "the following arguments are required: DIR"),
        (["pack", "nowhere", str(tmp_path / "x.tar")], "no environment nowhere"),
        (["pack", "h100-site", str(file)], "exists and is no archive of ci/airgap"),
        (["pack", "h100-site", str(tmp_path)], "exists and is no archive of ci/airgap"),
        (["pack", "h100-site", str(tmp_path / "no" / "x.tar")], "is no folder"),
    ]:
        done = run(paths.TOP, "airgap", *arguments)
        assert done.returncode == 2, arguments
        assert words in done.stderr and "Traceback" not in done.stderr
    assert file.read_text() == "mine"
    assert run(paths.TOP, "airgap", "--help").returncode == 0


def test_no_archive_without_all_sources(tmp_path, monkeypatch, capsys):
    lost = sources.Source(
        package="lost@1",
        hash="",
        path="_source-cache/archive/00/00.tar.gz",
        url="https://example/lost-1.tar.gz",
        sha256="0" * 64,
        commit=None,
        pypi=False,
    )
    monkeypatch.setattr(airgap_pack, "find", lambda: None)
    monkeypatch.setattr(sources, "needed", lambda *arguments: [lost])
    monkeypatch.setattr(sources, "_mirror_create", lambda *arguments: "")
    file = tmp_path / "x.tar"
    assert airgap_pack.pack("h100-site", file) == 1
    said = capsys.readouterr()
    assert "lost@1: not fetched: https://example/lost-1.tar.gz" in said.err
    assert f"{file} was not written" in said.err
    assert not list(tmp_path.iterdir())


def test_file_that_changes_while_it_is_packed(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.write_text("one")
    real = airgap_pack._add

    def later(tar, created, member, listed):
        source.write_text("two")
        real(tar, created, member, listed)

    monkeypatch.setattr(airgap_pack, "_add", later)
    with pytest.raises(airgap_pack.Incomplete, match=r"deepep/source is damaged"):
        airgap_pack.write(tmp_path / "x.tar", HEAD, [Member("deepep/source", source)])
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_replaces_its_own_archive_only_when_it_is_done(archive, tmp_path):
    file = tmp_path / "x.tar"
    shutil.copy(archive, file)
    airgap_pack._check_target(file)
    member = Member("deepep/a", archive)
    digest = airgap_pack.write(file, HEAD, [member])
    assert (tmp_path / "x.tar.sha256").read_text() == f"{digest}  x.tar\n"
    with pytest.raises(airgap_pack.Incomplete):
        airgap_pack.write(file, HEAD, [Member("../a", archive)])
    assert hashlib.sha256(file.read_bytes()).hexdigest() == digest


def test_project_files(tmp_path, monkeypatch):
    """What git knows, with what a site added to the rooms; no tools' leavings, nor the archive."""
    top = tmp_path / "top"
    for name in ("README.md", "environments/e/site.yaml", "ci/x.pyc", "airgap/big", "notes"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(name)
    (top / ".gitignore").write_text("*.pyc\n")
    monkeypatch.setattr(paths, "TOP", top)
    git = ["git", "-C", str(top), "-c", "user.name=x", "-c", "user.email=x@example"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "README.md", ".gitignore"], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "x"], check=True)
    (top / "environments/e/new.yaml").write_text("new")
    environment = airgap_pack.Environment("e")
    file = top / "environments/x.tar"
    file.write_text("")

    def found():
        return {m.path.removeprefix("deepep/") for m in airgap_pack._project(environment, file)}

    known = {"README.md", ".gitignore", "environments/e/site.yaml", "environments/e/new.yaml"}
    assert found() == known
    assert airgap_pack._state()["dirty"] is True
    site = tmp_path / "my-site.yaml"
    site.write_text("packages: {}\n")
    monkeypatch.setenv("DEEPEP_SITE_YAML", str(site))
    members = {m.path: m.source for m in airgap_pack._project(environment, file)}
    assert members["deepep/environments/e/site.yaml"] == site
    # No git to ask: a tarball of the repository, and what was unpacked from an archive
    shutil.rmtree(top / ".git")
    assert found() == known | {"notes", "ci/x.pyc", "airgap/big"}
    listed = [entry("unpack.py"), entry("deepep/README.md"), entry("deepep/airgap/big")]
    (top / "airgap/MANIFEST.json").write_text(json.dumps({**HEAD, "files": listed}))
    assert found() == known - {".gitignore"} | {"ci/x.pyc"}
    assert airgap_pack._state() == {"commit": "1" * 40, "dirty": None}


# What an unpacked tree finds by itself


@pytest.fixture
def unpacked(tmp_path, monkeypatch):
    """A tree with airgap/git/spack.git and an empty cache. Returns (the commit in it, it)."""
    source = tmp_path / "source"
    git = ["git", "-C", str(source), "-c", "user.name=x", "-c", "user.email=x@example"]
    subprocess.run(["git", "init", "--quiet", str(source)], check=True)
    (source / "file").write_text("content")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "x"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    top = tmp_path / 'a "tree"'
    monkeypatch.setenv("DEEPEP_CACHE", str(tmp_path / "cache"))
    spack.bare(source.as_uri(), commit.strip(), top / "airgap/git/spack.git")
    (top / "airgap/MANIFEST.json").touch()
    monkeypatch.setattr(paths, "TOP", top)
    return commit.strip(), top


def test_pinned_addresses_are_served_by_the_tree(unpacked, tmp_path, monkeypatch, pins):
    commit, top = unpacked
    # The user's own configuration leads to nothing, and asks to be read
    users = tmp_path / "users"
    users.write_text(
        f'[url "file:///nonexistent"]\n  insteadOf = {pins["git"]}\n[user]\n  name = known\n'
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(users))
    target = spack.checkout(pins["git"], commit, tmp_path / "checkout")
    assert (target / "file").read_text() == "content"
    environment = spack.environment()
    said = subprocess.run(
        ["git", "config", "user.name"], env=environment, capture_output=True, text=True
    )
    assert said.stdout == "known\n"
    # A command within another one: what the first one set does not include itself
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", environment["GIT_CONFIG_GLOBAL"])
    shutil.rmtree(target)
    spack.checkout(pins["git"], commit, tmp_path / "checkout")
    # The tree moves
    top.rename(tmp_path / "moved")
    monkeypatch.setattr(paths, "TOP", tmp_path / "moved")
    shutil.rmtree(target)
    spack.checkout(pins["git"], commit, tmp_path / "checkout")
    with pytest.raises(SetupError):
        spack.checkout(pins["git"], "0" * 40, tmp_path / "other")


def test_tree_of_another_user(unpacked, tmp_path, pins):
    """An administrator unpacks, others use it: git refuses a stranger's repository by itself."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files to another user")
    commit, top = unpacked
    for path in [top, *top.rglob("*")]:
        os.chown(path, 12345, 12345)
    spack.checkout(pins["git"], commit, tmp_path / "checkout")


def test_mirror_of_the_tree(unpacked, tmp_path):
    _, top = unpacked
    scope = spack._scope(spack.Spack(tmp_path / "no-spack", "1.1.0", "test"))
    mirrors = json.loads((scope / "mirrors.yaml").read_text())["mirrors"]
    assert mirrors["airgap"]["url"] == (top / "airgap/mirror").as_uri()


def test_a_folder_of_that_name_is_not_an_unpacked_archive(unpacked):
    """Somebody keeps archives in airgap/: addresses are those of the network."""
    _, top = unpacked
    (top / "airgap/MANIFEST.json").unlink()
    assert spack.airgap() is None and "GIT_CONFIG_GLOBAL" not in spack._git_environment()


def test_old_git_is_told(unpacked, tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "git").write_text("#!/bin/sh\necho git version 2.27.0\n")
    (folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    spack._check_git.cache_clear()
    try:
        with pytest.raises(SetupError, match="2.27.0: an unpacked archive .* needs 2.32"):
            spack.environment()
    finally:
        spack._check_git.cache_clear()


def test_wheels_of_the_tree_are_used(run, clone, tmp_path):
    """Not the index that pip is configured for: it is not there."""
    (clone / "airgap/wheels").mkdir(parents=True)
    (clone / "airgap/MANIFEST.json").touch()
    done = run(clone, "check", DEEPEP_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 2
    assert "airgap/wheels is for the Pythons" in done.stderr


def test_markers_are_those_of_each_python():
    """pip asks its own Python's; a requirement may differ between them."""
    oldest, newest = (
        {line.split(" ")[0] for line in airgap_pack._requirements(python)}
        for python in ("3.10", "3.13")
    )
    assert any(name.startswith("tomli==") for name in oldest - newest)
    assert not any(name.startswith("colorama==") for name in oldest | newest)
    assert all("--hash=sha256:" in line for line in airgap_pack._requirements("3.12"))


# The proof: a real archive, where there is no network


@pytest.fixture(scope="module")
def no_route():
    """Function: runs a command with no route to anywhere, an empty home, and a fresh cache."""
    unshare = ["unshare", "--map-root-user", "--net"]
    try:
        done = subprocess.run([*unshare, "true"], capture_output=True, text=True)
        reason = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        reason = str(error)
    if reason:
        missing("airgap", f"no network namespace can be made here: {reason}")

    def call(top: Path, line: str, timeout: float) -> subprocess.CompletedProcess[str]:
        for name in ("home", "tmp"):
            (top / name).mkdir(exist_ok=True)
        base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
        variables = {
            "PATH": os.environ["PATH"],
            "HOME": str(top / "home"),
            # Spack builds there; another install at the same time has the same names
            "TMPDIR": str(top / "tmp"),
            "LANG": "C.UTF-8",
            "DEEPEP_CACHE": str(top / "cache"),
            "DEEPEP_PYTHON": str(base),
        }
        return subprocess.run(
            [*unshare, "bash", "-euc", line],
            env=variables,
            cwd=top,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return call


@pytest.fixture(scope="module")
def packed(pinned_spack, tmp_path_factory):
    """h100-site, really packed."""
    file = tmp_path_factory.mktemp("packed") / "h100-site.tar"
    environment = {k: v for k, v in os.environ.items() if k != "DEEPEP_SITE_YAML"}
    done = subprocess.run(
        [str(paths.CI / "airgap"), "pack", "h100-site", str(file)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode == 1:
        assert not list(file.parent.iterdir())
        missing("sources", f"not all sources can be had: {done.stderr[-600:]}")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in file.parent.iterdir()) == [
        "h100-site.tar",
        "h100-site.tar.sha256",
    ]
    return file


def unpacked_there(no_route, packed: Path, top: Path) -> None:
    line = (
        f"test $(wc -l </proc/net/route) -le 1; sha256sum --quiet -c {packed.name}.sha256; "
        f"tar -xOf {packed.name} unpack.py | $DEEPEP_PYTHON - {packed.name} {top}/deepep"
    )
    done = no_route(top, f"cd {packed.parent}; {line}", 120)
    assert done.returncode == 0, done.stderr
    assert not (top / "cache").exists()


@pytest.mark.spack
@pytest.mark.sources
@pytest.mark.slow
def test_check_with_no_network(packed, no_route, tmp_path):
    unpacked_there(no_route, packed, tmp_path)
    done = no_route(tmp_path, "cd deepep; ci/check --spack require h100-site", 600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 failed, 0 skipped; Spack: " in done.stdout
    assert "Traceback" not in done.stderr
    assert not {".spack", ".cache"} & {path.name for path in (tmp_path / "home").iterdir()}
    # Every source is found before the address that cannot be reached
    done = no_route(tmp_path, "cd deepep; ci/airgap pack h100-site ../again.tar", 300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "again.tar").read_bytes()) > 50_000_000


@pytest.mark.build
@pytest.mark.spack
@pytest.mark.sources
@pytest.mark.slow
def test_install_with_no_network(packed, no_route, tmp_path, cuda_home, nvcc, pytorch):
    """The site writes its versions there, makes its lock, and installs: DeepEP's dependencies, or
    with DEEPEP_TEST_AIRGAP_INSTALL=1 (10 minutes more) all of it, module and import too."""
    try:
        document = site_document(cuda_home, pytorch("3.6.5"))
    except Unavailable as error:
        missing("build", str(error))
    everything = bool(os.environ.get("DEEPEP_TEST_AIRGAP_INSTALL"))
    unpacked_there(no_route, packed, tmp_path)
    site = tmp_path / "deepep/environments/h100-site/site.yaml"
    site.write_text(json.dumps(document, indent=1))
    install = "install" if everything else "install --only dependencies py-deep-ep"
    line = f"cd deepep; ci/lock h100-site; ci/spack -e environments/h100-site {install}"
    done = no_route(tmp_path, line, 3000)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    package, file = ("py-deep-ep", "deep_ep_cpp*.so") if everything else ("nvshmem", "*ibgda.so*")
    line = f"cd deepep; ci/spack -e environments/h100-site location -i {package}"
    done = no_route(tmp_path, line, 300)
    assert done.returncode == 0, done.stderr
    assert list(Path(done.stdout.strip()).rglob(file))
    if everything:
        line = 'eval "$(deepep/ci/spack env activate --sh deepep/environments/h100-site)"; '
        done = no_route(tmp_path, f"{line} python -c 'import deep_ep'", 300)
        assert done.returncode == 0, done.stderr
