"""From a problem to token ids, once, and from sampled token ids to text, for grading only.

Text is never tokenised again: the token ids that the engine got and returned are the record.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from halfmatch.config import Prompt
from halfmatch.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
THINK, END_OF_THINKING = "<think>", "</think>"


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, problem: str) -> list[int]:
    r"""The prompt of a problem.

    plain: the problem alone. boxed: the problem and the instruction to box the answer. chat: the same in the
    tokenizer's chat template. r1: chat, and the response begins inside `<think>` where the tokenizer has that token.
    """
    if prompt.template in ("chat", "r1"):
        # The template has written the special tokens, BOS among them.
        return _token_ids(tokenizer, _conversation(tokenizer, prompt, problem), add_special_tokens=False)
    if prompt.system is not None:
        raise UserError(
            f"prompt.system: the template {prompt.template} has no place for a system message; remove it, or use the "
            "template chat or r1"
        )
    text = problem if prompt.template == "plain" else f"{problem}\n{INSTRUCTION}\n"
    token_ids = _token_ids(tokenizer, text, add_special_tokens=True)
    # A tokenizer that ends what it encodes would have the model respond to a finished text.
    return token_ids[:-1] if token_ids and token_ids[-1] == tokenizer.eos_token_id else token_ids


def _token_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except Exception as error:  # tokenizers raises nothing more precise
        raise UserError(f"the model's tokenizer cannot encode the prompt {text[:60]!r}: {error}") from error


def _conversation(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, problem: str) -> str:
    """The text of a conversation in which it is the model's turn."""
    import jinja2

    if not tokenizer.chat_template:
        raise UserError(
            f"prompt.template: {prompt.template} needs a chat template, and the model's tokenizer has none; use the "
            "template boxed (or plain)"
        )
    messages = [{"role": "user", "content": f"{problem}\n{INSTRUCTION}"}]
    if prompt.system is not None:
        messages.insert(0, {"role": "system", "content": prompt.system})
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        advice = "remove prompt.system" if prompt.system is not None else "use the template boxed"
        raise UserError(f"the tokenizer's chat template fails: {error}; {advice}") from None
    assert isinstance(text, str)
    if prompt.template == "r1" and _has_token(tokenizer, THINK) and not text.rstrip().endswith(THINK):
        text += f"{THINK}\n"
    return text


def _has_token(tokenizer: PreTrainedTokenizerBase, token: str) -> bool:
    token_id = tokenizer.convert_tokens_to_ids(token)
    return token_id is not None and token_id != tokenizer.unk_token_id


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of a response without its special tokens, apart from those around the thinking, which grading reads."""
    special = {tokenizer.convert_ids_to_tokens(i): i for i in tokenizer.all_special_ids}
    dropped = {token_id for token, token_id in special.items() if token not in (THINK, END_OF_THINKING)}
    kept = [token_id for token_id in token_ids if token_id not in dropped]
    text = tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def stop_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a response: every EOS that the generation config, the config and the tokenizer name."""
    found = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if path.exists():
            eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            found.update(eos if isinstance(eos, list) else [eos])
    return sorted(found - {None})
