"""Bad input, case by case: one clear message, exit code 2 for what the user can mend and 1 for bugs, and not a byte of
what was there before changed or left half-written.

Every case runs the command line. What each module refuses is tested in depth beside the module; here is what the user
sees of it.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from halfmatch import artifacts, cli
from halfmatch.config import Config
from halfmatch.config_files import validate
from halfmatch.errors import UserError

Refused = Callable[..., str]
HALFMATCH = [sys.executable, "-c", "from halfmatch.cli import main; raise SystemExit(main())"]


def files(folder: Path) -> dict[str, bytes]:
    """Everything below a folder, but the empty lock of a training run."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user, empty."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def refused(here: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that has to be refused; returns its message."""

    def run(*arguments: str) -> str:
        before = files(here)
        assert cli.main(arguments) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.count(f"halfmatch {arguments[0]}: ") == 1
        assert "Traceback" not in output.err
        assert len(output.err) < 2500
        assert files(here) == before
        return output.err

    return run


def write_config(here: Path, **values: object) -> str:
    file = here / "mine.yaml"
    file.write_text(yaml.safe_dump({"output": "out", **values}), encoding="utf-8")
    return str(file)


# ------------------------------------------------------------------------------------------------------ configuration
_ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{later}: &{later} [{', '.join([f'*{earlier}'] * 9)}]\n"
    for earlier, later in zip("abcdefghi", "bcdefghij", strict=True)
)
CONFIGURATIONS: dict[str, tuple[str | bytes, str, str]] = {
    # name: content, where, what is wrong or what to do
    "misspelt key": ("sead: 1\n", "sead", "did you mean seed?"),
    "misspelt nested key": ("training: {iteratons: 3}\n", "training.iteratons", "did you mean iterations?"),
    "misspelt name": ("solvability: {problems: trian}\n", "solvability.problems", "did you mean train?"),
    "misspelt objective": ("training: {objectives: [grop]}\n", "training.objectives", "did you mean grpo?"),
    "misspelt choice": ("prompt: {template: plian}\n", "prompt.template", "'plain', 'r1', 'boxed' or 'chat'"),
    "key twice": ("seed: 1\nseed: 2\n", "line 2", "the key 'seed' stands twice (first in line 1)"),
    "key is a list": ("? [a, b]\n: 1\n", "line 1", "a list stands where a key is needed"),
    "key is a number": ("5: 1\n", "5", "keys should be strings"),
    "text for a number": ("seed: five\n", "seed", "valid integer"),
    "fraction for a whole number": ("seed: 1.5\n", "seed", "fractional part"),
    "yes for a number": ("seed: yes\n", "seed", "in YAML also yes, no, on, off"),
    "yes in a list of numbers": ("training: {seeds: [on]}\n", "training.seeds", "in YAML also yes, no, on, off"),
    "date for a text": ("report: {title: 2024-01-01}\n", "report.title", "valid string"),
    "date that is none": ("seed: 2024-13-45\n", "mine.yaml", "month must be in 1..12"),
    "number of 5,000 digits": (f"seed: {'1' * 5000}\n", "mine.yaml", "4300 digits"),
    "not a number": ("mismatch: {sampling: {temperature: .nan}}\n", "mismatch.sampling.temperature", "not nan"),
    "infinite": ("training: {learning_rate: .inf}\n", "training.learning_rate", "less than or equal to 1"),
    "list for a section": ("training: [1]\n", "training", "needs `key: value` lines"),
    "nothing for a section": ("mismatch:\n", "mismatch", "needs `key: value` lines"),
    "list for the whole": ("- seed: 1\n", "mine.yaml", "holds a list"),
    "two documents": ("seed: 1\n---\nseed: 2\n", "mine.yaml", "single document"),
    "tabs": ("training:\n\titerations: 1\n", "line 2", "cannot start any token"),
    "unknown alias": ("seed: *nowhere\n", "line 1", "undefined alias"),
    "code in a tag": ("seed: !!python/object/apply:os.getcwd []\n", "line 1", "could not determine a constructor"),
    "UTF-16": ("seed: 1\n".encode("utf-16"), "mine.yaml", "is not UTF-8 text"),
    "600 open brackets": ("seed: " + "[" * 600 + "\n", "mine.yaml", "nested too deeply"),
    "387 million aliases": (f"{_ALIASES}seed: *j\n", "seed", "valid integer"),
    "100,000 letters": (f"seed: {'x' * 100_000}\n", "seed", "valid integer"),
    "no output": ("output: ''\n", "output", "name a folder"),
    "output with wildcards": ("output: 'a{b}'\n", "output", "name another folder"),
    "output with NUL": ('output: "a\\0b"\n', "output", "name another folder"),
    "output in a folder called ~": ("output: ~/mine\n", "output", "write the path out"),
    "top-p with a ratio": ("training: {sampling: {top_p: 0.9}}\n", "training.sampling.top_p", "must be 1"),
    "top-p in the measurement": ("mismatch: {sampling: {top_p: 0.9}}\n", "mismatch.sampling.top_p", "must be 1"),
    "fp16 without scaling": (
        "precisions: {fp16: {compute: fp16, rollout: fp16, loss_scaling: null}}\n",
        "precisions.fp16",
        "leave loss_scaling out for the default",
    ),
    "scaling without fp16": (
        "precisions: {bf16: {compute: bf16, rollout: bf16, loss_scaling: {}}}\n",
        "precisions.bf16",
        "remove loss_scaling",
    ),
    "16-bit masters": (
        "precisions: {bf16: {compute: bf16, rollout: bf16, master: bf16}}\n",
        "precisions.bf16.master",
        "should be 'fp32'",
    ),
    "dtype auto": ("precisions: {bf16: {compute: bf16, rollout: auto}}\n", "precisions.bf16.rollout", "not 'auto'"),
    "engine's dtype in secret": (
        "precisions: {bf16: {compute: bf16, rollout: fp32}, fp16: {compute: fp16, rollout: fp16}, "
        "fp32: {compute: fp32, rollout: fp32}}\n",
        "precisions.bf16",
        "call it bf16-fp32",
    ),
    "settings of vllm without it": ("engine: {server: 'http://host'}\n", "engine.server", "set engine.name: vllm"),
    "a race against nobody": ("engine: {draws: race}\n", "engine.draws", "set engine.name: vllm"),
    "numbers of a server": (
        "engine: {name: vllm, server: 'http://host', draws: race}\n",
        "engine.draws",
        "leave out engine.draws or engine.server",
    ),
    "system message without a place": ("prompt: {system: Hello}\n", "prompt.system", "use chat or r1"),
    "engine twice": ("mismatch: {engines: [vllm, vllm]}\n", "mismatch.engines", "stands twice"),
    "k twice": ("evaluation: {k: [1, 1]}\n", "evaluation.k", "stands twice"),
    "the trainer alone": ("evaluation: {engines: [trainer]}\n", "evaluation.engines", "nothing to be compared with"),
    "k above the samples": ("evaluation: {k: [64]}\n", "evaluation", "between 1 and samples (32)"),
    "beta of 1": ("training: {adam_betas: [0.9, 1]}\n", "training.adam_betas", "below 1"),
    "band upside down": ("solvability: {low: 0.9, high: 0.1}\n", "solvability", "no problem could be kept"),
    "steps that do not divide": ("training: {gradient_steps: 5}\n", "training", "do not divide"),
    "ranks that do not spread evenly": ("training: {ranks: 3, nodes: 2}\n", "training", "do not divide into nodes 2"),
    "setting of another objective": (
        "training: {objective_settings: {pg: {clip_low: 0.1}}}\n",
        "training.objective_settings.pg.clip_low",
        "unknown setting",
    ),
    "branch for a commit": (
        "problems: {all: {source: hub, id: some/data, revision: main}}\n",
        "problems.all",
        "40 hex digits",
    ),
    "file without path": ("problems: {all: {source: file}}\n", "problems.all", "needs path"),
    "name with an underscore": ("problems: {a_b: {source: generator}}\n", "problems.a_b", "letters, digits, dots"),
    "name that leads out": ("models: {../x: {source: folder, path: x}}\n", "models.../x", "letters, digits, dots"),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration(name: str, here: Path, refused: Refused) -> None:
    content, where, what = CONFIGURATIONS[name]
    file = here / "mine.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refused("config", "--config", "mine.yaml")
    assert "mine.yaml" in message
    assert where in message
    assert what in message


def _keys(section: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in section.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from _keys(value, (*prefix, key))


_SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.dates())
_VALUES = st.one_of(
    _SCALARS, st.lists(_SCALARS, max_size=3), st.dictionaries(st.text(max_size=5), _SCALARS, max_size=2)
)


@given(key=st.sampled_from(list(_keys(Config().model_dump(mode="json")))), value=_VALUES)
def test_any_value_at_any_key_is_taken_or_refused_by_its_name(key: tuple[str, ...], value: object) -> None:
    """Never another error than the user's; a refusal names the section at least, since it may be of the whole."""
    values = Config().model_dump(mode="json")
    section = values
    for part in key[:-1]:
        section = section[part]
    section[key[-1]] = value
    message = ""
    try:
        validate(yaml.safe_load(yaml.safe_dump(values)), "mine.yaml")
    except UserError as error:
        message = str(error)
    header, *lines = message.splitlines() or [""]
    assert header in ("", "mine.yaml: the configuration is not valid")
    assert bool(lines) == bool(header)
    assert all(line.startswith("  ") and line.strip().split(":")[0] for line in lines)


# ------------------------------------------------------------------------------------------------------- command line
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["probelms"], "invalid choice: 'probelms'"),
        (["problems"], "the following arguments are required: --problems"),
        (["problems", "--problem-set", "all"], "--problems"),
        (["config", "--as", "xml"], "invalid choice: 'xml'"),
    ],
)
def test_a_command_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["problems", "--problems", "al"], "did you mean all?"),
        (["model", "--model", "../gain16"], "did you mean gain16?"),
        (["train", "--run", "fp16_grpo_seed-1"], "did you mean fp16_grpo_seed"),
        (["solvability", "--shard", "9-of-2"], "did you mean"),
        (["config", "--config", "missing.yaml"], "missing.yaml: there is no such file"),
        (["config", "--config", "."], ".: is a folder, where a YAML file is needed"),
        (["headline"], "headline.json: there is no such file"),
    ],
)
def test_a_name_on_the_command_line(arguments: list[str], message: str, refused: Refused) -> None:
    assert message in refused(*arguments)


