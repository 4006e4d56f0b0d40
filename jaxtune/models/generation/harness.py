"""Evaluates models with EleutherAI's lm-eval, an optional package (the extra lm-eval).

import lm_eval
from jaxtune.models.generation.harness import JaxtuneLM

results = lm_eval.simple_evaluate(JaxtuneLM(model, tokenizer), tasks=["arc_easy"])
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.system.extras import install

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
except ImportError as error:
    raise ImportError("jaxtune.models.generation.harness needs lm-eval: " + install("lm-eval")) from error

from jaxtune.conversations.prompts import prompt_tokens
from jaxtune.models.decoder import Decoder
from jaxtune.models.ends import end_token_ids
from jaxtune.models.generation.limits import FILTERS, that_count
from jaxtune.models.generation.prefixes import worthwhile_bytes
from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.hf import from_pretrained

_SHORTEST = 32  # rows are padded to at least this many tokens
_CHUNK = 512  # how many tokens' logits exist at a time
# The settings of a task that `generate` takes, by transformers' names, and their defaults.
_SAMPLING = {**FILTERS, "repetition_penalty": 1.0}


class JaxtuneLM(TemplateLM):
    """A Decoder as a model of lm-eval.

    pretrained: a model, or a path for from_pretrained, with `dtype` and `load_in`.
    tokenizer: None: the path's.
    batch_size: rows of a forward pass, and most slots of a device; also text, such as "8".
    max_length: None: the model's positions. Longer rows lose their first tokens.
    max_gen_toks: the most new tokens if a task names no number.
    others: "device" and "max_batch_size" have no effect.
    """

    def __init__(
        self,
        pretrained: Decoder | str | os.PathLike,
        tokenizer: Any = None,
        *,
        batch_size: int | str = 8,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        dtype: str | None = None,
        load_in: str | None = None,
        seed: int = 0,
        **others: Any,
    ):
        super().__init__()
        if unknown := {name for name, value in others.items() if value is not None} - {"device", "max_batch_size"}:
            raise ValueError(f"JaxtuneLM: {', '.join(sorted(unknown))} is unknown")
        if not isinstance(pretrained, Decoder):
            pretrained, folder_tokenizer = from_pretrained(pretrained, dtype=dtype, load_in=load_in)
            tokenizer = tokenizer or folder_tokenizer
        if not pretrained.config.head.is_text:
            raise ValueError(f"JaxtuneLM: {pretrained.config.head.description} and has no log-probabilities")
        if tokenizer is None:
            raise ValueError("JaxtuneLM: tokenizer is missing: give the model's")
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(f"JaxtuneLM: batch_size = {batch_size!r}: must be a positive number")
        positions = pretrained.config.context_length
        if max_length is not None and not 1 < max_length <= positions:
            raise ValueError(f"JaxtuneLM: max_length = {max_length}: must be between 2 and the model's {positions}")
        self.model, self.tokenizer = pretrained, tokenizer
        self.batch_size, self.max_length = int(batch_size), max_length or positions
        self.max_gen_toks, self.seed = max_gen_toks, seed
        self._graph, self._state = nnx.split(pretrained)

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's EOS; None if it has none."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: BOS, else EOS."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's template, for the fingerprint of requests; "" if lm-eval uses none."""
        return self.tokenizer.chat_template if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text. Without add_generation_prompt its last message can be continued."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids.

        string: the text.
        add_special_tokens: None: BOS only, once, if the tokenizer adds one.
        _: further arguments, ignored.
        """
        if add_special_tokens is None:
            return prompt_tokens(self.tokenizer, string)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    # ---- scores

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """(log-probability of the continuation in nats, whether it is greedy) for each (key, context ids, continuation
        ids).
        """
        scores: list[Any] = [None] * len(requests)
        # The longest first, so that a row that needs too much memory fails at once, and neighbours have one length.
        order = sorted(range(len(requests)), key=lambda index: -len(requests[index][1]) - len(requests[index][2]))
        for start in range(0, len(order), self.batch_size):
            indices = order[start : start + self.batch_size]
            rows = [(requests[index][1] + requests[index][2])[-self.max_length - 1 :] for index in indices]
            width = max(_SHORTEST, 1 << (max(map(len, rows)) - 2).bit_length())
            tokens, targets, segments = (np.zeros((self.batch_size, width), np.int32) for _ in range(3))
            for slot, row in enumerate(rows):
                count = len(row) - 1
                tokens[slot, :count], targets[slot, :count], segments[slot, :count] = row[:-1], row[1:], 1
            logprobs, greedy = map(np.asarray, _scored(self._graph, self._state, tokens, targets, segments))
            for slot, index in enumerate(indices):
                end = len(rows[slot]) - 1
                continuation = slice(max(end - len(requests[index][2]), 0), end)
                scores[index] = (
                    float(logprobs[slot, continuation].sum(dtype=np.float64)),
                    bool(greedy[slot, continuation].all()),
                )
                if requests[index][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], scores[index])
        return scores

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text in nats, summed over windows of at most max_length tokens."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            rolled = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(utils.make_disjoint_window, rolled):
                windows.append((None, context, continuation))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += logprob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    # ---- texts

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Answers, cut off before their first stop string or at an end token. A prompt that leaves no room in
        max_length loses its first tokens. Raises ValueError for a setting that is not supported.
        """
        eos = self.tokenizer.eos_token_id
        ends = end_token_ids(self.model) or ([] if eos is None else [eos])
        texts: list[str] = [""] * len(requests)
        groups: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[repr(request.args[1])].append(index)
        for indices in groups.values():
            settings = normalize_gen_kwargs(requests[indices[0]].args[1], self.max_gen_toks)
            until = [stop for stop in settings.pop("until") if stop]
            new, temperature = settings.pop("max_gen_toks"), settings.pop("temperature", 0.0)
            if not settings.pop("do_sample", temperature > 0):
                temperature = 0.0
            options = {name: settings.pop(name, default) for name, default in _SAMPLING.items()}
            options.update(that_count({**options, "temperature": temperature}))
            if settings:
                raise ValueError(f"JaxtuneLM: {', '.join(sorted(settings))} of generation_kwargs is not supported")
            if not new < self.max_length:
                raise ValueError(
                    f"JaxtuneLM: max_gen_toks = {new} leaves no room for a prompt in max_length = {self.max_length}"
                )
            prompts = [self.tok_encode(requests[index].args[0])[new - self.max_length :] for index in indices]
            sampler = Sampler(
                self.model,
                length=max(map(len, prompts)) + new,
                most_slots=self.batch_size,
                prefix_bytes=worthwhile_bytes(prompts),
            )
            rows = sampler.run(
                prompts,
                new,
                seed=[self.seed + index for index in indices],
                in_order=False,
                stop_strings=until,
                tokenizer=self.tokenizer,
                **options,
                eos_token_ids=ends,
            )
            for row in rows:
                index = indices[row.index]
                text = self.tokenizer.decode(row.ids, skip_special_tokens=True)
                for stop in until:
                    text = text.split(stop)[0]
                texts[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return texts


@functools.partial(jax.jit, static_argnums=0)
def _scored(graph, state, tokens: jax.Array, targets: jax.Array, segments: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(each target's log-probability in nats float32[B, T], whether it is the most likely token bool[B, T])."""
    model = nnx.merge(graph, state)
    hidden = model.hidden_states(tokens, segments)
    rows, chunk = hidden.reshape(-1, hidden.shape[-1]), min(_CHUNK, tokens.size)
    padding = -len(rows) % chunk

    def chunk_scores(operands):
        hidden, target = operands
        logits = model.logits(hidden)
        target_logits = jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]
        return target_logits - jax.nn.logsumexp(logits, axis=-1), logits.argmax(-1) == target

    chunks = [
        jnp.pad(array, ((0, padding), *((0, 0),) * (array.ndim - 1))).reshape(-1, chunk, *array.shape[1:])
        for array in (rows, targets.reshape(-1))
    ]

    def unpadded(results):
        """Joins chunks to [B, T], without the padding."""
        return results.reshape(-1)[: len(rows)].reshape(tokens.shape)

    logprobs, greedy = jax.lax.map(chunk_scores, tuple(chunks))
    return unpadded(logprobs), unpadded(greedy)
