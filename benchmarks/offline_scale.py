"""How fast the offline analysis is, and in how much memory: beside a plain pandas implementation, and on a large table.

    python benchmarks/offline_scale.py [--tokens 1e6 1e7 1e8] [--folder /tmp]

Writes synthetic tables of scores as the pipeline does (8 responses a problem, 1,024 tokens each on average), measures
each analysis in a process of its own, and prints Markdown. Speed is tokens a second of CPU time, of all threads
together: what one core does, also on a machine that is busy with other things; the wall time stands beside it. Needs
halfmatch installed, and 7 bytes of disk a token. pandas reads the first table alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from halfmatch import artifacts
from halfmatch.mismatch import offline

SAMPLES = 8
MEAN_LENGTH = 1024
VOCABULARY = 50_000
# d as BF16 has it: a KL of 1e-3 nats a token.
KL = 1e-3
SETTINGS: dict[str, Any] = {"bootstrap_samples": 1000, "seed": 0, "confidence": 0.95}


def write(path: Path, tokens: int) -> None:
    """A table of at least so many tokens."""
    rng = np.random.default_rng(0)
    written = problem = 0
    with artifacts.Writer(path, "scores", {"step": "scores"}) as out:
        while written < tokens:
            for sample in range(SAMPLES):
                length = int(rng.integers(1, 2 * MEAN_LENGTH))
                rollout = -rng.exponential(0.5, length).astype(np.float32)
                d = rng.normal(-KL, np.sqrt(2 * KL), length).astype(np.float32)
                row = {
                    "problem_id": f"{problem:012d}",
                    "sample": sample,
                    "token_ids": rng.integers(0, VOCABULARY, 16, dtype=np.int32).repeat(length // 16 + 1)[:length],
                    "logp_rollout": rollout,
                    "logp_train": rollout + d,
                }
                out.write([row])
                written += length
            problem += 1


def with_pandas(path: Path) -> dict[str, float]:
    """The same metrics, written as one would at a first go: the whole table, a row a token, groups.

    Values alone. The intervals, the numbers by length, by lag and by batch, and what is not finite, which the analysis
    has too, are not there.
    """
    table = pd.read_parquet(path, columns=["problem_id", "sample", "logp_rollout", "logp_train"])
    tokens = table.explode(["logp_rollout", "logp_train"], ignore_index=True)
    tokens[["logp_rollout", "logp_train"]] = tokens[["logp_rollout", "logp_train"]].astype(np.float64)
    tokens["d"] = tokens["logp_train"] - tokens["logp_rollout"]
    tokens["k3"] = np.expm1(tokens["d"]) - tokens["d"]
    tokens["difference"] = np.exp(tokens["logp_train"]) - np.exp(tokens["logp_rollout"])
    responses = tokens.groupby(["problem_id", "sample"], sort=False)
    position = responses.cumcount()
    bucket = np.floor(np.log2(np.maximum(position, 8) / 8)).astype(int)
    by_position = tokens.groupby(bucket)["k3"].mean()
    totals = responses["d"].agg(["sum", "size"])
    weights = np.exp(totals["sum"] - totals["sum"].max())
    return {
        "k1": -tokens["d"].mean(),
        "k2": (tokens["d"] ** 2).mean() / 2,
        "k3": tokens["k3"].mean(),
        "chi2": np.expm1(2 * tokens["d"]).mean(),
        "mean_abs_prob_diff": tokens["difference"].abs().mean(),
        "max_prob_diff": tokens["difference"].max(),
        "share_above_0.1": (tokens["d"].abs() > 0.1).mean(),
        "sigma": totals["sum"].std(),
        "kl_sequence": -totals["sum"].mean(),
        "slope_per_1k": 1000 * np.polyfit(totals["size"], totals["sum"], 1)[0],
        "ess_share": weights.sum() ** 2 / (weights**2).sum() / len(weights),
        "k3 of the first 16 tokens": by_position.loc[0],
    }


def with_halfmatch(path: Path) -> dict[str, float]:
    analysis = offline.analyse(path, **SETTINGS)
    values = {name: estimate["value"] for name, estimate in analysis["metrics"].items()}
    return {**values, "k3 of the first 16 tokens": analysis["positions"][0]["k3"]["value"]}


ANALYSES: dict[str, Callable[[Path], dict[str, float]]] = {"pandas": with_pandas, "halfmatch": with_halfmatch}


def measure(name: str, path: Path) -> None:
    """Run one analysis and print what it gave and took, as JSON."""
    wall, cpu = time.perf_counter(), time.process_time()
    values = ANALYSES[name](path)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"cpu": cpu, "wall": wall, "memory": memory, "values": values}))


def in_a_process(name: str, path: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--measure", name, str(path)], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def compare(folder: Path, sizes: list[int]) -> None:
    print("| tokens | file | analysis | CPU s | wall s | tokens a CPU second | peak resident memory |")
    print("|---|---|---|---|---|---|---|")
    memory: dict[int, float] = {}
    values: dict[str, dict[str, float]] = {}
    for size in sizes:
        path = folder / f"{size}.parquet"
        write(path, size)
        tokens = token_count(path)
        for name in ANALYSES if size == sizes[0] else ("halfmatch",):
            one = in_a_process(name, path)
            values.setdefault(name, one["values"])
            memory[tokens] = one["memory"]
            print(
                f"| {tokens:,} | {path.stat().st_size / 1e6:,.0f} MB | {name} | {one['cpu']:.1f} | {one['wall']:.1f} "
                f"| {tokens / one['cpu'] / 1e6:.2f} M | {one['memory'] / 1e6:,.0f} MB |",
                flush=True,
            )
        path.unlink()
    for name, value in values["pandas"].items():
        assert np.isclose(value, values["halfmatch"][name], rtol=1e-9), (name, value, values["halfmatch"][name])
    (small, first), (large, second) = list(memory.items())[-2:]
    slope = (second - first) / (large - small)
    print(
        f"\nThe two agree on the {len(values['pandas'])} numbers that both give, to nine digits. From {small:,} to "
        f"{large:,} tokens halfmatch's memory changed by {(second - first) / 1e6:+,.0f} MB; at that rate it has "
        f"{(second + slope * (1e9 - large)) / 1e6:,.0f} MB at 1e9."
    )


def token_count(path: Path) -> int:
    metadata = pq.read_metadata(path)
    column = metadata.schema.names.index("element")  # the first of the lists
    return sum(metadata.row_group(group).column(column).num_values for group in range(metadata.num_row_groups))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e6, 1e7, 1e8], help="sizes of tables, growing")
    parser.add_argument("--folder", type=Path, help="where the tables are written, and removed again")
    parser.add_argument("--measure", nargs=2, metavar=("ANALYSIS", "TABLE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure[0], Path(options.measure[1]))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        compare(Path(folder), [int(tokens) for tokens in options.tokens])


if __name__ == "__main__":
    main()