# ----------------------------------------------------------------------------------------------------------- problems
def _parquet(path: Path, **columns: list[object]) -> None:
    pq.write_table(pa.table(columns), path)


def _truncated_parquet(path: Path) -> None:
    _parquet(path, problem=["1+1"], answer=["2"])
    path.write_bytes(path.read_bytes()[:-9])


PROBLEM_FILES: dict[str, tuple[str, str | bytes | Callable[[Path], None] | None, str]] = {
    # name: file, content or how it is made, message
    "missing": ("p.jsonl", None, "there is no such file"),
    "empty": ("p.jsonl", "", "the file is empty"),
    "unknown format": ("p.xlsx", "PK", "the name has to end in"),
    "folder": ("p.csv", lambda path: path.mkdir(), "there is no such file"),
    "renamed column": ("p.parquet", lambda path: _parquet(path, problem=["1"], answr=["1"]), "no column 'answer'"),
    "truncated Parquet": ("p.parquet", _truncated_parquet, "not readable as parquet"),
    "text called Parquet": ("p.parquet", "problem,answer\n1,1\n", "not readable as parquet"),
    "Parquet without rows": ("p.parquet", lambda path: _parquet(path, problem=[], answer=[]), "there are no rows"),
    "lists for answers": (
        "p.parquet",
        lambda path: _parquet(path, problem=["1"], answer=[[1]]),
        "row 0, column 'answer'",
    ),
    "not UTF-8": ("p.csv", b"problem,answer\n\xff\xfe,1\n", "not UTF-8"),
    "comma without quotes": ("p.csv", "problem,answer\na, b,1\n", "put values with commas in quotes"),
    "not JSON": ("p.jsonl", '{"problem": "1", "answer": "1"}\n{"problem": \n', "line 2 is not JSON"),
    "JSON list": ("p.jsonl", "[1, 2]\n", "line 1 is a list"),
    "JSON number of 5,000 digits": ("p.jsonl", f'{{"problem": "1", "answer": {"1" * 5000}}}\n', "line 1 is not JSON"),
    "100,000 open brackets": ("p.jsonl", "[" * 100_000 + "\n", "line 1 is not JSON"),
    "half a surrogate pair": ("p.jsonl", '{"problem": "\\ud800", "answer": "1"}\n', "row 0, column 'problem'"),
    "conflicting answers": (
        "p.csv",
        "problem,answer\n1+1,2\n1+1,3\n",
        "no row is a problem; left out: 2 conflicting answers",
    ),
}


