r"""Whether an answer and a gold answer are the same: math-verify, and what has to be put right before and after it.

Imported in grading processes only: it may take any time and memory, and is killed when it does (see `process`).
"""

from __future__ import annotations

import logging
import re
from importlib import metadata
from typing import Any, Literal

from latex2sympy2_extended import is_expr_of_only_symbols
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Eq, Float, MatrixBase

from halfmatch.errors import UserError

# math-verify warns that its own time limit is off. It is: an alarm needs the main thread, and does not stop C code.
logging.getLogger("math_verify").setLevel(logging.ERROR)

Judgement = Literal["correct", "wrong", "unparseable"]

VERSIONED = ("math-verify", "latex2sympy2_extended", "sympy")

# Answers, gold answers, and what a working grader says of them.
KNOWN: tuple[tuple[str, str, Judgement], ...] = (
    ("0.5", r"\frac{1}{2}", "correct"),
    (r"\frac{2}{3}", r"\frac{1}{2}", "wrong"),
    (r"(3, \frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)", "correct"),
    ("[3,4)", "(3,4]", "wrong"),
    (r"\{2, 1\}", r"\{1,2\}", "correct"),
    (r"\text{even}", r"\text{odd}", "wrong"),
    ("2(k+1)", "2k+2", "correct"),
    (r"\undefined{2}", "5", "unparseable"),
)


# ------------------------------------------------------------------------------------------------- before math-verify
_SYMBOLS = str.maketrans({"−": "-", "°": r"^\circ", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty "})
_DELIMITERS = re.compile(r"^(?:\$+|\\[(\[])|(?:\$+|\\[)\]])$")
_SIZES = re.compile(r"\\(?:left|right)(?:\.|(?![A-Za-z]))")
_BLANK = r"\s|\\[ ,;:!]"
_BEGINNING = re.compile(rf"^(?:{_BLANK}|=|\\approx(?![A-Za-z]))+")
_END = re.compile(rf"(?:[.,;]|{_BLANK}|\\$)+$")
_THOUSANDS = re.compile(r"(?<=\d)(?:,\s*\\!|\{,\}|\\,)\s*(?=\d{3}(?!\d))")
_BRACED_THOUSANDS = re.compile(r"(?<=\{)\d{1,3}(?:,\d{3})+(?=\})")
_BLANKS_INSIDE = re.compile(r"(?<!\\)\\[ ,;:]|\s+")
_REPEATING = re.compile(r"(\d+)\.(\d*)\\overline\{(\d+)\}")
_COMMAND_ABOVE = re.compile(r"\\[dtc]?frac\s*(\\[A-Za-z]+)\s*(?:(\w)|(?=\{))")
_COMMAND_BELOW = re.compile(r"(\\[dtc]?frac\s*(?:\d|\{[^{}]*\}))\s*(\\[A-Za-z]+)(?!\s*[\[{A-Za-z])")


def tidy(text: str) -> str:
    r"""An answer as math-verify can read it.

    Left alone, it cannot read `\frac{1}{20,\!000}`, `90°`, `30^\circ.`, `\frac\pi 2` and `0.\overline{3}`, and takes
    `10\,080` for 90.
    """
    text = _SIZES.sub("", text.translate(_SYMBOLS).replace("**", "^"))
    text = _END.sub("", _BEGINNING.sub("", _DELIMITERS.sub("", text.strip())))
    text = _BLANKS_INSIDE.sub(" ", _THOUSANDS.sub("", text).replace(r"\!", ""))
    text = _BRACED_THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    text = _COMMAND_ABOVE.sub(lambda part: rf"\frac{{{part[1]}}}" + (f"{{{part[2]}}}" if part[2] else ""), text)
    return _REPEATING.sub(_as_fraction, _COMMAND_BELOW.sub(r"\1{\2}", text))


def _as_fraction(decimal: re.Match[str]) -> str:
    """A repeating decimal as a fraction: 0.1(6) is (16 - 1) / 90."""
    whole, fixed, repeated = decimal.groups()
    numerator = int(whole + fixed + repeated) - int(whole + fixed)
    return rf"\frac{{{numerator}}}{{{10 ** len(fixed) * (10 ** len(repeated) - 1)}}}"


_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox)\s*\{([^{}]*)\}")
_ONLY_TEXT = re.compile(rf"\(?\s*{_TEXT.pattern}\s*\)?")
_WORDS = re.compile(r"[A-Za-z][A-Za-z0-9,'-]*")
_TIME_OF_DAY = re.compile(r"(\d{1,2}(?::\d{2}){1,2})(?:([ap])\.?m\.?)?")
_BASE = re.compile(r"-?[0-9A-Za-z]+_\{?(\d+)\}?")
_LIST_OF_LETTERS = re.compile(r"[a-z](?:,[a-z])+")


def _unwrapped(text: str) -> str:
    r"""The text in lower case, without blanks, parentheses around it, and the `\text{}` of its parts."""
    text = re.sub(rf"{_BLANK}|~", "", _TEXT.sub(r"\1", text)).lower()
    return text[1:-1] if re.fullmatch(r"\([^()]*\)", text) else text


def _judge_as_text(answer: str, gold: str) -> Judgement | None:
    """Judge answers that are words, times of day or numerals of another base; None for mathematics.

    math-verify takes words for products of letters, 8:34 p.m. for 4/17, and forgets the base.
    """
    wanted, given = _unwrapped(gold), _unwrapped(answer)
    if _ONLY_TEXT.fullmatch(gold) and _WORDS.fullmatch(wanted):
        if _LIST_OF_LETTERS.fullmatch(wanted):
            return "correct" if sorted(given.split(",")) == sorted(wanted.split(",")) else "wrong"
        return "correct" if given == wanted else "wrong"
    wanted_time, given_time = _TIME_OF_DAY.fullmatch(wanted), _TIME_OF_DAY.fullmatch(given)
    if wanted_time and wanted_time[2]:
        same = given_time and given_time[1] == wanted_time[1] and given_time[2] in (wanted_time[2], None)
        return "correct" if same else "wrong"
    wanted_base, given_base = _BASE.fullmatch(wanted), _BASE.fullmatch(given)
    if wanted_base and given_base and wanted_base[1] != given_base[1]:
        return "wrong"
    return None


def _listed(text: str) -> int:
    """How many numbers or expressions a bare list names, repeated ones included; 0 where it is no bare list."""
    if re.search(r"[(\[{]|\\pm|\\mp|and|or|\d,\d{3}(?!\d)", text):
        return 0
    return text.count(",") + 1


# ------------------------------------------------------------------------------------------------------- math-verify
_ENDS_IN_VARIABLE = re.compile(r"(?:[\d}()+\-*/^]|^|\s)[A-Za-z]$|\d[A-Za-z]+$")


def _expressions(text: str, *, units: bool) -> list[Basic | MatrixBase]:
    """What math-verify reads in an answer; empty where it reads none. `units`: take words at the end for a unit."""
    config = LatexExtractionConfig(
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=units, malformed_operators=True, nits=True, boxed="all", equations=False
        ),
    )
    found = parse(rf"\boxed{{{text}}}", [config], parsing_timeout=None)
    return [expression for expression in found if not isinstance(expression, str)]


