"""The demonstrations are what they say they are, and a bootstrapped model is reproducible and continues as told."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from halfmatch import models
from halfmatch.config import Bootstrap, ModelSource
from halfmatch.models.bootstrap import Demonstrations, imitation_loss
from halfmatch.models.tiny_tokenizer import make_tokenizer

Source = Callable[..., ModelSource]


def drawn(bootstrap: Bootstrap, size: int, seed: int = 0) -> list[str]:
    """Demonstrations as text, padding cut off at the given lengths."""
    ids, lengths = Demonstrations(bootstrap, 0).draw(size, torch.Generator().manual_seed(seed))
    tokenizer = make_tokenizer()
    for row, length in zip(ids, lengths, strict=True):
        assert (row[length:] == 0).all()
    return [tokenizer.decode(row[:length]) for row, length in zip(ids, lengths, strict=True)]


def test_demonstrations_have_the_declared_form() -> None:
    texts = drawn(Bootstrap(thinking_tokens=(2, 4)), 4000)
    matches = [re.fullmatch(r"([2-9])x([2-9])([a-f]{2,4})=(\d\d)<eos>", text) for text in texts]
    assert all(matches)
    assert {(m[1], m[2]) for m in matches if m} == {(a, b) for a in "23456789" for b in "23456789"}
    lengths = np.bincount([len(m[3]) for m in matches if m])[2:]
    assert lengths / len(texts) == pytest.approx([1 / 3] * 3, abs=0.04)  # 5 standard errors
    letters = np.unique(list("".join(m[3] for m in matches if m)), return_counts=True)[1]
    assert letters / letters.sum() == pytest.approx([1 / 6] * 6, abs=0.02)


def test_demonstrations_of_larger_factors_have_longer_prompts_and_answers() -> None:
    texts = drawn(Bootstrap(factors=(9, 11), thinking_tokens=(2, 4), wrong_share=(0.0, 0.0)), 400)
    matches = [re.fullmatch(r"(09|10|11)x(09|10|11)[a-f]{2,4}=(\d{4})<eos>", text) for text in texts]
    assert all(int(m[1]) * int(m[2]) == int(m[3]) for m in matches if m)
    assert len({m[3] for m in matches if m}) == 6  # all products of three factors
    assert all(matches)


def test_wrong_products_come_as_often_as_their_problems_share() -> None:
    bootstrap = Bootstrap(thinking_tokens=(1, 1), wrong_share=(0.1, 0.9))
    shares = Demonstrations(bootstrap, 0).wrong_share
    # evenly spread from the lowest to the highest
    assert sorted(shares.tolist()) == pytest.approx([0.1 + 0.8 * number / 63 for number in range(64)])
    texts = drawn(bootstrap, 40_000)
    tries, wrong = np.zeros(64), np.zeros(64)
    for text in texts:
        left, right, answer = int(text[0]), int(text[2]), text.split("=")[1][:2]
        number = 8 * (left - 2) + right - 2
        tries[number] += 1
        wrong[number] += int(answer) != left * right
    error = np.sqrt(shares.numpy() * (1 - shares.numpy()) / tries)
    assert (abs(wrong / tries - shares.numpy()) < 5 * error).all()


def test_every_product_of_the_table_is_a_possible_wrong_answer_and_nothing_else() -> None:
    texts = drawn(Bootstrap(thinking_tokens=(1, 1), wrong_share=(1.0, 1.0)), 20_000)
    products = {f"{a * b:02d}" for a in range(2, 10) for b in range(2, 10)}
    assert {text.split("=")[1][:2] for text in texts} == products
    assert not any(int(text[0]) * int(text[2]) == int(text.split("=")[1][:2]) for text in texts)


def test_the_seed_and_nothing_else_says_which_problems_are_hard() -> None:
    first, again, other = (Demonstrations(Bootstrap(), seed).wrong_share for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_loss_is_the_weighted_mean_over_the_response() -> None:
    class Fixed(torch.nn.Module):
        """Gives token t the logit 0.1 t, everywhere."""

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.nn.Module:
            self.logits = (0.1 * torch.arange(20.0)).expand(*input_ids.shape, 20)
            return self

    tokenizer = make_tokenizer()
    rows = [tokenizer.encode("7x8ab=56<eos>"), [*tokenizer.encode("2x3f=06<eos>"), 0]]
    loss = imitation_loss(Fixed(), torch.tensor(rows), torch.tensor([9, 8]), prompt_tokens=3, answer_tokens=2)

    norm = math.log(sum(math.exp(0.1 * token) for token in range(20)))
    total = weight = 0.0
    for response, weights in (("ab=56<eos>", [1, 1, 1, 5, 5, 1]), ("f=06<eos>", [1, 1, 5, 5, 1])):
        for token, token_weight in zip(tokenizer.encode(response), weights, strict=True):
            total += token_weight * (norm - 0.1 * token)
            weight += token_weight
    assert loss.item() == pytest.approx(total / weight, rel=1e-6)


def test_the_same_seed_gives_the_same_bytes(bootstrapped: Path, bootstrap_source: Source, tmp_path: Path) -> None:
    models.prepare(bootstrap_source(), tmp_path / "again", seed=1)
    models.prepare(bootstrap_source(), tmp_path / "other", seed=2)
    for file in bootstrapped.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    assert models.digest(bootstrapped) == models.digest(tmp_path / "again") != models.digest(tmp_path / "other")


def test_bootstrapping_leaves_the_process_wide_generator_alone(bootstrap_source: Source, tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    models.prepare(bootstrap_source(steps=1), tmp_path / "model", seed=0)
    assert torch.equal(torch.rand(3), expected)


def test_training_lowers_the_loss(bootstrap_source: Source, tmp_path: Path) -> None:
    losses: list[float] = []
    source = bootstrap_source(steps=40, batch_size=16)
    models.prepare(source, tmp_path / "m", progress=lambda _, note: losses.append(float(note.removeprefix("loss "))))
    assert len(losses) == 40
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])


def test_a_variant_continues_with_the_gain_it_asks_for(
    bootstrapped: Path, bootstrap_source: Source, tmp_path: Path
) -> None:
    source = bootstrap_source(start="base", gain=48.0, steps=0)
    models.prepare(source, tmp_path / "variant", start=bootstrapped)
    before = dict(models.load(bootstrapped, torch.float32).named_parameters())
    after = dict(models.load(tmp_path / "variant", torch.float32).named_parameters())
    for name, weight in before.items():
        if name != "model.norm.weight":
            assert torch.equal(after[name], weight)
    gain = before["model.norm.weight"].double()
    assert after["model.norm.weight"].mean().item() == pytest.approx(48, rel=1e-6)
    torch.testing.assert_close(after["model.norm.weight"].double(), gain * 48 / gain.mean(), rtol=1e-6, atol=0)


def test_the_model_of_the_laptop_run_is_small_and_has_heads_that_vllm_serves(
    bootstrap_source: Source, tmp_path: Path
) -> None:
    models.prepare(bootstrap_source(**Bootstrap(steps=0).model_dump()), tmp_path / "model")
    model = models.load(tmp_path / "model", torch.float32)
    assert model.config.head_dim == 32
    # embedding (tied) + 4 × (q, k, v, o + MLP + 2 norms + q and k norms) + final norm
    layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 176 + 2 * 64 + 2 * 32
    assert sum(parameter.numel() for parameter in model.parameters()) == 20 * 64 + 4 * layer + 64