@pytest.mark.parametrize("name", PROBLEM_FILES)
def test_a_file_of_problems(name: str, here: Path, refused: Refused) -> None:
    file, content, what = PROBLEM_FILES[name]
    if callable(content):
        content(here / file)
    elif content is not None:
        (here / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    config = write_config(here, problems={"all": {"source": "file", "path": file}, **_OTHERS})
    message = refused("problems", "--config", config, "--problems", "all")
    assert file in message
    assert what in message


_OTHERS = {name: {"source": "generator", "split": name} for name in ("train", "heldout")}


def test_an_answer_of_50_megabytes_is_kept_out_of_the_messages(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "7" * 50_000_000
    lines = [{"problem": "a", "answer": long}, {"problem": "a", "answer": "1"}, {"problem": "b", "answer": "2"}]
    (here / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    config = write_config(here, problems={"all": {"source": "file", "path": "p.jsonl"}, **_OTHERS})
    assert cli.main(["problems", "--config", config, "--problems", "all"]) == 0
    assert len(capsys.readouterr().err) < 2500
    assert artifacts.read(Path("out/problems/all.excluded.parquet"), "excluded").num_rows == 2


# -------------------------------------------------------------------------------------------------------------- models
def _edit_json(name: str, **changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps({**content, **changes}), encoding="utf-8")

    return edit


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _with(name: str, content: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).write_text(content, encoding="utf-8")

    return spoil


def _truncate_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _header_of_a_terabyte(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", 1 << 40) + weights.read_bytes()[8:])


def _nan_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _pickle_for_weights(folder: Path) -> None:
    """A checkpoint of the old kind that would run code if anybody loaded it."""
    import torch

    class Harmful:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (os.mkdir, ("ran",))

    torch.save({"weight": Harmful()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _broken_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{", encoding="utf-8")


MODEL_FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (lambda folder: shutil.rmtree(folder), "there is no such model folder"),
    "without config": (_without("config.json"), "has no config.json"),
    "without weights": (_without("model.safetensors"), "has no weights in safetensors"),
    "pickle for weights": (_pickle_for_weights, "has no weights in safetensors"),
    "without tokenizer": (_without("tokenizer.json"), "has no tokenizer"),
    "tokenizer of another model": (_edit_json("config.json", vocab_size=8), "this tokenizer belongs to another model"),
    "tokenizer that is none": (_with("tokenizer.json", '{"model": 3}'), "its tokenizer cannot be read"),
    "truncated weights": (_truncate_weights, "model.safetensors is no whole file of safetensors"),
    "header of a terabyte": (_header_of_a_terabyte, "model.safetensors is no whole file of safetensors"),
    "NaN weights": (_nan_weights, "model.norm.weight has NaN"),
    "broken index": (_broken_index, "is no index of weights"),
    "broken config": (_with("config.json", "{"), "cannot read config.json"),
    "broken generation config": (_with("generation_config.json", "{"), "is no JSON object"),
    "needs foreign code": (
        _edit_json("config.json", model_type="theirs", auto_map={"AutoConfig": "theirs.Config"}),
        "trust_remote_code",
    ),
}


@pytest.mark.parametrize("name", MODEL_FOLDERS)
def test_a_model_folder(name: str, here: Path, refused: Refused, tiny_model_folder: Path) -> None:
    spoil, what = MODEL_FOLDERS[name]
    shutil.copytree(tiny_model_folder, here / "theirs")
    (here / "theirs" / "theirs.py").write_text("import os\nos.mkdir('ran')\n", encoding="utf-8")
    spoil(here / "theirs")
    message = refused("model", "--config", _model_config(here, source="folder", path="theirs"), "--model", "mine")
    assert "theirs" in message
    assert what in message
    assert not (here / "ran").exists()


def _model_config(here: Path, **source: object) -> str:
    return write_config(here, models={"mine": source}, solvability={"model": "mine"}, mismatch={"models": ["mine"]})


def test_a_refused_model_leaves_the_one_that_is_there(here: Path, tiny_model_folder: Path, refused: Refused) -> None:
    shutil.copytree(tiny_model_folder, here / "theirs")
    config = _model_config(here, source="folder", path="theirs")
    assert cli.main(["model", "--config", config, "--model", "mine"]) == 0
    _nan_weights(here / "theirs")
    refused("model", "--config", config, "--model", "mine")  # which compares all files before and after
    assert (here / "out/models/mine/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"source": "gguf", "path": "none.gguf"}, "there is no GGUF file none.gguf"),
        ({"source": "gguf", "package": "no-such-package-as-this"}, "is not installed"),
        ({"source": "gguf", "package": "pyyaml"}, "ships 0 GGUF files"),
    ],
)
def test_a_gguf_file(source: dict[str, object], message: str, here: Path, refused: Refused) -> None:
    assert message in refused("model", "--config", _model_config(here, **source), "--model", "mine")


# ----------------------------------------------------------------------------------------------------------- artefacts
TABLE = Path("out/problems/train.parquet")
COMPLETION = {
    "sample": 0,
    "prompt_ids": [5],
    "token_ids": [6, 1],
    "logprobs": [-0.5, -0.25],
    "finish_reason": "stop",
}


@pytest.fixture
def sampled(here: Path) -> str:
    """The configuration of a user whose problems were read and sampled."""
    config = write_config(here, solvability={"shards": 1, "samples": 1})
    assert cli.main(["problems", "--config", config, "--problems", "train"]) == 0
    rows = [
        {**COMPLETION, "problem_id": problem_id, "verdict": "wrong"}
        for problem_id in artifacts.read(TABLE, "problems")["problem_id"].to_pylist()
    ]
    artifacts.write(Path("out/solvability/shards/0-of-1.parquet"), "completions", rows, {})
    return config


def _foreign(path: Path) -> None:
    _parquet(path, problem_id=["p"], answer=["2"])


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 1
    path.write_bytes(content)


def _another_table(path: Path) -> None:
    shutil.copyfile("out/solvability/shards/0-of-1.parquet", path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _of_another_version(path: Path) -> None:
    table = pq.read_table(path)
    header = json.loads(table.schema.metadata[artifacts.PROVENANCE_KEY])
    header["schema_version"] += 1
    pq.write_table(table.replace_schema_metadata({artifacts.PROVENANCE_KEY: json.dumps(header)}), path)


ARTEFACTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (lambda path: path.unlink(), "the step that writes it has not run"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-20]), "remove it and run its step again"),
    "empty": (lambda path: path.write_bytes(b""), "remove it and run its step again"),
    "a flipped bit": (_flip_a_bit, "remove it and run its step again"),
    "of somebody else": (_foreign, "where 'problems' is needed"),
    "another table": (_another_table, "holds 'completions', where 'problems' is needed"),
    "another schema version": (_of_another_version, "run its step again"),
    "a folder": (_folder, "train.parquet"),
}


@pytest.mark.parametrize("name", ARTEFACTS)
def test_an_artefact(name: str, sampled: str, refused: Refused) -> None:
    spoil, what = ARTEFACTS[name]
    spoil(TABLE)
    message = refused("perfectible", "--config", sampled)
    assert str(TABLE) in message
    assert what in message


def test_a_plan_over_a_table_that_is_cut_short(sampled: str, refused: Refused) -> None:
    TABLE.write_bytes(b"")
    assert "train.parquet: not a complete Parquet file" in refused("plan", "--config", sampled)


def test_an_empty_set_after_the_filter_says_the_counts_and_what_to_change(
    here: Path, sampled: str, refused: Refused, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["perfectible", "--config", sampled]) == 0
    capsys.readouterr()
    shutil.copytree(tiny_model_folder, here / "out/models/gain320")
    message = refused("train", "--config", sampled, "--run", "fp16_grpo_seed0")
    assert "none of 48 problems" in message
    assert "Widen solvability.low and solvability.high" in message


@pytest.mark.parametrize("step", ["solvability --shard 0-of-2", "train --run fp16_grpo_seed0", "perfectible"])
def test_a_step_before_its_turn(step: str, refused: Refused) -> None:
    message = refused(*step.split())
    assert "results/laptop/" in message
    assert "there is no such" in message


# ---------------------------------------------------------------------------------------------------------- the machine
@pytest.fixture
def small_disk(here: Path) -> Iterator[Path]:
    """A disk of 32 kilobytes."""
    disk = here / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def _fill(disk: Path) -> None:
    with open(disk / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(512)):
                pass
        except OSError:
            pass


def test_a_full_disk_keeps_the_file_that_is_there(small_disk: Path, here: Path, refused: Refused) -> None:
    config = write_config(here, output=str(small_disk / "out"))
    arguments = ("problems", "--config", config, "--problems", "train")
    assert cli.main(arguments) == 0
    _fill(small_disk)
    message = refused(*arguments)
    assert "no space left on device; free some space" in message
    assert str(small_disk / "out/problems") in message


def test_a_disk_too_small_for_a_model(small_disk: Path, here: Path, refused: Refused) -> None:
    tiny = {"layers": 1, "hidden_size": 32, "heads": 1, "intermediate_size": 32, "steps": 0}
    config = _model_config(here, source="bootstrap", bootstrap=tiny)
    layer = here / "layer.yaml"
    layer.write_text(f"output: {small_disk / 'out'}\n", encoding="utf-8")
    message = refused("model", "--config", config, str(layer), "--model", "mine")
    assert "no space left on device; free some space" in message
    assert str(small_disk) in message


def test_a_disk_that_is_read_only(small_disk: Path, here: Path, refused: Refused) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    config = write_config(here, output=str(small_disk / "out"))
    message = refused("problems", "--config", config, "--problems", "train")
    assert "read-only file system" in message
    assert str(small_disk) in message


def test_output_below_a_file(here: Path, refused: Refused) -> None:
    (here / "taken").write_text("mine", encoding="utf-8")
    config = write_config(here, output="taken")
    message = refused("problems", "--config", config, "--problems", "train")
    assert "taken" in message
    assert "a file stands where a folder is needed" in message


def test_names_longer_than_a_file_system_takes(here: Path, refused: Refused) -> None:
    config = write_config(here, output="x" * 300)
    assert "shorten the names" in refused("problems", "--config", config, "--problems", "train")


def test_no_permission(here: Path, refused: Refused) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (here / "theirs").mkdir(mode=0o500)
    config = write_config(here, output="theirs/out")
    assert "give yourself the permission" in refused("problems", "--config", config, "--problems", "train")


def test_a_limit_on_file_sizes(here: Path) -> None:
    config = write_config(here)
    limited = ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *HALFMATCH]
    done = subprocess.run(
        [*limited, "problems", "--config", config, "--problems", "train"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "file too large; raise the limit on file sizes" in done.stderr
    assert not list(here.glob("out/problems/*train.parquet*"))


def test_a_bug_is_ours_and_ends_with_1() -> None:
    program = "from halfmatch import cli\ncli.run = lambda *_, **__: 1 / 0\nraise SystemExit(cli.main(['perfectible']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_two_trainings_of_one_run_in_one_folder(
    here: Path, refused: Refused, sampled: str, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second is refused while the first is alive, and goes on once it is gone."""
    from halfmatch.rl.checkpoints import Checkpoints

    layer = here / "layer.yaml"
    layer.write_text("solvability: {low: 0, high: 1}\n", encoding="utf-8")
    shutil.copytree(tiny_model_folder, here / "out/models/gain320")
    assert cli.main(["perfectible", "--config", sampled, str(layer)]) == 0
    capsys.readouterr()
    folder = here / "out/checkpoints/fp16_grpo_seed0"
    with Checkpoints(folder, course={}, keep=1).sole_user():
        message = refused("train", "--config", sampled, str(layer), "--run", "fp16_grpo_seed0")
    assert "out/checkpoints/fp16_grpo_seed0" in message
    assert "another process is training this run" in message
    with Checkpoints(folder, course={}, keep=1).sole_user():
        pass


def test_the_same_table_written_twice_at_once_is_whole(here: Path) -> None:
    config = write_config(here)
    command = [*HALFMATCH, "problems", "--config", config, "--problems", "train"]
    processes = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert artifacts.read(TABLE, "problems").num_rows == 48
    assert not list(here.rglob("*.part"))


def test_a_clock_that_jumps_changes_no_byte(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {"layers": 1, "hidden_size": 32, "heads": 1, "intermediate_size": 32, "steps": 2, "batch_size": 4}
    config = _model_config(here, source="bootstrap", bootstrap={**tiny, "thinking_tokens": [2, 3]})
    commands = [["problems", "--problems", "train"], ["model", "--model", "mine"]]
    for command in commands:
        assert cli.main([*command, "--config", config]) == 0
    straight = files(here)
    shutil.rmtree(here / "out")
    jumps = iter([10**9, -1, 2**33, 0] * 1000)
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    monkeypatch.setattr(time, "monotonic", lambda: next(jumps))
    for command in commands:
        assert cli.main([*command, "--config", config]) == 0
    assert files(here) == straight
