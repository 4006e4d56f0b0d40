"""One reader of conversations: every form that people write is the same list of messages, wherever it is read."""

from __future__ import annotations

import functools
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune import compat
from jaxtune.commands import answers
from jaxtune.conversations.messages import (
    MARKS,
    NEUTRAL,
    ROLES,
    THOUGHT,
    ConversationError,
    exclusion,
    for_template,
    read_messages,
    read_tools,
    template_for,
    turns_in,
    unknown_keys,
)
from jaxtune.conversations.thoughts import block_of, in_place, opened_thought
from jaxtune.serve.bodies import read_chat
from jaxtune.serve.served import Readable
from jaxtune.train.data.rendering.formats import normalize, normalize_labelled, normalize_pair
from jaxtune.train.data.rendering.packaged import PACKAGED
from jaxtune.train.data.rendering.templates import RowEncoder
from jaxtune.train.data.rows.row_errors import RowError
from jaxtune.train.data.rows.row_files import read_parquet
from jaxtune.train.sampled.prompts import prompt_of
from tests.train.data.conftest import make_tokenizer, spans, unread

few = settings(max_examples=40, deadline=None)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content }}|{{ m.content }}"
    "{% for c in m.tool_calls %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
words = st.text("abc xyz.ü", min_size=1, max_size=12).filter(str.strip)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
calls = st.builds(
    lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}},
    st.sampled_from(["look", "add"]),
    st.dictionaries(words, values, max_size=3),
)


@st.composite
def conversations(draw):
    """Messages as the reader gives them, without marks; the last one is the assistant's."""
    messages = [{"role": "system", "content": draw(words)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 2))):
        messages.append({"role": "user", "content": draw(words)})
        for _ in range(draw(st.integers(0, 2))):
            made = draw(st.lists(calls, min_size=1, max_size=2))
            thought = {"reasoning_content": draw(words)} if draw(st.booleans()) else {}
            text = draw(st.just("") | words)
            messages.append({"role": "assistant", "content": text, **thought, "tool_calls": made})
            messages += [{"role": "tool", "content": draw(words)} for _ in made]
        messages.append({"role": "assistant", "content": draw(words)})
    return messages


def named(role, calling=False):
    return sorted(name for name, known in ROLES.items() if known == role and ("call" in name) == calling)


@st.composite
def call_turns(draw, one, speaker, text):
    """The calls of a message as turns of their own."""
    written = []
    for call in one:
        function = call["function"]
        arguments = function["arguments"]
        if draw(st.booleans()):
            arguments = json.dumps(arguments) if arguments else draw(st.sampled_from(["", None, "null", "{}"]))
        written.append({"name": function["name"], draw(st.sampled_from(["arguments", "parameters"])): arguments})
    name = draw(st.sampled_from([n for n in named("assistant", True) if "output" not in n]))
    form = draw(st.sampled_from(["each", "list", "marks"]))
    if form == "list":
        return [{speaker: name, text: json.dumps(written)}]
    if form == "marks":
        return [{speaker: name, text: "\n".join(f"<tool_call>\n{json.dumps(w)}\n</tool_call>" for w in written)}]
    return [{speaker: name, text: json.dumps(w)} for w in written]


@st.composite
def turns_of_message(draw, message, speaker, text):
    """One message as someone writes it: one turn or several."""
    role, content = message["role"], message["content"]
    turn = {speaker: draw(st.sampled_from(named(role))), text: content}
    if draw(st.booleans()):
        turn[speaker] = turn[speaker].capitalize()
    if content and draw(st.booleans()):
        at = draw(st.integers(0, len(content)))
        turn[text] = [{"type": "text", "text": content[:at]}, {"type": "input_text", "text": content[at:]}]
    if "reasoning_content" in message:
        turn[draw(st.sampled_from(["reasoning_content", "thinking", "reasoning"]))] = message["reasoning_content"]
    for key in draw(st.lists(st.sampled_from(sorted(NEUTRAL)), max_size=2)):
        turn[key] = 7
    if draw(st.booleans()):
        turn["name"] = None
        turn["tool_calls"] = draw(st.sampled_from([None, []]))
    if not (one := message.get("tool_calls")):
        return [turn]
    if draw(st.booleans()):
        parts = draw(call_turns(one, speaker, text))
        return [turn, *parts] if content or "reasoning_content" in message else parts
    entries = []
    for call in one:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        shape = draw(st.sampled_from(["object", "text", "pairs"]))
        written = {"object": arguments, "text": json.dumps(arguments), "pairs": [list(p) for p in arguments.items()]}
        inner = {"name": name, "arguments": written[shape]}
        entries.append(inner if draw(st.booleans()) else {"type": "function", "function": inner})
    if len(entries) == 1 and draw(st.booleans()):
        return [turn | {"tool_calls": None, "function_call": entries[0]}]
    if not content:
        turn[text] = draw(st.sampled_from([None, ""]))
    return [turn | {"tool_calls": entries}]


