"""Which rows of a source become problems, and why the others do not."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from halfmatch.config import GradingRule
from halfmatch.problems.sources import Row

_SHOWN_CHARACTERS = 200


def screen(rows: Sequence[Row], rule: GradingRule | None) -> tuple[list[Row], list[dict[str, Any]]]:
    """The rows that are problems, and a row of the table of exclusions for each other one.

    Left out are rows without a problem or an answer, problems that are given different answers, all but the first of
    equal rows and, where a rule is given, answers that nothing can be compared with under it.
    """
    reasons: dict[int, str] = {}
    reasons.update(_empty(rows))
    reasons.update(_conflicting_or_repeated([row for row in rows if row.number not in reasons]))
    if rule is not None:
        reasons.update(_unreadable([row for row in rows if row.number not in reasons], rule))
    kept = [row for row in rows if row.number not in reasons]
    excluded = [
        {"row": row.number, "reason": reasons[row.number], "problem": row.problem}
        for row in rows
        if row.number in reasons
    ]
    return kept, excluded


def summary(excluded: Iterable[Mapping[str, Any]]) -> str:
    """How many rows were left out for which kind of reason, in a line: "2 repeated, 1 empty answer"."""
    kinds = Counter(row["reason"].partition(":")[0] for row in excluded)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "none"


def _empty(rows: Iterable[Row]) -> dict[int, str]:
    return {
        row.number: "empty answer" if row.problem.strip() else "empty problem"
        for row in rows
        if not (row.problem.strip() and row.answer)
    }


def _conflicting_or_repeated(rows: Iterable[Row]) -> dict[int, str]:
    """Rows whose problem stands in other rows as well; blanks do not make a problem another one."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[" ".join(row.problem.split())].append(row)
    reasons: dict[int, str] = {}
    for group in groups.values():
        first, *others = group
        if all(other.answer == first.answer for other in others):
            reasons.update({other.number: f"repeated: the same as row {first.number}" for other in others})
        else:
            answers = ", ".join(f"{_shown(row.answer)} in row {row.number}" for row in group)
            reasons.update({row.number: f"conflicting answers: {answers}" for row in group})
    return reasons


def _unreadable(rows: Iterable[Row], rule: GradingRule) -> dict[int, str]:
    from halfmatch.grading import Grader

    with Grader(rule) as grader:
        readable = {answer: grader.parses(answer) for answer in dict.fromkeys(row.answer for row in rows)}
    return {
        row.number: f"unreadable answer: {_shown(row.answer)} under the rule {rule}"
        for row in rows
        if not readable[row.answer]
    }


def _shown(answer: str) -> str:
    """An answer in a reason, cut: it may be megabytes of text."""
    return repr(answer) if len(answer) <= _SHOWN_CHARACTERS else f"{answer[:_SHOWN_CHARACTERS]!r}…"
