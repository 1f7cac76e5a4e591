"""The prompts of a measurement: the user's own, a problem set's, or questions that are built in."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmatch import prompts
from halfmatch.config import Prompt, PromptTemplate
from halfmatch.errors import UserError
from halfmatch.mismatch.foreign import read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Columns that a file of prompts may have; the first that a row has is taken.
TEXTS = ("prompt", "problem", "question", "text", "messages")
TOKENS = ("prompt_ids", "prompt_token_ids")


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt as the engine gets it, under a name that follows from its content."""

    problem_id: str
    token_ids: tuple[int, ...]


def built_in(count: int, seed: int) -> list[str]:
    """Questions that need no file and no network: sums of products, to be worked out step by step."""
    draw = random.Random(seed)
    return [
        f"What is {draw.randint(12, 98)} × {draw.randint(12, 98)} + {draw.randint(120, 980)}?" for _ in range(count)
    ]


def of_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], template: PromptTemplate | None
) -> list[TokenPrompt]:
    """Problems as prompts; without a template in the tokenizer's chat template, or plain where it has none."""
    chosen = template or ("chat" if tokenizer.chat_template else "plain")
    return _named(prompts.encode(tokenizer, Prompt(template=chosen), text) for text in texts)


def of_file(tokenizer: PreTrainedTokenizerBase, path: Path, *, chat: bool | None) -> list[TokenPrompt]:
    """The prompts of a Parquet, JSONL or JSON file, nothing added to them.

    A row has a text, a list of messages, or token ids. chat: whether a text is what a user says in a conversation; by
    default where the tokenizer has a chat template.
    """
    return _named(_of_row(tokenizer, row, f"{path}: row {number}", chat) for number, row in enumerate(read_rows(path)))


def _of_row(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], where: str, chat: bool | None) -> list[int]:
    name = next((name for name in (*TOKENS, *TEXTS) if row.get(name) is not None), None)
    if name is None:
        raise UserError(
            f"{where} has no prompt under one of the names {', '.join((*TOKENS, *TEXTS))}; it has {', '.join(row)}"
        )
    value = row[name]
    if name in TOKENS:
        return [int(token) for token in value]
    if isinstance(value, str):
        if not (chat if chat is not None else tokenizer.chat_template):
            return prompts.encode(tokenizer, Prompt(template="plain"), value)
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise UserError(f"{where}: {name} is neither a text nor a list of messages")
    if not tokenizer.chat_template:
        raise UserError(f"{where}: messages need a chat template, and the model's tokenizer has none; give texts")
    text = tokenizer.apply_chat_template(value, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def _named(token_ids: Iterable[list[int]]) -> list[TokenPrompt]:
    """Prompts by name, each once."""
    named = {}
    for ids in token_ids:
        if not ids:
            raise UserError("a prompt has no tokens; there is nothing to continue")
        name = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
        named[name] = TokenPrompt(name, tuple(ids))
    if not named:
        raise UserError("there are no prompts")
    return [named[name] for name in sorted(named)]