@st.composite
def written(draw, messages):
    """A conversation as someone writes it."""
    speaker, text = draw(st.sampled_from([("role", "content"), ("from", "value"), ("role", "text")]))
    turns = [turn for message in messages for turn in draw(turns_of_message(message, speaker, text))]
    if draw(st.booleans()):
        return turns
    return json.dumps(turns)


@functools.cache
def plain():
    """A tokenizer with a template that shows everything."""
    return make_tokenizer(TEMPLATE, adds_bos=True)


@functools.cache
def moved():
    """The tokenizer of a moved script."""
    return compat.texts.without_torch(make_tokenizer(TEMPLATE, adds_bos=True))


@few
@given(st.data())
def test_every_form_is_the_same_messages(data):
    messages = data.draw(conversations())
    form = data.draw(written(messages))
    found = read_messages(form)
    assert found == messages and read_messages(found) == found and unknown_keys(found) == []
    assert turns_in(json.dumps(messages), "prompt") == messages
    for row in ({"messages": form}, {"conversations": form}):
        kind = "messages" if "messages" in row else "sharegpt"
        assert normalize(row, kind).messages == messages
    [standard] = compat.standardize_sharegpt([{"conversations": form}])
    assert standard["conversations"] == messages


@few
@given(st.data())
def test_every_way_asks_with_the_same_tokens(data):
    """Rows, prompts of sampled answers, `generate --prompts`, the server, and tokenizers of moved scripts."""
    tokenizer = plain()
    messages = data.draw(conversations())[:-1]
    form = data.draw(written(messages))
    encoder = RowEncoder(tokenizer)
    expected = encoder.encode_prompt(normalize({"messages": messages}, "messages")).tolist()
    served = Readable("m", tokenizer)
    turns = json.loads(form) if isinstance(form, str) else form
    asked = read_chat({"model": "m", "messages": turns}, {"m": served}, {"m": 1_000_000})
    text = moved().apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert [
        list(prompt_of({"prompt": form}, encoder, 10**6, "").ids),
        answers.prompt_of({"messages": form}, tokenizer, False, "here").ids,
        answers.prompt_of({"prompt": form}, tokenizer, False, "here").ids,
        list(asked.rows[0].prompt),
        tokenizer(text)["input_ids"],
    ] == [expected] * 5


MARK = sorted(MARKS)


@st.composite
def marked(draw):
    """(Turns whose answers are marked, or not, in any trainer's words; whether each answer is trained on)."""
    turns, trained = [], []
    for number in range(draw(st.integers(1, 4))):
        train = draw(st.sampled_from([True, False, None]))
        turn = {"role": "assistant", "content": f"answer{number}"}
        if train is not None:
            key = draw(st.sampled_from(MARK))
            value = train is MARKS[key]
            turn[key] = draw(st.sampled_from([value, int(value), float(value), str(value), str(int(value))]))
        trained.append(train is not False)
        turns += [{"role": "user", "content": f"question{number}"}, turn]
    return turns, trained


@functools.cache
def packaged(name):
    """A tokenizer that a packaged template fits."""
    marks = PACKAGED[name].marks or ()
    tokenizer = make_tokenizer(None)
    tokenizer.add_tokens(list(marks), special_tokens=True)
    return tokenizer


