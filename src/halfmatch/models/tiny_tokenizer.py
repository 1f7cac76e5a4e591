"""The tokenizer of the bootstrapped model: one token a character, a vocabulary of 20, nothing added to a prompt."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD = "<pad>"
EOS = "<eos>"
DIGITS = "0123456789"
TIMES = "x"
EQUALS = "="
THINKING = "abcdef"

VOCABULARY: tuple[str, ...] = (PAD, EOS, *DIGITS, TIMES, EQUALS, *THINKING)
TOKEN_IDS: dict[str, int] = {token: index for index, token in enumerate(VOCABULARY)}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that encodes "7x8" to the ids of its three characters and decodes ids to their text, joined.

    A character outside the vocabulary is an error of the encoder: there is no unknown token to hide it.
    """
    tokenizer = Tokenizer(models.WordLevel(TOKEN_IDS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )
