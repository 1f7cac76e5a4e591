"""The tiny model of the laptop run: a Qwen3 trained here, in a minute or two, on demonstrations of products.

A demonstration is a prompt "7x8", thinking tokens drawn at random, "=", the answer and the end: "7x8cafbde…=56<eos>".
The answer is a wrong product with a probability of the problem's own, so the model that imitates them solves some
problems often and others seldom. The model itself says how long it thinks and when it answers; nothing is forced.

The architecture is the smallest that every engine here serves: grouped queries, tied embeddings, heads of 32. Qwen3 and
not Qwen2, whose tokenizer class `transformers` imposes on the folder, whatever tokenizer lies in it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from halfmatch.config import Bootstrap
from halfmatch.models.folder import load, save
from halfmatch.models.tiny_tokenizer import EOS, EQUALS, PAD, THINKING, TOKEN_IDS, VOCABULARY, make_tokenizer
from halfmatch.problems.generator import products

LONGEST_SEQUENCE = 512  # positions that the configuration declares

# The answer is all there is to learn, and 1 token in 30: without more weight they take twice as many steps.
ANSWER_WEIGHT = 5.0
# Wide enough that the logits start at their final scale; at the usual 0.02 tied embeddings learn slowly.
INITIALIZER_RANGE = 0.05
ADAM_BETAS = (0.9, 0.95)
CLIP_NORM = 1.0
WARMUP_STEPS = 50
FINAL_SHARE = 0.1  # of the learning rate, where the cosine ends

_IGNORED = -100  # cross_entropy's label of a position without a target


class Demonstrations:
    """Draws demonstrations. `wrong_share` [problems]: how often each problem's demonstrations are wrong."""

    def __init__(self, bootstrap: Bootstrap, seed: int):
        problems, answers = zip(*products(*bootstrap.factors), strict=True)
        distinct = sorted(set(answers))
        self.thinking_tokens = bootstrap.thinking_tokens
        self.prompts = _encode(problems)
        self.answers = _encode(distinct)
        self.correct = torch.tensor([distinct.index(answer) for answer in answers])
        self.wrong_share = _spread(problems, bootstrap.wrong_share, seed)

    @property
    def fixed_tokens(self) -> tuple[int, int]:
        """How many tokens every prompt has, and every answer."""
        return self.prompts.shape[1], self.answers.shape[1]

    def draw(self, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """`size` demonstrations: input ids [size, T], padded on the right, and their lengths, EOS included [size]."""

        def uniform(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator)

        prompt_tokens, answer_tokens = self.fixed_tokens
        shortest, longest = self.thinking_tokens
        problem = uniform(0, len(self.prompts), size)
        is_wrong = torch.rand(size, generator=generator) < self.wrong_share[problem]
        correct, other = self.correct[problem], uniform(0, len(self.answers) - 1, size)
        wrong = other + (other >= correct)  # any other answer, each as likely
        answer = self.answers[torch.where(is_wrong, wrong, correct)]
        equals = prompt_tokens + uniform(shortest, longest + 1, size)

        first_thinking = TOKEN_IDS[THINKING[0]]
        ids = uniform(first_thinking, first_thinking + len(THINKING), size, prompt_tokens + longest + answer_tokens + 2)
        ids[:, :prompt_tokens] = self.prompts[problem]
        rows = torch.arange(size)
        ids[rows, equals] = TOKEN_IDS[EQUALS]
        for digit in range(answer_tokens):
            ids[rows, equals + 1 + digit] = answer[:, digit]
        lengths = equals + answer_tokens + 2
        ids[rows, lengths - 1] = TOKEN_IDS[EOS]
        ids[torch.arange(ids.shape[1]) >= lengths[:, None]] = TOKEN_IDS[PAD]
        return ids, lengths


def _encode(texts: Iterable[str]) -> torch.Tensor:
    """Texts of one length as token ids [texts, length]."""
    return torch.tensor([[TOKEN_IDS[character] for character in text] for text in texts])


def _spread(problems: Sequence[str], limits: tuple[float, float], seed: int) -> torch.Tensor:
    """Shares from the lower to the upper limit in equal steps, to the problems in the order of a hash of each."""
    hashes = [hashlib.sha256(f"{seed} {problem}".encode()).digest() for problem in problems]
    order = sorted(range(len(problems)), key=lambda number: hashes[number])
    shares = torch.empty(len(problems))
    shares[torch.tensor(order)] = torch.linspace(*limits, len(problems))
    return shares


def write_bootstrapped(
    bootstrap: Bootstrap,
    folder: Path,
    *,
    start: Path | None,
    seed: int,
    progress: Callable[[int, str], None] | None = None,
    device: str = "cpu",
) -> None:
    """Train the tiny model and write it, with its tokenizer, to a folder. One thread, so that the bits repeat.

    start: the folder of the model whose weights to continue from (`bootstrap.start`). progress: told of every step.
    device: where it is trained; demonstrations and first weights are the same on any.
    """
    torch.set_num_threads(1)
    model = _initial(bootstrap, seed) if start is None else _continued(bootstrap, start)
    with _tf32() if device == "cuda" else nullcontext():
        _train(model.to(device), bootstrap, seed, progress)
    model.to("cpu")
    model.generation_config = GenerationConfig(eos_token_id=TOKEN_IDS[EOS], pad_token_id=TOKEN_IDS[PAD])
    save(model, make_tokenizer(), folder)


@contextmanager
def _tf32() -> Iterator[None]:
    """Lets a GPU round the inputs of fp32 matmuls to TF32, which is several times as fast: imitation takes no more."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _initial(bootstrap: Bootstrap, seed: int) -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=bootstrap.hidden_size,
        intermediate_size=bootstrap.intermediate_size,
        num_hidden_layers=bootstrap.layers,
        num_attention_heads=bootstrap.heads,
        num_key_value_heads=bootstrap.kv_heads,
        head_dim=bootstrap.hidden_size // bootstrap.heads,
        max_position_embeddings=max(LONGEST_SEQUENCE, 2 * bootstrap.thinking_tokens[1]),
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=TOKEN_IDS[EOS],
        pad_token_id=TOKEN_IDS[PAD],
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    torch.nn.init.constant_(model.model.norm.weight, bootstrap.gain)
    return model


def _continued(bootstrap: Bootstrap, start: Path) -> PreTrainedModel:
    """The weights of `start` with the final norm's mean gain at `bootstrap.gain`.

    A model that starts at a high gain does not learn; one that learnt at a low gain soon imitates as well at a higher.
    """
    model = load(start, torch.float32).requires_grad_(True)
    gain = model.model.norm.weight
    with torch.no_grad():
        gain.mul_(bootstrap.gain / gain.mean())
    return model


def _train(
    model: PreTrainedModel, bootstrap: Bootstrap, seed: int, progress: Callable[[int, str], None] | None
) -> None:
    demonstrations = Demonstrations(bootstrap, seed)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=bootstrap.learning_rate, betas=ADAM_BETAS, weight_decay=0.0, foreach=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, bootstrap.steps))
    model.train()
    for _ in range(bootstrap.steps):
        input_ids, lengths = (part.to(model.device) for part in demonstrations.draw(bootstrap.batch_size, generator))
        loss = imitation_loss(model, input_ids, lengths, *demonstrations.fixed_tokens)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
        if progress:
            progress(1, f"loss {loss.item():.3f}")
    model.eval()


def _rate(step: int, steps: int) -> float:
    """The learning rate at a step as a share of its peak: linear warm-up, then a cosine to `FINAL_SHARE`."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, steps))))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)


def imitation_loss(
    model: torch.nn.Module, input_ids: torch.Tensor, lengths: torch.Tensor, prompt_tokens: int, answer_tokens: int
) -> torch.Tensor:
    """Weighted mean cross-entropy of the response tokens, in nats. input_ids [B, T], lengths [B]."""
    position = torch.arange(1, input_ids.shape[1], device=input_ids.device)  # of the predicted token
    is_response = (position >= prompt_tokens) & (position < lengths[:, None])
    is_answer = is_response & (position >= lengths[:, None] - answer_tokens - 1) & (position < lengths[:, None] - 1)
    targets = torch.where(is_response, input_ids[:, 1:], _IGNORED)
    logits = model(input_ids[:, :-1], use_cache=False).logits
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="none")
    weights = is_response + (ANSWER_WEIGHT - 1) * is_answer
    return (losses.view_as(weights) * weights).sum() / weights.sum()
