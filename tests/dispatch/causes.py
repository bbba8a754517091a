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
        line = _line(cause, text)
        if line:
            return cause, line
    return None, ""


def of_outcome(outcome):
    """(cause, evidence) of a job that failed, else (None, ""). Several ranks' words count: one
    says why, the others that it is gone."""
    for cause in known():
        for rank in outcome.ranks:
            line = _line(cause, rank.output)
            if line:
                return cause, "rank {}: {}".format(rank.rank, line)
    return None, ""


def _line(cause, text):
    """The line of a text that fits a cause, "" if none does."""
    for pattern in cause["patterns"]:
        match = re.search(pattern, text)
        if match:
            start = text.rfind("\n", 0, match.start()) + 1
            end = text.find("\n", match.end())
            return text[start : None if end < 0 else end].strip()
    return ""
