"""Any row, any template, any bytes: what is raised is an error of jaxtune's own, which the command tells in a line.

HYPOTHESIS_PROFILE=full looks for longer.
"""

from __future__ import annotations

import io
import json
import shutil

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxtune import cli
from jaxtune.system.terminal import printable
from jaxtune.train.data import prepare
from jaxtune.train.data.tokens.cache import FIELDS
from tests.train.data.conftest import PLAIN_TEMPLATE, make_tokenizer

TOKENIZER = make_tokenizer()
CALLS = make_tokenizer(PLAIN_TEMPLATE + "{{ tools | tojson }}{{ messages[-1] | tojson }}")
SPECIAL = st.sampled_from(
    [
        "<|im_start|>",
        "<|im_end|>",
        "<|bos|>",
        "<think>",
        "</think>",
        "\x1b[2J",
        "\ud83d",
        "\u202e",
        "### Response:\n",
        "",
    ]
)
TEXT = st.one_of(st.text(st.characters(), max_size=8), SPECIAL, st.lists(SPECIAL, max_size=4).map("".join))
SCALAR = st.one_of(TEXT, st.none(), st.booleans(), st.integers(), st.floats())
# What rows are made of, and whatever else may stand in its place.
KEYS = st.sampled_from(
    [
        "messages",
        "conversations",
        "role",
        "content",
        "from",
        "value",
        "text",
        "type",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "tools",
        "system",
        "prompt",
        "completion",
        "instruction",
        "output",
        "input",
        "reasoning_content",
        "id",
    ]
)
VALUE = st.recursive(
    st.one_of(SCALAR, st.sampled_from(["user", "assistant", "human", "gpt", "function_call", "tool", "text"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | TEXT, inner, max_size=4),
    max_leaves=8,
)
CALL = st.fixed_dictionaries({}, optional={"function": VALUE, "name": VALUE, "arguments": VALUE, "id": VALUE})
TURN = st.fixed_dictionaries(
    {}, optional={"role": VALUE, "content": VALUE | TEXT, "tool_calls": st.lists(CALL | VALUE, max_size=2) | VALUE}
)
TYPED_TURN = st.builds(
    lambda role, content, more: {"role": role, "content": content, **more},
    st.sampled_from(["user", "assistant", "system", "tool"]),
    TEXT,
    st.dictionaries(KEYS | TEXT, VALUE, max_size=2),
)
SHARE = st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", "function_call", "x"]), "value": VALUE | TEXT})
ROW = st.one_of(
    st.fixed_dictionaries({"messages": st.lists(TYPED_TURN | TURN | VALUE, max_size=4)}, optional={"tools": VALUE}),
    st.fixed_dictionaries({"conversations": st.lists(SHARE | VALUE, max_size=4)}, optional={"system": VALUE}),
    st.fixed_dictionaries({"instruction": VALUE | TEXT, "output": VALUE | TEXT}, optional={"input": VALUE}),
    st.fixed_dictionaries({"prompt": VALUE | TEXT, "completion": VALUE | TEXT}),
    st.fixed_dictionaries({"text": VALUE | TEXT}),
    VALUE,
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "train_on": st.sampled_from(["responses", "all"]),
        "last_response_only": st.booleans(),
        "mask_spans": st.just([("<think>", "</think>")]),
        "packing": st.booleans(),
        "overflow": st.sampled_from(["truncate", "split", "error"]),
        "on_bad_row": st.sampled_from(["error", "skip"]),
        "length": st.integers(2, 40),
        "template": st.sampled_from(["chatml", "alpaca"]),
    },
)
MARKERS = st.sampled_from([{}, {"instruction_part": "<|im_start|>user\n", "response_part": "<|im_start|>assistant\n"}])
quick = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def prepared(rows, tokenizer=TOKENIZER, **options):
    """Prepares rows; an error must be one that the command tells in a line, in characters that any terminal takes."""
    try:
        data = prepare(rows, tokenizer, **{"length": 32, "say": lambda line: None} | options)
        said = [str(data.summary), *data.warnings(), str(data.report)]
        batch = data.batches(1).batch_at(0)
        assert batch.weights.sum() > 0 or data.report.trained_tokens == 0 or len(data.rows) > 1
    except Exception as error:
        assert isinstance(error, ValueError | OSError) and cli._is_user_error(error), repr(error)
        said = [str(error)]
    for text in said:
        assert printable(text) == text, repr(text)


@quick
@given(st.lists(ROW, min_size=1, max_size=3), OPTIONS, MARKERS)
def test_rows(rows, options, markers):
    if options.get("train_on") == "all":
        markers = {}
    prepared(rows, CALLS if "mask_spans" in options else TOKENIZER, **options, **markers)


ATOM = st.sampled_from(
    ["messages", "m", "m.role", "m.content", "tools", "bos_token", "loop", "messages[0]", "1", "''", "range(3)", "x"]
)
EXPRESSION = st.recursive(
    ATOM,
    lambda inner: st.one_of(
        st.builds("{}.{}".format, inner, st.sampled_from(["content", "__class__", "items()", "strip()", "x.y"])),
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "*", "in", "==", "and", "~", "/"]), inner),
        st.builds("{} | {}".format, inner, st.sampled_from(["tojson", "length", "upper", "first", "nope", "list"])),
        st.builds("raise_exception({})".format, inner),
    ),
    max_leaves=4,
)
PIECE = st.recursive(
    st.one_of(TEXT, st.builds("{{{{ {} }}}}".format, EXPRESSION), st.just(PLAIN_TEMPLATE)),
    lambda inner: st.one_of(
        st.builds("{{% for m in {} %}}{}{{% endfor %}}".format, EXPRESSION, inner),
        st.builds("{{% if {} %}}{}{{% endif %}}".format, EXPRESSION, inner),
        st.builds("{{% generation %}}{}{{% endgeneration %}}".format, inner),
        st.builds("{}{}".format, inner, inner),
        st.builds("{}{{%".format, inner),
    ),
    max_leaves=4,
)
CHAT = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I am a bot."}] * 2}


