"""ci/check: the main job. Do the environments promise, and get, what they should?"""

import argparse
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import expect, pairing, patches, refusals
from .drift import drift
from .environments import Environment, concretize, select
from .errors import DocumentError, SetupError
from .lockfile import Lock
from .progress import step
from .report import Report, Result, print_table, write_json, write_junit
from .spack import Spack, find

#: Checks of every environment, in this order
CHECKS = ("files", "lock", "patches", "pairing", "concretize", "drift")
WITH_SPACK = ("concretize", "drift")

EPILOG = """\
checks of each environment: (files) spack.yaml and expect.json against their schemas; (lock)
spack.lock keeps expect.json's promises; (patches) patch files, index and lock agree; (pairing) the
row of the pairing table it stands on; with Spack: (concretize) a new concretization keeps the
promises and does not drift from the lock. Once: (refusals) what must not concretize does not.
exit codes: 0 all hold, 1 a check failed, 2 set-up or usage"""


def main(arguments: list[str]) -> int:
    """Exit code: 0 all hold, 1 a check failed, 2 set-up or usage."""
    parser = argparse.ArgumentParser(
        prog="ci/check",
        description="Check environments and their locks.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("environments", metavar="ENV", nargs="*", help="default: all")
    parser.add_argument(
        "--spack",
        choices=("auto", "require", "off"),
        default="auto",
        help="use Spack if it can be had (auto), fail without (require), do not try (off)",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report as JSON")
    parser.add_argument("--junit", metavar="FILE", type=Path, help="write it as JUnit XML")
    options = parser.parse_args(arguments)
    chosen = select(options.environments)
    spack, report = _find_spack(options.spack)
    for environment in chosen:
        _check_offline(environment, report)
    refusals_usable = _check_refusal_table(report)
    if spack:
        _check_with_spack(spack, chosen, report)
    _check_refusals(spack if refusals_usable else None, report)
    _skip_the_rest(chosen, report)
    order = [environment.name for environment in chosen] + ["refusals"]
    report.results.sort(key=lambda result: order.index(result.environment))
    print_table(report)
    if options.json:
        write_json(report, options.json)
    if options.junit:
        write_junit(report, options.junit)
    return int(report.failed)


def _find_spack(mode: str) -> tuple[Spack | None, Report]:
    without = "nothing was concretized anew, and no refusal was tried"
    if mode == "off":
        return None, Report("not tried", notes=[f"Spack was not tried (--spack off): {without}."])
    try:
        spack = find()
    except SetupError as error:
        if mode == "require":
            raise
        note = f"Spack could not be had ({error}): {without}."
        return None, Report("could not be had", notes=[note])
    return spack, Report(f"{spack.version}, {spack.origin} {spack.root}")


def _check_offline(environment: Environment, report: Report) -> None:
    name = environment.name

    def document(check: str, read: object) -> object:
        try:
            return read()  # type: ignore[operator]
        except DocumentError as error:
            report.add(name, check, "fail", str(error))
            return None

    spack_yaml = document("files", environment.spack_yaml)
    promises = document("files", environment.expect)
    if spack_yaml is not None and promises is not None:
        report.add(name, "files", "pass", "spack.yaml and expect.json are valid")
    lock = document("lock", environment.lock)
    names = document("patches", patches.names_by_digest)
    if not isinstance(lock, Lock) or promises is None or names is None:
        return
    _report_promises(report, name, "lock", lock, promises, names)
    _check_patches(report, name, lock, names)
    _check_pairing(report, name, lock)


def _report_promises(report, name, check, lock, promises, names, seconds=0.0) -> None:
    broken = expect.problems(lock, promises, names)
    found = "\n".join(broken) or f"{len(lock)} packages keep what expect.json promises"
    report.add(name, check, "fail" if broken else "pass", found, seconds)


def _check_patches(report: Report, name: str, lock: Lock, names: dict[str, str]) -> None:
    broken = patches.problems()
    ours = [p for copies in lock.packages.values() for p in copies if p.namespace == "deepep"]
    applied = [(package, digest) for package in ours for digest in package.patches]
    broken += [
        f"{package.name} in the lock has patch {digest[:12]}..., no file of patches/ has that "
        f"sha256: run ci/lock {name}"
        for package, digest in applied
        if digest not in names
    ]
    found = "\n".join(broken) or ", ".join(names[digest] for _, digest in applied) or "none"
    report.add(name, "patches", "fail" if broken else "pass", found)


def _check_pairing(report: Report, name: str, lock: Lock) -> None:
    try:
        row = pairing.row_of(lock)
    except DocumentError as error:
        report.add(name, "pairing", "fail", str(error))
        return
    deepep = lock.one("py-deep-ep")
    if row is None:
        report.add(name, "pairing", "fail", "its pair is not in ci/pairing.json")
        return
    text, cell = row
    on_purpose = deepep is not None and deepep.variants.get("broken_on_purpose") != "none"
    if cell == "refused" and on_purpose:
        report.add(name, "pairing", "pass", f"{text}, allowed here by broken_on_purpose")
    else:
        report.add(name, "pairing", "fail" if cell == "refused" else "pass", text)


def _check_with_spack(spack: Spack, chosen: list[Environment], report: Report) -> None:
    # The first run of a fresh Spack clones spack-packages and builds indexes: not in parallel
    workers = min(2, os.cpu_count() or 1)
    names = ", ".join(environment.name for environment in chosen)
    with step(f"concretizing {names} with Spack {spack.version}"):
        first = [_concretize(spack, chosen[0])]
        with ThreadPoolExecutor(max_workers=workers) as pool:
            rest = pool.map(lambda environment: _concretize(spack, environment), chosen[1:])
            for results in [*first, *rest]:
                report.results += results


def _check_refusals(spack: Spack | None, report: Report) -> None:
    if spack is None:
        report.add("refusals", "solver", "skip", "not asked: needs Spack and a valid table")
        return
    with step("asking for what must be refused"):
        for refused in refusals.check(spack):
            status = "fail" if refused.problem else "pass"
            text = refused.problem or _shorten(refused.message)
            report.add("refusals", refused.identifier, status, text, refused.seconds)


def _skip_the_rest(chosen: list[Environment], report: Report) -> None:
    """A check that did not run is told as skipped, never left out."""
    done = {(result.environment, result.check) for result in report.results}
    for environment in chosen:
        for check in CHECKS:
            if (environment.name, check) not in done:
                reason = (
                    "needs Spack, and a solution"
                    if check in WITH_SPACK
                    else "needs the files above"
                )
                report.add(environment.name, check, "skip", reason)


def _concretize(spack: Spack, environment: Environment) -> list[Result]:
    name, begin = environment.name, time.monotonic()
    report = Report("")
    try:
        new, _ = concretize(spack, environment)
        seconds = time.monotonic() - begin
        promises, names = environment.expect(), patches.names_by_digest()
        _report_promises(report, name, "concretize", new, promises, names, seconds)
        _check_drift(report, environment, new)
    except DocumentError as error:
        report.add(name, "concretize", "fail", str(error), time.monotonic() - begin)
    return report.results


def _check_drift(report: Report, environment: Environment, new: Lock) -> None:
    changes = drift(environment.lock(), new)
    stale = [change for change in changes if change.kind == "spec"]
    lines = [f"{change.kind}: {change.package}: {change.text}" for change in changes]
    if stale:
        head = f"{len(stale)} changes against spack.lock: run ci/lock {environment.name}"
        report.add(environment.name, "drift", "fail", "\n".join([head, *lines]))
    elif changes:
        head = f"none but of this host or site ({len(changes)})"
        report.add(environment.name, "drift", "pass", "\n".join([head, *lines]))
    else:
        report.add(environment.name, "drift", "pass", "none")


def _check_refusal_table(report: Report) -> bool:
    """Whether the table of refusals can be used; without Spack that is all that can be said."""
    try:
        entries = refusals.table()
    except DocumentError as error:
        report.add("refusals", "table", "fail", str(error))
        return False
    report.add("refusals", "table", "pass", f"{len(entries)} specs that must not concretize")
    return True


def _shorten(message: str, length: int = 110) -> str:
    """The solver's sentence without the list of specs before it."""
    text = message.split("for the following reasons: ")[-1]
    text = re.split(r" required because | 2\. ", text.removeprefix("1. "))[0].strip()
    return text if len(text) <= length else text[: length - 3] + "..."
