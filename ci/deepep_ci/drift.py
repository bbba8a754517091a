"""What changed between two locks of one environment, sorted by whether it matters."""

from dataclasses import dataclass

from .lockfile import Lock, Package


@dataclass(frozen=True)
class Drift:
    """One difference between a committed lock and a new concretization.

    kind: "spec" (the environment says something else now: the lock is stale), "host" (another
    operating system or compiler), or "site" (another external of the site).
    """

    kind: str
    package: str
    text: str


def drift(old: Lock, new: Lock) -> list[Drift]:
    """All differences, sorted by package."""
    found = []
    for name in sorted(old.packages.keys() | new.packages.keys()):
        before, after = old.packages.get(name, []), new.packages.get(name, [])
        if len(before) == len(after):
            for one, other in zip(before, after):
                found += _changes(one, other)
        else:
            kind = "host" if (before or after)[0].host_specific else "spec"
            found.append(Drift(kind, name, f"{_versions(before)} -> {_versions(after)}"))
    return found


def _versions(copies: list[Package]) -> str:
    return " and ".join(package.version for package in copies) or "absent"


def _changes(old: Package, new: Package) -> list[Drift]:
    site = bool(old.external and new.external)
    kind = "host" if new.host_specific else "site" if site else "spec"
    found = []
    for key in ("version", "namespace", "target"):
        one, other = getattr(old, key), getattr(new, key)
        if one != other:
            found.append(Drift(kind, new.name, f"{key} {one} -> {other}"))
    for name in sorted(old.variants.keys() | new.variants.keys()):
        one, other = old.variants.get(name), new.variants.get(name)
        if one != other:
            found.append(Drift(kind, new.name, f"variant {name} {one} -> {other}"))
    if old.patches != new.patches:
        found.append(Drift(kind, new.name, f"patches {_short(old)} -> {_short(new)}"))
    if old.external != new.external:
        text = f"prefix {old.external or 'built'} -> {new.external or 'built'}"
        found.append(Drift(kind, new.name, text))
    if old.os != new.os:
        found.append(Drift("host", new.name, f"os {old.os} -> {new.os}"))
    if old.package_hash != new.package_hash and not found:
        found.append(Drift(kind, new.name, "recipe, source or patch file changed"))
    return found


def _short(package: Package) -> str:
    return "[" + ", ".join(digest[:7] for digest in package.patches) + "]"
