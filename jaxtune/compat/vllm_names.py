"""vLLM's names in scripts for Unsloth. The sampler is jaxtune's, in this process, over the weights that train."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jaxtune
from jaxtune.compat.seeds import next_seed
from jaxtune.conversations.tokenizing import Tokenizer, with_beginning
from jaxtune.models.decoder import Decoder
from jaxtune.models.ends import ends_of
from jaxtune.models.lora import has_adapter, without_adapter

_OURS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Arguments that change nothing at these values.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "min_tokens": (0,),
    "logit_bias": (None,),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "guided_decoding": (None,),
    "prompt_logprobs": (None,),
    "truncate_prompt_tokens": (None,),
    "logits_processors": (None,),
    "best_of": (None, 1),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True,),
    "output_kind": (None,),
    "extra_args": (None,),
}


_DEFAULTS = dict(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=16, repetition_penalty=1.0)


class SamplingParams:
    """vLLM's settings of an answer, with its defaults. ValueError for others that would change answers.

    n: answers to each prompt.
    top_k: -1 or 0: all tokens.
    max_tokens: None: as many as the model has positions.
    stop: texts that end an answer, without them unless include_stop_str_in_output.
    seed: None: draws anew.
    logprobs: any number: those of the answer's tokens.
    changed: settings of the sampler that are not vLLM's defaults.
    stop_token_ids: ids that end an answer.
    """

    def __init__(
        self,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        max_tokens: int | None = 16,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        include_stop_str_in_output: bool = False,
        ignore_eos: bool = False,
        skip_special_tokens: bool = True,
        seed: int | None = None,
        logprobs: int | None = None,
        **others: object,
    ):
        for name, value in others.items():
            if name not in _NEUTRAL:
                raise ValueError(f"SamplingParams: {name} = {value!r} is not an argument that jaxtune.compat knows")
            if value not in _NEUTRAL[name]:
                raise ValueError(f"SamplingParams: {name} = {value!r} is not supported; leave it out")
        given = dict(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, max_tokens=max_tokens)
        given["repetition_penalty"] = repetition_penalty
        self.changed = {name: value for name, value in given.items() if value != _DEFAULTS[name]}
        if n < 1:
            raise ValueError(f"SamplingParams: n = {n}: must be at least 1")
        self.n, self.temperature, self.top_p, self.top_k = n, temperature, top_p, max(0, top_k or 0)
        self.min_p, self.repetition_penalty, self.max_tokens = min_p, repetition_penalty, max_tokens
        self.stop = [stop] if isinstance(stop, str) else list(stop or ())
        self.stop_token_ids = list(stop_token_ids or ())
        self.include_stop_str_in_output, self.ignore_eos = include_stop_str_in_output, ignore_eos
        self.skip_special_tokens, self.seed, self.logprobs = skip_special_tokens, seed, logprobs


@dataclasses.dataclass(frozen=True)
class LoraRequest:
    """An adapter's folder, for fast_generate."""

    lora_path: str

    @property
    def path(self) -> str:
        return self.lora_path


@dataclasses.dataclass
class CompletionOutput:
    """One answer. token_ids has the token that ended it; `text` does not, unless special tokens are written."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[float] | None  # of token_ids, with SamplingParams(logprobs=...)
    finish_reason: str  # "stop", or "length": the answer has max_tokens
    stop_reason: int | str | None = None  # the stop text, or the token of stop_token_ids, that ended it


@dataclasses.dataclass
class RequestOutput:
    """The answers to one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    lora_request: LoraRequest | None = None


def with_lora(module: Decoder, request: LoraRequest | None) -> Decoder:
    """`module` without its adapter, or with that of `request`, as with vLLM."""
    base = without_adapter(module) if has_adapter(module) else module
    return base if request is None else jaxtune.load_adapter(base, request.lora_path)


