"""Which known cause fits what ranks printed (known_causes.json)."""

import json
import re
from pathlib import Path

TABLE = Path(__file__).with_name("known_causes.json")


def known():
    """The table's causes: dicts with name, patterns, cause, reference, action."""
    return json.loads(TABLE.read_text(encoding="utf-8"))["causes"]


def find(text):
    """(cause, line that shows it) of the first that fits a text, else (None, "")."""
    for cause in known():
        for pattern in cause["patterns"]:
            match = re.search(pattern, text)
            if match:
                start = text.rfind("\n", 0, match.start()) + 1
                end = text.find("\n", match.end())
                return cause, text[start : None if end < 0 else end].strip()
    return None, ""


def of_outcome(outcome):
    """(cause, evidence) of a job that failed. Several ranks' words count: one says why, the
    others that it is gone."""
    for cause, line, rank in sorted(
        ((*find(rank.output), rank.rank) for rank in outcome.ranks),
        key=lambda found: _order(found[0]),
    ):
        if cause is not None:
            return cause, "rank {}: {}".format(rank, line)
    return None, ""


def _order(cause):
    names = [entry["name"] for entry in known()]
    return names.index(cause["name"]) if cause else len(names)
