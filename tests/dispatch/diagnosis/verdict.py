"""Facts -> rows: first what fails, at the end what can work."""

from ..report import Row
from . import installation, machine
from .rule import ALL, CAPABILITIES

RULES = installation.RULES + machine.RULES


def wanted(facts, named):
    """The capabilities that are looked at: the named one, or all that this build has."""
    if named:
        return frozenset({named})
    return ALL if facts["hybrid"]["state"] != "absent" else ALL - {"hybrid-ep"}


def rows(facts, named=None):
    """Rows of all rules, and one for each capability; named is one of CAPABILITIES, or None."""
    uses = wanted(facts, named)
    made = [(rule, rule.row(facts, uses)) for rule in RULES]
    made = [(rule, row) for rule, row in made if row]
    # Of one kind in the order of the rules; findings first, for the reader at night
    found = sorted((row for _, row in made), key=lambda row: row.result != "fail")
    return found + [_capability(name, made, facts) for name in CAPABILITIES if name in uses]


def of_file(facts):
    """Rows on an extension alone."""
    made = [RULES_OF_FILE[name].row(facts, ALL) for name in RULES_OF_FILE]
    return sorted((row for row in made if row), key=lambda row: row.result != "fail")


#: What can be told of a file, without a process
RULES_OF_FILE = {
    rule.function.__name__: rule
    for rule in RULES
    if rule.function.__name__
    in ("readable", "compiled", "links", "releases", "lookup", "device_code")
}


def _capability(name, made, facts):
    check = "can work: {}".format(name)
    concerns = [(rule, row) for rule, row in made if name in rule.needs]
    failed = [row.check for _, row in concerns if row.result == "fail"]
    if name == "hybrid-ep" and facts["hybrid"]["state"] == "absent":
        failed.append("no hybrid_ep_cpp in this Python")
    if failed:
        return Row(check, "fail", "no: {}".format(", ".join(failed)))
    unknown = [row.check for _, row in concerns if row.result == "skip"]
    if unknown:
        return Row(check, "skip", "cannot be told: {}".format(", ".join(unknown)))
    return Row(check, "pass", "nothing found that speaks against it")
