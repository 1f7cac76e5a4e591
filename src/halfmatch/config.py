"""The one typed model of the configuration.

`config/config.yaml` (the laptop run) is this model's defaults, written out with the descriptions as comments, and
`workflow/schemas/config.schema.json` is its JSON schema; a test keeps both in step. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from halfmatch.config_checks import cross_check
from halfmatch.config_limits import SAMPLING_ROUNDS, unusable
from halfmatch.config_models import Bootstrap as Bootstrap
from halfmatch.config_models import Lora as Lora
from halfmatch.config_models import ModelShape as ModelShape
from halfmatch.config_models import ModelSource as ModelSource
from halfmatch.config_section import Name, Probability, Section
from halfmatch.precision import Fp32Module, Precision
from halfmatch.rl.objective_rows import OBJECTIVES

Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
Draws = Literal["race"]
EngineName = Literal["transformers", "vllm"]
EvaluationEngine = Literal["transformers", "vllm", "trainer"]
GradingRule = Literal["exact", "boxed", "r1", "last-number"]
PromptTemplate = Literal["plain", "r1", "boxed", "chat"]


# ---------------------------------------------------------------------------------------------------------- problems
class Columns(Section):
    problem: str = Field("problem", description="column with the problem's text")
    answer: str = Field("answer", description="column with the gold answer")
    level: str | None = Field(None, description="column with the difficulty, if there is one")


class ProblemSource(Section):
    """Where a set of problems comes from."""

    source: Literal["generator", "hub", "file"] = Field(
        description="built-in products, Hugging Face dataset, or local file"
    )
    id: str | None = Field(None, description="hub: dataset id")
    revision: str | None = Field(None, description="hub: commit (40 hex digits), so that the data cannot change")
    subset: str | None = Field(None, description="hub: configuration name of the dataset")
    split: str = Field("train", description="hub: split; generator: train, heldout or all")
    path: str | None = Field(None, description="file: Parquet, JSONL, Arrow or CSV")
    columns: Columns = Field(Columns(), description="hub and file: column names")
    sample: int | None = Field(None, ge=1, description="keep this many problems, chosen by content hash and the seed")
    lowest_factor: int = Field(2, ge=0, le=99, description="generator: smallest factor of a product")
    highest_factor: int = Field(9, ge=0, le=99, description="generator: largest factor of a product")
    heldout_share: Probability = Field(0.25, description="generator: share of the products that make the heldout split")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.source == "hub":
            if not self.id:
                raise ValueError("source: hub needs id")
            if not self.revision or len(self.revision) != 40 or set(self.revision) - set("0123456789abcdef"):
                raise ValueError("source: hub needs revision, the dataset's commit as 40 hex digits")
        if self.source == "file" and not self.path:
            raise ValueError("source: file needs path")
        if self.source == "generator":
            if self.split not in ("train", "heldout", "all"):
                raise ValueError(f"the generator has the splits train, heldout and all, not {self.split!r}")
            if self.lowest_factor > self.highest_factor:
                raise ValueError("lowest_factor is above highest_factor")
        return self


# ------------------------------------------------------------------------------------------------- prompts and engines
class Prompt(Section):
    template: PromptTemplate = Field(
        "plain", description="plain (the problem alone), r1, boxed, or chat (the tokenizer's)"
    )
    system: str | None = Field(None, description="system message, for templates that have one")


class Grading(Section):
    rule: GradingRule = Field(
        "exact", description="exact (after the last =), boxed, r1 (one </think> and boxed), last-number"
    )
    timeout_s: float = Field(5.0, gt=0, le=600, description="seconds a grader may take; then the verdict is timeout")
    workers: int = Field(1, ge=1, le=256, description="grading processes")


class EngineSettings(Section):
    """How completions are sampled, wherever they are."""

    name: EngineName = Field("transformers", description="rollout engine")
    slots: int = Field(64, ge=8, le=4096, description="sequences decoded at once")
    device: Literal["cpu", "cuda"] = Field("cpu", description="cpu, or cuda")
    tensor_parallel: int = Field(1, ge=1, le=64, description="vllm: GPUs a replica")
    data_parallel: int = Field(1, ge=1, le=64, description="replicas, each a process (on GPUs) of its own")
    gpu_memory: float = Field(
        0.6, gt=0, le=1, description="vllm: share of GPU memory, or of this machine's memory on a CPU"
    )
    server: str | None = Field(
        None, pattern=r"^https?://", description="vllm: URL of a running `vllm serve`; null starts vLLM in the process"
    )
    draws: Draws | None = Field(
        None,
        description="race: all engines draw tokens as vllm does, by an exponential race, with the same random numbers; "
        "null: transformers and trainer by inverse CDF, vllm with numbers of its own",
    )


class Sampling(Section):
    temperature: float = Field(1.0, gt=0, le=10, description="softmax temperature")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus; 1 keeps everything")
    max_tokens: int = Field(80, ge=1, le=1_000_000, description="longest response, in tokens")


# -------------------------------------------------------------------------------------------------------------- steps
class Solvability(Section):
    model: Name = Field("gain320", description="model whose solve rates make the perfectible set")
    problems: Name = Field("train", description="problem set to sample")
    samples: int = Field(40, ge=1, le=10_000, description="responses a problem [paper: 40]")
    shards: int = Field(2, ge=1, le=100_000, description="jobs that the problems are split into")
    precision: Name = Field("fp16", description="precision whose rollout dtype is sampled in")
    sampling: Sampling = Field(Sampling(), description="how the responses are sampled")
    low: Probability = Field(0.2, description="keep problems solved at least this often [paper: 0.2]")
    high: Probability = Field(0.8, description="keep problems solved at most this often [paper: 0.8]")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}: no problem could be kept")
        return self


class GradientFidelity(Section):
    """The gradient of each objective at a fixed policy and fixed rollouts, in each precision against fp32."""

    enabled: bool = Field(True, description="compute it (one backward pass a precision and objective)")
    objectives: tuple[Name, ...] = Field(("pg", "pg-seq-is", "grpo-token-tis"), description="objectives to compare")


class Origin(Section):
    """Where the mismatch comes from: both sides against float64 layer by layer, and with one part in fp32 at a time."""

    enabled: bool = Field(False, description="compute it, for rollouts of the transformers engine")
    responses: int = Field(8, ge=1, le=100_000, description="responses to trace, of a problem each")
    parts: tuple[Fp32Module, ...] = Field(
        ("attention", "mlp", "norm", "lm_head", "between_matmuls"),
        description="parts to put in fp32 on both sides, one at a time",
    )


class Mismatch(Section):
    """The offline measurement: rollouts in one dtype, the same token ids scored by the trainer."""

    models: tuple[Name, ...] = Field(
        ("gain16", "gain48", "gain120", "gain320"), min_length=1, description="models to measure"
    )
    problems: tuple[Name, ...] = Field(("all",), min_length=1, description="problem sets to sample")
    engines: tuple[EngineName, ...] = Field(("transformers",), min_length=1, description="rollout engines")
    precisions: tuple[Name, ...] = Field(
        ("bf16", "fp16", "fp32"), min_length=1, description="precisions: rollouts and scores in each"
    )
    grid: tuple[Name, ...] = Field(
        (), description="those of them of which every pair is measured, the rollouts of one scored in the other"
    )
    samples: int = Field(8, ge=1, le=10_000, description="responses a problem [paper: 32]")
    sampling: Sampling = Field(Sampling(), description="how the responses are sampled [paper: T 1, no top-p]")
    micro_batch_tokens: int = Field(2048, ge=1, le=100_000_000, description="tokens a scoring pass")
    gradient_fidelity: GradientFidelity = Field(GradientFidelity(), description="gradients against fp32")
    origin: Origin = Field(Origin(), description="which layers and operations it comes from")

    @model_validator(mode="after")
    def _unbiased(self) -> Self:
        if self.sampling.top_p < 1:
            raise ValueError(
                "mismatch.sampling.top_p must be 1: a nucleus biases the ratio of π and μ by the kept mass"
            )
        return self


class Training(Section):
    """The matrix {precision × objective × seed} and the settings all of its runs share."""

    precisions: tuple[Name, ...] = Field(("bf16", "fp16"), min_length=1, description="precisions to train in")
    objectives: tuple[Name, ...] = Field(
        ("grpo", "pg-seq-is"), min_length=1, description=f"objectives: {', '.join(OBJECTIVES)}"
    )
    seeds: tuple[Seed, ...] = Field((0, 1), min_length=1, description="seeds")
    iterations: int = Field(60, ge=1, le=1_000_000, description="rounds of sampling and training")
    prompts_per_iteration: int = Field(8, ge=1, le=1_000_000, description="problems sampled an iteration [paper: 64]")
    samples_per_prompt: int = Field(8, ge=2, le=1_000_000, description="responses a problem [paper: 8]")
    gradient_steps: int = Field(4, ge=1, le=1_000_000, description="optimizer steps an iteration [paper: 4]")
    max_prompt_tokens: int = Field(
        16, ge=1, le=1_000_000, description="longest prompt; longer ones are left out, counted and named"
    )
    sampling: Sampling = Field(Sampling(), description="how rollouts are sampled [paper: T 1, top-p 1, 8,192 tokens]")
    learning_rate: float = Field(6e-6, ge=0, le=1, description="constant after the warm-up [paper: 1e-6]")
    warmup_steps: int = Field(5, ge=0, le=1_000_000, description="optimizer steps of linear warm-up")
    adam_betas: tuple[Probability, Probability] = Field((0.9, 0.95), description="AdamW [paper: 0.9, 0.95]")
    adam_eps: float = Field(1e-15, gt=0, le=1, description="AdamW [paper: 1e-15]")
    weight_decay: float = Field(0.0, ge=0, le=10, description="AdamW [paper: 0]")
    clip_norm: float | None = Field(1.0, gt=0, le=1e6, description="gradient norm clip; null for none [paper: 1.0]")
    micro_batch_tokens: int = Field(2048, ge=1, le=100_000_000, description="tokens a forward and backward pass")
    activation_checkpointing: bool = Field(
        False, description="compute the activations of decoder blocks again in the backward pass, for less memory"
    )
    ranks: int = Field(
        1, ge=1, le=4096, description="processes of a run, on GPUs one each; the model is sharded over them (FSDP2)"
    )
    shard_gradients: bool = Field(
        False,
        description="several ranks: reduce gradients after every micro-batch and not once a step, so that no rank has "
        "whole ones: less memory, more communication",
    )
    nodes: int = Field(1, ge=1, le=512, description="machines that the ranks are spread over, evenly")
    probe: bool = Field(
        True, description="after every sync, score a few fixed tokens on both sides to see that the weights arrived"
    )
    objective_settings: dict[Name, dict[str, float | bool | str]] = Field(
        {}, description="changes to rows of the table of objectives, e.g. {grpo-token-tis: {bound: 3}}"
    )
    lora: Lora | None = Field(None, description="train adapters and leave the weights as they are; null: all weights")
    router_replay: bool = Field(
        False, description="mixtures of experts: score and train with the experts that the engine took for each token"
    )
    sampling_rounds: int = Field(
        SAMPLING_ROUNDS, ge=1, le=1000, description="dynamic_sampling: times that an iteration draws problems, at most"
    )
    critic_learning_rate: float | None = Field(
        None, gt=0, le=1, description="of an objective's value model (ppo); null for learning_rate"
    )
    checkpoint_every: int = Field(10, ge=1, le=1_000_000, description="iterations between checkpoints")
    keep_checkpoints: int = Field(2, ge=1, le=1_000_000, description="checkpoints that stay on disk")
    keep_weights_every: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="keep the weights after every so many iterations, and validate them; null for the last ones alone",
    )
    max_skip_share: float = Field(0.5, gt=0, le=1, description="stop when more than this share of 50 steps overflowed")
    on_collapse: Literal["warn", "stop"] = Field("warn", description="what to do when a collapse monitor fires")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        batch = self.prompts_per_iteration * self.samples_per_prompt
        if batch % self.gradient_steps:
            raise ValueError(f"{batch} rollouts an iteration do not divide into gradient_steps {self.gradient_steps}")
        if self.ranks % self.nodes:
            raise ValueError(f"ranks {self.ranks} do not divide into nodes {self.nodes}")
        if self.sampling.top_p < 1:
            raise ValueError(
                "training.sampling.top_p must be 1: a nucleus biases the ratio of π and μ by the kept mass"
            )
        return self


class Evaluation(Section):
    benchmarks: tuple[Name, ...] = Field(("train", "heldout"), min_length=1, description="problem sets to evaluate on")
    samples: int = Field(32, ge=1, le=10_000, description="responses a problem: avg@samples [paper: 32]")
    k: tuple[int, ...] = Field((1, 8, 32), description="k of pass@k and maj@k")
    engines: tuple[EvaluationEngine, ...] = Field(
        ("transformers", "trainer"),
        min_length=1,
        description="engines to evaluate with; trainer samples from the training engine itself, in the run's own "
        "precision: what the deployment gap of the others is taken from",
    )
    precisions: tuple[Name, ...] | None = Field(
        None, min_length=1, description="rollout dtypes to deploy in; null: the run's own"
    )
    sampling: Sampling = Field(Sampling(), description="how the responses are sampled [paper: T 0.6, top-p 0.95]")

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if any(k > self.samples or k < 1 for k in self.k):
            raise ValueError(f"every k must lie between 1 and samples ({self.samples}), not {list(self.k)}")
        return self


class Report(Section):
    title: str = Field("halfmatch: the laptop run", description="heading of the page")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="level of every interval")
    bootstrap_samples: int = Field(1000, ge=100, le=100_000, description="resamples of problems for an interval")


def _laptop_problems() -> dict[Name, ProblemSource]:
    return {split: ProblemSource(source="generator", split=split) for split in ("all", "train", "heldout")}


def _continued(start: Name, gain: float, learning_rate: float) -> ModelSource:
    bootstrap = Bootstrap(start=start, gain=gain, steps=250, learning_rate=learning_rate)
    return ModelSource(source="bootstrap", bootstrap=bootstrap)


def _laptop_models() -> dict[Name, ModelSource]:
    return {
        "gain16": ModelSource(source="bootstrap", bootstrap=Bootstrap()),
        "gain48": _continued("gain16", gain=48, learning_rate=3e-4),
        "gain120": _continued("gain16", gain=120, learning_rate=3e-4),
        "gain320": _continued("gain120", gain=320, learning_rate=1.5e-4),
    }


def _precisions() -> dict[Name, Precision]:
    return {name: Precision.named(name, emulate="always") for name in ("bf16", "fp16", "fp32")}


class Config(Section):
    """Everything a run depends on."""

    output: str = Field("results/laptop", description="folder that everything is written to")
    seed: int = Field(
        0, ge=0, le=2**31 - 1, description="seed of everything but the training matrix, which has its own"
    )
    problems: dict[Name, ProblemSource] = Field(
        default_factory=_laptop_problems, description="sets of problems, by name"
    )
    models: dict[Name, ModelSource] = Field(default_factory=_laptop_models, description="models, by name")
    shapes: dict[Name, ModelShape] = Field(
        {}, description="sizes of models that are not on this machine, by their names, for `halfmatch plan`"
    )
    precisions: dict[Name, Precision] = Field(default_factory=_precisions, description="precisions, by name")
    prompt: Prompt = Field(Prompt(), description="how a problem becomes a prompt")
    grading: Grading = Field(Grading(), description="how a response becomes a verdict")
    engine: EngineSettings = Field(EngineSettings(), description="rollout engine of solvability and training")
    solvability: Solvability = Field(Solvability(), description="solve rates and the perfectible set")
    mismatch: Mismatch = Field(Mismatch(), description="the offline mismatch of π and μ")
    training: Training | None = Field(Training(), description="the training matrix; null for none")
    evaluation: Evaluation | None = Field(Evaluation(), description="scores of the trained models; null for none")
    report: Report = Field(Report(), description="the page")

    @model_validator(mode="after")
    def _refers_to_what_exists(self) -> Self:
        complaints = [*cross_check(self), *unusable(self)]
        if complaints:
            raise ValueError("\n".join(complaints))
        return self