def fast_generate(
    module: Decoder,
    tokenizer: Tokenizer,
    prompts: str | Mapping | Iterable[str | Mapping],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    lora_request: LoraRequest | None,
    cache: str | None = None,
) -> list[RequestOutput]:
    """The answers to `prompts`: texts, {"prompt": text}, {"prompt_token_ids": ids}, or one of these.

    sampling_params: for all prompts, or one for each; None: the defaults.
    lora_request: the adapter; None: none, even if `module` has one, as in vLLM.
    tokenizer: encodes texts, and decodes answers.
    cache: as of jaxtune.generate.
    """
    listed = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
    if not isinstance(sampling_params, Sequence):
        sampling_params = [sampling_params or SamplingParams()] * len(listed)
    if len(sampling_params) != len(listed):
        raise ValueError(f"fast_generate: {len(listed)} prompts and {len(sampling_params)} sampling_params")
    model = with_lora(module, lora_request)
    text_and_ids = [_prompt(prompt, tokenizer) for prompt in listed]
    outputs: list[RequestOutput] = []
    groups: dict[int, list[int]] = {}
    for index, params in enumerate(sampling_params):
        groups.setdefault(id(params), []).append(index)
    answers: dict[int, list[CompletionOutput]] = {}
    for indices in groups.values():
        prompts_ids = [(i, text_and_ids[i][1]) for i in indices]
        answers |= _answers(model, tokenizer, prompts_ids, sampling_params[indices[0]], cache)
    for index, (text, ids) in enumerate(text_and_ids):
        outputs.append(RequestOutput(str(index), text, ids, answers[index], True, lora_request))
    return outputs


def _prompt(prompt: object, tokenizer: Tokenizer) -> tuple[str | None, list[int]]:
    if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
        return prompt.get("prompt"), list(prompt["prompt_token_ids"])
    text = prompt["prompt"] if isinstance(prompt, Mapping) else prompt
    if not isinstance(text, str):
        raise ValueError(
            f"fast_generate: prompts has a {type(text).__name__}: give texts, such as those of "
            "tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)"
        )
    return text, with_beginning(tokenizer, tokenizer(text)["input_ids"], ())


def _answers(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: list[tuple[int, list[int]]],
    params: SamplingParams,
    cache: str | None,
) -> dict[int, list[CompletionOutput]]:
    """{index of a prompt: its n answers} of (index, tokens) with the same settings."""
    longest = max(len(ids) for _, ids in prompts)
    room = model.config.context_length - longest
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    ends = set() if params.ignore_eos else set(ends_of(model, tokenizer))
    new, logprobs = jaxtune.generate(
        model,
        [ids for _, ids in prompts for _ in range(params.n)],
        most,
        seed=next_seed() if params.seed is None else params.seed,
        stop_strings=params.stop,
        tokenizer=tokenizer if params.stop else None,
        eos_token_ids=sorted(ends | set(params.stop_token_ids)),
        output_logprobs=True,
        cache=cache,
        **{name: getattr(params, name) for name in _OURS},
    )
    completions: dict[int, list[CompletionOutput]] = {}
    for row, (tokens, scores) in enumerate(zip(new, logprobs, strict=True)):
        text = str(tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens))
        stopped = next((stop for stop in params.stop if stop in text), None)
        if stopped is not None:
            text = text[: text.index(stopped) + len(stopped) * params.include_stop_str_in_output]
        last = tokens[-1] if tokens else None
        is_stopped = stopped is not None or last in ends or last in params.stop_token_ids
        reason = stopped if stopped is not None else last if last in params.stop_token_ids else None
        token_logprobs = None if params.logprobs is None else list(scores)
        total = None if params.logprobs is None else float(sum(scores))
        finish_reason = "stop" if is_stopped else "length"
        index = prompts[row // params.n][0]
        completions.setdefault(index, []).append(
            CompletionOutput(row % params.n, text, list(tokens), total, token_logprobs, finish_reason, reason)
        )
    return completions


def load_lora(folder: str | os.PathLike) -> LoraRequest:
    """The request for an adapter's folder; ValueError if it has no adapter."""
    path = Path(folder).expanduser()
    if not (path / "adapter_config.json").is_file():
        raise ValueError(f"load_lora: {path} has no adapter: name a folder that save_lora or save_pretrained wrote")
    return LoraRequest(os.fspath(path))
