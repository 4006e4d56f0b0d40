"""Answers that the user's code samples, in as many turns and with whatever it calls between them
(objective.rollout_func).

```python
def play(prompts, model):
    ids = [model.encode(prompt) for prompt in prompts]
    rows = model.generate(ids)
    return {
        "prompt_ids": ids,
        "completion_ids": [row.ids for row in rows],
        "logprobs": [row.logprobs for row in rows],
        "reward": [float(len(row.ids) < 50) for row in rows],
    }
```

It gets a generation's prompts, each once for each answer, and a RolloutModel, and returns lists with an entry for each:
`prompt_ids`, `completion_ids`, `logprobs` (at the sampling temperature; 0 where not sampled) and maybe `env_mask` (1
where sampled). Other entries are columns for reward functions; `rollout_reward` takes `reward`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.requests import Row
from jaxtune.models.generation.sampler import Sampler
from jaxtune.train.config import ConfigError
from jaxtune.train.sampled.answering import Prompt, SampledTurns, Sampling
from jaxtune.train.sampled.reward_functions import Turns
from jaxtune.train.user_code import errors
from jaxtune.train.user_code.calling import call, name_of
from jaxtune.train.user_code.copies import own_copy

_NEEDED = ("prompt_ids", "completion_ids", "logprobs")
_MASK = "env_mask"
_SEED_BITS = 0x7FFFFFFF


class RolloutModel:
    """What a rollout function samples with: the trained model and the run's options, for one generation.

    length: most tokens of a prompt with its continuation.
    encode: prompt to token ids.
    """

    def __init__(
        self, model: Decoder, sampling: Sampling, length: int, encode: Callable[[Turns], tuple[int, ...]], seed: int
    ):
        self._sampling, self._encode, self._seed, self._calls = sampling, encode, seed, 0
        self._sampler = Sampler(
            model,
            length=length,
            most_slots=sampling.slots,
            most_converted=sampling.most_converted,
            cache=sampling.settings.cache,
        )

    def encode(self, prompt: Turns) -> list[int]:
        """Token ids of a prompt up to the answer: messages by the chat template; text as it is or, with data.template,
        as the user's message.
        """
        return list(self._encode(prompt))

    def decode(self, ids: Sequence[int]) -> str:
        return self._sampling.decode(ids)

    def generate(self, prompt_ids: Sequence[Sequence[int]], max_new_tokens: int | None = None) -> list[Row]:
        """Samples a continuation of each prompt and waits for all: rows with `ids`, `logprobs` (at the sampling
        temperature) and `finish_reason`. Each call draws anew.

        Raises ValueError if a prompt with its new tokens exceeds data.length or the model's positions.

          prompt_ids: repeat a prompt in consecutive places for several answers, which share its prefill.
          max_new_tokens: None is objective.max_completion_length.
        """
        settings, self._calls = self._sampling.settings, self._calls + 1
        return list(
            self._sampler.run(
                prompt_ids,
                settings.max_completion_length if max_new_tokens is None else max_new_tokens,
                settings.temperature,
                (self._seed + self._calls) & _SEED_BITS,
                top_k=settings.top_k,
                top_p=settings.top_p,
                min_p=settings.min_p,
                repetition_penalty=settings.repetition_penalty,
                eos_token_ids=self._sampling.ends,
                scaled_logprobs=True,
            )
        )


# A rollout function: (prompts, RolloutModel) -> lists by name, as the module's docstring says.
type RolloutFunc = Callable[[list[Turns], RolloutModel], Mapping[str, Sequence]]


@dataclasses.dataclass(frozen=True)
class RolloutFunction:
    """Samples a generation by the user's function, and checks its result; only the first seed is used. No metrics."""

    function: RolloutFunc
    sampling: Sampling
    encode: Callable[[Turns], tuple[int, ...]]
    length: int
    """Most tokens of a prompt with its answer."""

    @property
    def tool_names(self) -> Sequence[str]:
        return ()

    @property
    def functions(self) -> Mapping[str, Callable]:
        return {"the rollout function": self.function}

    @property
    def changes_prompts(self) -> bool:
        return True

    @property
    def repeats_beginnings(self) -> bool:
        return False

    @property
    def one_row_a_prompt(self) -> bool:
        return False

    def __call__(
        self, model: Decoder, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> tuple[list[SampledTurns], dict[str, float]]:
        """ConfigError for a list that is missing or of another length, or an answer that is empty or too long."""
        sampler = RolloutModel(model, self.sampling, self.length, self._encoded(prompts), seeds[0])
        shown_prompts = [prompt.turns for prompt in prompts]
        result = self._called([own_copy(prompt) for prompt in shown_prompts], sampler)
        if not isinstance(result, Mapping) or any(name not in result for name in _NEEDED):
            lacking = [name for name in _NEEDED if not isinstance(result, Mapping) or name not in result]
            self._refuse(f"it returned no {', '.join(lacking)}")
        for name, values in result.items():
            try:
                count = len(values)
            except TypeError:
                self._refuse(f"{name} is {values!r}, and no list with an entry for each of {len(prompts)} answers")
            if count != len(prompts):
                self._refuse(f"{name} has {count} entries for {len(prompts)} answers")
        column_names = [name for name in result if name not in (*_NEEDED, _MASK)]
        return [
            self._given(
                index,
                prompt,
                result["prompt_ids"][index],
                result["completion_ids"][index],
                result["logprobs"][index],
                result[_MASK][index] if _MASK in result else None,
                {name: result[name][index] for name in column_names},
            )
            for index, prompt in enumerate(shown_prompts)
        ], {}

    def _encoded(self, prompts: Sequence[Prompt]) -> Callable[[Turns], tuple[int, ...]]:
        """`encode`, and for the rows' own prompts their ids, with the rows' tools and template variables."""

        def encoded(turns: Turns) -> tuple[int, ...]:
            known = {prompt.ids for prompt in prompts if prompt.turns == turns}
            if len(known) > 1:
                raise ValueError("two rows have this prompt, and other tools or chat_template_kwargs")
            return known.pop() if known else self.encode(turns)

        return encoded

    def _called(self, prompts: list[Turns], model: RolloutModel) -> object:
        """The function's result. Exceptions of JAX pass, such as running out of memory."""
        name = name_of(self.function)
        outcome = call(lambda: self.function(prompts, model), {}, name)
        error = outcome.error
        if error is not None and type(error).__module__.startswith("jax"):
            raise error
        if error is not None:
            summary = f"objective.rollout_func: {name} failed for {len(prompts)} prompts"
            raise errors.UserCodeError(errors.described(summary, error)) from error
        return outcome.value

    def _given(
        self, index: int, prompt: Turns, prompt_ids, ids, logps, mask, columns: Mapping[str, object]
    ) -> SampledTurns:
        """One returned answer. ConfigError if it is empty or too long, or its lists are not of one length.

        mask: 1 for each of `ids` that was sampled; None: all.
        """
        settings = self.sampling.settings
        if not len(ids) == len(logps) == len(ids if mask is None else mask):
            self._refuse(f"answer {index} has {len(ids)} tokens, and another number of logprobs or of env_mask")
        if not len(prompt_ids) or not len(ids):
            self._refuse(f"answer {index} has no tokens, or its prompt has none")
        if len(ids) > settings.max_completion_length or len(prompt_ids) + len(ids) > self.length:
            self._refuse(
                f"answer {index} has {len(ids):,} tokens after a prompt of {len(prompt_ids):,}; an answer may have "
                f"objective.max_completion_length = {settings.max_completion_length:,}, and both data.length = "
                f"{self.length:,}"
            )
        is_all_sampled = mask is None or all(mask)  # else other texts are among the model's
        text = (
            self.sampling.completion(prompt, prompt_ids, list(ids))
            if is_all_sampled
            else self.sampling.decode(self.sampling.without_end(ids))
        )
        return SampledTurns(
            tuple(map(int, prompt_ids)),
            prompt,
            list(map(int, ids)),
            list(map(float, logps)),
            None if mask is None else list(map(bool, mask)),
            "stop" if ids[-1] in self.sampling.ends else "length",
            text,
            columns,
        )

    def _refuse(self, why: str) -> NoReturn:
        raise ConfigError(f"objective.rollout_func: {name_of(self.function)}: {why}; see docs/rewards.md")
