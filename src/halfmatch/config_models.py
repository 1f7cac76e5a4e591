"""The sections of the configuration that say what a model is, and what of it is trained."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from halfmatch.config_section import Name, Probability, Section


class Bootstrap(Section):
    """A tiny Qwen3 that is trained here on demonstrations, so that the whole pipeline needs no download.

    The demonstrations carry a wrong product with a probability of each problem's own, which spreads the solve rates.
    """

    start: Name | None = Field(None, description="bootstrapped model whose weights this one continues from")
    gain: float = Field(16.0, gt=0, le=1000, description="gain of the final norm: the scale of the logits")
    layers: int = Field(4, ge=1, le=48, description="decoder layers")
    hidden_size: int = Field(64, ge=32, le=4096, description="width")
    heads: int = Field(
        2, ge=1, le=128, description="attention heads; hidden_size / heads is 32 or 64, so that vLLM serves it on a CPU"
    )
    kv_heads: int = Field(1, ge=1, le=128, description="key-value heads")
    intermediate_size: int = Field(176, ge=16, le=65_536, description="width of the MLP")
    steps: int = Field(900, ge=0, le=1_000_000, description="optimizer steps on demonstrations")
    batch_size: int = Field(32, ge=1, le=65_536, description="demonstrations a step")
    learning_rate: float = Field(3e-3, gt=0, le=1, description="peak learning rate; cosine to a tenth of it")
    factors: tuple[int, int] = Field((2, 9), description="lowest and highest factor of the demonstrated products")
    thinking_tokens: tuple[int, int] = Field(
        (56, 66), description="shortest and longest thinking part of a demonstration"
    )
    wrong_share: tuple[Probability, Probability] = Field(
        (0.15, 0.85), description="range of the per-problem chance of a wrong product"
    )

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        if self.hidden_size / self.heads not in (32, 64):
            raise ValueError(
                f"hidden_size {self.hidden_size} / heads {self.heads} must be 32 or 64: "
                "vLLM serves no other head on a CPU"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} do not divide into kv_heads {self.kv_heads}")
        if not 0 < self.thinking_tokens[0] <= self.thinking_tokens[1]:
            raise ValueError(f"thinking_tokens {list(self.thinking_tokens)} must be [shortest, longest], both above 0")
        if not 0 <= self.factors[0] < self.factors[1] <= 99:
            raise ValueError(f"factors {list(self.factors)} must be [lowest, highest], two numbers from 0 to 99")
        if self.wrong_share[0] > self.wrong_share[1]:
            raise ValueError(f"wrong_share {list(self.wrong_share)} must be [lowest, highest]")
        return self


class ModelSource(Section):
    """Where a model comes from."""

    source: Literal["bootstrap", "hub", "folder", "gguf"] = Field(
        description="trained here, hub, local folder, GGUF file"
    )
    id: str | None = Field(None, description="hub: model id")
    revision: str | None = Field(None, description="hub: commit (40 hex digits), so that the weights cannot change")
    path: str | None = Field(None, description="folder or gguf: where it lies")
    package: str | None = Field(None, description="gguf: installed Python package that ships the file, instead of path")
    bootstrap: Bootstrap | None = Field(None, description="bootstrap: how the tiny model is made")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.source == "bootstrap" and self.bootstrap is None:
            raise ValueError("source: bootstrap needs the section bootstrap")
        if self.source == "hub":
            if not self.id:
                raise ValueError("source: hub needs id")
            if not self.revision or len(self.revision) != 40 or set(self.revision) - set("0123456789abcdef"):
                raise ValueError("source: hub needs revision, the model's commit as 40 hex digits")
        if self.source == "folder" and not self.path:
            raise ValueError("source: folder needs path")
        if self.source == "gguf" and not (self.path or self.package):
            raise ValueError("source: gguf needs path or package")
        return self


class Lora(Section):
    """Low-rank adapters, trained in place of the weights that they are added to."""

    rank: int = Field(32, ge=1, le=512, description="rank of each adapter [paper: 32, or 1 in the released script]")
    alpha: float = Field(64.0, gt=0, le=1e4, description="alpha / rank multiplies the adapter [paper: 64, or 2]")
    targets: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")], ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="names of the Linear layers that get one",
    )
    push: Literal["merged", "unmerged"] = Field(
        "merged",
        description="what the engine gets: weights with the adapter added in fp32 and rounded once, or the adapter",
    )


class ModelShape(Section):
    """What `halfmatch plan` has to know of a model that is not on this machine; from its config.json."""

    layers: int = Field(ge=1, le=1000, description="decoder layers (num_hidden_layers)")
    hidden_size: int = Field(ge=1, le=1_000_000, description="width")
    heads: int = Field(ge=1, le=10_000, description="attention heads (num_attention_heads)")
    kv_heads: int = Field(ge=1, le=10_000, description="key-value heads (num_key_value_heads)")
    head_dim: int = Field(ge=1, le=10_000, description="width of a head")
    intermediate_size: int = Field(ge=1, le=1_000_000, description="width of the MLP, or of one expert")
    vocabulary: int = Field(ge=1, le=10_000_000, description="rows of the embedding (vocab_size)")
    tied_embeddings: bool = Field(False, description="whether the LM head is the embedding (tie_word_embeddings)")
    query_key_norm: bool = Field(False, description="whether queries and keys are normalised, as in Qwen3")
    experts: int = Field(1, ge=1, le=10_000, description="experts of a layer (num_experts); 1: a plain MLP")
    experts_per_token: int = Field(1, ge=1, le=10_000, description="of which so many compute (num_experts_per_tok)")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} of {self.experts} experts")
        return self
