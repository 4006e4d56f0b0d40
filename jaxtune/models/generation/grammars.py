"""Rows whose text follows a grammar: JSON of a schema, a regular expression, calls of tools. By llguidance."""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import json
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from jaxtune.conversations.answers import AnswerReader, Mark
from jaxtune.conversations.call_grammars import SPACES
from jaxtune.conversations.tokenizing import Tokenizer
from jaxtune.models.generation.call_constraints import CallConstraint, Compiled, Watched
from jaxtune.models.generation.limits import NO_MASK
from jaxtune.system.extras import install

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from jaxtune.models.decoder import Decoder

_MOST_BYTES = 256 * 1024  # of a grammar
_MOST_RULES = 500  # and definitions of a schema: llguidance takes stack for each that another one calls
_RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_]\w*[^\S\n]*[\[{.:]", re.MULTILINE)
_DEFINITIONS = ("$defs", "definitions")
# Of a processor, that a row may take: other rows wait meanwhile. Few grammars take a millisecond for a token.
_SECONDS, _SECONDS_PER_TOKEN = 1.0, 0.02
_MOST_VOCABULARIES = 4
_vocabularies: dict[bytes, LLTokenizer] = {}  # the last used ones, in the order of their use
_vocabularies_lock = threading.Lock()
_WATCHED_TOKENS = 16  # in which each row's grammar is timed, after those of all rows together took too long
_MOST_THREADS = 8  # that follow grammars
_TAIL = 16  # tokens in which the end of thoughts is looked for


def json_grammar(schema: Mapping[str, object]) -> str:
    """Of JSON that a schema describes. ValueError for a schema that is not supported."""
    _require_few("definitions", _definitions(schema))
    return checked(json.dumps({"grammars": [{"json_schema": {**schema, **SPACES}}]}))


def regex_grammar(pattern: str) -> str:
    """Of texts that a regular expression matches whole, in Rust's syntax. ValueError for another one."""
    return checked(_llguidance().LLMatcher.grammar_from_regex(pattern))


def grammar_of(schema: Mapping[str, object] | str | None, pattern: str | None) -> str | None:
    """That of a JSON schema, perhaps as text, or of a regular expression; None without either. ValueError: as theirs,
    or there are both.
    """
    if schema is not None and pattern is not None:
        raise ValueError("an answer follows a JSON schema or a regular expression: give one of them")
    if pattern is not None:
        return regex_grammar(pattern)
    if schema is None:
        return None
    try:
        values = json.loads(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise ValueError(f"the schema is not JSON: {error}") from None
    if not isinstance(values, Mapping):
        raise ValueError(f"the schema must be a JSON object, not {str(values)[:80]!r}")
    return json_grammar(values)


def choice_grammar(choices: Sequence[str]) -> str:
    """Of one of several texts. ValueError for none."""
    if not choices:
        raise ValueError("there is no choice")
    return lark_grammar("start: " + " | ".join(json.dumps(choice) for choice in choices))


def lark_grammar(lark: str) -> str:
    """Of texts of a grammar in llguidance's dialect of Lark. ValueError for another one."""
    _require_few("rules", len(_RULE.findall(lark)))
    return checked(_llguidance().LLMatcher.grammar_from_lark(lark))


def calls_grammar(lark: str) -> str:
    """Of calls as `AnswerReader.begun_call_grammar` gives them. ValueError if it is not followed."""
    return checked(_llguidance().LLMatcher.grammar_from_lark(lark))


def _definitions(schema: object) -> int:
    """How many a schema has in all of its levels."""
    count, rest = 0, [schema]
    while rest:
        value = rest.pop()
        if isinstance(value, Mapping):
            count += sum(len(value[key]) for key in _DEFINITIONS if isinstance(value.get(key), Mapping))
        if isinstance(value, Mapping | list | tuple):
            rest += value.values() if isinstance(value, Mapping) else value
    return count


def _require_few(kind: str, count: int) -> None:
    if count > _MOST_RULES:
        raise ValueError(f"there are {count:,} {kind}; at most {_MOST_RULES:,} are followed: leave some out")


def either(answer: str, calls: str) -> str:
    """Of texts of one of two grammars. ValueError if they are too large together.

    answer: of one of these functions.
    calls: in llguidance's Lark.
    """
    first, *more = json.loads(answer)["grammars"] if answer.startswith("{") else [{"lark_grammar": answer}]
    choice = {"lark_grammar": "start: @either_answer | @either_calls"}
    named = [{**first, "name": "either_answer"}, {"lark_grammar": calls, "name": "either_calls"}]
    return checked(json.dumps({"grammars": [choice, *named, *more]}))


def checked(grammar: str) -> str:
    """The grammar; ValueError if llguidance cannot follow it."""
    if len(grammar) > _MOST_BYTES:
        raise ValueError(f"the grammar has {len(grammar):,} characters; at most {_MOST_BYTES:,} are followed")
    is_error, messages = _llguidance().LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise ValueError(_first_words(messages[0]))
    return grammar


def _first_words(error: str) -> str:
    """An error without the state of a parser that follows it."""
    return " ".join(error.partition("<state>")[0].split())[:300]


def _llguidance():
    try:
        import llguidance
    except ImportError as error:
        raise ValueError(f"grammars need llguidance ({error}): {install('serve')}") from None
    return llguidance


def _vocabulary(tokenizer: Tokenizer, size: int, ends: Sequence[int]) -> LLTokenizer:
    """Makes it in seconds, in which no other thread of Python runs. Equal tokenizers share it."""
    from llguidance import hf

    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        raise ValueError(f"grammars need a fast tokenizer (tokenizer.json), and this is a {type(tokenizer).__name__}")
    key = hashlib.sha256(f"{size} {ends} {tokenizer.eos_token_id} {backend.to_str()}".encode()).digest()
    with _vocabularies_lock:
        vocabulary = _vocabularies.pop(key, None)
        if vocabulary is None:
            vocabulary = hf.from_tokenizer(tokenizer, size, [*ends] or None)
        _vocabularies[key] = vocabulary
        while len(_vocabularies) > _MOST_VOCABULARIES:
            del _vocabularies[next(iter(_vocabularies))]
    return vocabulary


class Grammars:
    """Constraints for the rows of one model.

    tokenizer: a fast one.
    ends: ids of the tokens that end a row.
    vocab_size: the model's.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int], vocab_size: int):
        self._width, self._tokenizer = (vocab_size + 31) // 32, tokenizer
        end_tokens = [token for token in ends if token < len(tokenizer)]
        # A request's rows have the same grammar, and nothing of it stays after them.
        self._compiled: weakref.WeakValueDictionary[str, Compiled] = weakref.WeakValueDictionary()
        self._watched: dict[tuple[Mark, ...], Watched] = {}
        most = max(vocab_size, len(tokenizer))
        self._compiler, self._bits = _vocabulary(tokenizer, most, end_tokens), (most + 31) // 32

    @classmethod
    def of(cls, model: Decoder, tokenizer: Tokenizer) -> Self:
        """Whose texts end as the model's files say."""
        from jaxtune.models.ends import end_token_ids  # readers of requests import no JAX

        return cls(tokenizer, end_token_ids(model), model.config.vocab_size)

    def compiled(self, grammar: str) -> Compiled:
        """What its rows share, anew unless one has it. ValueError: it is not followed."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            matcher = _llguidance().LLMatcher(self._compiler, grammar, log_level=0)
            if matcher.is_error():
                raise ValueError(_first_words(matcher.get_error()))
            compiled = self._compiled[grammar] = Compiled(matcher)
        return compiled

    def begun(self, grammar: str) -> LLMatcher:
        """As a row has it with its first mask. ValueError: it is not followed."""
        matcher = self.compiled(grammar).matcher.deep_copy()
        matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(_first_words(matcher.get_error()))
        return matcher

    def after_thoughts(self, grammar: str, prompt_ids: Sequence[int], reader: AnswerReader) -> GrammarConstraint:
        """Of the answer to a prompt in `reader`'s chat template."""
        return self.constraint(grammar, *reader.before_content(prompt_ids, reader.opening(prompt_ids)))

    def of_calls(self, grammar: str, reader: AnswerReader, thinks: bool) -> CallConstraint:
        """Of an answer that may call tools.

        grammar: of `calls_grammar`.
        reader: of the answer.
        thinks: whether the row begins within thoughts.
        """
        if (watched := self._watched.get(marks := tuple(reader.marks))) is None:
            watched = self._watched[marks] = Watched(self._tokenizer, *marks)
        return CallConstraint(self.compiled(grammar), self._width, self._bits, watched, thinks)

    def constraint(
        self, grammar: str, thoughts_end: re.Pattern[str] | None = None, thinks: bool = False, opens: int | None = None
    ) -> GrammarConstraint:
        """Of one row.

        thoughts_end: what ends thoughts, after which the grammar begins; None: the text has none.
        thinks: whether the row begins within thoughts.
        opens: a token that opens thoughts if it is the row's first; None: there is none.
        """
        compiled = self.compiled(grammar)

        def decode(ids: Sequence[int]) -> str:
            return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

        return GrammarConstraint(compiled, self._width, self._bits, decode, thoughts_end, thinks, opens)


class GrammarConstraint:
    """A `requests.Constraint`: any thoughts, then a text of the grammar.

    first: copied when the row needs it. width, bits: words of a mask, and of llguidance's, which may have more.
    """

    def __init__(
        self,
        first: Compiled,
        width: int,
        bits: int,
        decode: Callable[[Sequence[int]], str],
        thoughts_end: re.Pattern[str] | None,
        thinks: bool,
        opens: int | None,
    ):
        self._first, self._width, self._bits, self._decode = first, width, bits, decode
        self._thoughts_end, self._thinks, self._opens = thoughts_end, thinks and thoughts_end is not None, opens
        self._thoughts: list[int] = []
        self._seconds = _SECONDS  # that are left
        self._taken = False  # whether the next tokens were taken by `take_all`
        self._watched = 0  # tokens for which it is followed alone, and timed

    @functools.cached_property
    def _matcher(self) -> LLMatcher:
        return self._first.matcher.deep_copy()

    def mask(self) -> np.ndarray | None:
        if self._thinks:
            return None
        from llguidance.numpy import fill_next_token_bitmask

        began = time.thread_time()
        bits = np.zeros((1, self._bits), np.int32)
        fill_next_token_bitmask(self._matcher, bits, 0)
        self._seconds -= time.thread_time() - began
        mask = bits[0].view(np.uint32)[: self._width]
        if self._opens is not None:
            mask[self._opens // 32] |= np.uint32(1) << np.uint32(self._opens % 32)
        return mask

    def accept(self, tokens: Sequence[int]) -> bool:
        spent = 0.0
        if self._taken:
            self._taken = False
        else:
            began = time.thread_time()
            for token in tokens:
                if not self._is_thought(token) and not self._matcher.consume_token(token):
                    break
            self._watched = max(0, self._watched - len(tokens))
            spent = time.thread_time() - began
        if self._thinks:
            return False
        self._seconds = min(_SECONDS, self._seconds - spent + _SECONDS_PER_TOKEN * len(tokens))
        if self._seconds < 0:
            raise ValueError("the grammar takes too long to follow: make it less ambiguous")
        if self._matcher.is_error():
            raise ValueError(f"the grammar is not followed: {_first_words(self._matcher.get_error())}")
        return self._matcher.is_stopped()

    def _is_thought(self, token: int) -> bool:
        """Whether the next token is one of thoughts, which it then is."""
        first, self._opens = self._opens, None
        if self._thinks:
            assert self._thoughts_end is not None
            self._thoughts = [*self._thoughts[-_TAIL:], token]
            self._thinks = self._thoughts_end.search(self._decode(self._thoughts)) is None
            return True
        self._thinks = first is not None and token == first
        return self._thinks

    # ---- of many rows

    @classmethod
    def fill(cls, rows: Sequence[tuple[Self, int]], masks: np.ndarray) -> None:
        together = [row for row in rows if not row[0]._thinks and not row[0]._watched]
        together = together if len(together) > 1 else []
        for constraint, index in rows:
            if not together or constraint._thinks or constraint._watched:
                mask = constraint.mask()
                masks[index] = NO_MASK if mask is None else mask
        groups = collections.defaultdict(list)  # an adapter's tokenizer may have more tokens
        for row in together:
            groups[row[0]._bits].append(row)
        for bits, group in groups.items():
            cls._fill_together(group, bits, masks)

    @classmethod
    def _fill_together(cls, together: Sequence[tuple[Self, int]], bits: int, masks: np.ndarray) -> None:
        """bits: words of the mask of the rows' vocabulary."""
        from llguidance.numpy import fill_next_token_bitmask_par

        direct = bits == masks.shape[1]
        words = masks.view(np.int32) if direct else np.zeros((len(together), bits), np.int32)
        where = [index for _, index in together]
        matchers = [
            (constraint._matcher, index if direct else place) for place, (constraint, index) in enumerate(together)
        ]
        with _timed([constraint for constraint, _ in together]):
            fill_next_token_bitmask_par(_executor(), matchers, words)
        if not direct:
            masks[where] = words.view(np.uint32)[:, : masks.shape[1]]
        for constraint, index in together:
            if (opens := constraint._opens) is not None:
                masks[index, opens // 32] |= np.uint32(1) << np.uint32(opens % 32)

    @classmethod
    def take_all(cls, rows: Sequence[tuple[Self, Sequence[int]]]) -> None:
        from llguidance.numpy import consume_token_par

        single = [(constraint, its[0]) for constraint, its in rows if len(its) == 1 and not constraint._watched]
        single = single if len(single) > 1 else []
        consumed = [(constraint, token) for constraint, token in single if not constraint._is_thought(token)]
        if consumed:
            with _timed([constraint for constraint, _ in consumed]):
                consume_token_par(_executor(), [(constraint._matcher, token) for constraint, token in consumed])
        for constraint, _ in single:
            constraint._taken = True


@contextlib.contextmanager
def _timed(constraints: Sequence[GrammarConstraint]) -> Iterator[None]:
    """While constraints are followed together: if it takes long, each is timed alone for some tokens."""
    began = time.monotonic()
    yield
    if time.monotonic() - began > _SECONDS_PER_TOKEN * max(1, len(constraints) // _threads()):
        for constraint in constraints:
            constraint._watched = _WATCHED_TOKENS


@functools.cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(num_threads=_threads())


def _threads() -> int:
    return max(1, min(_MOST_THREADS, (os.cpu_count() or 1) - 1))
