"""Figures: the same bytes every time, one colour a dtype, ids and colours that the page can take in."""

import dataclasses
import re

import numpy as np
import pytest

from halfmatch.config import Config, Training
from halfmatch.paths import Run
from halfmatch.precision import Precision
from halfmatch.report.figures import grid, layers, mismatch, overview, sigma_law, style, training
from halfmatch.report.numbers import number
from halfmatch.report.training import TrainingRun

DRAWERS = [
    overview.headline,
    overview.solve_rates,
    mismatch.tokens,
    mismatch.sequences,
    mismatch.differences,
    mismatch.positions,
    sigma_law.draw,
    mismatch.fidelity,
    training.reward,
    training.health,
]


@pytest.fixture(scope="module")
def narrow(results):
    """One model, one objective, two seeds: quick to draw."""
    runs = [run for run in results.runs if run.name.objective == "grpo" and run.name.seed < 2]
    config = results.config.model_copy(
        update={"training": results.config.training.model_copy(update={"objectives": ("grpo",), "seeds": (0, 1)})}
    )
    return dataclasses.replace(results, config=config, cells=results.cells[2:], runs=runs)


def drawn(draw, results):
    with style.styled():
        drawing = draw(results)
        return drawing, style.render(drawing)


@pytest.fixture(scope="module")
def gallery(narrow):
    """Every figure, drawn once."""
    with style.styled():
        return [(drawing, style.render(drawing)) for drawing in (draw(narrow) for draw in DRAWERS)]


@pytest.mark.parametrize("draw", [mismatch.tokens, mismatch.fidelity])
def test_the_same_numbers_give_the_same_bytes(draw, narrow):
    assert drawn(draw, narrow)[1] == drawn(draw, narrow)[1]


def test_files_hold_no_time_and_no_program(gallery):
    for _, rendered in gallery:
        assert rendered.png.startswith(b"\x89PNG")
        assert not {b"tEXt", b"tIME"} & {rendered.png[at : at + 4] for at in range(len(rendered.png) - 4)}
        assert "<dc:date>" not in rendered.svg
        assert "Matplotlib" not in rendered.svg


def test_every_figure_says_what_is_seen_and_how_to_read_it(gallery):
    assert len({drawing.name for drawing, _ in gallery}) == len(DRAWERS)
    for drawing, _ in gallery:
        assert all((drawing.title, drawing.caption, drawing.alt))
        assert "nan" not in drawing.caption + drawing.alt


def test_each_dtype_has_its_colour_wherever_it_stands(gallery):
    for drawing, rendered in gallery:
        shown = {dtype for dtype, colour in style.COLOURS.items() if colour in rendered.svg}
        # Points in an image have no colour of their own in the SVG; the problems are of no precision.
        assert shown == (set() if drawing.name in ("mismatch-tokens", "solve-rates") else {"bf16", "fp16"})


def test_the_grid_says_every_number_in_its_cell_and_in_words(crossed):
    drawing, rendered = drawn(grid.heat_maps, crossed)
    cell = crossed.crossed[0]
    assert f"BF16 scored in FP16: k3 {number(cell.metric('k3').value)}" in drawing.alt
    panel = drawing.figure.axes[0]
    words = {text.get_text().split("\n")[0] for text in panel.texts}
    assert words == {number(one.metric("k3").value, 2) for one in [*crossed.cells, *crossed.crossed]}
    assert [label.get_text() for label in panel.get_xticklabels()] == ["BF16", "FP16"]
    assert "nan" not in drawing.caption + drawing.alt
    assert drawn(grid.heat_maps, crossed)[1] == rendered


def test_precisions_outside_of_the_grid_have_a_column_of_their_own(crossed):
    mismatch_ = crossed.config.mismatch.model_copy(update={"grid": ("bf16",)})
    config = crossed.config.model_copy(update={"mismatch": mismatch_})
    drawing, _ = drawn(grid.heat_maps, dataclasses.replace(crossed, config=config, crossed=[]))
    assert [label.get_text() for label in drawing.figure.axes[0].get_xticklabels()] == ["BF16", "as the\nengine"]
    assert [label.get_text() for label in drawing.figure.axes[0].get_yticklabels()] == ["BF16", "FP16"]
    assert len(drawing.figure.axes[0].texts) == 2


def test_the_grid_shows_what_training_in_each_pair_reached(crossed):
    """Six iterations are a running mean of six; of two seeds the mean and the extremes."""
    precisions = {
        **crossed.config.precisions,
        "fp16-bf16": Precision(compute="fp16", rollout="bf16"),
        "bf16-head": Precision(compute="bf16", rollout="bf16", fp32_modules=("lm_head",)),
    }
    training_ = Training(precisions=("fp16-bf16", "bf16-head", "fp16"), objectives=("grpo",), iterations=6)
    solvability = crossed.config.solvability.model_copy(update={"model": "gain16"})
    config = crossed.config.model_copy(
        update={"precisions": precisions, "training": training_, "solvability": solvability}
    )
    runs = [
        TrainingRun(Run(precision, "grpo", seed), 6, 6, {"reward": np.full(6, reward)}, [])
        for precision, rewards in {"fp16-bf16": (0.3, 0.5), "bf16-head": (0.1, 0.2)}.items()
        for seed, reward in enumerate(rewards)
    ]
    drawing, _ = drawn(grid.heat_maps, dataclasses.replace(crossed, config=config, runs=runs))
    (words,) = drawing.figure.axes[2].texts  # a head in fp32 is no pair of the grid, and fp16 was not trained
    assert words.get_position() == (1.5, 0.5), "trainer fp16, engine bf16"
    assert words.get_text() == "0.40\n[0.30, 0.50]"
    assert "engine in BF16 and the trainer in FP16: reward 0.400" in drawing.alt
    assert "last 10 of 6 iterations and over 2 seeds" in drawing.caption
    assert "no confidence interval" in drawing.caption

    elsewhere = config.model_copy(update={"solvability": solvability.model_copy(update={"model": "gain48"})})
    drawing, _ = drawn(grid.heat_maps, dataclasses.replace(crossed, config=elsewhere, runs=runs))
    assert not drawing.figure.axes[2].texts, "another model was trained"


