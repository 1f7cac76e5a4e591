"""Make the page, the figures and the headline of everything that is there."""

from __future__ import annotations

from halfmatch import report
from halfmatch.config import Config


def run(config: Config) -> None:
    report.build(config)