@pytest.mark.parametrize("name", PACKAGED)
@settings(max_examples=8, deadline=None)
@given(row=marked(), form=st.sampled_from(["messages", "sharegpt"]))
def test_marks_are_followed_in_every_packaged_template(name, row, form):
    turns, trained = row
    if form == "sharegpt":
        names = {"role": "from", "content": "value"}
        turns = [{names.get(key, key): value for key, value in turn.items()} for turn in turns]
    column = "messages" if form == "messages" else "conversations"
    tokenizer = packaged(name)
    [encoded] = RowEncoder(tokenizer, template=name).encode([normalize({column: turns}, form)])
    assert not isinstance(encoded, RowError), encoded
    found = spans(tokenizer, encoded.tokens, encoded.mask)
    assert len(found) == encoded.responses == sum(trained)
    for number, train in enumerate(trained):
        assert sum(f"answer{number}" in text for text in found) == train
    unmarked = [{key: turn[key] for key in list(turn)[:2]} for turn in turns]
    [plain] = RowEncoder(tokenizer, template=name).encode([normalize({column: unmarked}, form)])
    assert tokenizer.decode(plain.tokens) == tokenizer.decode(encoded.tokens)
    everything = spans(tokenizer, plain.tokens, plain.mask)
    assert found == [text for text, train in zip(everything, trained, strict=True) if train]


@few
@given(st.data())
def test_parts_of_an_answer_are_left_out(data):
    """axolotl's spans: what stands in none is not trained on."""
    content = data.draw(words)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(content)), max_size=4)) | {0, len(content)})
    details, kept = [], [False] * len(content)
    for low, high in itertools.pairwise(cuts):
        train = data.draw(st.sampled_from([True, False, None]))
        if train is not None:
            details.append({"begin_offset": low, "end_offset": high - 1, "train": train})
        kept[low:high] = [bool(train)] * (high - low)
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content, "train_detail": details}]
    tokenizer = plain()
    [encoded] = RowEncoder(tokenizer).encode([normalize({"messages": turns}, "messages")])
    text = tokenizer.decode(encoded.tokens[encoded.mask])
    within = tokenizer.decode(encoded.tokens[~encoded.mask])
    expected = "".join(char for char, keep in zip(content, kept, strict=True) if keep)
    assert text.endswith("<|im_end|>") and len(text) <= len("|") + len(expected) + len("<|im_end|>")
    if not any(kept):
        assert content in within or content == ""


def turn(role, content, **keys):
    return {"role": role, "content": content, **keys}


Q, A, B = turn("user", "What is it?"), turn("assistant", "a"), turn("assistant", "b")
CALL = {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}


def test_text_and_calls_are_one_message():
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "Let me look."}, CALL, CALL]
    _, message = read_messages(turns)
    assert message["content"] == "Let me look." and len(message["tool_calls"]) == 2
    assert len(read_messages([Q, A, B])) == 3  # two texts stay two turns
    assert len(read_messages([turn("assistant", "x", name="ann"), CALL])) == 2  # two speakers
    left_out = read_messages([turns[0], turns[1] | {"loss": False}, CALL])[1]
    assert left_out["train_detail"] == [{"begin_offset": 0, "end_offset": 11, "train": False}]
    assert read_messages([turns[0], turns[1] | {"weight": 0}, CALL | {"masked": True}])[1]["train"] is False
    with pytest.raises(ConversationError, match=r"messages\[1\]: text and calls of one message are marked differently"):
        read_messages([turns[0], turns[1], CALL | {"loss": 0}])


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([turn("assistant", "a", weight=0.5)], r"messages\[0\].weight: 0.5: answers are trained on or not"),
        ([turn("assistant", "a", weight=0, train=True)], "weight, train disagree"),
        ([turn("assistant", "a", lossOn=0)], r"\[0\].lossOn: 0 seems to say whether the answer is trained on"),
        ([turn("assistant", "a", mask=1)], "name it loss_mask .1 trains on it. or masked"),
        ([turn("user", "q", train=True), turn("assistant", "a", train=False)], "train on a turn of the role user"),
        ([turn("assistant", "a", train_detail=[{"begin_offset": 0, "end_offset": 1, "train": 1}])], "not within the 1"),
        (
            [turn("assistant", "", tool_calls=[{"name": "f", "arguments": "[1]"}])],
            "of the tool call f are not an object",
        ),
        ([turn("assistant", "", tool_calls=[{"name": "f", "arguments": "{'a': 1}"}])], "f are not JSON.*json.dumps"),
        ([turn("user", "q", tool_calls=[{"name": "f"}])], "of the role user calls tools"),
        ([turn("assistant", "a", thinking="b", reasoning="c")], "it has several thoughts"),
        ([turn("user", [{"type": "image_url"}])], r"content\[0\]: a part of the type image_url in content"),
        ("[{'role': 'user', 'content': 'x'}]", "is a printed Python object, not JSON: write it with json.dumps"),
        ("array([{'role': 'user'}], dtype=object)", "is a printed Python object"),
        ('[{"role": "user", "role": "user", "content": "x"}]', "an object has the key 'role' twice"),
    ],
)
def test_what_cannot_be_read_says_where_and_what_to_do(turns, message):
    with pytest.raises(ConversationError, match=message):
        read_messages(turns)


