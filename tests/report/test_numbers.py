"""Numbers as a reader sees them."""

import math

import pytest

from halfmatch.report.numbers import as_printed, interval, number, percent, span, with_interval
from halfmatch.statistics import Estimate


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.00123456, "0.00123"),
        (1.23456e-5, "1.23e-5"),
        (-1.23456e-5, "−1.23e-5"),
        (0.99996, "1.00"),
        (9.996, "10.0"),
        (1234.5, "1,230"),
        (-71.53, "−71.5"),
        (23456789.0, "2.35e7"),
        (math.nan, "–"),
        (None, "–"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
    ],
)
def test_three_significant_digits(value, text):
    assert number(value) == text


def test_the_paper_is_quoted_with_the_digits_it_has():
    assert [as_printed(value) for value in (7.64, 0.32, -1.01, 1.5e-05, 2.0)] == [
        "7.64",
        "0.32",
        "−1.01",
        "1.5e-5",
        "2",
    ]


def test_an_interval_stands_behind_its_number_and_is_left_out_where_there_is_none():
    assert with_interval(Estimate(0.5, 0.4123, 0.5999)) == "0.500 [0.412, 0.600]"
    assert with_interval(Estimate(0.5, math.nan, math.nan)) == "0.500"
    assert interval(Estimate(1.0, -math.inf, 2.0), 2) == "[−∞, 2.0]"


def test_a_span_goes_from_the_smallest_number_to_the_largest_and_as_far_as_their_intervals():
    few, many = Estimate(20.0, 18.0, 75.0), Estimate(60.0, 50.0, 70.0)
    assert span([many, few]) == "20.0 to 60.0 [18.0, 75.0]"
    assert span([few, few], percent) == "2000 % [1800 %, 7500 %]"
    assert span([Estimate(0.5, math.nan, math.nan), few]) == "0.500 to 20.0 [18.0, 75.0]"
    assert span([Estimate(0.5, math.nan, math.nan)]) == "0.500"


def test_percentages():
    assert percent(0.2) == "20 %"
    assert percent(-0.0516, 1) == "−5.2 %"
    assert percent(math.nan) == "–"