def judge(answer: str, gold: str) -> Judgement:
    """Whether an answer is the gold answer; unparseable where one of the two cannot be read.

    What cannot be shown to be equal is wrong.
    """
    answer, gold = tidy(answer), tidy(gold)
    if answer == gold:
        return "correct"
    if (judgement := _judge_as_text(answer, gold)) is not None:
        return judgement
    if min(_listed(answer), _listed(gold)) > 1 and _listed(answer) != _listed(gold):
        return "wrong"  # math-verify takes -1,3,3 and -1,3 for the same set
    # In a gold answer such as 2s or a + b + c, the last letter is a variable and no unit.
    units = _ENDS_IN_VARIABLE.search(gold) is None
    given, wanted = _expressions(answer, units=units), _expressions(gold, units=units)
    if not given or not wanted:
        return "unparseable"
    if any(_is_equation_in_unknowns(e) for e in given) and not any(isinstance(e, Eq) for e in wanted):
        return "wrong"  # math-verify compares the right-hand side of 4x - y = 0 with 0
    same = verify(wanted, given, timeout_seconds=None) and not _small_and_apart(given[0], wanted[0])
    return "correct" if same else "wrong"


def _is_equation_in_unknowns(expression: Basic | MatrixBase) -> bool:
    """Whether this is an equation other than `x = …` or `f(x) = …`."""
    return (
        isinstance(expression, Eq) and bool(expression.lhs.free_symbols) and not is_expr_of_only_symbols(expression.lhs)
    )


def _small_and_apart(given: Any, wanted: Any) -> bool:
    """Whether two decimals below 0.01 differ in their first three digits: math-verify compares six decimal places."""
    if not all(isinstance(e, Basic) and e.is_number and e.is_real for e in (given, wanted)):
        return False
    decimals = given.has(Float) or wanted.has(Float)
    return bool(decimals and 0 < abs(wanted) < 0.01 and abs(given - wanted) > 1e-3 * abs(wanted))


def parses(gold: str) -> bool:
    """Whether a gold answer is words or can be read by math-verify."""
    gold = tidy(gold)
    return _ONLY_TEXT.fullmatch(gold) is not None or bool(
        _expressions(gold, units=_ENDS_IN_VARIABLE.search(gold) is None)
    )


def self_check() -> None:
    """Judge known answers; a grader that gets one wrong must not grade."""
    for answer, gold, expected in KNOWN:
        if (said := judge(answer, gold)) != expected:
            versions = ", ".join(f"{package} {metadata.version(package)}" for package in VERSIONED)
            raise UserError(
                f"the grader fails its self-check: it calls the answer {answer!r} to {gold!r} {said}, and it is "
                f"{expected}. {versions} do not work together here; install the versions of the lock file"
            )
