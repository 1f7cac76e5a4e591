"""Grading processes: they check themselves, die at their limits, and take nothing else with them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmatch.errors import UserError
from halfmatch.grading import Grader, Verdict, grade, parses, process
from halfmatch.grading.process import GradingProcess

HANGS = "\\boxed{9^{9^{9^{9}}}}"  # one call of a C function that no alarm of Python interrupts
DATA = Path(__file__).parents[3] / "shared" / "data"


def labels(verdicts: list[Verdict]) -> list[str]:
    return [verdict.label for verdict in verdicts]


@pytest.fixture
def math_verify_with(tmp_path, monkeypatch):
    """Put a math-verify before the real one that runs a piece of code on import, with the real one as `real`."""

    def install(code: str) -> None:
        preamble = f"""
            import os, sys, time
            sys.path.remove({os.fspath(tmp_path)!r})
            del sys.modules["math_verify"]
            import math_verify as real
            verify = real.verify
        """
        module = textwrap.dedent(preamble) + textwrap.dedent(code)
        (tmp_path / "math_verify.py").write_text(module, encoding="utf-8")
        paths = [os.fspath(tmp_path), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))

    return install


def when_asked_for_13(action: str) -> str:
    return f"""
        def verify_13(gold, target, **settings):
            if str(gold[0]) == "13":
                {action}
            return verify(gold, target, **settings)
        real.verify = verify_13
    """


# ------------------------------------------------------------------------------------------------------------ verdicts
def test_a_verdict_holds_the_answer():
    assert grade("so \\boxed{ 1/2 }", "\\frac{1}{2}") == Verdict("correct", "1/2")
    assert grade("so \\boxed{1/3}", "\\frac{1}{2}") == Verdict("wrong", "1/3")
    assert grade("so a half", "\\frac{1}{2}") == Verdict("unparseable", None)


@pytest.mark.parametrize("rule", ["exact", "boxed", "r1", "last-number"])
def test_a_truncated_response_is_truncated_whatever_it_holds(rule):
    assert grade("</think> \\boxed{5} =5", "5", rule=rule, truncated=True) == Verdict("truncated", None)


def test_verdicts_come_in_the_order_of_the_responses(boxed):
    responses = [(f"\\boxed{{{i // 2}}}", str(i % 7), i % 5 == 0) for i in range(40)]
    expected = ["truncated" if i % 5 == 0 else "correct" if i // 2 == i % 7 else "wrong" for i in range(40)]
    assert labels(boxed.grade_many(responses)) == expected


def test_no_responses_have_no_verdicts(boxed):
    assert boxed.grade_many([]) == []


def test_an_unknown_rule_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown grading rule 'boxes'; known: exact, boxed, r1, last-number"):
        Grader("boxes")


fractions = st.fractions(min_value=-50, max_value=50, max_denominator=12)


@settings(max_examples=60)
@given(answer=fractions, gold=fractions, as_latex=st.booleans(), factor=st.integers(1, 5))
def test_fractions_are_the_same_when_they_are(answer: Fraction, gold: Fraction, as_latex, factor, boxed):
    above, below = answer.numerator * factor, answer.denominator * factor
    written = f"\\frac{{{above}}}{{{below}}}" if as_latex else f"{above}/{below}"
    (verdict,) = boxed.grade_many([(f"\\boxed{{{written}}}", str(gold), False)])
    assert verdict.label == ("correct" if answer == gold else "wrong")


# -------------------------------------------------------------------------------------------------------------- limits
@pytest.mark.parametrize("workers", [1, 2])
def test_an_answer_that_hangs_times_out_and_the_others_are_kept(workers):
    with Grader("boxed", timeout_s=0.5, workers=workers) as grader:
        responses = [("\\boxed{5}", "5", False), (HANGS, "5", False), ("\\boxed{4}", "5", False)]
        assert labels(grader.grade_many(responses)) == ["correct", "timeout", "wrong"]
        assert labels(grader.grade_many(responses[::2])) == ["correct", "wrong"]  # with a new process


def test_a_gold_answer_that_hangs_times_out_too():
    assert grade("\\boxed{5}", "9^{9^{9^{9}}}", timeout_s=0.5).label == "timeout"


@pytest.mark.parametrize(
    "action",
    [
        "time.sleep(3600)",  # takes no processor time
        "os.kill(os.getpid(), 9)",  # as a machine out of memory does
        "bytearray(1 << 40)",  # more than a grading process may have
    ],
)
def test_whatever_ends_a_process_is_no_wrong_answer(action, math_verify_with, monkeypatch):
    monkeypatch.setattr(process, "WALL_CLOCK_MARGIN_S", 1.0)
    math_verify_with(when_asked_for_13(action))
    with Grader("boxed", timeout_s=0.5) as grader:
        responses = [("\\boxed{5}", "5", False), ("\\boxed{12}", "13", False), ("\\boxed{4}", "5", False)]
        assert labels(grader.grade_many(responses)) == ["correct", "timeout", "wrong"]


def test_fifty_megabytes_of_answer_are_no_answer(boxed):
    responses = [("\\boxed{" + "1" * 50_000_000 + "}", "5", False), ("(" * 50_000_000 + "\\boxed{5}", "5", False)]
    assert labels(boxed.grade_many(responses)) == ["unparseable", "correct"]


def test_the_same_answer_is_judged_once(boxed, monkeypatch):
    asked = []
    ask = GradingProcess.ask
    monkeypatch.setattr(GradingProcess, "ask", lambda *task, **limit: asked.append(task[1:]) or ask(*task, **limit))
    responses = [("\\boxed{5}", "5", False), ("so \\boxed{5}", "5", False), ("\\boxed{5}", "6", False)]
    assert labels(boxed.grade_many(responses * 10)) == ["correct", "correct", "wrong"] * 10
    assert sorted(asked) == [("judge", "5", "5"), ("judge", "5", "6")]


# --------------------------------------------------------------------------------------------------------- self-check
def test_a_grader_that_is_wrong_refuses_to_start_and_names_the_versions(math_verify_with):
    math_verify_with("real.verify = lambda *arguments, **settings: False")
    with pytest.raises(UserError, match=r"fails its self-check.*math-verify \d.*latex2sympy2_extended \d.*sympy \d"):
        Grader("boxed").__enter__()


def test_a_grader_that_finds_everything_correct_refuses_to_start(math_verify_with):
    math_verify_with("real.verify = lambda *arguments, **settings: True")
    with pytest.raises(UserError, match="self-check"):
        grade("\\boxed{1}", "1", timeout_s=3.21)  # a limit of its own, so that no process of another test answers


def test_a_grader_that_cannot_be_imported_says_why(math_verify_with):
    math_verify_with("raise ImportError('antlr4 is missing')")
    with pytest.raises(UserError, match="ImportError: antlr4 is missing"):
        Grader("boxed").__enter__()


def test_a_grader_that_dies_at_once_says_so(math_verify_with):
    math_verify_with("os._exit(7)")
    with pytest.raises(UserError, match="ended with status 7"):
        Grader("boxed").__enter__()


def test_exact_needs_no_process(monkeypatch):
    def start(process: GradingProcess) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(GradingProcess, "start", start)
    with Grader("exact") as grader:
        assert labels(grader.grade_many([("abc=56", "56", False), ("abc=65", "56", False)])) == ["correct", "wrong"]
        assert grader.parses("06")
        assert not grader.parses(" ")


# ------------------------------------------------------------------------------------------------ threads and processes
def test_it_works_outside_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(grade("\\boxed{1/2}", "0.5").label))
    thread.start()
    thread.join()
    assert found == ["correct"]


def test_one_grader_serves_several_threads():
    with Grader("boxed", timeout_s=20, workers=2) as grader, ThreadPoolExecutor(4) as threads:
        batches = [[(f"\\boxed{{{i}}}", "3", False)] * 2 for i in range(20)]
        found = list(threads.map(grader.grade_many, batches))
    assert [labels(batch) for batch in found] == [["correct" if i == 3 else "wrong"] * 2 for i in range(20)]


def test_a_fork_does_not_share_the_connection():
    assert grade("\\boxed{1}", "1").label == "correct"  # the connection of this process is open
    child = os.fork()
    if child == 0:
        good = all(grade(f"\\boxed{{{i}}}", "3").label == ("correct" if i == 3 else "wrong") for i in range(6))
        os._exit(0 if good else 1)
    here = [grade(f"\\boxed{{{i}}}", "4").label for i in range(6)]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert here == ["correct" if i == 4 else "wrong" for i in range(6)]


def test_no_process_outlives_a_parent_that_was_killed():
    script = """
        import os, psutil, threading
        from halfmatch.grading import Grader
        with Grader("boxed", timeout_s=1) as grader:
            threading.Thread(target=grader.grade_many, args=[[(r"\\boxed{9^{9^{9^{9}}}}", "5", False)]]).start()
            print(*[child.pid for child in psutil.Process().children()], flush=True)
            os.kill(os.getpid(), 9)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    (worker,) = map(int, run.stdout.split())
    deadline = time.monotonic() + 60
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------------------- gold answers
@pytest.mark.parametrize(
    ("gold", "readable"),
    [
        ("5", True),
        ("\\frac{1}{2}", True),
        ("\\text{Evelyn}", True),
        ("a + b + c", True),
        ("7\\text{ hours}.", True),
        ("\\dfrac{2469}{20,\\!000}", True),
        ("", False),
        (" ", False),
        ("\\undefined{2}", False),
        ("2+", False),
        ("(1,2", False),
        ("\\frac{1}{", False),
    ],
)
def test_gold_answers_that_can_be_compared_with(gold, readable):
    assert parses(gold) is readable
    assert parses(gold, "r1") is readable


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="the shared problem sets are not here")
@pytest.mark.parametrize("name", ["aime24", "amc23", "math500", "math_sanity_r1d_1_5b"])
def test_every_gold_answer_of_the_problem_sets_parses_and_is_correct(name, boxed):
    golds = [str(gold) for gold in pq.read_table(DATA / f"{name}.parquet")["answer"].to_pylist()]
    assert [gold for gold in golds if not boxed.parses(gold)] == []
    rewritten = [(f"so $\\boxed{{ {gold.replace(' ', '  ')} }}$.", gold, False) for gold in golds]
    assert set(labels(boxed.grade_many(rewritten))) == {"correct"}