@pytest.mark.parametrize(
    "text",
    ["[x] Is it done?", '[{"role": "admin"}]', '{"a": 1}', "{'name': 'Bob'}", "[1, 2]", "(a) or (b)?", "array(3)"],
)
def test_text_that_is_no_conversation_stays_text(text):
    assert turns_in(text, "prompt") == text
    example = normalize({"prompt": text, "completion": "c"}, "prompt_completion")
    assert (example.prompt, example.completion) == (text, "c")


def test_json_text_is_decoded_in_every_column():
    asked, answer = json.dumps([Q]), json.dumps([A])
    tools = '[{"name": "f"}]'
    assert normalize({"prompt": asked, "completion": answer, "tools": tools}, "prompt_completion").messages == [Q, A]
    for row in ({"prompt": asked, "chosen": answer, "rejected": json.dumps(B)},):
        pair = normalize_pair(row)
        assert (pair.chosen.messages, pair.rejected.messages) == ([Q, A], [Q, B])
    assert normalize_labelled({"prompt": asked, "completion": answer, "label": 1}).chosen.messages == [Q, A]
    assert read_tools(tools) == [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(RowError, match="prompt: .*is a printed Python object"):
        normalize({"prompt": str([Q]), "completion": "c"}, "prompt_completion")


SYSTEM = turn("system", "Be brief.")
EARLIER = [turn("user", "q"), turn("assistant", "x")]
TOLD = [Q, turn("assistant", "x"), turn("user", "And?")]


@pytest.mark.parametrize(
    ("row", "before"),
    [
        ({"conversation": [Q], "chosen": A, "rejected": B}, [Q]),
        ({"instruction": "What is it?", "chosen": [A], "rejected": [B]}, [Q]),
        ({"instruction": "What", "input": "is it?", "chosen": [A], "rejected": [B]}, [turn("user", "What\n\nis it?")]),
        ({"prompt": "What is it?", "chosen": [Q, A], "rejected": [Q, B]}, [Q]),
        ({"prompt": [SYSTEM, Q], "chosen": [Q, A], "rejected": [Q, B]}, [SYSTEM, Q]),
        ({"prompt": "What is it?", "chosen": [*TOLD, A], "rejected": [*TOLD, B]}, TOLD),
        ({"prompt": "And?", "chosen": [*TOLD, A], "rejected": [*TOLD, B]}, TOLD),
        ({"messages": [Q, A], "chosen": [Q, A], "rejected": [Q, B]}, [Q]),
        ({"chosen": [Q, A], "rejected": [Q, B]}, [Q]),
        ({"messages": [Q, A], "rejected_response": "b"}, [Q]),
        ({"input": {"messages": [Q], "tools": []}, "preferred_output": [A], "non_preferred_output": [B]}, [Q]),
        ({"prompt": "What is it?", "chosen": "a", "rejected": "b"}, [Q]),
        ({"prompt": "What is it?", "chosen": "What is it?a", "rejected": "What is it?b"}, [Q]),
        ({"query": "What is it?", "chosen": "a", "rejected": "b"}, [Q]),
        (
            {"chosen": "\n\nHuman: What is it?\n\nAssistant: a", "rejected": "\n\nHuman: What is it?\n\nAssistant: b"},
            [Q],
        ),
        ({"chosen": "What is it?a", "rejected": "What is it?b", "score_chosen": 3.5, "source": "x"}, [Q]),
        ({"prompt": "What is it?", "history": [["q", "x"]], "chosen": "a", "rejected": "b"}, [*EARLIER, Q]),
        ({"prompt": "What is it?", "history": EARLIER, "chosen": [A], "rejected": [B]}, [*EARLIER, Q]),
    ],
)
def test_a_preference_asks_its_one_question_once(row, before):
    pair = normalize_pair(row)
    assert (pair.chosen.messages, pair.rejected.messages) == ([*before, A], [*before, B])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"topic": "t", "chosen": A, "rejected": B},
            r"chosen has no question before it; set data.columns=.*to one of topic",
        ),
        ({"topic": "t", "chosen": "a", "rejected": "b"}, "there is no prompt before it; .*to one of topic"),
        ({"topic": "Is it hot?", "chosen": "It is hot", "rejected": "It is cold"}, "there is no prompt .*one of topic"),
        ({"prompt": [SYSTEM], "chosen": A, "rejected": B}, "chosen has no question before it"),
        (
            {"prompt": "Why?", "chosen": [Q, A], "rejected": [Q, B]},
            "chosen begins with another question than column prompt",
        ),
        ({"chosen": [Q, A], "rejected": [turn("user", "Why?"), B]}, "begin with different questions"),
        ({"prompt": [Q], "chosen": [Q, A], "rejected": [B]}, "one begins with its question, and the other does not"),
        ({"query": "q", "conversation": [Q], "chosen": A, "rejected": B}, "has no question before it"),
    ],
)
def test_a_preference_without_one_question_is_refused(row, message):
    with pytest.raises(RowError, match=message):
        normalize_pair(row)


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize(
    "texts", [("Paris", "Pasta"), ("Yes, it is.", "Never."), ("It is hot", "It is hot"), ("It is", "It is hot")]
)
def test_texts_that_begin_with_no_question_are_whole(texts, system):
    """As in TRL, unless another column has a text, which may be their question."""
    row = dict(zip(("chosen", "rejected"), texts, strict=True)) | ({"system": system} if system else {})
    pair = normalize_pair(row)
    assert [side.completion for side in (pair.chosen, pair.rejected)] == list(texts)
    assert {side.prompt for side in (pair.chosen, pair.rejected)} == {f"{system}\n\n" if system else ""}
    with pytest.raises(RowError, match="there is no prompt before it; .*to one of topic"):
        normalize_pair(row | {"topic": "t"})


