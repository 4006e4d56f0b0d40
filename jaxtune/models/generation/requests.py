"""What is requested of a sampler and what it returns. A row is one prompt with its new tokens."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

import jax
import numpy as np

from jaxtune.conversations.picture_processors import DeferredPatches, PictureArrays
from jaxtune.models.config import DecoderConfig
from jaxtune.models.generation.limits import NO_MASK
from jaxtune.models.generation.sampling import Sampling
from jaxtune.models.vision.pictures import Pictures
from jaxtune.models.vision.tower import TowerConfig


class Decodes(Protocol):
    """The part of transformers' tokenizers that turns token ids into text."""

    def decode(
        self, token_ids: Sequence[int], /, *, skip_special_tokens: bool = ..., clean_up_tokenization_spaces: bool = ...
    ) -> str:
        """The text of token ids.

        token_ids: of the text.
        skip_special_tokens: leave out special tokens.
        clean_up_tokenization_spaces: remove spaces before punctuation.
        """
        ...


class Constraint(Protocol):
    """Which tokens one row may make."""

    def mask(self) -> np.ndarray | None:
        """uint32[(V + 31) // 32], a bit for each token that may come next, the lowest first; None: any may."""
        ...

    def accept(self, tokens: Sequence[int]) -> bool:
        """Takes the row's new tokens; True: its text is complete. ValueError: the row cannot go on, and ends."""
        ...


@runtime_checkable
class Waiting(Constraint, Protocol):
    """A Constraint that lets any tokens pass for a while, in which rounds are dispatched ahead.

    waits: whether it does.
    dropped: how many of the tokens that it took last the row does not keep, as they were made before it knew what may
    come: the row goes back.
    """

    @property
    def waits(self) -> bool: ...

    dropped: int


@runtime_checkable
class Together(Constraint, Protocol):
    """A Constraint of which those of many rows are followed faster together."""

    @classmethod
    def fill(cls, rows: Sequence[tuple[Self, int]], masks: np.ndarray) -> None:
        """Writes masks of (constraint, index of `masks`)."""
        ...

    @classmethod
    def take_all(cls, rows: Sequence[tuple[Self, Sequence[int]]]) -> None:
        """Before `accept` of each row, which then has little to do."""
        ...


def fill_masks(rows: Iterable[tuple[Constraint, int]], masks: np.ndarray) -> None:
    """Writes the mask of each constraint into a row of `masks`, uint32[N, (V + 31) // 32], all bits for None."""
    for kind, indexed in _by_type(rows).items():
        if issubclass(kind, Together):
            kind.fill(indexed, masks)
            continue
        for constraint, index in indexed:
            mask = constraint.mask()
            masks[index] = NO_MASK if mask is None else mask


def accept_all(rows: Sequence[tuple[Constraint, Sequence[int]]]) -> list[bool | ValueError]:
    """What each constraint says of its row's new tokens: `accept`, or its error."""
    for kind, its_rows in _by_type(rows).items():
        if issubclass(kind, Together):
            kind.take_all(its_rows)
    return [_accepted(*row) for row in rows]


def _accepted(constraint: Constraint, tokens: Sequence[int]) -> bool | ValueError:
    try:
        return constraint.accept(tokens)
    except ValueError as error:
        return error


def _by_type[T](rows: Iterable[tuple[Constraint, T]]) -> dict[type, list[tuple[Any, T]]]:
    groups = collections.defaultdict(list)
    for row in rows:
        groups[type(row[0])].append(row)
    return groups


def text_of(tokenizer: Decodes, ids: Sequence[int]) -> str:
    """The text of an answer, without special tokens. Spaces before punctuation stay, so that text shown while tokens
    arrive is how the whole text begins.
    """
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


# Why a row ended: an end token or a stop string; max_new_tokens; Sampler.cancel; its constraint.
FinishReason = Literal["stop", "length", "cancelled", "failed"]


@dataclasses.dataclass(frozen=True)
class Row:
    """A row that has ended."""

    index: int  # of its prompt in the prompts given to `run`
    ids: list[int]  # the new tokens, up to and including the one that ended it
    # log-probability of each new token under the model: log softmax of its logits, without penalty or filters, and
    # without temperature unless scaled_logprobs was set
    logprobs: list[float]
    # "stop": an end token or a stop string; "length": max_new_tokens, or no more room; "cancelled": `cancel` was called
    finish_reason: FinishReason
    # for each new token the most likely tokens in its place and their log-probabilities, in descending order: as many
    # as top_logprobs says; empty without it
    top_logprobs: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Piece:
    """The new tokens of one request in one step."""

    request: int  # the request's number, from `submit`
    ids: list[int]  # new tokens since the last piece; may be empty in the last piece
    logprobs: list[float]  # the log-probabilities of these tokens, as Row.logprobs
    finish_reason: FinishReason | None  # why the request ended; None: it has not
    # the most likely tokens at the position of each of these, as in Row.top_logprobs; empty unless asked for
    top_logprobs: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    error: str = ""  # of a request that "failed"
    # in the last piece: tokens of the prompt whose states an earlier prompt had left
    reused: int = 0


