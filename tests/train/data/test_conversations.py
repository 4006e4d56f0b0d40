"""Conversations whose templates write turns otherwise once later ones follow, or leave parts of them out; and texts
that were rendered before."""

from __future__ import annotations

import pytest

from jaxtune.conversations.ends import turn_ends
from jaxtune.conversations.messages import ConversationError, read_messages
from jaxtune.conversations.prompts import prompt_tokens
from jaxtune.train.data import prepare
from jaxtune.train.data.packing.packing import NothingUsable
from jaxtune.train.data.rendering.formats import Example
from jaxtune.train.data.rendering.templates import RowEncoder, derive_markers
from jaxtune.train.data.rows.row_errors import RowError
from tests.train.data.conftest import PLAIN_TEMPLATE, make_tokenizer, spans

END = "<|im_end|>"
# Like Qwen3.5: a prompt opens a thought, which turns before the last question have lost, and text stands before calls.
OPENED = (
    "{% set asked = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > asked.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
    "{% endif %}{{ m.content | trim }}{% for call in m.tool_calls or [] %}"
    "{{ '\n\n' if m.content else '' }}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# Like Qwen3: it splits the text of an answer at </think>, and takes the last thought.
SPLITS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set c = m.content %}{% set t = m.reasoning_content or '' %}"
    "{% if m.reasoning_content is not string and '</think>' in c %}"
    "{% set t = c.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set c = c.split('</think>')[-1].lstrip() %}{% endif %}"
    "{% if m.role == 'assistant' %}<think>{{ t }}</think>{% endif %}{{ c }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like gpt-oss: channels, two ends of a turn, the name of a call told again with its result, no text beside a thought.