def test_results_of_tools_in_a_users_turn_are_turns_of_tools():
    """As Anthropic has them: results first, then what the user says."""
    call = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": content}
        for content in ("3", [{"type": "text", "text": "4"}], None)
    ]
    turns = [
        Q,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [*results, {"type": "text", "text": "so?"}]},
        A,
    ]
    read = read_messages(turns)
    assert [(message["role"], message["content"]) for message in read[2:]] == [
        *(("tool", text) for text in ("3", "4", "")),
        ("user", "so?"),
        ("assistant", A["content"]),
    ]
    assert {message["tool_call_id"] for message in read[2:5]} == {"t1"} and read_messages(read) == read
    assert read_messages([*turns[:2], {"role": "user", "content": results[:1]}])[2:] == read[2:3]


def test_the_tags_of_a_result_are_written_once():
    tagged = {"role": "tool", "content": "<tool_response>\n3\n</tool_response>"}
    for template, content in (("<tool_response>{{ m.content }}", "3"), ("{{ m.content }}", tagged["content"])):
        assert for_template([tagged], template)[0]["content"] == content
    two = {"role": "tool", "content": 2 * tagged["content"]}
    assert for_template([two], "<tool_response>")[0] == two


def test_many_line_breaks_are_no_work():
    """Found by the text's own searches, not by an expression that tries each way to part them."""
    lines = 400_000 * "\n"
    assert opened_thought(f"<think>{lines}") == "" and block_of(f"<think>{lines}") is None
    assert block_of(f"<think>{lines}a{lines}</think>{lines}b") == ("a", "b") and block_of(f"{lines}</think>") is None
    message = in_place(turn("assistant", f"{lines}</think>b"), "{{ messages[1].reasoning_content }}")
    assert message["content"] == "b"