@quick
@given(PIECE, OPTIONS, MARKERS)
def test_templates(template, options, markers):
    if options.pop("train_on", None) == "all":
        markers = {}
    prepared([CHAT], **options | {"template": template + "{{ '' }}"}, **markers)


def good_parquet() -> bytes:
    rows = [CHAT["messages"][:2], CHAT["messages"]]
    stream = io.BytesIO()
    parquet.write_table(arrow.table({"messages": rows, "n": [1, None]}), stream)
    return stream.getvalue()


GOOD = {
    ".jsonl": "\n".join([json.dumps(CHAT)] * 3).encode(),
    ".json": json.dumps([CHAT] * 2, indent=1).encode(),
    ".csv": b'prompt,completion\n"Add, 2","It is ""4"""\nWho?,I\n',
    ".parquet": good_parquet(),
}
NOISE = st.binary(max_size=6) | st.sampled_from(
    [b'"', b"[", b"{", b",", b"\n", b"\r", b"\x00", b"\xff", b"\\ud800", b""]
)


@pytest.mark.parametrize("suffix", GOOD)
@quick
@given(data=st.data())
def test_bytes_of_files(tmp_path, suffix, data):
    content = bytearray(GOOD[suffix])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 4))] = data.draw(NOISE)
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]) if data.draw(st.booleans()) else content)
    prepared(
        path, on_bad_row=data.draw(st.sampled_from(["skip", "error"])), cache_dir=tmp_path / "cache", num_workers=1
    )


@quick
@given(data=st.data())
def test_bytes_of_the_token_cache(tmp_path, data):
    path, cache, pristine = tmp_path / "rows.jsonl", tmp_path / "cache", tmp_path / "pristine"
    if not pristine.exists():
        path.write_bytes(GOOD[".jsonl"])
        prepare(path, TOKENIZER, length=64, cache_dir=pristine)
    shutil.rmtree(cache, ignore_errors=True)
    shutil.copytree(pristine, cache)
    target = next(cache.iterdir()) / data.draw(st.sampled_from(["meta.json", *(f"{name}.bin" for name in FIELDS)]))
    content = bytearray(target.read_bytes())
    at = data.draw(st.integers(0, 500)) % (len(content) + 1)
    content[at : at + data.draw(st.integers(0, 4))] = data.draw(NOISE | st.sampled_from([b"0", b"9", b"null"]))
    target.write_bytes(content)
    again = prepare(path, TOKENIZER, length=64, cache_dir=cache, say=lambda line: None)
    expected = prepare(path, TOKENIZER, length=64, cache_dir=pristine)
    assert expected.cached and len(again.documents) == len(expected.documents)
    np.testing.assert_array_equal(again.documents.tokens, expected.documents.tokens)
    np.testing.assert_array_equal(again.documents.mask, expected.documents.mask)
