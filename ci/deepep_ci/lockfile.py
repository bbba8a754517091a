"""Reads spack.lock and projects it to the facts that expectations and drift speak of."""

import base64
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .documents import load_json, shown, validate
from .errors import DocumentError

#: What the tested Spacks write: 6, or 7 when an environment uses groups of specs
LOCKFILE_VERSIONS = (6, 7)

#: Entries of a node's parameters that are not variants
_FLAGS = {"cflags", "cppflags", "cxxflags", "fflags", "ldflags", "ldlibs", "patches"}

#: Packages that stand for the machine that concretized, not for a choice of the environment
HOST_PACKAGES = {"gcc", "gcc-runtime", "glibc", "musl", "llvm", "compiler-wrapper"}


@dataclass(frozen=True)
class Package:
    """Facts of one concrete spec of a lock."""

    name: str
    version: str
    namespace: str
    #: variant -> True, False, a string, or a sorted list of strings
    variants: dict[str, Any]
    #: sha256 of each applied patch, in the order of application
    patches: tuple[str, ...]
    target: str
    #: Host-specific: operating system of the machine that concretized
    os: str
    #: Prefix of an external, None for what Spack builds. Host- or site-specific
    external: str | None
    #: Digest of the recipe, its sources and patches; None for externals
    package_hash: str | None
    hash: str
    #: name -> hash of direct dependencies; language -> compiler for %c and the like
    dependencies: dict[str, str]
    root: bool
    #: Whether the hash is that of the content: False for a lock somebody edited
    intact: bool

    @property
    def host_specific(self) -> bool:
        return self.name in HOST_PACKAGES


@dataclass(frozen=True)
class Lock:
    """A lock's facts: root specs as written, and every package by name."""

    path: Path
    roots: dict[str, str]
    packages: dict[str, list[Package]]

    def one(self, name: str) -> Package | None:
        """The package of that name, or None if the lock has none. For single copies."""
        found = self.packages.get(name, [])
        return found[0] if found else None

    def __len__(self) -> int:
        return sum(len(copies) for copies in self.packages.values())


def read_lock(path: Path) -> Lock:
    """Facts of a spack.lock. Raises DocumentError if it is none that we can read."""
    return lock_from(load_json(path), path)


def lock_from(document: Any, path: Path) -> Lock:
    """Facts of a lock's document; path serves for messages."""
    meta = document.get("_meta", {}) if isinstance(document, dict) else {}
    version = meta.get("lockfile-version") if isinstance(meta, dict) else None
    if version not in LOCKFILE_VERSIONS:
        known = " or ".join(str(v) for v in LOCKFILE_VERSIONS)
        raise DocumentError(
            f"{shown(path)}: $._meta.lockfile-version is {json.dumps(version)}, {known} was "
            f"expected; write it anew: ci/lock {path.parent.name}"
        )
    validate(document, "lock", path)
    nodes = document["concrete_specs"]
    roots = {root["hash"]: root["spec"] for root in document["roots"]}
    _check_edges(roots, nodes, path)
    packages: dict[str, list[Package]] = {}
    for digest, node in nodes.items():
        packages.setdefault(node["name"], []).append(_package(digest, node, digest in roots))
    for copies in packages.values():
        copies.sort(key=lambda package: (package.version, package.hash))
    return Lock(path, {nodes[digest]["name"]: spec for digest, spec in roots.items()}, packages)


def _check_edges(roots: dict[str, str], nodes: dict[str, Any], path: Path) -> None:
    for digest in roots:
        if digest not in nodes:
            raise DocumentError(f"{shown(path)}: root {digest} is not among $.concrete_specs")
    for digest, node in nodes.items():
        if node["hash"] != digest:
            raise DocumentError(
                f"{shown(path)}: $.concrete_specs.{digest}.hash is {node['hash']}, not its key"
            )
        for dependency in node.get("dependencies", []):
            if dependency["hash"] not in nodes:
                raise DocumentError(
                    f"{shown(path)}: {node['name']} depends on {dependency['name']} "
                    f"{dependency['hash']}, which is not among $.concrete_specs"
                )


def _package(digest: str, node: dict[str, Any], root: bool) -> Package:
    parameters = node.get("parameters", {})
    target = node["arch"]["target"]
    external = node.get("external")
    return Package(
        name=node["name"],
        version=node["version"],
        namespace=node["namespace"],
        variants={
            name: sorted(value) if isinstance(value, list) else value
            for name, value in parameters.items()
            if name not in _FLAGS
        },
        patches=tuple(node.get("patches", ())),
        target=target if isinstance(target, str) else target["name"],
        os=node["arch"]["platform_os"],
        external=external["path"] if external else None,
        package_hash=node.get("package_hash"),
        hash=digest,
        dependencies={d["name"]: d["hash"] for d in node.get("dependencies", [])},
        root=root,
        # Spack 1.1 and 1.3 hash externals differently, and all else the same
        intact=external is not None or _hash_of(node) == digest,
    )


def _hash_of(node: dict[str, Any]) -> str:
    """Spack's DAG hash of a node: SHA-1 of its JSON without the hash itself, in base 32."""
    content = {key: value for key, value in node.items() if key != "hash"}
    text = json.dumps(content, separators=(",", ":"))
    return base64.b32encode(hashlib.sha1(text.encode()).digest()).decode().lower()