def test_details_of_reasoning_are_thoughts_or_refuse_the_row():
    details = [{"type": "reasoning.text", "text": "hm", "format": "x"}]
    for keys in ({"reasoning_details": details}, {"reasoning": "hm", "reasoning_details": details}):
        assert read_messages([Q, A | keys])[1]["reasoning_content"] == "hm"
    with pytest.raises(ConversationError, match="'reasoning.encrypted' has no known text"):
        read_messages([Q, A | {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}])


def test_columns_that_mark_turns_are_followed():
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "loss_mask": [0, 0]}
    assert [m["train"] for m in normalize(row, "sharegpt").messages] == [False, False]
    assert unread(row, "sharegpt") == []
    with pytest.raises(RowError, match="column loss_mask has 1 marks, and conversations 2 turns"):
        normalize(row | {"loss_mask": [0]}, "sharegpt")


WORDS = st.lists(st.text("ab3é?:", min_size=1, max_size=4), min_size=2, max_size=5).map(" ".join)


@given(WORDS, st.sampled_from([" ", "\n", "?", " [/INST] "]), *[st.text("cd 4", min_size=1, max_size=6)] * 2)
def test_what_both_answers_begin_with_is_the_question_up_to_a_words_end(asked, between, one, other):
    answers = [asked + between + one, asked + between + other]
    try:
        pair = normalize_pair({"chosen": answers[0], "rejected": answers[1]})
    except RowError as error:
        assert "no prompt before it" in str(error) or "empty" in str(error)
        return
    sides = [pair.chosen, pair.rejected]
    assert [side.prompt + side.completion for side in sides] == answers and all(side.implied for side in sides)
    prompt, [rest, another] = pair.chosen.prompt, [side.completion for side in sides]
    assert pair.rejected.prompt == prompt == prompt.rstrip(" ") and rest.strip() and another.strip()
    if not prompt:  # the texts are whole
        return
    assert not (prompt[-1].isalnum() and (rest[0].isalnum() or another[0].isalnum()))
    same = "".join(a for a, *_ in itertools.takewhile(lambda two: two[0] == two[1], zip(rest, another, strict=False)))
    assert not same.strip() or same.lstrip(" ").isalnum()  # no more than a word that they share the beginning of


PAIRS = st.lists(st.tuples(st.text("ab ", min_size=1).filter(str.strip), st.text("cd", min_size=1)), max_size=3)
ASKED = [
    ("alpaca", {"instruction": "Say", "input": "it", "output": "a"}, turn("user", "Say\n\nit")),
    ("alpaca", {"instruction": "What is it?", "output": "a"}, Q),
    ("prompt_completion", {"prompt": "What is it?", "completion": "a"}, Q),
    ("prompt_completion", {"question": "What is it?", "answer": "a"}, Q),
]