CHANNELS = (
    "{% set last = namespace(call='') %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{% if (m.content or m.thinking) and loop.revindex < 4 %}"
    "<|im_start|>assistant|analysis|{{ m.content or m.thinking }}<|im_end|>{% endif %}"
    "{% set last.call = m.tool_calls[0].function.name %}"
    "<|im_start|>assistant to={{ last.call }}|{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}{% if m.thinking and loop.last %}<|im_start|>assistant|analysis|{{ m.thinking }}<|im_end|>{% endif %}"
    "<|im_start|>assistant|final|{{ m.content }}{{ '<|eos|>' if loop.last else '<|im_end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}<|im_start|>{{ last.call }} to=assistant|{{ m.content | tojson }}<|im_end|>"
    "{% else %}<|im_start|>{{ m.role }}|{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


def user(text):
    return {"role": "user", "content": text}


def answer(text, thought=None, call=None):
    made = {"role": "assistant", "content": text}
    made |= {"reasoning_content": thought, "thinking": thought} if thought else {}
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": call}}}]
    return made | ({"tool_calls": calls} if call is not None else {})


def result(text):
    return {"role": "tool", "content": text}


def rounds(*thoughts):
    """Two rounds of a tool."""
    one, two, three, four = thoughts
    return [
        user("Add."),
        answer("", one, 1),
        result("2"),
        answer("It is 2.", two),
        user("More."),
        answer("", three, 3),
        result("4"),
        answer("It is 4.", four),
    ]


def encode(template, messages, tools=None, **options):
    specials = ["<|im_start|>", "<|im_end|>", "<|call|>"]
    tokenizer = make_tokenizer(template, additional_special_tokens=specials)
    (found,) = RowEncoder(tokenizer, **options).encode([Example(messages=messages, tools=tools)])
    if isinstance(found, RowError):
        raise found
    return found, spans(tokenizer, found.tokens, found.mask)


def test_two_rounds_of_a_tool_under_a_prompt_that_opens_a_thought():
    plain = ['<call>add {"a": 1}', "It is 2.", '\n</think>\n\n<call>add {"a": 3}', "\n</think>\n\nIt is 4."]
    encoded, found = encode(OPENED, rounds(None, None, None, None))
    assert found == [f"{each}{END}" for each in plain] and encoded.left_out == ""
    encoded, found = encode(OPENED, rounds("hm", "so", "again", "done"))
    assert found == [f"{each}{END}" for each in (*plain[:2], f"again{plain[2]}", f"done{plain[3]}")]
    assert encoded.left_out == "reasoning_content of message 1 (assistant), reasoning_content of message 3 (assistant)"


def test_a_thought_within_the_text_of_an_earlier_turn():
    chat = [user("A?"), answer("B", "hm"), user("C?"), answer("<think>so</think>D")]
    encoded, found = encode(OPENED, chat)
    assert found == [f"B{END}", f"so\n</think>\n\nD{END}"]
    assert encoded.left_out == "reasoning_content of message 1 (assistant)"


def test_two_rounds_of_a_tool_in_channels():
    calls = ['assistant to=add|{"a": 1}', 'assistant to=add|{"a": 3}']
    for thoughts in ((None, None, None, None), ("hm", "so", "again", "done")):
        encoded, found = encode(CHANNELS, rounds(*thoughts))
        assert len(found) == 4
        assert found[0] == calls[0].removeprefix("assistant") + "<|call|>" and found[1] == f"|final|It is 2.{END}"
        if thoughts[0] is None:
            assert found[2:] == [calls[1].removeprefix("assistant") + "<|call|>", "|final|It is 4.<|eos|>"]
            assert encoded.left_out == ""
        else:
            assert found[2].startswith("|analysis|again") and found[3].startswith("|analysis|done")
            assert "message 1" in encoded.left_out and "message 7" not in encoded.left_out


# ---- thoughts at the start of a content

BLOCKS = ["<think>hm</think>B", "<think>\nhm\n</think>\n\nB", " <think>\nhm</think>\n\nB"]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("template", [OPENED, CHANNELS])
def test_a_block_is_the_thought_under_the_templates_key(template, block):
    """Nothing is doubled, nothing lost, and an empty block is no thought."""
    keyed, inline = (encode(template, [user("A?"), turn]) for turn in (answer("B", "hm"), answer(block)))
    assert keyed[1] == inline[1] and "".join(inline[1]).count("hm") == 1 and inline[0].left_out == ""
    assert (
        encode(template, [user("A?"), answer(block.replace("hm", ""))])[1]
        == encode(template, [user("A?"), answer("B")])[1]
    )
    assert not inline[0].has_stray_thought


@pytest.mark.parametrize("block", BLOCKS)
def test_a_template_that_splits_blocks_gets_them_as_they_are(block):
    """Like Qwen3; one that reads no thoughts trains them as words, which is said."""
    encoded, found = encode(SPLITS, [user("A?"), answer(block)])
    assert found == [f"<think>hm</think>B{END}"] and not encoded.has_stray_thought
    encoded, found = encode(PLAIN_TEMPLATE, [user("A?"), answer(block)])
    assert found == [f"{block}{END}"] and encoded.has_stray_thought
    rows = [{"messages": [user("A?"), answer(text)]} for text in (block, "B", "So: " + block)]
    data = prepare(rows, make_tokenizer(), length=99, num_workers=0)
    [said] = [sentence for sentence in data.warnings() if "<think>" in sentence]
    assert said.startswith("1 rows have a thought (<think>)") and "first rows:1; set data.template" in said


@pytest.mark.parametrize(
    "text", ["So <think>x</think> b", "<think>a</think>b<think>c</think>d", "<think>a <think>b</think>c</think>d"]
)
def test_nothing_of_a_text_with_several_blocks_is_lost(text):
    """A template that splits takes the last, and leaves out what is before it."""
    _, [found] = encode(SPLITS, [user("A?"), answer(text)])
    thought, _, words = text.partition("</think>") if text.startswith("<think>") else ("", "", text)
    assert found == f"<think>{thought.removeprefix('<think>')}</think>{words}{END}"


@pytest.mark.parametrize("template", [OPENED, CHANNELS])
def test_a_thought_that_the_prompt_opened(template):
    """As models write it behind a prompt that ends with <think>."""
    opened = encode(template, [user("A?"), answer("hm\n</think>\n\nB")])
    assert opened[1] == encode(template, [user("A?"), answer("B", "hm")])[1]


def test_a_thought_without_an_end_is_said():
    assert encode(OPENED, [user("A?"), answer("<think>hm")])[0].has_stray_thought


@pytest.mark.parametrize("template", [OPENED, CHANNELS, PLAIN_TEMPLATE])
def test_a_thought_that_is_written_twice_is_one(template):
    twice = {"role": "assistant", "content": BLOCKS[1], "reasoning_content": "hm"}
    read = read_messages([user("A?"), twice])
    assert read[1]["content"] == "B" and read[1]["reasoning_content"] == "hm"
    assert encode(template, read)[1] == encode(template, [user("A?"), answer("B", "hm")])[1]
    with pytest.raises(ConversationError, match="several thoughts"):
        read_messages([user("A?"), twice | {"reasoning_content": "so"}])


@pytest.mark.parametrize(
    ("template", "begins"), [(OPENED, "assistant\n<think>\n{}"), (CHANNELS, "assistant|analysis|{}")]
)
@pytest.mark.parametrize("thought", ["", "hm, <b"])
def test_a_begun_thought_is_continued(template, begins, thought):
    tokenizer = make_tokenizer(template)
    ids = prompt_tokens(tokenizer, [user("A?"), answer(f"<think>\n{thought}")], continues=True)
    assert tokenizer.decode(ids).rstrip().endswith(begins.format(thought).rstrip())
    ids = prompt_tokens(tokenizer, [user("A?"), answer(f"<think>\nhm\n</think>\n\n{thought}")], continues=True)
    assert tokenizer.decode(ids).count("hm") == 1 + ("hm" in thought) and "<think>\n\n" not in tokenizer.decode(ids)


# ---- turns that end by the next role's token

# Like GLM's: no turn has an end; the model stops at <|user|>, or at <|observation|> where it calls.
ROLES = (
    "{% for m in messages %}{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}{% endfor %}{{ behind }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
ROLE_TOKENS = ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"]


@pytest.mark.parametrize("behind", ["", "\n"])
@pytest.mark.parametrize("train_on", ["responses", "turns"])
def test_a_turn_that_ends_by_the_next_roles_token(behind, train_on):
    tokenizer = make_tokenizer(ROLES.replace("behind", repr(behind)), additional_special_tokens=ROLE_TOKENS)
    encoder = RowEncoder(tokenizer, train_on=train_on)

    def found(messages, **options):
        [encoded] = encoder.encode([Example(messages=messages, **options)])
        assert not isinstance(encoded, RowError) and encoded.ended == encoded.responses and encoded.left_out == ""
        return spans(tokenizer, encoded.tokens, encoded.mask)

    end, call = f"{behind}<|user|>", f"{behind}<|observation|>"
    expected = [f"<call>add{call}", f"It is 2.{end}", f"<call>add{call}", f"It is 4.{end}"]
    assert found(rounds(None, None, None, None)) == expected
    assert found(rounds(None, None, None, None)[:2]) == expected[:1]
    marked = [user("A?"), answer("B") | {"train": False}, user("C?"), answer("D"), user("E?")]
    assert found(marked) == [f"D{end}"] and found([*marked, marked[1]]) == [f"D{end}"]
    assert found([user("A?"), answer("B"), user("C?"), answer("D")], prompt_messages=3) == [f"D{end}"]
    assert turn_ends(tokenizer) == sorted(tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"]))


def test_markers_and_pairs_under_such_a_template():
    tokenizer = make_tokenizer(ROLES, additional_special_tokens=ROLE_TOKENS)
    markers = dict(zip(("instruction_part", "response_part"), derive_markers(tokenizer), strict=True))
    assert markers == {"instruction_part": "<|user|>\n", "response_part": "<|assistant|>\n"}
    rows = [{"messages": [user("A?"), answer("B"), user("C?"), answer("D")]}]
    for options in ({}, markers):
        data = prepare(rows, tokenizer, length=99, num_workers=0, **options)
        [document] = list(data.documents)
        assert spans(tokenizer, document.tokens, document.mask) == ["B<|user|>", "D<|user|>"]
    pair = {"prompt": [user("A?")], "chosen": [answer("B")], "rejected": [answer("D")]}
    data = prepare([pair], tokenizer, length=99, num_workers=0, format="preference", pairs=True)
    assert [spans(tokenizer, one.tokens, one.mask) for one in data.documents] == [["B<|user|>"], ["D<|user|>"]]


def test_a_token_that_begins_any_turn_ends_none():
    template = PLAIN_TEMPLATE.replace("<|im_end|>", "")
    assert encode(template, [user("A?"), answer("B"), user("C?"), answer("D")])[0].ended == 0
    assert turn_ends(make_tokenizer(template)) == []


def test_a_thought_that_is_written_empty_where_the_prompt_opens_one():
    """Like Nemotron 3's."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{{ '<think>\n' + m.reasoning_content + '</think>' if m.reasoning_content else '<think></think>' }}{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    chat = [user("A?"), answer("B"), user("C?"), answer("D", "hm"), user("E?"), answer("F")]
    assert encode(template, chat)[1] == [f"</think>B{END}", f"hm</think>D{END}", f"</think>F{END}"]
    opened = [f"<think></think>B{END}\n", f"<think>\nhm</think>D{END}\n", f"<think></think>F{END}\n"]
    assert encode(template, chat, train_on="turns")[1] == opened  # what TRL marks


# ---- what a template does not write

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]


@pytest.mark.parametrize(
    ("messages", "tools", "lost"),
    [
        ([user("A?"), answer("B", "hm")], None, "reasoning_content of message 1 (assistant)"),
        ([user("A?"), answer("B")], TOOLS, "tools"),
        ([user("A?"), answer("Now:", None, 1), result("2"), answer("B")], None, "tool_calls of message 1 (assistant)"),
        ([user("A?"), answer("<think>hm</think>B")], None, ""),  # it is written as it stands
        ([user("hm"), answer("hm", "hm")], None, "reasoning_content of message 1 (assistant)"),
    ],
)
@pytest.mark.parametrize("marked", [False, True])
def test_what_a_template_does_not_write_is_said(messages, tools, lost, marked):
    template = PLAIN_TEMPLATE
    if marked:
        body = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
        template = template.replace("{{ m.content }}<|im_end|>\n", body)
    assert encode(template, messages, tools)[0].left_out == lost


def test_a_message_that_a_template_drops_is_said():
    template = PLAIN_TEMPLATE.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    chat = [{"role": "system", "content": "Be brief."}, user("A?"), answer("B")]
    assert encode(template, chat)[0].left_out == "content of message 0 (system)"
    assert encode(PLAIN_TEMPLATE.replace("m.content", "m.content | upper"), chat)[0].left_out == ""


def test_rows_are_counted_and_the_first_is_named(write, tmp_path):
    rows = [{"messages": [user("A?"), answer("B", "hm" if number else None)]} for number in range(3)]
    path = write("a.jsonl", rows)
    for _ in range(2):  # tokenised, and from the cache
        found = prepare(path, make_tokenizer(), length=64, cache_dir=tmp_path / "cache").summary
        assert found.left_out == 2
        (said,) = [line for line in found.warnings() if "does not write" in line]
        assert (
            f"2 rows have a part that the chat template does not write, so that it is not trained on, first {path}:2"
            in said
        )


# ---- texts that were rendered before, with markers

PARTS = dict(instruction_part="<|im_start|>user\n", response_part="<|im_start|>assistant\n")
TEXT = f"<|im_start|>user\nA?{END}\n<|im_start|>assistant\nB{END}\n<|im_start|>user\nC?{END}\n<|im_start|>assistant\nD"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{TEXT}{END}\n", [f"B{END}", f"D{END}"]),  # ends a turn, and not with the EOS
        (f"{TEXT}{END}", [f"B{END}", f"D{END}"]),
        (TEXT, [f"B{END}", "D<|eos|>"]),  # ends with neither
        (f"{TEXT}{END}<|eos|>", [f"B{END}", f"D{END}<|eos|>"]),
        (f"<|im_start|>user\nA?{END}\n", []),  # no response
        ("Only a text.", []),
    ],
)
def test_a_text_that_ends_otherwise_than_with_the_eos(text, expected):
    tokenizer = make_tokenizer(eos="<|eos|>")
    (found,) = RowEncoder(tokenizer, **PARTS).encode([Example(text=text)])
    assert spans(tokenizer, found.tokens, found.mask) == expected
    assert (found.responses, found.ended) == (len(expected), len(expected))


@pytest.mark.parametrize("tail", ["", "\n", " ", "\n\n", " \n\t"])
@pytest.mark.parametrize("train_on", ["responses", "turns", "completion", "all"])
@pytest.mark.parametrize("form", ["text", "completion"])
def test_white_space_may_follow_the_end_of_a_rendered_text(tail, train_on, form):
    """Without markers; a template's end is the EOS here, so that none is appended."""
    ends = Example(text=f"{TEXT}{END}{tail}") if form == "text" else Example(prompt="C?", completion=f"D{END}{tail}")
    tokenizer = make_tokenizer()
    (found,) = RowEncoder(tokenizer, train_on=train_on).encode([ends])
    assert found.ended == 1 and tokenizer.decode(found.tokens).rstrip().endswith(END)


def test_a_last_answer_that_is_marked_is_the_reason():
    rows = [{"messages": [user("A?"), answer("B"), user("C?"), answer("D") | {"loss": False}]}]
    with pytest.raises(NothingUsable, match="trains the last answer of a row alone, which marks"):
        prepare(rows, make_tokenizer(), length=99, num_workers=0, last_response_only=True)


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_no_such_row_vanishes(on_bad_row, write, tmp_path):
    rows = [{"text": f"{TEXT}{END}\n"}, {"text": f"<|im_start|>user\nA?{END}\n"}, {"text": f"{TEXT}{END}\n"}]
    tokenizer = make_tokenizer(eos="<|eos|>")
    options = dict(length=128, cache_dir=tmp_path, on_bad_row=on_bad_row, **PARTS)
    found = prepare(write("a.jsonl", rows), tokenizer, **options).summary
    assert (found.rows, found.documents, found.bad_rows, found.untrained) == (3, 2, 0, 1)
    assert found.responses == found.ended == 4


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_rows_that_a_mark_excludes_are_left_out_and_counted(on_bad_row, write, tmp_path):
    """Also those that could not be used."""
    ask, answer = {"role": "user", "content": "A?"}, {"role": "assistant", "content": "B"}
    rows = [{"messages": [ask, answer], "weight": 1}, {"messages": [ask, answer], "weight": 0}, {"messages": 3}]
    rows[2]["masked"] = True
    options = dict(length=128, cache_dir=tmp_path, on_bad_row=on_bad_row, template="chatml")
    tokenizer = make_tokenizer(eos=END)
    for _ in range(2):  # tokenised, and of the cache
        found = prepare(write("a.jsonl", rows), tokenizer, **options).summary
        assert (found.rows, found.documents, found.bad_rows, found.untrained, found.excluded) == (3, 1, 0, 0, 2)
        assert found.excluded_first[0].endswith("a.jsonl:2: weight = 0") and "2 rows left out by their marks" in str(
            found
        )
    with pytest.raises(ValueError, match="all 2 rows are left out by their marks, first .*:1: weight = 0"):
        prepare(write("b.jsonl", rows[1:]), tokenizer, **options)


def test_pairs_without_a_prompt_are_told(write, tmp_path):
    rows = [{"chosen": "Q: 1 + 1? A: 2", "rejected": "Q: 1 + 1? A: 3"}] * 2
    tokenizer = make_tokenizer(eos="<|eos|>")
    found = prepare(write("a.jsonl", rows), tokenizer, length=64, cache_dir=tmp_path, format="preference", pairs=True)
    assert "2 pairs have no prompt: their question is what both answers begin with" in str(found.summary)


FAMILIES = {
    "gemma": ("<start_of_turn>", "<end_of_turn>", "user", "model"),
    "gemma3": ("<start_of_turn>", "<end_of_turn>", "user", "model"),
    "phi3": ("<|user|>", "<|end|>", "<|user|>", "<|assistant|>"),
    "phi3_5": ("<|user|>", "<|end|>", "<|user|>", "<|assistant|>"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_of_gemma_and_phi(name, test_data):
    """As a notebook renders them before it asks for responses alone."""
    opening, end, asks, answers = FAMILIES[name]
    specials = sorted({opening, end, "<|user|>", "<|assistant|>", "<|system|>"})
    tokenizer = make_tokenizer(None, eos="<|eos|>", additional_special_tokens=specials)
    tokenizer.chat_template = (test_data / "chat_templates" / f"{name}.jinja").read_text()
    chat = [user("A?"), answer("B"), user("C?"), answer("D")]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    parts = (asks, answers) if "phi" in name else (f"{opening}{asks}\n", f"{opening}{answers}\n")
    options = dict(zip(("instruction_part", "response_part"), parts, strict=True))
    (found,) = RowEncoder(tokenizer, **options).encode([Example(text=text)])
    assert not isinstance(found, RowError)
    trained = [each.strip() for each in spans(tokenizer, found.tokens, found.mask)]
    assert trained[0] == f"B{end}" and trained[1].startswith(f"D{end}") and len(trained) == 2
    assert found.ended == found.responses == 2
