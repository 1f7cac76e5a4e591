"""Prompts and responses as token ids."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from halfmatch.config import Prompt
from halfmatch.errors import UserError
from halfmatch.grading import grade
from halfmatch.models.tiny_tokenizer import TOKEN_IDS, make_tokenizer
from halfmatch.prompts import INSTRUCTION, decode, encode, stop_token_ids

CHAT = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
OPENS_THINKING = CHAT.replace("<assistant>", "<assistant><think>\n")
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHAT
)


def make(
    chat_template: str | None = None, *, thinks: bool = False, adds: str = "<s> $A", special_thinking: bool = False
) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes that puts <s> before what it encodes, as Llama's do."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if thinks:
        tokenizer.add_tokens([AddedToken(token, special=special_thinking) for token in ("<think>", "</think>")])
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=adds, special_tokens=ids)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.chat_template = chat_template
    return made


def text_of(tokenizer: PreTrainedTokenizerFast, template: str, problem: str = "1+1?", system: str | None = None) -> str:
    token_ids = encode(tokenizer, Prompt(template=template, system=system), problem)
    return tokenizer.decode(token_ids, skip_special_tokens=False)


def test_plain_is_the_problem_alone():
    assert encode(make_tokenizer(), Prompt(template="plain"), "7x8") == [TOKEN_IDS["7"], TOKEN_IDS["x"], TOKEN_IDS["8"]]
    assert text_of(make(), "plain") == "<s>1+1?"


def test_boxed_asks_for_a_box():
    assert text_of(make(), "boxed") == f"<s>1+1?\n{INSTRUCTION}\n"
    assert INSTRUCTION.endswith(r"\boxed{}.")


def test_chat_uses_the_template_of_the_tokenizer():
    assert text_of(make(CHAT), "chat") == f"<s><user>1+1?\n{INSTRUCTION}<assistant>"
    assert (
        text_of(make(CHAT), "chat", system="Be brief.") == f"<s><system>Be brief.<user>1+1?\n{INSTRUCTION}<assistant>"
    )


def test_r1_opens_the_thinking_once_where_there_is_such_a_token():
    opened = f"<s><user>1+1?\n{INSTRUCTION}<assistant><think>\n"
    assert text_of(make(CHAT, thinks=True), "r1") == opened
    assert text_of(make(OPENS_THINKING, thinks=True), "r1") == opened
    assert text_of(make(CHAT), "r1") == opened.removesuffix("<think>\n")
    assert text_of(make(CHAT, thinks=True), "chat") == opened.removesuffix("<think>\n")


@pytest.mark.parametrize("template", ["plain", "boxed", "chat", "r1"])
@pytest.mark.parametrize("adds", ["<s> $A", "<s> $A </s>"])
def test_one_beginning_and_no_end_of_text(template, adds):
    tokenizer = make(CHAT, thinks=True, adds=adds)
    token_ids = encode(tokenizer, Prompt(template=template), "1+1?")
    assert token_ids.count(tokenizer.bos_token_id) == 1
    assert token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in token_ids


@pytest.mark.parametrize("template", ["chat", "r1"])
def test_a_missing_chat_template_names_what_to_use(template):
    with pytest.raises(UserError, match=f"{template} needs a chat template.*use the template boxed"):
        encode(make(), Prompt(template=template), "1+1?")


def test_a_template_without_system_messages_says_what_to_remove():
    assert text_of(make(NO_SYSTEM), "chat").startswith("<s><user>")
    with pytest.raises(UserError, match=r"System role not supported; remove prompt\.system"):
        text_of(make(NO_SYSTEM), "chat", system="Be brief.")


def test_a_broken_template_says_what_to_use():
    with pytest.raises(UserError, match=r"chat template fails.*use the template boxed"):
        text_of(make("{% for %}"), "chat")


@pytest.mark.parametrize("template", ["plain", "boxed"])
def test_a_system_message_is_not_lost_silently(template):
    with pytest.raises(UserError, match=f"the template {template} has no place for a system message"):
        encode(make(CHAT), Prompt(template=template, system="Be brief."), "1+1?")


def test_a_problem_that_the_tokenizer_cannot_encode_is_named():
    with pytest.raises(UserError, match="cannot encode the prompt 'What is 7 times 8"):
        encode(make_tokenizer(), Prompt(template="plain"), "What is 7 times 8?")


# ------------------------------------------------------------------------------------------------------------ responses
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_a_response_is_decoded_to_its_text(text):
    tokenizer = make()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if not {"<s>", "</s>"} & set(tokenizer.convert_ids_to_tokens(token_ids)):
        assert decode(tokenizer, [*token_ids, tokenizer.eos_token_id]) == text


@pytest.mark.parametrize("special", [True, False])
def test_the_end_of_thinking_stays_for_grading(special):
    tokenizer = make(thinks=True, special_thinking=special)
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    response = "so 1+1 it is</think>\\boxed{2}"
    text = decode(tokenizer, [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id])
    assert text == response
    assert grade(text, "2", rule="r1").label == "correct"


def test_a_response_of_the_tiny_model_is_graded_exactly():
    response = [TOKEN_IDS[letter] for letter in "abcfed=56"]
    assert decode(make_tokenizer(), [*response, TOKEN_IDS["<eos>"]]) == "abcfed=56"
    assert grade(decode(make_tokenizer(), [*response, TOKEN_IDS["<eos>"]]), "56", rule="exact").label == "correct"


def test_spaces_before_punctuation_are_not_cleaned_up():
    tokenizer = make()
    tokenizer.clean_up_tokenization_spaces = True
    assert decode(tokenizer, tokenizer.encode("f ( x ) , 2 .", add_special_tokens=False)) == "f ( x ) , 2 ."


# ---------------------------------------------------------------------------------------------------------- stop tokens
@pytest.mark.parametrize(
    ("generation", "config", "stops"),
    [
        ({"eos_token_id": [300, 7]}, {"eos_token_id": 9}, [7, 9, 257, 300]),
        ({"eos_token_id": 9}, {"eos_token_id": None}, [9, 257]),
        (None, {"eos_token_id": 257}, [257]),
        ({}, {}, [257]),
    ],
)
def test_every_end_of_text_stops(generation, config, stops, tmp_path):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = make()
    assert tokenizer.eos_token_id == 257
    assert stop_token_ids(tmp_path, tokenizer) == stops


def test_a_model_without_any_end_of_text_has_no_stop(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    tokenizer = make()
    tokenizer.eos_token = None
    assert stop_token_ids(tmp_path, tokenizer) == []
