"""Verifies and unpacks an archive of `ci/airgap pack`, with Python's standard library alone.

Runs where nothing of this repository is yet: it is a member of the archive,

    tar -xOf FILE unpack.py | python3 - FILE DIR

and keeps to Python 3.6, the python3 of the oldest systems with H100s. The archive is a plain tar:
MANIFEST.json, its checksum, then exactly the members that the manifest lists, in its order.
"""

import argparse
import hashlib
import json
import os
import posixpath
import re
import shutil
import sys
import tarfile
import tempfile

FORMAT = "deepep-airgap-1"
MANIFEST, MANIFEST_SHA256 = "MANIFEST.json", "MANIFEST.sha256"
#: The member that is this file
UNPACKER = "unpack.py"
#: The folder in the archive whose content becomes DIR
TREE = "deepep"
#: Where the manifest is kept in DIR
KEPT_MANIFEST = "airgap/" + MANIFEST
#: No manifest is longer; what claims to be is damaged
MANIFEST_LIMIT = 16 << 20
BLOCK = tarfile.BLOCKSIZE
NOT_AN_ARCHIVE = "it is not an archive of ci/airgap, or damaged at its beginning"

_COMMIT = r"[0-9a-f]{40}"
#: The manifest's values but for `files`: (path, pattern of a text, what else it may be)
_FIELDS = [
    (("format",), re.escape(FORMAT), ()),
    (("environment",), r"[A-Za-z0-9][A-Za-z0-9._-]*", ()),
    (("created",), r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", ()),
    (("project", "commit"), _COMMIT, (None,)),
    (("project", "dirty"), None, (True, False, None)),
    (("spack", "git"), r"https://\S+", ()),
    (("spack", "commit"), _COMMIT, ()),
    (("spack_packages", "git"), r"https://\S+", ()),
    (("spack_packages", "commit"), _COMMIT, ()),
    (("wheels", "machine"), r"[a-z0-9_]+", ()),
    (("wheels", "python"), None, ()),
]


class Refused(Exception):
    """The archive or the folder is not what it has to be. `code` is the exit code."""

    def __init__(self, text, code=1):
        Exception.__init__(self, text)
        self.code = code


def unpack(file, folder):
    """Verifies all of file, then makes folder of it. Returns the manifest. Raises Refused."""
    # A link to a folder stays one, the folder behind it is filled
    folder = os.path.realpath(str(folder))
    _check_folder(folder)
    try:
        stream = open(str(file), "rb")
    except OSError as error:
        raise Refused("{}: {}".format(file, error.strerror), 2)
    with stream:
        manifest, text = verify(stream, file)
        _check_space(folder, manifest)
        _extract(stream, file, folder, manifest, text)
    return manifest


def verify(stream, file):
    """Holds every byte of an archive against its manifest. Returns the manifest, and its text.

    Raises Refused for anything that is missing, cut, changed, added, or that would leave the tree.
    """
    reader = _Reader(stream, file)
    text = reader.small(MANIFEST)
    listed = reader.small(MANIFEST_SHA256)
    if listed != checksum_line(text):
        raise reader.refused("its manifest is damaged")
    manifest = _parsed(text, reader)
    length = sum(_room(e) for e in [_entry(text), _entry(listed)] + manifest["files"]) + 2 * BLOCK
    length += -length % tarfile.RECORDSIZE
    actual = stream.seek(0, os.SEEK_END)
    if actual != length:
        what = "ends early" if actual < length else "is longer than its manifest says"
        raise reader.refused("it {}: {} of {} bytes".format(what, actual, length))
    reader = _Reader(stream, file)
    reader.small(MANIFEST)
    reader.small(MANIFEST_SHA256)
    for entry in manifest["files"]:
        reader.entry(entry, None)
    reader.end()
    return manifest, text


def is_archive(file):
    """Whether a file begins as an archive of this format does; it may be damaged."""
    try:
        with open(str(file), "rb") as stream:
            reader = _Reader(stream, file)
            return json.loads(reader.small(MANIFEST).decode("utf-8"))["format"] == FORMAT
    except (OSError, Refused, ValueError, KeyError, TypeError, RecursionError):
        return False


def checksum_line(text):
    """The content of MANIFEST.sha256 for a manifest, as sha256sum writes it."""
    return "{}  {}\n".format(hashlib.sha256(text).hexdigest(), MANIFEST).encode("ascii")


def problem_of(manifest):
    """What is wrong with a manifest, in words, or "". The same rules as the JSON schema
    ci/schemas/airgap.schema.json, which is out of reach here, and those it cannot express."""
    if not isinstance(manifest, dict):
        return "it is no JSON object"
    if manifest.get("format") != FORMAT:
        return "its format is {!r}, this can unpack {}".format(manifest.get("format"), FORMAT)
    if set(manifest) != {keys[0] for keys, _, _ in _FIELDS} | {"files"}:
        return "its keys are {}".format(", ".join(sorted(manifest)))
    for group in ("project", "spack", "spack_packages", "wheels"):
        known = {keys[1] for keys, _, _ in _FIELDS if keys[0] == group}
        if not isinstance(manifest[group], dict) or set(manifest[group]) != known:
            return "{} has not exactly the keys {}".format(group, ", ".join(sorted(known)))
    for keys, pattern, others in _FIELDS:
        value = manifest
        for key in keys:
            value = value[key]
        if keys == ("wheels", "python") or any(value is other for other in others):
            continue
        if not pattern or not _matches(pattern, value):
            return "{} is {!r}".format(".".join(keys), value)
    pythons = manifest["wheels"]["python"]
    if not isinstance(pythons, list) or not pythons:
        return "wheels.python is {!r}".format(pythons)
    if not all(_matches(r"3\.\d+", version) for version in pythons):
        return "wheels.python is {!r}".format(pythons)
    if not isinstance(manifest["files"], list) or not manifest["files"]:
        return "files is no list"
    return _problem_of_files(manifest["files"])


def _problem_of_files(files):
    regular, links = set(), {}
    for entry in files:
        keys = set(entry) if isinstance(entry, dict) else set()
        path = entry["path"] if "path" in keys else None
        if not _is_inside(path):
            return "a file is {!r}, outside of the tree".format(path)
        if path in regular or path in links:
            return "{} is listed twice".format(path)
        if keys == {"path", "link"}:
            links[path] = entry["link"]
        elif (
            keys == {"path", "size", "sha256", "executable"}
            and type(entry["size"]) is int
            and entry["size"] >= 0
            and isinstance(entry["executable"], bool)
            and _matches(r"[0-9a-f]{64}", entry["sha256"])
        ):
            regular.add(path)
        else:
            return "the entry of {} is damaged".format(path)
    for path, target in links.items():
        # Only to a file of the archive: a link can then lead nowhere else
        joined = posixpath.join(posixpath.dirname(path), str(target))
        if posixpath.isabs(str(target)) or posixpath.normpath(joined) not in regular:
            return "{} is a link to {!r}, which is no file of the archive".format(path, target)
    for path in [*regular, *links]:
        above = posixpath.dirname(path)
        while above:
            if above in regular or above in links:
                return "{} is listed below {}, which is no folder".format(path, above)
            above = posixpath.dirname(above)
    return ""


def _matches(pattern, value):
    return isinstance(value, str) and re.match("(?:{})\\Z".format(pattern), value) is not None


def _is_inside(path):
    """Whether a member may be named so: the unpacker, or a plain relative path in the tree."""
    if path == UNPACKER:
        return True
    if not isinstance(path, str) or not path.startswith(TREE + "/") or "\0" in path:
        return False
    parts = path.split("/")
    return not {"", ".", ".."} & set(parts) and path != TREE + "/" + KEPT_MANIFEST


def _parsed(text, reader):
    try:
        manifest = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        raise reader.refused("its manifest is not JSON")
    problem = problem_of(manifest)
    if problem:
        raise Refused("{}: refused for its manifest: {}".format(reader.file, problem))
    return manifest


def _entry(text):
    return {"size": len(text)}


def _room(entry):
    """Bytes that a member takes in the tar: a header, and its content in whole blocks."""
    return BLOCK + -(-entry.get("size", 0) // BLOCK) * BLOCK


class _Reader:
    """Reads a tar member by member; tarfile itself would follow extensions and skip damage."""

    def __init__(self, stream, file):
        self.stream = stream
        self.file = file
        stream.seek(0)

    def refused(self, what):
        return Refused(
            "{}: {}; nothing was written. Copy it again, and hold the copy against its checksum: "
            "sha256sum -c {}.sha256".format(self.file, what, os.path.basename(str(self.file)))
        )

    def small(self, name):
        """The content of the next member, which has to be a short one of this name."""
        header = self._header(name)
        if header.type != tarfile.REGTYPE or header.size > MANIFEST_LIMIT:
            raise self.refused(NOT_AN_ARCHIVE)
        text = self.stream.read(header.size)
        self._rest(header.size, len(text), name)
        return text

    def entry(self, entry, target):
        """Reads the next member, which has to be this entry; writes it to the path target."""
        name = entry["path"]
        header = self._header(name)
        kind = tarfile.SYMTYPE if "link" in entry else tarfile.REGTYPE
        size = entry.get("size", 0)
        if (header.type, header.size) != (kind, size) or header.linkname != entry.get("link", ""):
            raise self.refused("{} is not the file its manifest lists".format(name))
        if kind == tarfile.SYMTYPE:
            if target:
                os.symlink(entry["link"], target)
            return
        if bool(header.mode & 0o100) != entry["executable"]:
            raise self.refused("{} has another mode than its manifest lists".format(name))
        digest, left = hashlib.sha256(), size
        out = open(target, "wb") if target else None
        try:
            while left:
                chunk = self.stream.read(min(left, 1 << 20))
                if not chunk:
                    break
                digest.update(chunk)
                left -= len(chunk)
                if out:
                    out.write(chunk)
        finally:
            if out:
                out.close()
        self._rest(size, size - left, name)
        if digest.hexdigest() != entry["sha256"]:
            raise self.refused("{} is damaged (sha256)".format(name))
        if target and entry["executable"]:
            os.chmod(target, os.stat(target).st_mode | (os.stat(target).st_mode & 0o444) >> 2)

    def end(self):
        """The end of the archive: zeros, and nothing more."""
        if self.stream.read(2 * tarfile.RECORDSIZE).strip(b"\0"):
            raise self.refused("something follows the files that its manifest lists")

    def _header(self, name):
        block = self.stream.read(BLOCK)
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
            # Its checksum says nothing of its own bytes
            if block[148:156] != b"%06o\0 " % header.chksum:
                raise ValueError
        except (tarfile.HeaderError, ValueError):
            if name in (MANIFEST, MANIFEST_SHA256):
                raise self.refused(NOT_AN_ARCHIVE)
            raise self.refused("{} is missing or damaged (tar header)".format(name))
        if header.name != name:
            if name in (MANIFEST, MANIFEST_SHA256):
                raise Refused("{}: it is not an archive of ci/airgap".format(self.file))
            raise self.refused(
                "{!r} is in the place of {}: it is not listed there".format(header.name, name)
            )
        return header

    def _rest(self, size, found, name):
        padding = self.stream.read(-size % BLOCK)
        if found < size or len(padding) < -size % BLOCK:
            raise self.refused("it ends early, within {}".format(name))
        if padding.strip(b"\0"):
            raise self.refused("it is damaged behind {}".format(name))


def _check_folder(folder):
    if os.path.lexists(folder):
        if not os.path.isdir(folder):
            raise Refused("{} is not a folder: name another".format(folder), 2)
        if os.listdir(folder):
            raise Refused("{} is not empty: name a new folder".format(folder), 2)


def _above(folder):
    """The nearest folder above that exists."""
    above = os.path.dirname(folder)
    while not os.path.isdir(above):
        above = os.path.dirname(above)
    return above


def _check_space(folder, manifest):
    # A file takes whole blocks of the file system, some need more than one inode's worth
    needed = sum(entry.get("size", 0) + 4096 for entry in manifest["files"])
    above = _above(folder)
    if not os.access(above, os.W_OK | os.X_OK):
        raise Refused("cannot write to {}: name another folder".format(above), 2)
    free = shutil.disk_usage(above).free
    if free < needed:
        raise Refused(
            "{} has {} MB left, {} MB are needed: make room, or name a folder elsewhere".format(
                above, free >> 20, (needed >> 20) + 1
            ),
            2,
        )


def _extract(stream, file, folder, manifest, text):
    """Writes the tree beside folder and renames it; what is read is verified once more."""
    parent, name = os.path.split(folder)
    prefix = ".{}.unpacking-".format(name)
    fresh = None
    try:
        os.makedirs(parent, exist_ok=True)
        for other in sorted(os.listdir(parent)):
            if other.startswith(prefix):
                print(
                    "ci/airgap: {} is left of an interrupted unpack, or another is under way: "
                    "remove it if not".format(os.path.join(parent, other)),
                    file=sys.stderr,
                )
        fresh = tempfile.mkdtemp(prefix=prefix, dir=parent)
        # mkdtemp keeps others out; the tree is as open as the user's umask says
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(fresh, 0o777 & ~umask)
        reader = _Reader(stream, file)
        reader.small(MANIFEST)
        reader.small(MANIFEST_SHA256)
        for entry in manifest["files"]:
            if not entry["path"].startswith(TREE + "/"):
                reader.entry(entry, None)
                continue
            target = os.path.join(fresh, *entry["path"].split("/")[1:])
            os.makedirs(os.path.dirname(target), exist_ok=True)
            reader.entry(entry, target)
        kept = os.path.join(fresh, *KEPT_MANIFEST.split("/"))
        os.makedirs(os.path.dirname(kept), exist_ok=True)
        with open(kept, "wb") as out:
            out.write(text)
        # Replaces an empty folder, and nothing else
        os.rename(fresh, folder)
    except OSError as error:
        reason = error.strerror or error
        raise Refused("cannot unpack to {}: {}: name a folder elsewhere".format(folder, reason), 2)
    finally:
        if fresh and os.path.isdir(fresh):
            shutil.rmtree(fresh, ignore_errors=True)


def run(file, folder, name="ci/airgap"):
    """Unpacks and reports. Exit code: 0 done, 1 the archive is refused, 2 usage or set-up."""
    try:
        manifest = unpack(file, folder)
    except Refused as error:
        print("{}: {}".format(name, error), file=sys.stderr)
        return error.code
    except OSError as error:
        print(
            "{}: cannot read {}: {}".format(name, file, error.strerror or error), file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        print("{}: interrupted; nothing was unpacked".format(name), file=sys.stderr)
        return 130
    size = sum(entry.get("size", 0) for entry in manifest["files"])
    environment = manifest["environment"]
    print(
        "{}: {} of {} ({} files, {} MB, all verified) is in {}. There, with no network:\n"
        "  ci/check --spack require {}\n"
        "  ci/spack -e environments/{} install".format(
            file, environment, manifest["created"], len(manifest["files"]), size // 1000000,
            folder, environment, environment,
        )
    )  # fmt: skip
    return 0


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="unpack.py",
        description="Verify an archive of ci/airgap, and unpack it into a new folder.",
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("folder", metavar="DIR", help="must not exist, or be empty")
    options = parser.parse_args(arguments)
    return run(options.file, options.folder, parser.prog)


if __name__ == "__main__":
    sys.exit(main())
