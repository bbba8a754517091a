"""Holds the facts of a lock against what its environment promises (expect.json)."""

from fnmatch import fnmatchcase
from typing import Any

from .lockfile import Lock, Package


def problems(lock: Lock, expect: dict[str, Any], patch_names: dict[str, str]) -> list[str]:
    """A sentence for each promise of expect.json that the lock does not keep.

    Args:
        lock: facts of the lock
        expect: valid expect.json
        patch_names: {sha256: file name} of patches/
    """
    found = []
    missing = set(expect["roots"]) - set(lock.roots)
    extra = set(lock.roots) - set(expect["roots"])
    found += [f"{name} is not a root of the lock" for name in sorted(missing)]
    found += [f"root {name} is not expected" for name in sorted(extra)]
    for name, promise in expect["packages"].items():
        found += _package_problems(lock, name, promise, patch_names)
    for name in expect["one_copy"]:
        copies = lock.packages.get(name, [])
        if len(copies) != 1:
            versions = ", ".join(f"{copy.version} ({copy.hash[:7]})" for copy in copies) or "none"
            found.append(f"one {name} was expected, the lock has {len(copies)}: {versions}")
    for name, reason in expect["forbidden"].items():
        if name in lock.packages:
            found.append(f"{name}@{lock.packages[name][0].version} is in the lock: {reason}")
    if len(lock) > expect["max_packages"]:
        found.append(f"{len(lock)} packages, at most {expect['max_packages']} were expected")
    found += [
        f"{package.name} has target {package.target}, {expect['target']} was expected"
        for copies in lock.packages.values()
        for package in copies
        if package.target != expect["target"]
    ]
    return found + [
        f"{package.name}@{package.version} was edited by hand, its hash is not that of its content"
        for copies in lock.packages.values()
        for package in copies
        if not package.intact
    ]


def _package_problems(
    lock: Lock, name: str, promise: dict[str, Any], patch_names: dict[str, str]
) -> list[str]:
    copies = lock.packages.get(name, [])
    if not copies:
        return [f"{name} is not in the lock"]
    return [
        f"{name}: {problem}"
        for package in copies
        for problem in _differences(package, promise, patch_names)
    ]


def _differences(
    package: Package, promise: dict[str, Any], patch_names: dict[str, str]
) -> list[str]:
    found = []
    for key in ("version", "namespace"):
        actual, expected = getattr(package, key), promise.get(key)
        if expected is not None and not fnmatchcase(actual, expected):
            found.append(f"{key} is {actual}, {expected} was expected")
    for variant, expected in promise.get("variants", {}).items():
        actual = package.variants.get(variant)
        if actual != expected:
            found.append(f"variant {variant} is {_text(actual)}, {_text(expected)} was expected")
    if "patches" in promise:
        actual = [patch_names.get(digest, digest[:12] + "...") for digest in package.patches]
        if actual != promise["patches"]:
            found.append(f"patches are {_text(actual)}, {_text(promise['patches'])} were expected")
    if "external" in promise and bool(package.external) != promise["external"]:
        words = {True: "an external", False: "built by Spack"}
        found.append(
            f"is {words[bool(package.external)]}, {words[promise['external']]} was expected"
        )
    for dependency in promise.get("depends_on", []):
        if dependency not in package.dependencies:
            found.append(f"does not depend on {dependency}")
    return found


def _text(value: Any) -> str:
    """A variant's value as people write it."""
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return "[" + ", ".join(str(item) for item in value) + "]"
    return str(value)
