"""What a rule is: a function of the facts, with the sentences that its finding shows."""

import dataclasses
from typing import Callable, NamedTuple

from ..report import Row

#: What DeepEP is used for. The value is the help of `--for`
CAPABILITIES = {
    "intranode": "dispatch and combine within a node, over NVLink",
    "internode": "dispatch and combine between nodes, over NVSHMEM's IBGDA",
    "low-latency": "the low-latency kernels, over NVSHMEM's IBGDA",
    "hybrid-ep": "HybridEP",
}

ALL = frozenset(CAPABILITIES)
NVSHMEM = frozenset({"internode", "low-latency"})
NETWORK = NVSHMEM
HYBRID = frozenset({"hybrid-ep"})


class Verdict(NamedTuple):
    """Result of a rule; action, where not empty, in place of the rule's."""

    result: str
    found: str
    evidence: str = ""
    action: str = ""
    data: dict = {}


def holds(found, evidence="", **data):
    return Verdict("pass", found, evidence, "", data)


def fails(found, evidence="", action="", **data):
    return Verdict("fail", found, evidence, action, data)


def untold(found, action="", evidence=""):
    return Verdict("skip", found, evidence, action)


def told(found, evidence="", **data):
    return Verdict("info", found, evidence, "", data)


@dataclasses.dataclass(frozen=True)
class Rule:
    """check: "installation: ..." or "node: ..."; needs: the capabilities that it can rule out;
    function(facts) -> Verdict, or None where it does not apply."""

    check: str
    needs: frozenset
    why: str
    reference: str
    action: str
    function: Callable

    def row(self, facts, uses):
        """Its row, None where it does not apply. A failure that none of uses needs is told."""
        verdict = self.function(facts)
        if verdict is None:
            return None
        result, found = verdict.result, verdict.found
        if result == "fail" and not self.needs & uses:
            result, found = (
                "info",
                "{} (of no matter for {})".format(found, ", ".join(sorted(uses))),
            )
        finding = verdict.result == "fail"
        return Row(
            self.check,
            result,
            found,
            evidence=verdict.evidence,
            why=self.why if finding else "",
            reference=self.reference if finding else "",
            action=(verdict.action or self.action) if finding or verdict.action else "",
            data=verdict.data,
        )


class Rules(list):
    """Rules in the order of their definition; a decorator adds one."""

    def rule(self, check, needs, why, action, reference=""):
        def add(function):
            self.append(Rule(check, needs, why, reference, action, function))
            return function

        return add


def section(facts, name):
    """A section of the facts that was collected, else None."""
    found = facts.get(name, {})
    return found if found.get("state") == "ok" else None


#: What to do where a file cannot be read for want of readelf
NO_READELF = "install binutils: readelf reads what is linked, and objdump the code of the host"


def lacks_readelf(found):
    """Whether a section failed because binutils are not installed."""
    return "readelf does not run" in found.get("error", "")


def listed(items):
    return ", ".join(str(item) for item in items)
