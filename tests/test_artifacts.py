"""Tables between steps: the same rows give the same bytes, what is written is read, and nothing half is ever seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmatch import artifacts
from halfmatch.artifacts import TABLES, Writer, atomic, open_table, read, read_json, row_groups, write, write_json
from halfmatch.errors import UserError

PROVENANCE = {"config": "c0ffee", "versions": {"halfmatch": "0"}}


def completion(problem_id: str = "p", sample: int = 0, tokens: int = 3, **changes: Any) -> dict[str, Any]:
    return {
        "problem_id": problem_id,
        "sample": sample,
        "prompt_ids": [5, 6],
        "token_ids": list(range(tokens)),
        "logprobs": [-0.5] * tokens,
        "finish_reason": "stop",
        "verdict": None,
        **changes,
    }


completions = st.lists(
    st.builds(
        lambda problem_id, sample, prompt, tokens, verdict: {
            "problem_id": problem_id,
            "sample": sample,
            "prompt_ids": prompt,
            "token_ids": [token for token, _ in tokens],
            "logprobs": [logprob for _, logprob in tokens],
            "finish_reason": "length",
            "verdict": verdict,
        },
        st.text(st.characters(exclude_categories=["Cs"])),
        st.integers(0, 2**31 - 1),
        st.lists(st.integers(0, 2**31 - 1), max_size=4),
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-(2.0**99), 0, width=32)), max_size=8),
        st.sampled_from(["correct", "timeout", None]),
    ),
    unique_by=lambda row: (row["problem_id"], row["sample"]),
    max_size=12,
)


@given(rows=completions)
def test_rows_are_read_as_written_in_the_order_of_the_key(rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("round-trip") / "completions.parquet"
    write(path, "completions", rows, PROVENANCE)
    assert read(path, "completions").to_pylist() == sorted(rows, key=lambda row: (row["problem_id"], row["sample"]))


@given(rows=completions, data=st.data())
def test_the_order_of_arrival_and_the_chunks_do_not_change_a_byte(rows, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    write(folder / "one.parquet", "completions", rows, PROVENANCE)
    write(folder / "two.parquet", "completions", data.draw(st.permutations(rows)), dict(reversed(PROVENANCE.items())))
    with Writer(folder / "three.parquet", "completions", PROVENANCE) as out:
        for row in sorted(rows, key=lambda row: (row["problem_id"], row["sample"])):
            out.write([row])
    assert (folder / "one.parquet").read_bytes() == (folder / "two.parquet").read_bytes()
    assert (folder / "one.parquet").read_bytes() == (folder / "three.parquet").read_bytes()


def test_bytes_do_not_depend_on_how_rows_hold_their_lists(tmp_path):
    write(tmp_path / "lists.parquet", "completions", [completion(logprobs=[-0.1, -0.2, -0.3])], PROVENANCE)
    as_arrays = completion(
        prompt_ids=np.array([5, 6]), token_ids=(0, 1, 2), logprobs=np.array([-0.1, -0.2, -0.3], np.float32)
    )
    write(tmp_path / "arrays.parquet", "completions", [as_arrays], PROVENANCE)
    assert (tmp_path / "lists.parquet").read_bytes() == (tmp_path / "arrays.parquet").read_bytes()


def test_row_groups_end_at_a_number_of_rows_or_of_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "ROWS_A_GROUP", 4)
    monkeypatch.setattr(artifacts, "TOKENS_A_GROUP", 100)
    rows = [completion(sample=i, tokens=1) for i in range(9)]
    rows += [completion(sample=9, tokens=60), completion(sample=10, tokens=1)]
    write(tmp_path / "t.parquet", "completions", rows, PROVENANCE)
    # 4 and 4 rows; then the ninth and the long one, which holds 2 + 60 + 60 tokens; then what is left
    assert [len(group) for group in row_groups(tmp_path / "t.parquet", "completions")] == [4, 4, 2, 1]


def test_memory_of_the_writer_does_not_grow_with_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "TOKENS_A_GROUP", 20_000)

    def peak(rows: int) -> int:
        before = pa.total_allocated_bytes()
        highest = 0
        tracemalloc.start()
        with Writer(tmp_path / f"{rows}.parquet", "completions", PROVENANCE) as out:
            for i in range(rows):
                out.write([completion(sample=i, tokens=1000)])
                highest = max(highest, pa.total_allocated_bytes() - before)
        python = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return highest + python

    peak(20)  # whatever is allocated once
    assert peak(400) < 1.5 * peak(40)


def test_a_declared_table_keeps_its_types_and_nullability(tmp_path):
    for name, table in TABLES.items():
        write(tmp_path / f"{name}.parquet", name, [], PROVENANCE)
        stored = read(tmp_path / f"{name}.parquet", name)
        assert stored.schema.equals(table.schema)
        assert stored.num_rows == 0


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (completion(answer="5"), "undeclared columns"),
        (completion(finish_reason=None), "no value for"),
        ({key: value for key, value in completion().items() if key != "token_ids"}, "no value for"),
        (completion(logprobs=[-1.0]), "one entry a token"),
    ],
)
def test_a_row_that_is_not_as_declared_is_refused(row, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        write(tmp_path / "t.parquet", "completions", [row], PROVENANCE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong", [{"token_ids": [0.5, 1, 2]}, {"token_ids": [2**40, 1, 2]}, {"prompt_ids": [None, 1]}, {"sample": "first"}]
)
def test_a_value_of_another_type_is_refused(wrong, tmp_path):
    with pytest.raises((ValueError, TypeError)):
        write(tmp_path / "t.parquet", "completions", [completion(**wrong)], PROVENANCE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("samples", [[1, 0], [0, 0]])
def test_rows_out_of_order_or_twice_are_refused(samples, tmp_path):
    with (
        pytest.raises(ValueError, match="unique and sorted"),
        Writer(tmp_path / "t.parquet", "completions", PROVENANCE) as out,
    ):
        out.write(completion(sample=i) for i in samples)
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_last_rows_leaves_the_old_file_alone(tmp_path, monkeypatch):
    write(tmp_path / "t.parquet", "completions", [completion()], PROVENANCE)
    before = (tmp_path / "t.parquet").read_bytes()

    def full_disk(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write(tmp_path / "t.parquet", "completions", [completion(sample=1)], PROVENANCE)
    assert (tmp_path / "t.parquet").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


def test_a_writer_killed_in_the_middle_leaves_nothing_under_the_name(tmp_path):
    script = """
        import os, signal, sys
        from halfmatch import artifacts
        artifacts.ROWS_A_GROUP = 2
        with artifacts.Writer(sys.argv[1], "problems", {}) as out:
            for i in range(5):
                out.write([{"problem_id": str(i), "problem": "p", "answer": "a", "source": "s", "split": "all"}])
            os.kill(os.getpid(), signal.SIGKILL)
    """
    path = tmp_path / "problems.parquet"
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script), os.fspath(path)])
    assert run.returncode == -signal.SIGKILL
    assert not path.exists()


def test_atomic_replaces_only_at_the_end(tmp_path):
    path = tmp_path / "deep" / "curves.csv"
    with atomic(path, "w") as file:
        file.write("a,b\n")
        assert not path.exists()
    assert path.read_bytes() == b"a,b\n"
    with pytest.raises(TypeError), atomic(path, "w") as file:
        file.writelines(["half", None])
    assert path.read_bytes() == b"a,b\n"
    assert [entry.name for entry in path.parent.iterdir()] == ["curves.csv"]


# ------------------------------------------------------------------------------------------------ files of other kinds
def test_a_missing_file_names_the_step(tmp_path):
    with pytest.raises(UserError, match="has not run"):
        read(tmp_path / "none.parquet", "problems")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"problem,answer\n1+1,2\n", os.urandom(2000)])
def test_what_is_not_parquet_is_refused(content, tmp_path):
    (tmp_path / "t.parquet").write_bytes(content)
    with pytest.raises(UserError, match="not a complete Parquet file"):
        read(tmp_path / "t.parquet", "problems")


@given(share=st.floats(0, 0.999))
def test_a_truncated_table_is_refused_wherever_it_ends(share, tmp_path_factory):
    path = tmp_path_factory.mktemp("truncated") / "t.parquet"
    write(path, "completions", [completion(sample=i) for i in range(50)], PROVENANCE)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(UserError, match="not a complete Parquet file"):
        read(path, "completions")


def test_a_flipped_bit_in_the_data_is_noticed(tmp_path):
    path = tmp_path / "t.parquet"
    write(path, "completions", [completion(sample=i) for i in range(50)], PROVENANCE)
    column = pq.read_metadata(path).row_group(0).column(TABLES["completions"].schema.names.index("token_ids"))
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a complete Parquet file"):
        read(path, "completions")
    with pytest.raises(UserError, match="not a complete Parquet file"):
        list(row_groups(path, "completions"))


def test_a_table_of_somebody_else_is_refused(tmp_path):
    pq.write_table(pa.table({"problem": ["1+1"]}), tmp_path / "foreign.parquet")
    with pytest.raises(UserError, match="no table of halfmatch"):
        open_table(tmp_path / "foreign.parquet", "problems")
    foreign = pa.table({"problem": ["1+1"]}).replace_schema_metadata({artifacts.PROVENANCE_KEY: b"not JSON"})
    pq.write_table(foreign, tmp_path / "key.parquet")
    with pytest.raises(UserError, match="no table of halfmatch"):
        open_table(tmp_path / "key.parquet", "problems")


def test_another_table_of_ours_is_refused_by_name(tmp_path):
    write(tmp_path / "t.parquet", "completions", [completion()], PROVENANCE)
    with pytest.raises(UserError, match="holds 'completions', where 'scores' is needed"):
        read(tmp_path / "t.parquet", "scores")


def test_another_schema_version_is_refused(tmp_path, monkeypatch):
    write(tmp_path / "t.parquet", "completions", [completion()], PROVENANCE)
    monkeypatch.setattr(artifacts, "SCHEMA_VERSION", artifacts.SCHEMA_VERSION + 1)
    with pytest.raises(UserError, match="schema version"):
        read(tmp_path / "t.parquet", "completions")


def test_other_columns_than_declared_are_refused(tmp_path):
    write(tmp_path / "t.parquet", "completions", [completion()], PROVENANCE)
    table = pq.read_table(tmp_path / "t.parquet")
    pq.write_table(table.drop_columns(["verdict"]), tmp_path / "t.parquet")
    with pytest.raises(UserError, match="columns differ"):
        read(tmp_path / "t.parquet", "completions")


# ------------------------------------------------------------------------------------------------ provenance and JSON
def test_provenance_is_read_back_from_either_kind_of_file(tmp_path):
    write(tmp_path / "t.parquet", "completions", [completion()], PROVENANCE)
    stored = artifacts.provenance(tmp_path / "t.parquet")
    assert stored == {**PROVENANCE, "table": "completions", "schema_version": artifacts.SCHEMA_VERSION}
    write_json(tmp_path / "m.json", {"k3": 1e-3}, PROVENANCE)
    assert artifacts.provenance(tmp_path / "m.json") == PROVENANCE


def test_metrics_are_exact_sorted_and_without_nan(tmp_path):
    content = {"b": [0.1 + 0.2, float("nan")], "a": {"x": float("-inf"), 1: (True, 3)}}
    write_json(tmp_path / "one.json", content, PROVENANCE)
    write_json(tmp_path / "two.json", dict(reversed(content.items())), PROVENANCE)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert read_json(tmp_path / "one.json") == {
        "a": {"x": None, "1": [True, 3]},
        "b": [0.30000000000000004, None],
        "provenance": PROVENANCE,
    }


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"k3": 1}', b'{"provenance": "\xff"}'])
def test_json_that_is_not_ours_is_refused(content, tmp_path):
    path: Path = tmp_path / "m.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"m\.json"):
        read_json(path)


def test_missing_json_names_the_step(tmp_path):
    with pytest.raises(UserError, match="has not run"):
        read_json(tmp_path / "none.json")
