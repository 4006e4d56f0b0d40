"""How the answers that an objective learns from are sampled."""

from __future__ import annotations

import dataclasses

from jaxtune.models.generation.structure import check_cache


@dataclasses.dataclass(frozen=True)
class Settings:
    """How answers are sampled and how often trained on; names are TRL's but for `slots`, `cache`, `regex`,
    `json_schema` and `exact`. Raises ValueError for a value out of range.
    """

    num_generations: int = 8
    """Answers to a prompt, at least 2: a group, within which rewards are compared."""
    max_completion_length: int = 512
    """Most tokens of an answer, tools' texts included."""
    temperature: float = 1.0
    """Divides the logits in sampling and in the loss."""
    top_k: int = 0
    """Only this number of most probable tokens; 0: all."""
    top_p: float = 1.0
    """Only the most probable tokens that add up to it; 1: all."""
    min_p: float = 0.0
    """Only tokens of at least min_p times the highest probability; 0: all."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of prompt and answer become less probable; 1: none."""

    regex: str | None = None
    """An expression, in Rust's syntax, that each answer matches whole, after its thoughts."""
    json_schema: str | None = None
    """A JSON schema, as text, that each answer follows, after its thoughts."""

    mask_truncated_completions: bool = False
    """Leave answers without an end out of the loss."""

    num_iterations: int = 1
    """Steps in which each answer is trained on."""

    steps_per_generation: int = 1
    """Steps among which a generation's answers are divided."""

    slots: int = 64
    """Most answers a device samples at a time; fewer if memory is short."""

    cache: str | None = None
    """As of Sampler: "fp8" stores keys and values in half the memory; None: in the model's dtype."""

    exact: bool = False
    """Sampler and training forward compute the same bits (pallas/one_order/README.md); there is no correction then."""

    def __post_init__(self) -> None:
        for name in ("max_completion_length", "num_iterations", "steps_per_generation", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 1 or more")
        if self.num_generations < 2:
            raise ValueError(f"num_generations = {self.num_generations}: answers are compared, so it takes 2 or more")
        if self.temperature <= 0:
            raise ValueError(f"temperature = {self.temperature}: must be above 0, or all answers to a prompt are one")
        check_cache("cache", self.cache, self.exact)

    @property
    def steps(self) -> int:
        """Optimizer steps from one generation to the next."""
        return self.steps_per_generation * self.num_iterations