def test_errors_by_layer_are_drawn_and_said(traced):
    drawing, rendered = drawn(layers.error_origin, traced)
    assert "attention 90 [81, 99] %, MLPs 10 [9.0, 11] %" in drawing.alt
    along, alone, parts = drawing.figure.axes[:3]
    assert [label.get_text() for label in along.get_xticklabels()] == ["1", "2", "norm", "head"]
    assert along.lines[0].get_ydata() == pytest.approx([2e-3, 4e-3, 6e-3, 6e-3])
    assert sorted({line.get_xdata()[0] for line in alone.lines}) == pytest.approx([2.5e-4, 2e-3])
    assert [label.get_text() for label in parts.get_yticklabels()] == ["attention", "MLPs"]
    assert drawn(layers.error_origin, traced)[1] == rendered


def test_precisions_of_one_compute_dtype_share_its_colour_and_differ_otherwise():
    config = Config.model_validate(
        {
            "precisions": {
                "bf16": {"compute": "bf16", "rollout": "bf16"},
                "bf16-fp32": {"compute": "bf16", "rollout": "fp32"},
                "fp16": {"compute": "fp16", "rollout": "fp16"},
            },
            "mismatch": {"precisions": ["bf16"]},
        }
    )
    looks = style.looks(config.precisions)
    first, second, other = looks["bf16"], looks["bf16-fp32"], looks["fp16"]
    assert first.colour == second.colour != other.colour
    assert (first.marker, first.line) != (second.marker, second.line)
    assert (first.label, second.label) == ("BF16", "bf16-fp32")


def test_a_user_s_own_matplotlib_settings_change_nothing(narrow):
    import matplotlib

    plain = drawn(mismatch.fidelity, narrow)[1]
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "pink", "figure.dpi": 30}):
        among_others = drawn(mismatch.fidelity, narrow)[1]
        assert matplotlib.rcParams["font.size"] == 20
    assert plain == among_others


def test_inline_figures_take_the_page_s_colours_and_keep_their_ids_apart(gallery):
    (rendered,) = (rendered for drawing, rendered in gallery if drawing.name == "mismatch-tokens")
    inline = style.inline_svg(rendered, "one", 'π < μ & "k3"')
    assert inline.startswith("<svg ")
    assert 'aria-label="π &lt; μ &amp; &quot;k3&quot;"' in inline
    assert "currentColor" in inline
    assert style.INK not in inline
    ids = set(re.findall(r'\bid="([^"]+)"', inline))
    assert all(name.startswith("one-") for name in ids)
    references = set(re.findall(r'(?:href="#|url\(#)([^")]+)', inline))
    assert references
    assert references <= ids


def test_missing_cells_and_runs_are_said_in_the_panel(narrow):
    """Nothing of BF16: its panel says so, and the others are drawn."""
    cells = [cell for cell in narrow.cells if cell.precision == "fp16"]
    for draw in (mismatch.tokens, mismatch.sequences):
        with style.styled():
            drawing = draw(dataclasses.replace(narrow, cells=cells))
            texts = [text.get_text() for panel in drawing.figure.axes for text in panel.texts]
            assert texts.count("no scores") == 1
    with style.styled():
        runs = [run for run in narrow.runs if run.name.precision == "fp16"]
        labels = training.reward(dataclasses.replace(narrow, runs=runs)).figure.legends[0].get_texts()
        assert [label.get_text() for label in labels] == ["FP16"]


def test_a_caption_does_not_call_extremes_an_interval(narrow):
    with style.styled():
        assert "no confidence interval" in training.reward(narrow).caption
        one_seed = dataclasses.replace(narrow, runs=[run for run in narrow.runs if run.name.seed == 0])
        assert "band" not in training.reward(one_seed).caption


def test_logs_without_a_positive_number_are_drawn(narrow):
    """A log axis has no place for zeros: a gradient norm that is always 0 leaves an empty panel, and no error."""
    runs = [
        dataclasses.replace(run, series={**run.series, "gradient_norm": run.series["gradient_norm"] * 0})
        for run in narrow.runs
    ]
    with style.styled():
        figure = training.health(dataclasses.replace(narrow, runs=runs)).figure
        (panel,) = (panel for panel in figure.axes if panel.get_ylabel() == "gradient norm")
        assert [text.get_text() for text in panel.texts] == ["no values to show"]
        figure.draw_without_rendering()


def test_the_style_leaves_no_trace(narrow):
    import matplotlib

    before = dict(matplotlib.rcParams)
    drawn(mismatch.fidelity, narrow)
    assert dict(matplotlib.rcParams) == before