@given(PAIRS, st.sampled_from(ASKED), st.booleans(), st.sampled_from(["pairs", "turns", "json"]))
def test_history_is_the_turns_before_the_question(pairs, row, has_system, form):
    format, columns, asked = row
    earlier = [turn(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]
    cell = {"pairs": [list(pair) for pair in pairs], "turns": earlier, "json": json.dumps(pairs)}[form]
    value = columns | {"history": cell} | ({"system": "Be brief."} if has_system else {})
    example = normalize(value, format)
    assert example.messages == [*([SYSTEM] if has_system else []), *earlier, asked, A]
    assert example.prompt is None and unread(value, format) == []
    assert normalize(columns | {"history": None}, format) == normalize(columns, format)


def test_history_that_cannot_be_read():
    row = {"instruction": "q", "output": "a"}
    assert unread(row | {"history": "of France"}, "alpaca") == ["history"]  # a text is another column
    assert unread({"messages": [Q, A], "history": [["q", "a"]]}, "messages") == ["history"]
    for cell, words in (([["q"]], r"history\[0\] is neither a pair"), ([["q", " "]], "empty response in history")):
        with pytest.raises(RowError, match=words):
            normalize(row | {"history": cell}, "alpaca")


@pytest.mark.parametrize("name", sorted(MARKS))
def test_each_mark_beside_a_conversation_is_followed(name):
    leaves, trains = (0, 1) if MARKS[name] else (1, 0)
    for value in (leaves, bool(leaves), float(leaves), str(leaves), str(bool(leaves)).lower()):
        assert exclusion({"messages": [], name: value}) == f"{name} = {value!r}"
    for value in (trains, bool(trains), None, 0.5, "heavy", [0, 1]):
        assert exclusion({"messages": [], name: value}) == ""
    assert name not in unread({"messages": [Q], name: leaves}, "messages")
    assert unread({"messages": [Q], name: 0.5}, "messages") == [name]
    assert normalize({"prompt": "q", "completion": "a", name: ["b", "c"]}, "prompt_completion").prompt == "q"
    other = next(key for key, mark in MARKS.items() if mark is not MARKS[name])
    with pytest.raises(ConversationError, match="disagree whether the row is trained on"):
        exclusion({name: 1, other: 1})


@given(
    st.sampled_from(sorted(MARKS)),
    st.lists(st.booleans(), min_size=2, max_size=2),
    st.sampled_from(["d", " ", ",", "()"]),
)
def test_marks_of_turns_that_are_text_are_followed_or_refused(name, trains, form):
    marks = [0, int(trains[0] is MARKS[name]), 0, int(trains[1] is MARKS[name])]
    marks[::2] = [int(not MARKS[name])] * 2  # of questions
    messages = [Q, A, Q, A]
    row = {"messages": json.dumps(messages), name: json.dumps(marks)}
    for cell in (json.dumps(marks), marks, tuple(marks), np.array(marks), json.dumps([bool(mark) for mark in marks])):
        made = normalize(row | {name: cell}, "messages")
        assert [message["train"] for message in made.messages[1::2]] == trains
        assert unread(row | {name: cell}, "messages") == []
    text = str(tuple(marks)) if form == "()" else ("" if form == "d" else form).join(map(str, marks))
    if form != "d" or "mask" in name:
        for format, other in (
            ("messages", row),
            ("text", {"text": "a"}),
            ("prompt_completion", {"prompt": "q", "completion": "a"}),
            ("alpaca", {"instruction": "q", "output": "a"}),
        ):
            with pytest.raises(RowError, match=name):
                normalize(other | {name: text}, format)


CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": read_messages([turn("function_call", '{"name": "add"}')])[0]["tool_calls"],
}
CHANNELS = [
    ([A | {"channel": "final"}], [A]),
    ([turn("assistant", "HMM", channel="analysis"), A | {"channel": "final"}], [A | {"reasoning_content": "HMM"}]),
    (
        [turn("assistant", text, channel="analysis") for text in ("HMM", "so")] + [A],
        [A | {"reasoning_content": "HMM\n\nso"}],
    ),
    (
        [turn("assistant", "HMM", channel="analysis"), {**CALLED, "channel": "commentary"}],
        [{**CALLED, "reasoning_content": "HMM"}],
    ),
    ([A | {"channel": "web", "recipient": "all"}], [A | {"channel": "web", "recipient": "all"}]),
]


@pytest.mark.parametrize(("turns", "expected"), CHANNELS)
def test_channels_are_followed(turns, expected):
    assert read_messages([Q, *turns]) == [Q, *expected]
    assert read_messages(read_messages([Q, *turns, Q, A])) == [Q, *expected, Q, A]


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        ([turn("assistant", "HMM", channel="analysis")], "a thought without an answer"),
        ([turn("assistant", "HMM", channel="analysis"), Q, A], "no answer of the assistant"),
        ([turn("assistant", "HMM", channel="analysis", loss=0), A], "marked differently"),
        ([turn("assistant", "Wait.", channel="commentary"), A], "without tool_calls"),
        ([turn("assistant", "{}", recipient="functions.add")], "write it as tool_calls"),
    ],
)
def test_channels_that_are_no_messages_are_refused(turns, why):
    with pytest.raises(ConversationError, match=rf"messages.*{why}"):
        read_messages([Q, *turns])


def test_unknown_keys_are_named():
    example = normalize({"messages": [Q, A | {"persona": "pirate", "id": 3}]}, "messages")
    assert example.unknown == ("messages[].persona",) and example.messages[1]["persona"] == "pirate"


