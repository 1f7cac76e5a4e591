r"""Where in a response the answer stands. Pure functions of text, each linear in its length.

Each rule gives the text it points at, or None where there is none: no `=`, no complete `\boxed`, another format.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping

from halfmatch.config import GradingRule

# A response ends with its answer, so only this many last characters are searched (32K tokens are about 130,000).
SEARCHED_CHARACTERS = 1_000_000
# What is longer is no answer (the longest of MATH's perfectible set has 209 characters), and parsers are not linear.
LONGEST_ANSWER = 2000

_BRACES = re.compile(r"\\+(?:boxed|fbox)\s*(\{)|\\.|[{}]", re.DOTALL)
_SIGN = r"(?:(?<![\w)\]}])[-−+])?\$?"
_WHOLE = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(rf"{_SIGN}(?:{_WHOLE}(?:\.\d+)?(?:/\d+)?|(?<!\w)\.\d+)", re.ASCII)


def after_last_equals(response: str) -> str | None:
    """The text after the last `=`: the answer of the built-in products."""
    _, equals, answer = response.rpartition("=")
    return answer.strip() if equals else None


def last_boxed(response: str) -> str | None:
    r"""The content of the last complete `\boxed{…}`, which may hold braces and other boxes; of nested boxes the inner.

    A box that is never closed is none. `\fbox` is read as `\boxed`; an escaped brace is no brace.
    """
    response = response[-SEARCHED_CHARACTERS:]
    opened: list[int | None] = []  # for each open brace, where the content of its box begins; None where it is no box's
    last: tuple[int, int] | None = None
    for token in _BRACES.finditer(response):
        if token[1]:
            opened.append(token.end())
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened:
            begin = opened.pop()
            if begin is not None and (last is None or begin > last[0]):
                last = (begin, token.start())
    return response[slice(*last)].strip() if last else None


def boxed_after_thinking(response: str) -> str | None:
    r"""The last complete `\boxed{…}` after the only `</think>`: the format of DeepSeek R1 [released scripts]."""
    if response.count("</think>") != 1:
        return None
    return last_boxed(response.partition("</think>")[2])


def last_number(response: str) -> str | None:
    """The last number: a sign, thousands separators, a decimal part and a denominator belong to it."""
    found = deque(_NUMBER.finditer(response[-SEARCHED_CHARACTERS:]), maxlen=1)
    return found[0][0] if found else None


RULES: Mapping[GradingRule, Callable[[str], str | None]] = {
    "exact": after_last_equals,
    "boxed": last_boxed,
    "r1": boxed_after_thinking,
    "last-number": last_number,
}


def extract(response: str, rule: GradingRule) -> str | None:
    """The answer of a response under a rule; None where the response has none."""
    answer = RULES[rule](response)
    return answer if answer and len(answer) <= LONGEST_ANSWER else None
