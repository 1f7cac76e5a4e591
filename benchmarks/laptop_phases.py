"""Where the time of an iteration of the laptop run goes, phase by phase.

    snakemake --cores 2 -- all
    python benchmarks/laptop_phases.py [--config config/config.yaml]

Reads the seconds that every training run leaves beside its checkpoints, of the clock, and prints the median over
iterations as Markdown. Runs that ran side by side on a busy machine have longer ones; the shares are what to look at.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from statistics import median

from halfmatch import jobs
from halfmatch.config_files import load
from halfmatch.paths import Paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="+", type=Path, default=[Path("config/config.yaml")])
    options = parser.parse_args()
    config = load(options.config)
    header = True
    for run in jobs.runs(config):
        path = Paths(Path(config.output)).of("checkpoints", run=run.name) / "seconds.csv"
        if not path.is_file():
            continue  # it has not been trained yet
        with open(path, encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        phases = [phase for phase in rows[0] if phase != "iteration"]
        seconds = {phase: median(float(row[phase]) for row in rows) for phase in phases}
        total = sum(seconds.values())
        if header:
            print(f"| run | iterations | s an iteration | {' | '.join(phases)} |\n|{'---|' * (3 + len(phases))}")
            header = False
        shares = " | ".join(f"{value:.3f} ({value / total:.0%})" for value in seconds.values())
        print(f"| {run.name} | {len(rows)} | {total:.2f} | {shares} |")
    if header:
        parser.error(f"no run of {config.output} has been trained; run snakemake first")


if __name__ == "__main__":
    main()
