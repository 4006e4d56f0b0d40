"""The tokens that TRL trains, of random rows over all templates: compat trains the same ones."""

from __future__ import annotations

import logging
import types
from pathlib import Path
from typing import Any

import datasets
import pytest
import transformers
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from jaxtune import compat
from jaxtune.compat.settings import trained_tokens
from jaxtune.train.data.rendering.formats import LABELLED, PREFERENCE
from jaxtune.train.data.rendering.templates import RowEncoder
from jaxtune.train.data.rows.reading import Row
from jaxtune.train.data.tokens.chunks import encode_chunk

# The tokenizers that have the templates' special tokens, or to which they are added.
TEMPLATES = {
    **dict.fromkeys(("qwen2_5", "qwen2_5_training", "chatml"), "qwen2.5"),
    **dict.fromkeys(("qwen3", "qwen3_training", "qwen3_instruct_2507", "qwen3_instruct_2507_training"), "qwen3"),
    **dict.fromkeys(("llama3", "llama3_training", "llama3_1", "llama3_2"), "llama-3.2"),
    **dict.fromkeys(("gemma", "gemma_training", "gemma3", "gemma3_training"), "qwen3"),
    **dict.fromkeys(("gptoss", "gptoss_training"), "gpt-oss"),
    **dict.fromkeys(("phi3", "phi3_training", "phi3_5", "phi3_5_training", "mistral_v1_spm", "alpaca"), "llama-2"),
    **dict.fromkeys(("mistral_v2v3", "mistral_v3_spm"), "mistral-7b-v0.3"),
    "phi_4": "phi-4",
}
# TRL renders several turns of Qwen3 by a template of its own, which writes a thought into each.
ONE_TURN = ("qwen3",)
WORDS = st.sampled_from(["Blue", " it", " is", ".", "\n", "  ", "2 + 2", " = 4", "ä", "!\n\n", "Hi?", "def f():"])
TEXTS = st.lists(WORDS, min_size=1, max_size=6).map("".join).filter(str.strip)
SEARCH = settings(
    max_examples=2,  # each of several rows, because TRL takes a while for any number
    phases=[Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
type Row_ = dict[str, Any]
type Trained = list[tuple[list[int], list[bool]]]


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    datasets.enable_progress_bars()


def tokenizer_of(data: Path, template: str):
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(data / "tokenizers" / TEMPLATES[template])
    tokenizer.chat_template = (data / "chat_templates" / f"{template}.jinja").read_text(encoding="utf-8")
    if "phi3" in template:
        marks = ("<|end|>", "<|user|>", "<|assistant|>")
        tokenizer.add_tokens([transformers.AddedToken(m, rstrip=True, special=True, normalized=False) for m in marks])
    return tokenizer


def prepared(trainer: Any, tokenizer: Any, rows: list[Row_], args: Any, **more: Any):
    """The rows of a trainer of TRL, without a model."""
    itself = types.SimpleNamespace(_tokenizer=tokenizer, chat_template=None, calculate_KL=False, **more)
    itself.desirable_weight = itself.undesirable_weight = 1.0
    named = (None, "train") if trainer is not SFTTrainer else (False, None, "train")
    if trainer is SFTTrainer:
        if args.assistant_only_loss and not has_generation_markers(tokenizer.chat_template):
            itself.chat_template = get_training_chat_template(tokenizer)
        default = "prompt" in rows[0]
        itself.completion_only_loss = default if args.completion_only_loss is None else args.completion_only_loss
        return trainer._prepare_dataset(itself, datasets.Dataset.from_list(rows), tokenizer, args, *named)
    return trainer._prepare_dataset(itself, datasets.Dataset.from_list(rows), tokenizer, args, "train")


def arguments(kind: Any, **options: Any):
    return kind(output_dir="unused", use_cpu=True, bf16=False, max_length=None, report_to="none", **options)


def of_trl(tokenizer: Any, rows: list[Row_], **options: Any) -> Trained:
    made = prepared(SFTTrainer, tokenizer, rows, arguments(SFTConfig, **options))
    return [(row["input_ids"], [label != -100 for label in row["labels"]]) for row in made]


def ours(tokenizer: Any, rows: list[Row_], form: str, train_on: Any) -> Trained:
    """Without a BOS that no template wrote, which TRL leaves out and jaxtune writes before every text."""
    encoder = RowEncoder(tokenizer, train_on=train_on, last_response_only=form in (PREFERENCE, LABELLED))
    chunk = encode_chunk(
        encoder, [Row(file="rows", number=n, value=row, error="", format=form) for n, row in enumerate(rows)]
    )
    assert not chunk.problems
    found, at = [], 0
    for length in chunk.lengths:
        found.append((chunk.tokens[at : at + length].tolist(), (chunk.mask[at : at + length] != 0).tolist()))
        at += length
    return found


def same(tokenizer: Any, found: Trained, wanted: Trained) -> None:
    assert len(found) == len(wanted)
    for (ids, mask), (their_ids, their_mask) in zip(found, wanted, strict=True):
        if len(ids) == len(their_ids) + 1 and ids[0] == tokenizer.bos_token_id:
            ids, mask = ids[1:], mask[1:]
        assert ids == their_ids, (tokenizer.decode(ids), tokenizer.decode(their_ids))
        marked, theirs = (
            [(n, tokenizer.decode([i])) for n, (i, on) in enumerate(zip(ids, one, strict=True)) if on]
            for one in (mask, their_mask)
        )
        assert marked == theirs


def chats(turns: st.SearchStrategy[int]) -> st.SearchStrategy[list[Row_]]:
    def of(count: int):
        pair = st.tuples(TEXTS, TEXTS).map(
            lambda two: [{"role": "user", "content": two[0]}, {"role": "assistant", "content": two[1]}]
        )
        return st.lists(pair, min_size=count, max_size=count).map(lambda pairs: [turn for one in pairs for turn in one])

    return turns.flatmap(of)


def some(one: st.SearchStrategy) -> st.SearchStrategy[list]:
    return st.lists(one, min_size=5, max_size=8)


@pytest.mark.parametrize("template", TEMPLATES)
def test_conversations(template, test_data):
    tokenizer = tokenizer_of(test_data, template)
    known = has_generation_markers(tokenizer.chat_template)
    if not known:
        try:
            known = get_training_chat_template(tokenizer) is not None
        except ValueError:
            known = False

    @SEARCH
    @given(some(chats(st.integers(1, 1 if template in ONE_TURN else 3))), st.data())
    def check(several, data):
        asked = [2 * data.draw(st.integers(0, len(chat) // 2 - 1)) + 1 for chat in several]
        whole = [{"messages": chat} for chat in several]
        divided = [{"prompt": chat[:n], "completion": chat[n:]} for chat, n in zip(several, asked, strict=True)]
        assert trained_tokens(compat.SFTConfig(), "messages") == "all"
        assert trained_tokens(compat.SFTConfig(), "prompt_completion") == "completion"
        same(tokenizer, ours(tokenizer, whole, "messages", "all"), of_trl(tokenizer, whole))
        same(tokenizer, ours(tokenizer, divided, "prompt_completion", "completion"), of_trl(tokenizer, divided))
        if known:
            assert trained_tokens(compat.SFTConfig(assistant_only_loss=True), "messages") == "turns"
            for rows, form in ((whole, "messages"), (divided, "prompt_completion")):
                wanted = of_trl(tokenizer, rows, assistant_only_loss=True)
                same(tokenizer, ours(tokenizer, rows, form, "turns"), wanted)

    check()


def preferences(tokenizer: Any, rows: list[Row_]) -> Trained:
    made = prepared(DPOTrainer, tokenizer, rows, arguments(DPOConfig))
    return [
        (row["prompt_ids"] + row[side], [False] * len(row["prompt_ids"]) + [True] * len(row[side]))
        for row in made
        for side in ("chosen_ids", "rejected_ids")
    ]


@pytest.mark.parametrize("name", ["llama-2", "llama-3.2", "qwen2.5", "mistral-7b-v0.3"])
def test_texts(name, test_data):
    """Tokens that extend over the end of a prompt, and texts that end with EOS or with white space behind it."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(test_data / "tokenizers" / name)
    eos = tokenizer.eos_token
    ends = st.sampled_from(["", "", eos, f"{eos}\n"])

    @SEARCH
    @given(some(st.tuples(TEXTS, TEXTS, TEXTS, ends, st.booleans())))
    def check(several):
        several = [(p, c + e, r + e, on) for p, c, r, e, on in several if c != r and not c.startswith(p)]
        assume(several)
        rows = [{"prompt": prompt, "completion": chosen, "label": on} for prompt, chosen, _, on in several]
        plain = [{key: row[key] for key in ("prompt", "completion")} for row in rows]
        same(tokenizer, ours(tokenizer, plain, "prompt_completion", "completion"), of_trl(tokenizer, plain))
        pairs = [{"prompt": prompt, "chosen": c, "rejected": r} for prompt, c, r, _ in several]
        same(tokenizer, ours(tokenizer, pairs, PREFERENCE, "completion"), preferences(tokenizer, pairs))
        wanted = []
        for made in prepared(KTOTrainer, tokenizer, rows, arguments(KTOConfig)):
            asked, answer = made["prompt_ids"], made["completion_ids"]
            wanted.append((asked + answer, [False] * len(asked) + [True] * len(answer)))
        found = [one for one in ours(tokenizer, rows, LABELLED, "completion") if one[0]]
        same(tokenizer, found, wanted)

    check()


@pytest.mark.parametrize("template", ["qwen2_5", "llama3", "gemma", "phi3", "gptoss"])
def test_preferences(template, test_data):
    """With the prompt in its column or in both answers, which may have several turns."""
    tokenizer = tokenizer_of(test_data, template)

    @SEARCH
    @given(some(st.tuples(chats(st.just(1)), chats(st.integers(1, 2)))), st.booleans())
    def check(several, explicit):
        several = [(one, other) for one, other in several if one[1] != other[1]]
        assume(several)
        wanted = [{"prompt": one[:1], "chosen": one[1:], "rejected": other[1:]} for one, other in several]
        rows = [
            row if explicit else {side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in wanted
        ]
        same(tokenizer, ours(tokenizer, rows, PREFERENCE, "completion"), preferences(tokenizer, wanted))

    check()
