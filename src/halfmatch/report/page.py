"""The page: one HTML file that needs nothing else. The template escapes whatever it is given but our own figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from halfmatch import __version__, paper
from halfmatch.report.figures import style
from halfmatch.report.figures.style import Drawing, Rendered
from halfmatch.report.numbers import with_interval
from halfmatch.report.tables import Table
from halfmatch.report.verdicts import NOT_REPRODUCED, NOT_TESTABLE, REPRODUCED, Verdict

# A mark beside the words, for those who do not tell the colours apart.
MARKS = {REPRODUCED: "✓", NOT_REPRODUCED: "✗", NOT_TESTABLE: "?"}


@dataclass(frozen=True)
class Section:
    """A part of the page: what it says, its figures, tables in view and tables to unfold."""

    name: str
    title: str
    lead: str
    figures: Sequence[Drawing] = ()
    tables: Sequence[Table] = ()
    folded: Sequence[Table] = ()
    lines: Sequence[str] = ()  # a list to unfold

    @property
    def is_empty(self) -> bool:
        return not (self.figures or any(table.rows for table in [*self.tables, *self.folded]) or self.lines)


def render(
    *,
    title: str,
    sentence: str,
    verdicts: Sequence[Verdict],
    sections: Sequence[Section],
    rendered: Mapping[str, Rendered],
    confidence: float,
) -> str:
    """The page as text; `rendered` has the sections' figures by name."""
    environment = Environment(
        loader=PackageLoader("halfmatch.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    drawn = {
        drawing.name: Markup(style.inline_svg(rendered[drawing.name], drawing.name, drawing.alt))
        for section in sections
        for drawing in section.figures
    }
    return environment.get_template("page.html.jinja").render(
        arxiv=paper.ARXIV,
        confidence=confidence,
        drawn=drawn,
        marks=MARKS,
        sections=sections,
        sentence=sentence,
        sources=paper.SOURCES,
        title=title,
        verdicts=verdicts,
        version=__version__,
        with_interval=with_interval,
    )