def test_templates_get_what_they_read():
    messages = read_messages([Q, A | {"weight": 1, "reasoning_content": "t"}])
    assert for_template(messages, "{{ m.thinking }}")[1] == A | {"thinking": "t"}
    assert for_template(messages, "{{ m.reasoning_content }}")[1] == A | {"reasoning_content": "t"}
    several = {"default": "d", "tool_use": "t"}
    assert [template_for(several, tools) for tools in (None, [{}])] == ["d", "t"]
    assert template_for({"default": "d"}, [{}]) == template_for("d", [{}]) == "d" and template_for(None, None) is None


def test_maps_and_json_of_parquet_are_objects(tmp_path):
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    inner = arrow.struct([("name", arrow.string()), ("arguments", arrow.map_(arrow.string(), arrow.int64()))])
    turns = arrow.list_(arrow.struct([("role", arrow.string()), ("tool_calls", arrow.list_(inner))]))
    made = [[{"role": "assistant", "tool_calls": [{"name": "f", "arguments": [("a", 1), ("b", 2)]}]}]]
    whole = arrow.ExtensionArray.from_storage(
        arrow.json_(), arrow.array([json.dumps([Q, {"a": None}])], arrow.string())
    )
    table = arrow.table({"messages": arrow.array(made, turns), "other": whole})
    parquet.write_table(table, tmp_path / "a.parquet")
    [row] = read_parquet(tmp_path / "a.parquet", 0)
    assert row.value["messages"][0]["tool_calls"] == [{"name": "f", "arguments": {"a": 1, "b": 2}}]
    assert row.value["other"] == [Q, {"a": None}]


THOUGHTS = {  # forms of a thought
    "text": lambda text: text,
    "texts": lambda text: [text[:1], text[1:]],
    "an object": lambda text: {"type": "thinking", "thinking": text, "signature": "x"},
    "without a type": lambda text: {"text": text},
    "parts": lambda text: [{"type": "text", "text": text[:1]}, {"type": "thinking", "thinking": text[1:]}],
    "chunks": lambda text: [{"type": "thinking", "thinking": [{"type": "text", "text": text}]}],
    "a summary": lambda text: [{"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}],
    "content": lambda text: {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}], "summary": []},
}


@given(st.text("ab \n", min_size=1).filter(str.strip), st.sampled_from([*THOUGHTS]), st.sampled_from(THOUGHT))
def test_a_thought_is_read_in_each_form_and_place(text, form, key):
    thought = THOUGHTS[form](text)
    read = [read_messages([Q, {**A, key: thought}])]
    parts = thought if isinstance(thought, list) else [thought]
    if all(isinstance(part, dict) and part.get("type") in ("thinking", "reasoning") for part in parts):
        read.append(read_messages([Q, {**A, "content": [*parts, {"type": "text", "text": A["content"]}]}]))
    if form == "without a type":  # Gemini's
        read.append(
            read_messages([Q, {"role": "model", "parts": [{**thought, "thought": True}, {"text": A["content"]}]}])
        )
    assert all(messages[1] == A | {"reasoning_content": text} for messages in read)


@pytest.mark.parametrize(
    "thought",
    [True, 3, 0.5, [1], [["a"], True], {"a": "b"}, {"type": "redacted_thinking", "data": "x"}, b"a"]
    + [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, {"type": "thinking", "thinking": {"a": 1}}],
)
@pytest.mark.parametrize("key", THOUGHT)
def test_a_thought_of_an_unknown_form_is_refused(key, thought):
    with pytest.raises(ConversationError, match=rf"messages\[1\].{key}.*(thought|encrypted)"):
        read_messages([Q, {**A, key: thought}])
    if isinstance(thought, dict) and "type" in thought:
        with pytest.raises(ConversationError, match=r"messages\[1\].content\[0\].*(type|thought|encrypted)"):
            read_messages([Q, {**A, "content": [thought, {"type": "text", "text": "a"}]}])


@pytest.mark.parametrize("nothing", [None, False, "", [], {}, {"text": None}, {"type": "reasoning", "summary": []}])
def test_no_thought_is_handed_on_where_there_is_none(nothing):
    assert read_messages([Q, {**A, "reasoning_content": nothing}]) == [Q, A]
