"""The tokenizer of the bootstrapped model: one character, one token, the same after loading."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from halfmatch import models
from halfmatch.models.tiny_tokenizer import make_tokenizer

CHARACTERS = "0123456789x=abcdef"


def test_a_prompt_is_its_characters_and_nothing_is_added() -> None:
    # <pad> 0, <eos> 1, digits from 2, x 12, = 13, thinking letters from 14
    assert make_tokenizer().encode("7x8") == [9, 12, 10]
    assert make_tokenizer().encode("7x8=56") == [9, 12, 10, 13, 7, 8]


@given(st.text(CHARACTERS))
def test_decoding_gives_back_any_text(text: str) -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_end_decodes_to_nothing_for_a_grader() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.decode([9, 12, 10, 13, 7, 8, 1], skip_special_tokens=True) == "7x8=56"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (1, 0, None)
    assert len(tokenizer) == 20


def test_a_foreign_character_is_an_error_and_not_dropped() -> None:
    with pytest.raises(Exception, match="UNK"):
        make_tokenizer().encode("7×8")


def test_auto_tokenizer_reads_the_same_tokenizer(bootstrapped: Path) -> None:
    """vLLM and other tools read it so; for some architectures AutoTokenizer exchanges the class and the vocabulary."""
    for tokenizer in (AutoTokenizer.from_pretrained(bootstrapped), models.load_tokenizer(bootstrapped)):
        assert tokenizer.get_vocab() == make_tokenizer().get_vocab()
        assert tokenizer.encode("7x8ace=56") == make_tokenizer().encode("7x8ace=56")
        assert len(tokenizer) == 20
