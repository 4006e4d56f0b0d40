"""Answers that a function of the user's code samples, in as many turns and with whatever it calls between them.
`RolloutFunction` calls it and checks what it returns; `RolloutModel` is what the function samples with. A run of GRPO
or RLOO has one if objective.rollout_func names it or a Python script gives it.

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

The function gets the prompts of a generation (one round of sampling), each once for each of its answers, and a
RolloutModel. It returns lists with one entry for each of the prompts: `prompt_ids`, `completion_ids` and `logprobs` (of
each token of the completion, at the sampling temperature; 0 where it was not sampled), and, if some tokens of a
completion were not sampled, `env_mask` (1 for those that were). All other entries are columns for reward functions; the
ready function `rollout_reward` takes the column `reward`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.requests import Row
from jaxtune.models.generation.sampler import Sampler
from jaxtune.train.config import ConfigError
from jaxtune.train.objectives.answering import Given, Sampling
from jaxtune.train.objectives.packed_answers import Prompt
from jaxtune.train.objectives.reward_functions import Turns
from jaxtune.train.user_code import errors
from jaxtune.train.user_code.calling import call, name_of
from jaxtune.train.user_code.copies import own_copy

_NEEDED = ("prompt_ids", "completion_ids", "logprobs")
_MASK = "env_mask"
_SEED_BITS = 0x7FFFFFFF


class RolloutModel:
    """What a rollout function samples with: the model that is trained, with the run's sampling options. `encode` makes
    token ids of a prompt, `generate` samples their continuations, and `decode` makes text of them. RolloutFunction
    makes one for each generation (round of sampling), with a sampler of its own.

    Args:
      model: the model.
      sampling: the options of sampling, and what makes text of tokens.
      length: the most tokens of a prompt with its continuation.
      encode: a function that makes token ids of a prompt.
      seed: the sampling seed of this generation.
    """

    def __init__(
        self, model: Decoder, sampling: Sampling, length: int, encode: Callable[[Turns], tuple[int, ...]], seed: int
    ):
        self._sampling, self._encode, self._seed, self._calls = sampling, encode, seed, 0
        self._sampler = Sampler(model, length=length, most_slots=sampling.slots, most_converted=sampling.most_converted)

    def encode(self, prompt: Turns) -> list[int]:
        """The token ids of `prompt`, as the run makes them from the prompts of data rows, up to where the model's
        answer begins. A list of messages is written by the chat template. A text is taken as it is; if data.template is
        set, it is written by that template as the user's message. The rollout function calls it for the `prompt_ids`
        that it samples with and returns."""
        return list(self._encode(prompt))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens, for a rollout function that reads what was sampled."""
        return self._sampling.decode(ids)

    def generate(self, prompt_ids: Sequence[Sequence[int]], max_new_tokens: int | None = None) -> list[Row]:
        """Samples a continuation of each prompt with the run's sampling options, several at a time, and waits for all.
        Returns a Row for each, in their order, from which the rollout function makes what it returns, with `ids` (the
        new tokens), `logprobs` (of these, at the sampling temperature) and `finish_reason` ("stop" or "length"). Each
        call draws other tokens, which depend on the generation's seed and the number of the call.

        Args:
          prompt_ids: the token ids of each prompt; for several answers to one, repeat it in consecutive places, because
            the model then runs over it once for all of them.
          max_new_tokens: the most new tokens of each; None is objective.max_completion_length.
        Raises:
          ValueError: a prompt with its new tokens is longer than data.length or than the model's positions.
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
    """Samples the answers of a generation (one round of sampling) by a function of the user's code
    (`answering.Answering`), with the run's model, and checks what the function returns. Called with (the model, the
    prompts, a sampling seed for each), it returns (a `Given` for each prompt, {}); it raises ConfigError if what the
    function returned cannot be used. Only the first seed is used, for all that the function samples. SampledAnswers
    calls it."""

    function: RolloutFunc
    """The function: (prompts, RolloutModel) -> lists by name, such as prompt_ids, completion_ids and logprobs, with an
    entry for each answer."""
    sampling: Sampling
    """The options of sampling, and what makes text of tokens."""
    encode: Callable[[Turns], tuple[int, ...]]
    """A function that makes token ids of a prompt, messages or text (`RolloutModel.encode`)."""
    length: int
    """The most tokens of a prompt with its answer."""

    @property
    def tool_names(self) -> Sequence[str]:
        """(): the run knows no names of tools, because the function calls tools itself. So none are shown when a run
        begins or stored in checkpoints."""
        return ()

    @property
    def functions(self) -> Mapping[str, Callable]:
        """{name for messages: function or class} of the user's code that it calls."""
        return {"the rollout function": self.function}

    @property
    def changes_prompts(self) -> bool:
        """True: the function returns the prompts' token ids, which may differ from those of the data rows, so that
        sampling is planned with room for data.length tokens in a row."""
        return True

    def __call__(
        self, model: Decoder, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> tuple[list[Given], dict[str, float]]:
        """Calls the function with all prompts and checks what it returned: (an answer to each prompt in their order,
        {}, as it has no metrics).

        Args:
          model: the model to sample from.
          prompts: the prompts, each once for each of its answers.
          seeds: the sampling seed of each answer; only the first is used, for all that the function samples.
        Raises:
          ConfigError: the function returned no mapping with prompt_ids, completion_ids and logprobs; a list has not one
            entry for each prompt; or an answer is empty, too long, or has another number of log-probabilities.
        """
        sampler = RolloutModel(model, self.sampling, self.length, self.encode, seeds[0])
        shown = [prompt.given for prompt in prompts]
        made = self._called([own_copy(prompt) for prompt in shown], sampler)
        if not isinstance(made, Mapping) or any(name not in made for name in _NEEDED):
            lacking = [name for name in _NEEDED if not isinstance(made, Mapping) or name not in made]
            self._refuse(f"it returned no {', '.join(lacking)}")
        for name, values in made.items():
            try:
                count = len(values)
            except TypeError:
                self._refuse(f"{name} is {values!r}, and no list with an entry for each of {len(prompts)} answers")
            if count != len(prompts):
                self._refuse(f"{name} has {count} entries for {len(prompts)} answers")
        others = [name for name in made if name not in (*_NEEDED, _MASK)]
        return [
            self._given(
                index,
                prompt,
                made["prompt_ids"][index],
                made["completion_ids"][index],
                made["logprobs"][index],
                made[_MASK][index] if _MASK in made else None,
                {name: made[name][index] for name in others},
            )
            for index, prompt in enumerate(shown)
        ], {}

    def _called(self, prompts: list[Turns], model: RolloutModel) -> object:
        """What the function returns. Exceptions of JAX pass, such as that memory ran out."""
        name = name_of(self.function)
        outcome = call(lambda: self.function(prompts, model), {}, name)
        error = outcome.error
        if error is not None and type(error).__module__.startswith("jax"):
            raise error
        if error is not None:
            what = f"objective.rollout_func: {name} failed for {len(prompts)} prompts"
            raise errors.UserCodeError(errors.described(what, error)) from error
        return outcome.value

    def _given(self, index: int, prompt: Turns, prompt_ids, ids, logps, mask, columns: Mapping[str, object]) -> Given:
        """Checks one of the answers that the function returned, and returns it as a `Given`. Its finish_reason is
        "stop" if its last token is one that ends an answer, else "length". `__call__` calls this for each answer.

        Args:
          index: the number of the answer, for errors.
          prompt: the prompt, a text or messages, as reward functions get it.
          prompt_ids: the token ids of the prompt, a sequence of ints.
          ids: the token ids of the answer, a sequence of ints.
          logps: the log-probability of each of `ids`, a sequence of floats.
          mask: 1 for each of `ids` that was sampled, else 0; None: all were.
          columns: {name: value} of what else the function returned for the answer, for reward functions.
        Raises:
          ConfigError: lengths differ, the prompt or the answer has no tokens, the answer has more than
            max_completion_length, or both have more than `length`.
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
        whole = mask is None or all(mask)  # else other texts are among the model's
        text = (
            self.sampling.completion(prompt, prompt_ids, list(ids))
            if whole
            else self.sampling.decode(self.sampling.without_end(ids))
        )
        return Given(
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
        """Always raises ConfigError, about something wrong in what the function returned. `__call__` and `_given` call
        it, which check that. why: what is wrong, in words, to which the message adds the function's name and the page
        of documentation."""
        raise ConfigError(f"objective.rollout_func: {name_of(self.function)}: {why}; see docs/rewards.md")
