"""Reward models as reward functions of GRPOTrainer and RLOOTrainer: a text's score is that of its last token."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.compat.model import CompatModel
from jaxtune.compat.settings import SFTConfig
from jaxtune.compat.transformers_names import load_plain, with_dtype
from jaxtune.compat.vision import plain_tokenizer
from jaxtune.train.sampled.reward_functions import RewardFunction, Turns

_AT_ONCE = 8  # texts
_SHORTEST = 64  # tokens to which texts are padded; longer ones to a power of two


class RewardModel:
    """Called with prompts and completions, it returns the model's scores. The model does not train, and stays on the
    device.

    model: one that scores texts; ValueError for another.
    tokenizer: with the chat template by which conversations are written; None: the model's own.
    template_arguments: variables of that template.
    """

    def __init__(
        self,
        model: CompatModel,
        tokenizer=None,
        template_arguments: Mapping[str, object] | None = None,
    ):
        if model.module.config.head.outputs != 1:
            raise ValueError(
                f"reward_funcs has a model that does not score texts, because {model.module.config.head.description}: "
                "give one of RewardTrainer, or of AutoModelForSequenceClassification.from_pretrained(num_labels=1)"
            )
        self.model, self.tokenizer = model, plain_tokenizer(model.tokenizer if tokenizer is None else tokenizer)
        source = model.module.source
        self.__name__ = "reward_model" if source is None else os.path.basename(os.path.normpath(source.path))
        self._template_arguments = dict(template_arguments or {})
        if self.tokenizer.pad_token is None:  # as in TRL
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self._graph, self._state = nnx.split(model.module)

        @jax.jit
        def scores(state: nnx.State, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
            """float32[rows]: at the last of each row's `lengths` tokens."""
            segment_ids = (jnp.arange(tokens.shape[1]) < lengths[:, None]).astype(jnp.int32)
            values = nnx.merge(self._graph, state)(tokens, segment_ids)
            return values[jnp.arange(len(tokens)), lengths - 1, 0].astype(jnp.float32)

        self._scores = scores

    def __call__(self, prompts: Sequence[Turns], completions: Sequence[Turns], **_: object) -> list[float]:
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        ids = self.tokenizer(text=texts, add_special_tokens=False)["input_ids"]
        if not all(ids):
            raise ValueError(f"{self.__name__}: a text without a token has no score")
        most = self.model.module.config.context_length
        if (longest := max(map(len, ids))) > most:
            raise ValueError(
                f"{self.__name__}: a prompt with its answer has {longest:,} tokens, and the reward model {most:,} "
                "positions: lower max_completion_length"
            )
        found: list[float] = []
        for start in range(0, len(ids), _AT_ONCE):
            rows = ids[start : start + _AT_ONCE]
            width = max(_SHORTEST, 1 << (max(map(len, rows)) - 1).bit_length())
            tokens, lengths = np.zeros((_AT_ONCE, width), np.int32), np.ones(_AT_ONCE, np.int32)
            for slot, row in enumerate(rows):
                tokens[slot, : len(row)], lengths[slot] = row, len(row)
            found += np.asarray(self._scores(self._state, tokens, lengths))[: len(rows)].tolist()
        return found

    def _text(self, prompt: Turns, completion: Turns) -> str:
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion
        messages = [*prompt, *completion]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **self._template_arguments)


def with_reward_models(
    name: str, functions: Sequence[RewardFunction | str | CompatModel], tokenizers: object, args: SFTConfig
) -> tuple[list[RewardFunction], list[object]]:
    """(reward functions, with models by name or as CompatModels replaced by RewardModels; their tokenizers, None for a
    function). ValueError for another number of tokenizers. name: the trainer's.
    """
    given = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers]
    given = [None] * len(functions) if tokenizers in (None, []) else given
    if len(given) != len(functions):
        raise ValueError(
            f"{name}: the number of reward processing classes ({len(given)}) must match the number of reward functions "
            f"({len(functions)}): give a list with an entry for each, None for a function"
        )
    replaced: list[RewardFunction] = []
    for function, tokenizer in zip(functions, given, strict=True):
        if isinstance(function, str | os.PathLike):
            loading = with_dtype(function, args.model_init_kwargs) | {"num_labels": 1}
            function = load_plain(f"{name}: reward_funcs", function, args.seed, False, loading)
        if isinstance(function, CompatModel):
            function = RewardModel(function, tokenizer, getattr(args, "chat_template_kwargs", None))
        replaced.append(function)
    return replaced, [getattr(function, "tokenizer", None) for function in replaced]
