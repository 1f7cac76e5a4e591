"""The report: one page, its figures, and the few numbers of the headline, from whatever artefacts are there.

The same artefacts and configuration give the same bytes in every file.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from halfmatch import artifacts
from halfmatch.config import Config
from halfmatch.paths import Paths
from halfmatch.report import comparison, deployment, origin, sigma_law, tables, validation, verdicts
from halfmatch.report.headline import headline, headline_text
from halfmatch.report.numbers import counted
from halfmatch.report.page import Section, render
from halfmatch.report.results import Results, collect
from halfmatch.steps import digest, provenance

__all__ = ["build", "headline_text"]


def build(config: Config, *, preset: Path = origin.PAPER_PRESET) -> dict[str, Any]:
    """Write report/index.html, report/figures and report/headline.json; returns the headline.

    preset: the configuration of the paper, which the run's is compared with where it is at hand.
    """
    from halfmatch.report.figures import style

    paths, results = Paths(Path(config.output)), collect(config)
    judged = verdicts.judge(results)
    numbers = headline(results, {verdict.key: verdict.outcome for verdict in judged})
    figures = paths.of("figures")
    shutil.rmtree(figures, ignore_errors=True)  # of an earlier report, which may have had others
    figures.mkdir(parents=True)
    with style.styled():
        sections = sections_of(results, preset)
        drawings = [drawing for section in sections for drawing in section.figures]
        rendered = {drawing.name: style.render(drawing) for drawing in drawings}
    for name, one in rendered.items():
        style.write(one, name, figures)
    page = render(
        title=config.report.title,
        sentence=numbers["sentence"],
        verdicts=judged,
        sections=sections,
        rendered=rendered,
        confidence=config.report.confidence,
    )
    with artifacts.atomic(paths.of("report"), "w") as file:
        file.write(page)
    # One digest of all inputs: DVC shows a metrics file whole, and the page lists them one by one.
    inputs = digest({artefact.path: artefact.sha256 for artefact in results.artefacts})
    artifacts.write_json(paths.of("headline"), numbers, {**provenance(config, "report"), "inputs": inputs})
    return numbers


def sections_of(results: Results, preset: Path) -> list[Section]:
    """What the page says, in order; a section without anything to show is left out."""
    from halfmatch.report.figures import grid, layers, mismatch, overview, training
    from halfmatch.report.figures import sigma_law as sigma_law_figure
    from halfmatch.report.figures import validation as validation_figure

    is_measured, deployments = bool(results.cells), deployment.by_precision(results)
    differences = origin.differences(results, preset)
    sections = [
        Section(
            "headline",
            "Headline",
            "How far the trainer's policy π is from the rollout engine's policy μ at the same weights, by the "
            "precision that both compute in. Nothing is trained for this, so there is no noise of reinforcement "
            "learning in it.",
            figures=[
                *([overview.headline(results)] if is_measured else []),
                *([grid.heat_maps(results)] if is_measured and results.config.mismatch.grid else []),
            ],
            tables=[tables.headline(results), *([tables.grid(results)] if results.config.mismatch.grid else [])],
        ),
        Section(
            "mismatch",
            "The mismatch, token by token and response by response",
            "The engine sampled responses in each precision; the trainer then gave the same tokens its own "
            "probabilities, in one pass over the whole response. d = log π − log μ is the difference on a sampled "
            "token.",
            figures=[
                draw(results)
                for draw in (
                    mismatch.tokens,
                    mismatch.sequences,
                    mismatch.differences,
                    mismatch.positions,
                )
            ]
            if is_measured
            else [],
            folded=[tables.mismatch(results)],
        ),
        Section(
            "sigma-law",
            "The σ law: where it holds, and where it fails",
            "What k3 of single tokens says of whole responses, and so of how long they may be, beside what was seen. "
            f"{sigma_law.statement(results)}",
            figures=[sigma_law_figure.draw(results)] if is_measured else [],
            folded=[sigma_law.table(results)],
        ),
        Section(
            "layers",
            "Where the mismatch arises",
            "Some responses traced through both sides, the engine's decoding from its cache and the trainer's pass, "
            "and compared with float64; then computed again with one part in fp32.",
            figures=[layers.error_origin(results)] if results.origins else [],
            tables=[tables.parts(results)],
        ),
        Section(
            "gradient",
            "Gradient fidelity",
            "What the mismatch does to learning, at fixed weights: the gradient that an objective gives the trainer, "
            "beside the one that it should have.",
            figures=[mismatch.fidelity(results)] if any(cell.objectives for cell in results.cells) else [],
            folded=[tables.gradients(results)],
        ),
        Section(
            "training",
            "Training",
            "The matrix of precisions, objectives and seeds. Runs that share a seed see the same problems in the same "
            "order and draw the same random numbers.",
            figures=[training.reward(results), training.health(results)] if results.runs else [],
            tables=[tables.training_by_precision(results), tables.training(results)],
        ),
        Section(
            "validation",
            "Accuracy along the training",
            "The weights that every run kept on its way answer the benchmarks, after every iteration and in every "
            f"precision with the same random numbers. {validation.statement(results.validations)}".rstrip(),
            figures=[validation_figure.draw(results)] if validation.curves(results) else [],
            tables=[validation.summary(results)],
            folded=[validation.table(results)],
        ),
        Section(
            "evaluation",
            "Evaluation",
            "avg@k is the mean share of correct responses, pass@k the chance that one of k is correct, maj@k the "
            "chance that the most frequent answer of k is.",
            tables=[tables.evaluation(results)],
        ),
        Section(
            "deployment",
            "The deployment gap",
            "The same weights and the same requests, answered by the training engine (every token drawn from the "
            "trainer's own forward pass) and by an engine that they may be deployed in, with the same random numbers "
            "where the engine takes them (vLLM with engine.draws: race). Gaps are differences of avg@k, deployed minus "
            "trainer; intervals resample problems, and p is of an exact test that flips the signs of problems. "
            f"{deployment.statement(deployments)}",
            tables=[
                deployment.table("deployment", "All runs trained in a precision, and the initial model", deployments)
            ],
            folded=[deployment.table("deployment-runs", "Gaps of every run", deployment.by_run(results))],
        ),
        Section(
            "problems",
            "Problems",
            "Training takes the problems that the initial model solves sometimes, neither hardly ever nor nearly "
            "always.",
            figures=[overview.solve_rates(results)] if results.perfectible is not None else [],
            tables=[tables.perfectible(results)],
            folded=[tables.excluded(results)],
        ),
        Section(
            "paper",
            "Beside the paper",
            "The paper's numbers come from models of 1.5 billion parameters and more, and responses of thousands of "
            "tokens; what compares between scales are factors and directions.",
            tables=[
                comparison.offline(results),
                comparison.online(results),
                comparison.training(results),
                comparison.untrained(results),
                comparison.grid(results),
                comparison.findings(results),
            ],
            folded=[comparison.all_peaks(), comparison.settings()],
        ),
        Section(
            "settings",
            "Settings and versions",
            f"How this run differs from {preset}, the paper's sanity test, with the source of each of the paper's "
            "values:"
            if differences
            else "What ran, and with what.",
            lines=differences or (),
            tables=[tables.precisions(results), origin.computed_in(results), origin.versions(results)],
            folded=[origin.settings(results)],
        ),
        Section(
            "origin",
            "Where the numbers come from",
            f"{counted(len(results.artefacts), 'file')}, by the digests of their bytes; each holds the digests of what "
            f"it was made from. Asked for by the configuration and not there: {counted(len(results.missing), 'file')}.",
            tables=[tables.missing(results)],
            folded=[origin.artefacts(results)],
        ),
    ]
    return [section for section in sections if not section.is_empty]