def joined_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """One piece for each request, in the order of their first."""
    joined: dict[int, Piece] = {}
    for piece in pieces:
        if (first := joined.get(piece.request)) is not None:
            ids, logprobs, top_logprobs = (
                getattr(first, name) + getattr(piece, name) for name in ("ids", "logprobs", "top_logprobs")
            )
            piece = dataclasses.replace(piece, ids=ids, logprobs=logprobs, top_logprobs=top_logprobs)
        joined[piece.request] = piece
    return [*joined.values()]


class StopStrings:
    """Finds the token that completes one of several strings in the new text of a row, with its special tokens or
    without, as it is shown. Raises ValueError without a tokenizer or for an empty string.

      caller: the caller's name, for errors.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Decodes | None, caller: str = "generate"):
        if tokenizer is None or not all(strings):
            lacks = "give the tokenizer that turns tokens into text" if tokenizer is None else "one of them is empty"
            raise ValueError(f"{caller}: stop_strings = {list(strings)!r}: {lacks}")
        self._strings, self._tokenizer = list(strings), tokenizer
        # A string can start in earlier tokens. A character has at most four tokens (its bytes); some tokens have none.
        self._reach = 4 * max(map(len, strings)) + 8

    def end(self, new: Sequence[int], searched_count: int, first: int = 0) -> int | None:
        """The number of new tokens up to and including the first that completes a string, or None.

        searched_count: how many of `new` were searched before.
        first: as many tokens at the beginning of `new` are not searched.
        """
        if first:
            end = self.end(new[first:], max(0, searched_count - first))
            return None if end is None else first + end
        if not self._in(new[max(0, searched_count - self._reach) :]):
            return None
        return next((count for count in range(searched_count + 1, len(new) + 1) if self._in(new[:count])), None)

    def _in(self, tokens: Sequence[int]) -> bool:
        decode = functools.partial(self._tokenizer.decode, tokens, clean_up_tokenization_spaces=False)
        texts = (decode(skip_special_tokens=without) for without in (False, True))
        return any(string in text for text in texts for string in self._strings)


class PromptPictures(NamedTuple):
    """The pictures of one prompt, numpy arrays of one row without padding tokens; its patches may be
    decoded when they are read."""

    pictures: Pictures  # with rows = 1 and as many tokens as the prompt has
    positions: np.ndarray  # int32[tokens, axes]
    digest: bytes = b""  # of `key`, if it is known

    @classmethod
    def of(cls, arrays: PictureArrays | None) -> Self | None:
        """None of a prompt without pictures."""
        if arrays is None:
            return None
        values = jax.tree.map(lambda array: array, dict(arrays))
        pictures = cls(positions=values.pop("positions"), pictures=Pictures(**values))
        return pictures._replace(digest=pictures.key())

    @property
    def delta(self) -> int:
        """The position of the token after the prompt, less its index."""
        return int(self.positions.max()) + 1 - len(self.positions)

    def key(self) -> bytes:
        """16 bytes by which equal ones are known."""
        if self.digest:
            return self.digest
        content = hashlib.blake2b(digest_size=16)
        for array in (*jax.tree.leaves(self.pictures), self.positions):
            content.update(array.digest if isinstance(array, DeferredPatches) else np.asarray(array).tobytes())
        return content.digest()

    def padded(self, tokens: int, patches: int) -> tuple[np.ndarray, Pictures]:
        """(positions int32[1, tokens, axes], numpy arrays of pictures) of the prompt's first `tokens` tokens, or with
        padding up to as many. patches: to which they are padded.
        """
        count, pictures = min(tokens, len(self.positions)), self.pictures
        positions = np.zeros((1, tokens, *self.positions.shape[1:]), np.int32)
        positions[0, :count] = self.positions[:count]
        features = np.full((1, tokens), -1, np.int32)
        features[0, :count] = np.asarray(pictures.picture_features)[0, :count]

        def of_patches(array: jax.Array, dtype: type = np.int32) -> np.ndarray:
            values = np.asarray(array, dtype)
            widths = ((0, 0), (0, patches - values.shape[1]), *((0, 0),) * (values.ndim - 2))
            return np.pad(values, widths)

        arrays = pictures.patch_segments, pictures.patch_grids, pictures.patch_coordinates
        arrays = of_patches(pictures.patches, np.float32), *map(of_patches, arrays), features
        return positions, jax.tree.unflatten(jax.tree.structure(pictures), arrays)


def check_pictures(
    prompt: Sequence[int], pictures: PromptPictures, tower: TowerConfig | None, config: DecoderConfig, name: str
) -> None:
    """Raises ValueError for pictures that do not fit the prompt or the model.

    tower, config: of the model. name: of the prompt, in errors.
    """
    if tower is None:
        raise ValueError(f"{name} has pictures, and the model was loaded without its tower; load it with pictures=True")
    tokens, axes = len(prompt), len(config.rotary[0].sections)
    shape = (tokens, axes) if axes else (tokens,)
    features = np.asarray(pictures.pictures.picture_features)
    if pictures.positions.shape != shape or features.shape != (1, tokens):
        raise ValueError(
            f"{name} of {tokens} tokens has pictures with positions {pictures.positions.shape} and picture_features "
            f"{features.shape}: must be {shape} and {(1, tokens)}"
        )
    patches, block = pictures.pictures.patch_segments.shape[1], tower.merge_size**2
    if patches % block or features.max() >= patches // block:
        raise ValueError(
            f"{name} has {patches} patches and feature {features.max()}: {block} patches are a feature, from 0 on"
        )
    if features[0, -1] >= 0:
        raise ValueError(f"{name} ends in a picture: a text token must follow it, as chat templates write")


@dataclasses.dataclass(eq=False)
class Request:
    """A row that waits for a slot, decodes in one, or is done."""

    number: int  # by which the sampler's pieces and `cancel` name the request
    tokens: list[int]  # the prompt and the new tokens
    start: int  # number of the prompt's tokens
    limit: int  # the row ends when it has this many tokens
    sampling: Sampling  # how tokens are chosen
    seed: int  # with `index` and the step, determines what the row draws
    index: int  # tells rows with the same seed apart
    ends: frozenset[int]  # tokens that end it
    stops: StopStrings | None  # strings that end it, or None
    least: int = 0  # new tokens in which no string is looked for
    pictures: PromptPictures | None = None
    slot: int | None = None  # the slot in which it decodes; None while it waits
    # how often it was placed in a slot, by which the sampler knows results of an earlier stay in a slot; more than once
    # only if a longrope model changes its factors, and its states are computed anew
    placements: int = 0
    ahead: int = 0  # the most tokens that dispatched rounds make, which have not been read
    # identifies the tokens of which its states are computed, so that requests with equal prompts share a prefill; set
    # when it is queued (Prefills.add_waiting)
    key: bytes = b""
    reused: int = 0  # tokens of the prompt whose states an earlier prompt had left
    done: bool = False  # whether it has ended
    client: tuple[Hashable, ...] = ()  # who asks; see `in_turns`
    constraint: Constraint | None = None
    adapter: int = 0  # its number in the sampler; 0: none

    @property
    def is_constrained(self) -> bool:
        """Whether its next token needs a mask."""
        return self.constraint is not None and not getattr(self.constraint, "waits", False)

    def take(self, tokens: list[int], accepted: bool | ValueError = False) -> tuple[list[int], FinishReason | None]:
        """Adds the device's new tokens, up to the one that completes a stop string. Returns (these, why the row ends or
        None). accepted: what its constraint says of them; ValueError: raised.
        """
        count_before = len(self.tokens) - self.start
        self.tokens += tokens
        if self.stops is not None and tokens:
            end = self.stops.end(self.tokens[self.start :], count_before, self.least)
            if end is not None:
                del self.tokens[self.start + end :]
                return self.tokens[self.start + count_before :], "stop"
        if isinstance(accepted, ValueError):
            raise accepted
        if accepted:
            return tokens, "stop"
        if tokens and tokens[-1] in self.ends:
            return tokens, "stop"
        return tokens, "length" if len(self.tokens) >= self.limit else None


def in_turns(requests: Iterable[Request]) -> list[Request]:
    """The requests such that clients take turns, one request each, at each level of `client`: those with an equal first
    entry are one client, among whose requests those with an equal second entry take turns.

    >>> clients = [("a", 1), ("a", 1), ("a", 2), ("b", 3)]
    >>> [request.client for request in in_turns(map(_of_client, clients))]
    [('a', 1), ('b', 3), ('a', 2), ('a', 1)]
    """
    ordered = list(requests)
    for level in range(max((len(request.client) for request in ordered), default=0), 0, -1):
        groups: dict[Hashable, list[Request]] = {}
        for request in ordered:
            groups.setdefault(request.client[:level], []).append(request)
        turns = itertools.zip_longest(*groups.values())
        ordered = [request for turn in turns for request in turn if request is not None]
    return ordered


def _of_client(client: tuple[Hashable, ...]) -> Request:
    return Request(0, [1], 1, 2, Sampling(), 0, 0, frozenset(), None, client=client)


def checked_prompt(prompt: Sequence[int], vocab_size: int, name: str) -> list[int]:
    """The prompt as a list. Raises ValueError if it is empty or not a list of ids of this vocabulary.

    prompt: token ids.
    vocab_size: ids must be below it.
    name: of the prompt, in errors.
    """
    row = np.asarray(prompt)
    if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
        raise ValueError(f"{name} is not a list of token ids; encode text with the tokenizer first")
    if row.size == 0:
        raise ValueError(f"{name} is empty; it needs at least one token, such as BOS")
    if row.min() < 0 or row.max() >= vocab_size:
        bad = int(row.min() if row.min() < 0 else row.max())
        raise ValueError(f"{name} contains token id {bad}, outside the vocabulary of {vocab_size}")
    return row.tolist()


def checked_bias(token: int, bias: float, vocab_size: int) -> tuple[int, float]:
    """Raises ValueError for a token outside the vocabulary, or a bias that is no number."""
    if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
        raise ValueError(f"Sampler: logit_bias: token id {token!r} is outside the vocabulary of {vocab_size}")
    if np.isnan(bias) or bias == np.inf:
        raise ValueError(f"Sampler: logit_bias: {bias!r} for token {token}: must be a finite number, or -inf")
    return int(token), float(bias)


def checked_length(prompt: Sequence[int], max_new_tokens: int | None, positions: int, name: str, whose: str) -> int:
    """The length at which a row ends, in tokens with the prompt's. Raises ValueError for too few positions.

    prompt: token ids.
    max_new_tokens: of the answer; None: as many as there are positions for, at least one.
    positions: the most tokens of a row.
    name, whose: for errors, such as "generate: prompt 3" and "the model has".
    """
    if max_new_tokens is None:
        max_new_tokens = max(positions - len(prompt), 1)
    if not isinstance(max_new_tokens, int | np.integer) or max_new_tokens < 1:
        raise ValueError(f"{name.partition(':')[0]}: max_new_tokens = {max_new_tokens!r}: must be a positive integer")
    if len(prompt) + max_new_tokens > positions:
        raise ValueError(
            f"{name} of {len(prompt)} tokens and max_new_tokens = {max_new_tokens} need "
            f"{len(prompt) + max_new_tokens} positions; {whose} {positions}: shorten one of them"
        )
    return len(prompt) + int(max_new_tokens)


def one_a_prompt[T](values: Sequence[T | None] | None, count: int, name: str) -> list[T | None]:
    """The values, all None for None. Raises ValueError for another number than of prompts. name: for the error."""
    if values is not None and len(values) != count:
        raise ValueError(f"{name} of {len(values)} prompts for {count} prompts")
    return [None] * count if values is None else [*values]


def constraints_of(constraints: Sequence[Constraint | None] | None, count: int, caller: str) -> list[Constraint | None]:
    """One a prompt. Raises ValueError for another number, or one that two rows have. caller: for the error."""
    values = one_a_prompt(constraints, count, f"{caller}: constraints")
    if len({id(each) for each in values if each is not None}) < sum(each is not None for each in values):
        raise ValueError(f"{caller}: constraints: one is of several rows, and each follows one text: make one for each")
    return values


def seeds_of(seed: int | Sequence[int], count: int, caller: str) -> list[tuple[int, int]]:
    """(seed, index) for each row. Raises ValueError for another number of seeds.

    seed: one for all, with the rows' indices, or one a row with index 0, so that it draws as if alone.
    count: of the rows.
    caller: the caller's name, for errors.
    """
    if isinstance(seed, int | np.integer):
        return [(int(seed), index) for index in range(count)]
    seeds = np.asarray(seed)
    if seeds.shape != (count,) or not np.issubdtype(seeds.dtype, np.integer):
        raise ValueError(f"{caller}: seed = {seed!r}: must be an integer, or {count} of them, one a prompt")
    return [(int(row_seed), 0) for row_seed in seeds]
