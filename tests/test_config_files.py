"""Configuration files: layers, traps of YAML, and the files that are generated from the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from halfmatch import config_files
from halfmatch.config import Config
from halfmatch.config_files import load, read_yaml, to_reference, to_schema, to_yaml
from halfmatch.errors import UserError

REPOSITORY = Path(__file__).parents[1]
CONFIGURATIONS = {
    "config/config.yaml": ("config/config.yaml",),
    "config/deployment-vllm.yaml": ("config/config.yaml", "config/deployment-vllm.yaml"),
    "config/gpu_sanity.yaml": ("config/gpu_sanity.yaml",),
    "config/gpu_sanity-cpu.yaml": ("config/gpu_sanity.yaml", "config/gpu_sanity-cpu.yaml"),
    "config/grid.yaml": ("config/grid.yaml",),
    **{
        f"config/{name}.yaml": (f"config/{name}.yaml",)
        for name in (
            *("paper", "paper-lora", "paper-octothinker", "paper-moe", "paper-14b"),
            *("llama-2-7b", "mistral-7b"),
        )
    },
    "config/released.yaml": ("config/released.yaml",),
    "config/smollm2.yaml": ("config/smollm2.yaml",),
    "config/smollm2-vllm.yaml": ("config/smollm2.yaml", "config/smollm2-vllm.yaml"),
    "config/smollm2-files.yaml": ("config/smollm2.yaml", "config/smollm2-files.yaml"),
}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_no_files_are_the_defaults() -> None:
    assert load([]) == Config()


def test_the_default_configuration_is_the_model_s_defaults_with_its_descriptions() -> None:
    text = (REPOSITORY / "config/config.yaml").read_text(encoding="utf-8")
    assert text == to_yaml(Config()), "halfmatch config > config/config.yaml"
    assert load([REPOSITORY / "config/config.yaml"]) == Config()


def test_the_schema_is_the_model_s() -> None:
    text = (REPOSITORY / "workflow/schemas/config.schema.json").read_text(encoding="utf-8")
    assert text == to_schema(), "halfmatch config --as schema > workflow/schemas/config.schema.json"
    assert json.loads(text)["properties"]["training"]


def test_the_readme_explains_every_key() -> None:
    text = (REPOSITORY / "config/README.md").read_text(encoding="utf-8")
    assert to_reference() in text, "halfmatch config --as reference, and paste it into config/README.md"


@pytest.mark.parametrize("name", [path.name for path in (REPOSITORY / "config").glob("*.yaml")])
def test_every_shipped_configuration_is_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    load([Path(path) for path in CONFIGURATIONS[f"config/{name}"]])


def test_every_value_of_the_paper_s_presets_says_where_it_comes_from() -> None:
    """But names, and what stands for itself: sources, ids and revisions of data, shapes of published models."""
    for preset in ("paper", "paper-lora", "paper-octothinker", "paper-moe", "paper-14b", "released"):
        lines = (REPOSITORY / f"config/{preset}.yaml").read_text(encoding="utf-8").splitlines()
        section = ""
        for line in lines:
            if line and not line.startswith((" ", "#")):
                section = line.split(":")[0]
            value = line.split("#")[0].partition(":")[2].strip()
            if value and section not in ("problems", "models", "shapes", "report", "output") and "device" not in line:
                assert "  # " in line, f"{preset}: {line}"


@given(
    st.builds(
        Config,
        seed=st.integers(0, 2**31 - 1),
        output=st.text(
            st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters="{}~"), min_size=1
        ),
    )
)
def test_what_is_written_reads_as_the_same(config: Config) -> None:
    assert config_files.validate(yaml.load(to_yaml(config), config_files._Loader), "") == config


def test_later_files_lie_over_earlier_ones_key_by_key(tmp_path: Path) -> None:
    below = write(tmp_path / "below.yaml", "seed: 3\ntraining:\n  iterations: 7\n  seeds: [1, 2]\n")
    above = write(tmp_path / "above.yaml", "training:\n  seeds: [5]\n")
    config = load([below, above])
    assert config.training is not None
    assert (config.seed, config.training.iterations, config.training.seeds) == (3, 7, (5,))


def test_a_layer_can_take_a_section_away(tmp_path: Path) -> None:
    below = write(tmp_path / "below.yaml", "training:\n  iterations: 7\n")
    above = write(tmp_path / "above.yaml", "training: null\n")
    assert load([below, above]).training is None


def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "twice.yaml", "training:\n  iterations: 7\n  seeds: [1]\n  iterations: 8\n")
    with pytest.raises(UserError, match=r"twice\.yaml, line 4: the key 'iterations' stands twice \(first in line 2\)"):
        load([path])


@pytest.mark.parametrize("number", ["1e-6", "1E-6", "1.e-6", ".1e-5", "+1e-06", "0.000001"])
def test_numbers_are_numbers_however_they_are_written(tmp_path: Path, number: str) -> None:
    path = write(tmp_path / "a.yaml", f"training:\n  objective_settings:\n    grpo: {{clip_low: {number}}}\n")
    config = load([path])
    assert config.training is not None
    assert config.training.objective_settings["grpo"]["clip_low"] == 1e-6


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        ("- a\n- b\n", "holds a list, where `key: value` lines are needed"),
        ("a: [1, 2", "not valid YAML"),
        ("seed: 1\nsead: 2\n", "sead: unknown key; did you mean seed?"),
    ],
)
def test_an_unusable_file_is_named_with_what_is_wrong(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "given.yaml"
    if content is not None:
        write(path, content)
    with pytest.raises(UserError) as caught:
        load([path])
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        load([tmp_path / "a.yaml"])


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert read_yaml(write(tmp_path / "a.yaml", "# nothing\n")) == {}
    assert load([tmp_path / "a.yaml"]) == Config()
