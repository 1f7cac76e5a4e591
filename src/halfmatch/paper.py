"""What the paper (arXiv 2510.26788) did and reported, as data that presets, verdicts and the report compare with.

Every value carries where it comes from, because not all of them are equally sure: see SOURCES.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["T", "T1", "C", "F"]
DTypeName = Literal["bf16", "fp16", "fp32"]
Phase = Literal["offline", "start", "end", "collapse"]  # at fixed weights; or in training

ARXIV = "2510.26788"

SOURCES: dict[Source, str] = {
    "T": "printed in the paper, by two independent transcriptions",
    "T1": "printed in the paper, by one transcription only",
    "C": "the released scripts",
    "F": "read by eye from the released figures: at best ±0.01 on accuracy and ±20 steps",
}


@dataclass(frozen=True)
class Setting:
    """A setting of the paper in words; where paper and released scripts disagree there is a row for each."""

    item: str
    value: str
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Score:
    """avg@32 of the untrained DeepSeek-R1-Distill-Qwen-1.5B, in percent."""

    dtype: DTypeName
    benchmark: str
    budget_tokens: int
    percent: float
    sources: tuple[Source, ...] = ("T",)


@dataclass(frozen=True)
class Quantity:
    """A measured number: `key` is the name halfmatch gives the same quantity, `phase` when it was measured."""

    key: str
    what: str
    phase: Phase
    dtype: DTypeName
    value: float
    unit: str
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Peak:
    """The best training accuracy of a run (or the best AIME24 avg@32 where `what` says so), and what became of it."""

    run: str
    dtype: DTypeName
    value: float
    step: int | None = None
    framework: Literal["VeRL", "Oat", ""] = ""
    what: Literal["training accuracy", "AIME24"] = "training accuracy"
    note: str = ""
    sources: tuple[Source, ...] = ("F",)


@dataclass(frozen=True)
class GridCell:
    """How GRPO training went with one dtype in the trainer and one in the rollout engine."""

    train: DTypeName
    rollout: DTypeName
    outcome: str
    sources: tuple[Source, ...] = ("T1",)


@dataclass(frozen=True)
class Finding:
    """What others found afterwards, in favour of the paper's reading or beside it."""

    key: str
    supports: bool
    text: str


PERFECTIBLE_BAND = (0.2, 0.8)
PERFECTIBLE_TRIES = 40
PERFECTIBLE_PROBLEMS = 1460
SANITY_ACCURACY = 0.95  # the sanity test is passed above this training accuracy [T]

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "perfectible set",
        "MATH; 40 responses a problem; initial accuracy in [20 %, 80 %]; DeepSeek-R1-Distill-Qwen-1.5B gives "
        "1,460 problems (dataset sail/Sanity-Test-R1D-1.5B)",
        ("T", "C"),
    ),
    Setting("pass rule of the sanity test", "training accuracy above 95 %", ("T",)),
    Setting(
        "sanity training",
        "64 prompts × 8 rollouts an iteration, 4 gradient steps an iteration, 8K response budget, prompt ≤ 1,024 "
        "tokens; learning rate 1e-6, constant; AdamW β (0.9, 0.95), weight decay 0, eps 1e-15; gradient-norm clip "
        "1.0; no KL term; T = 1, top-p 1",
        ("T", "C"),
    ),
    Setting(
        "advantage and normaliser",
        "reward − group mean, no division by the standard deviation; sum over tokens divided by a constant length (the "
        "generation limit). GSPO: with the standard deviation, mean over the sequence",
        ("C",),
    ),
    Setting("reward", "1 or 0; a truncated response scores 0; exactly one </think> and a \\boxed answer", ("C",)),
    Setting(
        "fp16 loss scaling", "dynamic: start 65,536, growth 2, backoff 0.5; growth interval 400 (VeRL patch)", ("C",)
    ),
    Setting("fp16 loss scaling", "growth interval 1,000 with hysteresis 2 (DeepSpeed's defaults, Oat)", ("C",)),
    Setting("evaluation", "AIME24 (also AIME25), avg@32, T 0.6, top-p 0.95, 8K tokens; every 16 steps", ("C",)),
    Setting("offline scores", "32 responses a problem, T 0.6, top-p 0.95", ("T1",)),
    Setting("offline mismatch", "32 responses a problem, T 1, no top-p, 32K tokens", ("T1",)),
    Setting("clip", "0.2 / 0.2", ("C",)),
    Setting("clip", "0.2 / 0.28", ("T1",)),
    Setting(
        "C of TIS and MIS",
        'Token-TIS 2, GRPO-Seq-MIS 10, "PG-Seq-MIS" 3 (the released script of that name clamps, so it is PG-Seq-TIS)',
        ("C",),
    ),
    Setting("C of TIS and MIS", "3 everywhere", ("T1",)),
    Setting("GSPO clip", "3e-4 / 4e-4 on the geometric-mean ratio π/π_old; μ does not enter", ("C",)),
    Setting("LoRA run", "Qwen2.5-Math-1.5B on MATH, learning rate 4e-5, 3,000 tokens; rank 1, α 2", ("C",)),
    Setting("LoRA run", "rank 32, α 64", ("T1",)),
    Setting("OctoThinker run", "OctoThinker-3B-Hybrid-Base on MATH-12k, 128 prompts, 3,000 tokens, GRPO", ("C",)),
    Setting(
        "MoE run",
        "Qwen3-30B-A3B-Base; 512 prompts × 16, 20,480 tokens, mini-batch 32, clip 0.2 / 0.28, eps 1e-15; GRPO-Seq-MIS, "
        "GRPO-Token-TIS, PG-Seq-TIS",
        ("T1",),
    ),
    Setting(
        "dense 14B run",
        "Qwen3-14B-Base, DAPO (dynamic sampling: 1,536 generated for 512 trained), n 16, 20,480 tokens, clip 0.2 "
        "/ 0.28, dual clip 10, token mean, weight decay 0.1, warm-up 10, avg@8",
        ("T1",),
    ),
    Setting("hardware", "8 × A100-80G; vLLM 0.8.4", ("C",)),
    Setting("hardware", "vLLM 0.10.0", ("T1",)),
)

