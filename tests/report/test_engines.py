"""The report of two engines shows both, side by side: figures, tables and headline, with intervals."""

from __future__ import annotations

import itertools

import pytest

from halfmatch.config import Config
from halfmatch.report import tables
from halfmatch.report.figures import mismatch, overview, sigma_law
from halfmatch.report.headline import headline, headline_text
from halfmatch.report.results import Results, collect

LABELS = ["gain16, transformers", "gain16, vllm"]


@pytest.fixture(scope="module")
def both(two_engines: Config) -> Results:
    return collect(two_engines)


def test_the_headline_has_both_with_their_intervals(both: Results) -> None:
    found = headline(both, {})
    assert list(found["mismatch"]) == LABELS
    for label, precision in itertools.product(LABELS, ("bf16", "fp16")):
        for name in ("k3", "sigma", "ess_share", "usable_length"):
            estimate = found["mismatch"][label][precision][name]
            assert estimate["low"] <= estimate["value"] <= estimate["high"]
    k3 = [found["mismatch"][label]["bf16"]["k3"]["value"] for label in LABELS]
    assert k3[1] / k3[0] == pytest.approx(1.5, rel=0.05), "as the artefacts were made"
    text = headline_text(found)
    assert all(label in text for label in LABELS)


def test_the_tables_have_both(both: Results) -> None:
    for table in (tables.headline(both), tables.mismatch(both)):
        assert [row[:2] for row in table.rows] == [(label, dtype) for label in LABELS for dtype in ("BF16", "FP16")]
    assert all("[" in cell for row in tables.headline(both).rows for cell in row[2:7])


@pytest.mark.parametrize("draw", [mismatch.sequences, sigma_law.draw, mismatch.fidelity])
def test_every_figure_has_panels_of_both(draw, both: Results) -> None:
    drawing = draw(both)
    words = [axes.get_title() for axes in drawing.figure.axes] + [axes.get_ylabel() for axes in drawing.figure.axes]
    for label in LABELS:
        assert any(text.startswith(label) for text in words)
        assert label in drawing.alt


def test_the_figure_of_four_numbers_has_a_row_of_each(both: Results) -> None:
    panel = overview.headline(both).figure.axes[0]
    assert [label.get_text() for label in panel.get_yticklabels()] == LABELS
    assert len(panel.containers) == 2, "a series of points with bars for each precision"
    for container in panel.containers:
        ((bars,),) = [container[2]]
        assert len(bars.get_segments()) == len(LABELS), "an interval an engine"
