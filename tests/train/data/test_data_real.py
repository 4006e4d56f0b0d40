"""The data room on tokenizers, templates and data sets that nobody here made (JAXTUNE_TEST_DATA)."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest

from jaxtune.train.data import prepare
from jaxtune.train.data.rendering.formats import Example, normalize
from jaxtune.train.data.rendering.markers import Markers
from jaxtune.train.data.rendering.templates import RowEncoder, derive_markers
from jaxtune.train.data.rows.row_errors import RowError
from tests.train.data.conftest import spans

# What each tokenizer's own template writes around an answer that is trained on, and what ends it.
OWN = {
    "llama-3.2": ("", "<|eot_id|>"),
    "qwen2.5": ("", "<|im_end|>"),
    "qwen3": ("<think>\n\n</think>\n\n", "<|im_end|>"),
    "phi-4": ("", "<|im_end|>"),
    "mistral-7b-v0.3": ("", "</s>"),
    "gpt-oss": ("<|channel|>final<|message|>", "<|return|>"),
}


@functools.cache
def load(path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


@functools.cache
def rows_of(path, count):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line, _ in zip(file, range(count), strict=False)]


def squeezed(text):
    """Without white space, which templates trim and sentencepiece moves."""
    return "".join(text.split())


@pytest.mark.parametrize("name", list(OWN))
def test_gsm8k_answers_are_trained_whole_and_alone(test_data, name):
    tokenizer = load(test_data / "tokenizers" / name)
    rows = rows_of(test_data / "datasets/gsm8k/test.jsonl", 60)
    encoder = RowEncoder(tokenizer)
    examples = [normalize(row, "prompt_completion") for row in rows]
    before, after = OWN[name]
    for row, example, encoded in zip(rows, examples, encoder.encode(examples), strict=True):
        (answer,) = spans(tokenizer, encoded.tokens, encoded.mask)
        assert squeezed(answer) == squeezed(before + row["answer"] + after)
        assert int(encoded.tokens[encoded.mask][-1]) == tokenizer.convert_tokens_to_ids(after)
        # The same ids that transformers makes of the conversation, and the prompt that a model will be asked.
        assert encoded.tokens.tolist() == tokenizer.apply_chat_template(example.messages, return_dict=False)
        asked = tokenizer.apply_chat_template(example.messages[:1], add_generation_prompt=True, return_dict=False)
        assert encoder.encode_prompt(example).tolist() == asked
        assert encoded.mask.tolist() == [False] * len(asked) + [True] * int(encoded.mask.sum()) + [False] * (
            len(encoded.tokens) - len(asked) - int(encoded.mask.sum())
        )
        assert encoded.tokens.tolist().count(tokenizer.bos_token_id) == (name in ("llama-3.2", "mistral-7b-v0.3"))


@pytest.mark.parametrize("name", list(OWN))
def test_every_turn_of_sharegpt_rows_is_trained(test_data, name):
    tokenizer = load(test_data / "tokenizers" / name)
    rows = rows_of(test_data / "datasets/multi_turn/fastchat_identity_sharegpt.jsonl", 40)
    examples = [normalize(row, "sharegpt") for row in rows]
    before, after = OWN[name]
    for example, encoded in zip(examples, RowEncoder(tokenizer).encode(examples), strict=True):
        answers = [m["content"] for m in example.messages if m["role"] == "assistant"]
        found = spans(tokenizer, encoded.tokens, encoded.mask)
        assert len(found) == len(answers) == encoded.responses == encoded.ended
        for index, (answer, text) in enumerate(zip(answers, found, strict=True)):
            last = index == len(answers) - 1
            opening = before if last or name == "gpt-oss" else ""  # Qwen3 takes the thought off earlier answers
            ending = after if last or name != "gpt-oss" else "<|end|>"  # gpt-oss ends the last one otherwise
            assert squeezed(text) == squeezed(opening + answer + ending)
        assert encoded.tokens.tolist() == tokenizer.apply_chat_template(example.messages, return_dict=False)


@pytest.mark.parametrize(
    ("name", "plain", "marked"),
    [
        ("llama-3.2", "llama3", "llama3_training"),
        ("qwen2.5", "qwen2_5", "qwen2_5_training"),
        ("qwen3", "qwen3_instruct_2507", "qwen3_instruct_2507_training"),
    ],
)
def test_marks_prefixes_markers_and_transformers_agree(test_data, name, plain, marked):
    """Four ways to the same mask; transformers' own is the one that is not ours."""
    tokenizer = load(test_data / "tokenizers" / name)
    rows = rows_of(test_data / "datasets/multi_turn/fastchat_identity_sharegpt.jsonl", 30)
    examples = [normalize(row, "sharegpt") for row in rows]
    plain_path, marked_path = (str(test_data / "chat_templates" / f"{stem}.jinja") for stem in (plain, marked))
    by_prefix = RowEncoder(tokenizer, template=plain_path).encode(examples)
    by_marks = RowEncoder(tokenizer, template=marked_path).encode(examples)
    instruction, response = derive_markers(tokenizer, plain_path)
    by_markers = RowEncoder(
        tokenizer, template=plain_path, instruction_part=instruction, response_part=response
    ).encode(examples)
    with open(marked_path, encoding="utf-8") as file:
        template = file.read()
    newline = tokenizer.encode("\n", add_special_tokens=False)[0]
    for example, first, marks, markers in zip(examples, by_prefix, by_marks, by_markers, strict=True):
        theirs = tokenizer.apply_chat_template(
            example.messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        assert first.tokens.tolist() == marks.tokens.tolist() == markers.tokens.tolist() == theirs["input_ids"]
        np.testing.assert_array_equal(first.mask, markers.mask)
        # Marks may include the line break before an answer, and transformers takes the one after its end too.
        for more, less in ((np.array(theirs["assistant_masks"], bool), marks.mask), (marks.mask, first.mask)):
            assert not (less & ~more).any()
            assert set(first.tokens[more & ~less].tolist()) <= {newline}


def test_tool_calls_of_real_rows(test_data):
    tokenizer = load(test_data / "tokenizers/qwen2.5")
    for name, count, form in (
        ("glaive_toolcall_sharegpt", 100, "sharegpt"),
        ("reason_tool_use_demo_50", 50, "messages"),
    ):
        rows = rows_of(test_data / f"datasets/multi_turn/{name}.jsonl", count)
        examples = [normalize(row, form) for row in rows]
        calls = 0
        for example, encoded in zip(examples, RowEncoder(tokenizer).encode(examples), strict=True):
            found = spans(tokenizer, encoded.tokens, encoded.mask)
            turns = [m for m in example.messages if m["role"] == "assistant"]
            assert len(found) == len(turns)
            for turn, text in zip(turns, found, strict=True):
                assert text.endswith("<|im_end|>") and text.count("<|im_end|>") == 1
                called = [call["function"]["name"] for call in turn.get("tool_calls", [])]
                assert [
                    json.loads(part.split("</tool_call>")[0])["name"] for part in text.split("<tool_call>")[1:]
                ] == called
                calls += len(called)
        assert calls > 10


def test_thoughts_that_a_template_hides_are_said(test_data):
    """Qwen3 drops the reasoning of turns before the last question; what was answered then is trained all the same."""
    tokenizer = load(test_data / "tokenizers/qwen3")
    rows = rows_of(test_data / "datasets/multi_turn/reason_tool_use_demo_50.jsonl", 50)
    examples = [normalize(row, "messages") for row in rows]
    results = RowEncoder(tokenizer).encode(examples)
    for example, result in zip(examples, results, strict=True):
        assert not isinstance(result, RowError)
        assert result.responses == result.ended == sum(turn["role"] == "assistant" for turn in example.messages)
    assert 0 < sum(bool(result.left_out) for result in results) < len(rows)
    last = RowEncoder(tokenizer, last_response_only=True).encode(examples)
    assert not any(isinstance(result, RowError) for result in last)


def test_dolly_packs_to_97_percent_with_nothing_cut_or_dropped(test_data, tmp_path):
    tokenizer = load(test_data / "tokenizers/llama-3.2")
    path = test_data / "datasets/dolly/dolly_alpaca_prompt_151.jsonl"
    # One of the 151 rows is longer than a row of 2,048; "split" keeps all of it but the first piece, a prompt's.
    report = prepare(path, tokenizer, length=2048, overflow="split", cache_dir=tmp_path).report
    assert (report.documents, report.split, report.dropped, report.truncated) == (151, 1, 0, 0)
    assert report.fill >= 0.97
    documents = prepare(path, tokenizer, length=2048, cache_dir=tmp_path).documents
    assert report.untrained_pieces == 1
    assert report.tokens == documents.lengths.sum() - 2048
    assert report.rows == -(-report.tokens // 2048)  # no packing can have fewer


@pytest.mark.parametrize("name", ["llama-2", "mistral-7b-v0.3", "llama-3.2", "phi-4"])
def test_real_alpaca_rows_with_and_without_a_template(test_data, name):
    tokenizer = load(test_data / "tokenizers" / name)
    rows = rows_of(test_data / "datasets/alpaca/alpaca_small.jsonl", 60)
    examples = [normalize(row, "alpaca") for row in rows]
    for template in (None, "alpaca"):
        for row, encoded in zip(rows, RowEncoder(tokenizer, template=template).encode(examples), strict=True):
            (answer,) = spans(tokenizer, encoded.tokens, encoded.mask)
            assert squeezed(answer) == squeezed(row["output"] + tokenizer.eos_token)
            assert int(encoded.tokens[-1]) == tokenizer.eos_token_id


@pytest.mark.parametrize("name", ["llama-2", "llama-3.2", "qwen2.5"])
def test_marker_strings_of_plain_text_on_real_tokenizers(test_data, name):
    """The edges of such markers merge differently in every vocabulary."""
    tokenizer = load(test_data / "tokenizers" / name)
    text = "### Instruction:\n{}\n\n### Response:\n{}" + tokenizer.eos_token + "\n\n"
    answers = ["Blue.", "\n\nA list:\n- one\n- two", "  indented", "4", "'quoted'", "你好"]
    whole = "".join(text.format(f"Question {i}?", answer) for i, answer in enumerate(answers))
    tokens = np.array(tokenizer(whole, add_special_tokens=False)["input_ids"])
    for parts in (("### Instruction:\n", "### Response:\n"), ("### Instruction:", "### Response:")):
        found = [tokenizer.decode(tokens[first:last]) for first, last in Markers(tokenizer, *parts).spans(tokens)]
        assert [squeezed(span) for span in found] == [squeezed(answer + tokenizer.eos_token) for answer in answers]


@pytest.mark.parametrize("name", ["llama-2", "llama-3.2", "qwen2.5"])
def test_markers_within_a_line_on_real_tokenizers(test_data, name):
    tokenizer = load(test_data / "tokenizers" / name)
    eos = tokenizer.eos_token
    text = f"USER: Hi ASSISTANT: Hello.{eos}USER: And? ASSISTANT: Blue.{eos}"
    tokens = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
    found = Markers(tokenizer, "USER:", "ASSISTANT:").spans(tokens)
    assert [tokenizer.decode(tokens[first:last]).strip() for first, last in found] == [f"Hello.{eos}", f"Blue.{eos}"]


def test_text_rows_of_the_web(test_data, tmp_path):
    tokenizer = load(test_data / "tokenizers/llama-3.2")
    path = test_data / "datasets/text/c4_demo.jsonl"
    dataset = prepare(path, tokenizer, length=512, overflow="split", max_rows=80, cache_dir=tmp_path)
    for index, row in enumerate(rows_of(path, 80)):
        document = dataset.documents[index]
        assert tokenizer.decode(document.tokens) == "<|begin_of_text|>" + row["text"] + "<|eot_id|>"
        assert not document.mask[0] and document.mask[1:].all()
    assert dataset.report.fill > 0.97 and dataset.report.dropped == 0
    with pytest.raises(ValueError, match="columns chosen and rejected are preference data"):
        prepare(test_data / "datasets/preference/dpo_en_demo.jsonl", tokenizer, length=512, cache_dir=tmp_path)


def test_a_token_of_another_model_is_refused(test_data):
    tokenizer = load(test_data / "tokenizers/llama-3.2")
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    with pytest.raises(
        ValueError, match=r"token id 1280\d\d \('<\|.*\|>'\) is beyond the model's vocabulary of 128000"
    ):
        prepare([row], tokenizer, length=64, vocab_size=128_000)
    assert Example(messages=row["messages"]).tools is None


def test_llama_2_is_offered_what_it_can_end(test_data):
    """It has no template of its own, and what it does not know becomes <unk>, which is special too."""
    tokenizer = load(test_data / "tokenizers" / "llama-2")
    assert not tokenizer.chat_template
    row = {"messages": [{"role": "user", "content": "Add"}, {"role": "assistant", "content": "4"}]}
    for template in (None, "chatml"):
        with pytest.raises(ValueError, match="data.template to alpaca, or to the path of a .jinja file"):
            prepare([row], tokenizer, length=64, template=template)
    assert prepare([row], tokenizer, length=64, template="alpaca").summary.ended == 1