# Precision alone does not change the score of the untrained model.
OFFLINE_SCORES: tuple[Score, ...] = (
    Score("bf16", "AMC23", 8192, 50.38),
    Score("bf16", "AIME24", 8192, 22.60),
    Score("bf16", "AMC23", 32768, 62.35),
    Score("bf16", "AIME24", 32768, 29.90),
    Score("fp16", "AMC23", 8192, 50.60),
    Score("fp16", "AIME24", 8192, 20.10),
    Score("fp16", "AMC23", 32768, 63.10),
    Score("fp16", "AIME24", 32768, 30.94),
    Score("fp32", "AMC23", 8192, 51.54),
    Score("fp32", "AIME24", 8192, 22.30),
    Score("fp32", "AMC23", 32768, 62.42),
    Score("fp32", "AIME24", 32768, 28.44),
)

MISMATCH: tuple[Quantity, ...] = (
    Quantity("kl_sequence", "KL[μ‖π] of a response", "offline", "bf16", 7.64, "nats", ("F",)),
    Quantity("kl_sequence", "KL[μ‖π] of a response", "offline", "fp16", 0.32, "nats", ("F",)),
    Quantity(
        "slope_per_1k", "slope of log π/μ against length", "offline", "bf16", -1.01, "nats per 1,000 tokens", ("F",)
    ),
    Quantity(
        "slope_per_1k", "slope of log π/μ against length", "offline", "fp16", -0.07, "nats per 1,000 tokens", ("F",)
    ),
    Quantity("k3", "KL a token", "start", "bf16", 1e-3, "nats", ("F",)),
    Quantity("k3", "KL a token", "start", "fp16", 1.5e-5, "nats", ("F",)),
    Quantity("k3", "KL a token", "end", "fp16", 7e-6, "nats", ("F",)),
    Quantity("k3", "KL a token", "collapse", "bf16", 2.0, "nats", ("F",)),
    Quantity("mean_abs_prob_diff", "mean |π − μ|", "start", "bf16", 0.004, "", ("F",)),
    Quantity("mean_abs_prob_diff", "mean |π − μ|", "start", "fp16", 0.0005, "", ("F",)),
    Quantity("largest_prob_diff", "max |π − μ|", "collapse", "bf16", 1.0, "", ("F",)),
    Quantity("largest_prob_diff", "max |π − μ|", "end", "fp16", 0.1, "", ("F",)),
)

TRAINING: tuple[Peak, ...] = (
    Peak("GRPO", "bf16", 0.73, 370, "VeRL"),
    Peak("GRPO", "bf16", 0.60, 610, "VeRL"),
    Peak("GRPO", "bf16", 0.84, 400, "Oat", note="collapse by 600"),
    Peak("GRPO", "fp16", 0.98, 2000),
    Peak("GRPO-Token-TIS", "bf16", 0.82, 620, "VeRL"),
    Peak("GRPO-Token-TIS", "bf16", 0.885, 850, "Oat"),
    Peak("GRPO-Token-TIS", "fp16", 0.985),
    Peak("GRPO-Seq-MIS", "bf16", 0.945, 2500, "VeRL", note="slow"),
    Peak("GRPO-Seq-MIS", "bf16", 0.855, 1050, "Oat", note="still rising"),
    Peak("GRPO-Seq-MIS", "fp16", 0.975),
    Peak("GSPO", "bf16", 0.845, 830, "VeRL", note="NaN gradients after about 1,200 steps"),
    Peak("GSPO", "bf16", 0.93, 1030, "Oat"),
    Peak("GSPO", "fp16", 0.98),
    Peak("PG-Seq-IS", "bf16", 0.79, 2060),
    Peak("PG-Seq-IS", "fp16", 0.973, 1830, "VeRL"),
    Peak("PG-Seq-IS", "fp16", 0.98, 2200, "Oat"),
    Peak("PG-Seq-MIS", "bf16", 0.945, 2500),
    Peak("PG-Seq-MIS", "fp16", 0.98),
    Peak("GRPO", "bf16", 0.285, what="AIME24", note="best avg@32"),
    Peak("GRPO-Token-TIS", "bf16", 0.335, what="AIME24", note="best avg@32"),
    Peak("GSPO", "bf16", 0.372, what="AIME24", note="0.325 to 0.372, best avg@32"),
    Peak("GRPO-Seq-MIS", "bf16", 0.342, what="AIME24", note="best avg@32"),
    Peak("PG-Seq-IS", "fp16", 0.397, what="AIME24", note="0.385 to 0.397, best avg@32"),
    Peak("OctoThinker GRPO", "bf16", 0.53, 170, note="0 by about step 300"),
    Peak("OctoThinker GRPO", "fp16", 0.61),
    Peak("LoRA GRPO-Token-TIS", "bf16", 0.77, note="collapse at about step 620"),
    Peak("LoRA GRPO-Token-TIS", "fp16", 0.785),
    Peak("MoE GRPO-Seq-MIS", "bf16", 0.65),
    Peak("MoE GRPO-Seq-MIS", "fp16", 0.70),
    Peak("MoE GRPO-Token-TIS", "bf16", 0.675),
    Peak("MoE GRPO-Token-TIS", "fp16", 0.75),
    Peak("MoE PG-Seq-TIS", "bf16", 0.69),
    Peak("MoE PG-Seq-TIS", "fp16", 0.70),
    Peak("14B DAPO", "bf16", 0.775),
    Peak("14B DAPO", "bf16", 0.505, what="AIME24"),
    Peak("14B DAPO", "fp16", 0.80),
    Peak("14B DAPO", "fp16", 0.555, what="AIME24"),
)

# Trainer dtype + rollout dtype; fp16 + fp32 is not reported.
GRID: tuple[GridCell, ...] = (
    GridCell("bf16", "bf16", "collapses"),
    GridCell("bf16", "fp16", "collapses later"),
    GridCell("bf16", "fp32", "stable; rollouts about 3 times slower"),
    GridCell("fp16", "bf16", "moderate (one source)"),
    GridCell("fp16", "fp16", "best"),
)

LATER_FINDINGS: tuple[Finding, ...] = (
    Finding("fp16-paths", True, "FP16 paths were merged in other RL frameworks."),
    Finding(
        "zero-mismatch", True, "A zero-mismatch reference shows that small token-level mismatch can cause collapse."
    ),
    Finding("kl-precedes", True, "A KL near 1e-3 nats a token precedes collapse."),
    Finding("ess-predicts", True, "The effective sample size predicts collapse."),
    Finding("both-collapse", False, "One LoRA replication saw both dtypes collapse."),
    Finding("none-collapses", False, "One framework saw no collapse of a dense model in over 300 runs."),
    Finding("rare-tokens", False, "The authors' later work finds the ratio noisy for rare tokens even in FP16."),
    Finding("schedule", False, "Others fix the collapse with the learning-rate schedule."),
)


def mismatch(key: str, phase: Phase, dtype: str) -> Quantity | None:
    """The paper's value of a mismatch quantity; None where it reports none."""
    wanted = (key, phase, dtype)
    return next((one for one in MISMATCH if (one.key, one.phase, one.dtype) == wanted), None)


def best_training(run: str, dtype: str) -> Peak | None:
    """The best training accuracy shown for a run by its name there or as an objective here; None where none is."""
    wanted = (run.lower(), dtype, "training accuracy")
    peaks = [peak for peak in TRAINING if (peak.run.lower(), peak.dtype, peak.what) == wanted]
    return max(peaks, key=lambda peak: peak.value, default=None)
