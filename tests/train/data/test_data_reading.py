"""Reading rows and their five forms: what is accepted, and what is said about what is not."""

from __future__ import annotations

import json

import pytest

from jaxtune.train.data.rendering.formats import (
    LABELLED,
    PREFERENCE,
    detect_format,
    normalize,
    normalize_labelled,
    normalize_pair,
)
from jaxtune.train.data.rows.reading import open_sources, read_rows
from jaxtune.train.data.rows.row_errors import RowError
from tests.train.data.conftest import unread

GOOD = [{"text": "one"}, {"text": "two"}, {"text": "three"}]


def read(source, **options):
    return list(read_rows(open_sources(source), **options))


def test_jsonl_names_the_line_of_every_bad_row(write):
    path = write("a.jsonl", [GOOD[0], "{broken", "", b'{"text": "\xff\xfe"}', "[1, 2]", GOOD[1]])
    rows = read(path)
    assert [(row.number, row.error.split(":")[0]) for row in rows] == [
        (1, ""),
        (2, "bad JSON"),
        (4, "not UTF-8 (byte 10 of the line)"),
        (5, "not an object with columns but list"),
        (6, ""),
    ]
    assert [row.value for row in rows if row.value] == GOOD[:2]
    assert {row.file for row in rows} == {str(path)}


def test_a_byte_order_mark_is_no_error(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD[0]).encode() + b"\n")
    assert read(path)[0].value == GOOD[0]


def test_json_arrays_have_line_numbers_and_json_lines_are_understood(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(GOOD, indent=1))
    assert [(row.number, row.value) for row in read(path)] == [(2, GOOD[0]), (5, GOOD[1]), (8, GOOD[2])]
    path.write_text("[" + json.dumps(GOOD[0]) + ",\n{]")
    assert [row.error.split(":")[0] for row in read(path)] == ["", "bad JSON, the array cannot be read further"]
    path.write_text("\n".join(json.dumps(row) for row in GOOD))
    assert [row.value for row in read(path)] == GOOD
    path.write_bytes(b'[{"text": "a"},\n{"text": "\xff"}]')
    assert [(row.number, row.error[:9]) for row in read(path)] == [(2, "not UTF-8")]


def test_files_that_were_joined_lose_nothing_without_a_word(tmp_path, write):
    path = tmp_path / "a.json"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(GOOD)}")
    rows = read(path)
    assert [row.value for row in rows] == [*GOOD, None] and "something follows the array's end" in rows[-1].error
    mark = b"\xef\xbb\xbf" + json.dumps(GOOD[0]).encode()
    assert [row.value for row in read(write("b.jsonl", [mark, mark]))] == [GOOD[0]] * 2


def test_a_key_that_an_object_has_twice_is_refused(write):
    lines = [
        '{"prompt": "a", "completion": "b", "completion": "c"}',
        '{"messages": [{"role": "user", "role": "tool"}]}',
    ]
    assert [row.error.partition("has the ")[2] for row in read(write("a.jsonl", lines))] == [
        "key 'completion' twice",
        "key 'role' twice",
    ]


def test_csv(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'prompt,completion\nhi,"a, b\nc"\nonly one\nx,\xff\nlast,one\n')
    rows = read(path)
    assert [(row.number, row.value and row.value["completion"], row.error) for row in rows] == [
        (2, "a, b\nc", ""),
        (4, None, "1 fields, the header has 2"),
        (5, None, "not UTF-8"),
        (6, "one", ""),
    ]
    assert rows[0].format == "prompt_completion"
    path.write_bytes(b"text,,text,\none,,two,\n")
    with pytest.raises(ValueError, match="names the column 'text' more than once"):
        read(path)
    path.write_bytes(b'text,"a"b\nmine,1\nyours,2\n')  # of which the second line would be the header
    with pytest.raises(ValueError, match="a.csv: its header, line 1, is bad CSV"):
        read(path)
    path.write_bytes(b",text,\n0,one,\n")  # names that are left out are nobody's columns
    assert read(path)[0].value["text"] == "one"


def test_parquet(tmp_path):
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    path = tmp_path / "a.parquet"
    rows = [{"messages": [{"role": "user", "content": "hi"}], "tools": "[]"}, {"messages": [], "tools": None}]
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    assert [(row.number, row.value) for row in read(path)] == [(1, rows[0]), (2, rows[1])]
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"a.parquet: not a readable Parquet file"):
        read(path)


@pytest.mark.parametrize("as_file", [True, False])
def test_what_a_table_fills_in_is_no_argument_of_a_call(tmp_path, as_file):
    """An object of a table's column has every key that any object of it has."""
    from datasets import Dataset

    def called(name, arguments):
        return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}

    rows = [
        {"messages": [called("weather", {"place": "Paris", "days": [1, None]})], "tools": [{"name": "weather"}]},
        {"messages": [called("sum", {"terms": [1, 2]})], "tools": [{"name": "sum", "parameters": {"required": ["x"]}}]},
    ]
    table = Dataset.from_list(rows)
    assert table[0]["messages"][0]["tool_calls"][0]["function"]["arguments"]["terms"] is None
    table.to_parquet(tmp_path / "a.parquet")
    assert [row.value for row in read(tmp_path / "a.parquet" if as_file else table)] == rows


def test_folders_and_lists_are_read_in_order_and_each_file_has_its_form(write, tmp_path):
    write("b.jsonl", [{"prompt": "p", "completion": "c"}])
    write("a.jsonl", GOOD)
    (tmp_path / "notes.txt").write_text("not data")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    write(".ipynb_checkpoints/a-checkpoint.jsonl", GOOD)
    assert [row.format for row in read(tmp_path)] == ["text"] * 3 + ["prompt_completion"]
    assert [row.format for row in read([tmp_path / "b.jsonl", str(tmp_path / "a.jsonl")])][:2] == [
        "prompt_completion",
        "text",
    ]
    assert len(read(tmp_path, max_rows=2)) == 2


def test_a_folder_of_several_splits_or_of_files_that_cannot_be_read_is_refused(write, tmp_path):
    (tmp_path / "data").mkdir()
    write("data/train-0.jsonl", GOOD)
    write("data/latest.jsonl", GOOD)  # "test" is a part of a word here
    assert len(open_sources(tmp_path)) == 2
    write("data/train_dev.jsonl", GOOD)  # which says both, and so neither
    assert len(open_sources(tmp_path)) == 3
    write("data/test-0.jsonl", GOOD)
    with pytest.raises(ValueError, match=r"several splits, such as data/train-0.jsonl and data/test-0.jsonl"):
        open_sources(tmp_path)
    (tmp_path / "data" / "test-0.jsonl").rename(tmp_path / "data" / "b.jsonl.gz")
    with pytest.raises(ValueError, match=r"b.jsonl.gz: cannot read .gz"):
        open_sources(tmp_path)


def test_datasets_saved_to_disk_and_in_memory(tmp_path):
    from datasets import Dataset, DatasetDict

    dataset = Dataset.from_list(GOOD)
    assert [row.value for row in read(dataset)] == GOOD
    dataset.save_to_disk(tmp_path / "one")
    DatasetDict({"train": dataset, "test": dataset.select([0])}).save_to_disk(tmp_path / "dict")
    DatasetDict({"test": dataset}).save_to_disk(tmp_path / "test_only")
    assert [row.value for row in read(tmp_path / "one")] == GOOD
    assert [row.value for row in read(tmp_path / "dict")] == GOOD
    assert len(read(tmp_path / "dict" / "test")) == 1
    with pytest.raises(ValueError, match=r"has no split `train` but test"):
        read(tmp_path / "test_only")


def test_a_list_of_dicts(tmp_path):
    rows = read([*GOOD, 5])
    assert [(row.file, row.number, row.error) for row in rows[2:]] == [
        ("rows", 3, ""),
        ("rows", 4, "not an object with columns but int"),
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing/here.jsonl", "no such data file or folder: nothing/here.jsonl"),
        ("./nothing", "no such data file or folder"),
        ("nobody/no-such-data-set", "'nobody/no-such-data-set' is no file or folder, and as a data set it cannot"),
        (7, "data must be a path, a data set's name, a list of them, or a list of dicts, got int"),
    ],
)
def test_what_is_not_there(source, message):
    with pytest.raises(ValueError, match=message):
        open_sources(source)


def test_unknown_files_and_empty_folders(tmp_path):
    with pytest.raises(ValueError, match=r"holds no data file \(.jsonl, .json, .parquet, .csv\)"):
        open_sources(tmp_path)
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"a.txt: cannot read .txt; known: .jsonl"):
        open_sources(tmp_path / "a.txt")


def test_bad_options(write):
    path = write("a.jsonl", GOOD)
    with pytest.raises(ValueError, match=r"data.format must be one of auto, messages.*got 'chat'"):
        read(path, format="chat")
    with pytest.raises(ValueError, match=r"data.max_rows must be at least 1, got 0"):
        read(path, max_rows=0)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (["text", "id"], "text"),
        (["instruction", "input", "output", "text"], "alpaca"),
        (["instruction", "context", "response", "category"], "alpaca"),
        (["prompt", "completion"], "prompt_completion"),
        (["prompt", "answer"], "prompt_completion"),
        (["question", "answer"], "prompt_completion"),
        (["messages", "text"], "messages"),
        (["id", "conversations"], "sharegpt"),
    ],
)
def test_forms_are_known_by_their_columns(columns, expected):
    assert detect_format(columns) == expected


def test_unknown_columns_are_named_with_the_forms_that_exist():
    with pytest.raises(ValueError, match=r"columns body, label fit no known form \(messages: messages; .*text"):
        detect_format(["body", "label"])
    with pytest.raises(ValueError, match=r"columns chosen and rejected are preference data"):
        detect_format(["prompt", "chosen", "rejected"])


def test_alpaca_prompts_have_alpacas_wording():
    example = normalize({"instruction": "Add.", "input": "1 2", "output": "3"}, "alpaca")
    assert example.prompt == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n"
    )
    assert example.completion == "3"
    assert example.messages == [{"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}]
    plain = normalize({"instruction": "Add.", "input": "", "response": "3"}, "alpaca")
    assert plain.prompt == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nAdd.\n\n### Response:\n"
    )


@pytest.mark.parametrize("column", ["system", "system_prompt"])
def test_a_system_message_of_any_form_stands_before_the_prompt(column):
    told = {"role": "system", "content": "Be brief."}
    rows: list[tuple[str, dict]] = [
        ("prompt_completion", {"question": "Q", "response": "A"}),
        ("prompt_completion", {"prompt": "Q", "completion": "A"}),
        ("alpaca", {"instruction": "Q", "output": "A"}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}),
        ("messages", {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}),
    ]
    asked = [normalize(value | {column: "Be brief."}, format) for format, value in rows]
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    pair = normalize_pair({column: "Be brief.", "question": "Q", "chosen": "A", "rejected": "B"})
    labelled = normalize_labelled({column: "Be brief.", "label": True, "messages": turns})
    asked += [one for one in (pair.chosen, labelled.chosen) if one]
    assert [one.messages for one in asked] == [[told, *turns]] * 7
    assert asked[1].prompt == "Be brief.\n\nQ"


def test_columns_of_which_nothing_is_read_are_named():
    tools, turns = [{"name": "add"}], [turn("user", "q"), turn("assistant", "a")]
    row = {
        "question": "Q",
        "prompt": "P",
        "answer": "A",
        "context": "C",
        "id": 0,
        "tools": "",
        "notes": None,
        "system": "S",
    }
    assert unread(row, "prompt_completion") == ["question", "context", "id"]
    assert unread({"instruction": "Q", "output": "A", "context": "C", "history": [["q", "a"]]}, "alpaca") == []
    assert unread({"chosen": "A", "rejected": "B", "prompt": "P", "score": 0.0}, PREFERENCE) == ["score"]
    assert unread({"messages": turns, "label": False, "notes": [1]}, LABELLED) == ["notes"]
    for kind, row in (  # tools are described in a conversation, and not before plain text
        ("prompt_completion", {"prompt": "P", "completion": "C"}),
        (PREFERENCE, {"prompt": "P", "chosen": "A", "rejected": "B"}),
        (LABELLED, {"prompt": "P", "completion": "C", "label": True}),
    ):
        more = {"tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
        assert unread({**row, **more}, kind, plain=True) == [*more]
        assert unread({**row, **more}, kind) == []
        assert unread({**row, "prompt": turns[:1], "tools": tools}, kind) == []
    row = {"prompt": "P", "messages": turns, "tools": tools, "label": True}  # the messages have the prompt
    assert unread(row, LABELLED) == ["prompt"]


def test_a_question_is_a_conversation_and_a_prompt_is_both():
    assert normalize({"question": "q", "answer": "a"}, "prompt_completion").prompt is None
    both = normalize({"prompt": "q", "completion": "a"}, "prompt_completion")
    assert (both.prompt, both.completion, both.messages[1]["content"]) == ("q", "a", "a")


def test_prompts_and_completions_may_be_turns():
    """TRL's conversational form: what is known of the prompt is how many turns it has."""
    asked, answer = [turn("user", "q")], [turn("assistant", "a")]
    for row in (
        {"prompt": asked, "completion": answer},
        {"prompt": "q", "completion": answer},
        {"prompt": asked, "completion": "a"},
        {"question": asked[0], "answer": answer[0]},
        {"prompt": [{"from": "human", "value": "q"}], "completion": [{"from": "gpt", "value": "a"}]},
    ):
        example = normalize(row, "prompt_completion")
        assert (example.prompt, example.messages, example.prompt_messages) == (None, asked + answer, 1)
    row = {"system": "Be kind.", "prompt": asked + answer + asked, "completion": answer, "tools": '[{"name": "add"}]'}
    example = normalize(row, "prompt_completion")
    assert example.prompt_messages == 4 and example.messages[0]["role"] == "system" and len(example.tools) == 1


def test_conversations_as_json_and_openais_other_forms():
    """A cell of JSON, as in CSV files; an older form of a call, which got lost; parts of a later form."""
    older = {"role": "assistant", "content": "Now:", "function_call": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [turn("user", [{"type": "input_text", "text": "q"}]), older, turn("function", "4") | {"name": "add"}]
    for row, form in (
        ({"messages": turns}, "messages"),
        ({"messages": json.dumps(turns)}, "messages"),
        ({"conversations": json.dumps(turns)}, "sharegpt"),
    ):
        asked, called, answered = normalize(row, form).messages
        assert asked == turn("user", "q") and (answered["role"], answered["content"]) == ("tool", "4")
        assert called["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
        assert called["content"] == "Now:" and "function_call" not in called
    for own, kept in (([], "add"), ([{"function": {"name": "new", "arguments": {}}}], "new")):
        [call] = normalize({"messages": [older | {"content": None, "tool_calls": own}]}, "messages").messages[0][
            "tool_calls"
        ]
        assert call["function"]["name"] == kept


def test_roles_by_other_names():
    turns = [turn("System", "s"), turn("human", "q"), turn("gpt", "a"), turn("User", "q"), turn("model", "a")]
    found = normalize({"messages": [*turns, turn("tool", "4"), turn("Developer", "c")]}, "messages").messages
    assert [m["role"] for m in found] == ["system", "user", "assistant", "user", "assistant", "tool", "system"]
    with pytest.raises(RowError, match=r"messages\[1\].role: 'critic' is no known role: rename it to system, user"):
        normalize({"messages": [*turns[:1], turn("critic", "c")]}, "messages")


def test_sharegpt_roles_and_tools():
    row = {
        "system": "Be kind.",
        "tools": '[{"name": "add"}]',
        "conversations": [
            {"from": "human", "value": "1+1"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "Two."},
        ],
    }
    example = normalize(row, "sharegpt")
    assert [m["role"] for m in example.messages] == ["system", "user", "assistant", "tool", "assistant"]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert example.messages[2] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert example.tools == [{"type": "function", "function": {"name": "add"}}]


def test_messages_with_parts_and_with_the_nones_of_tables():
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    row = {"messages": [{"role": "user", "content": parts, "name": None}, {"role": "assistant", "content": "x"}]}
    assert normalize(row, "messages").messages == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "x"},
    ]


def turn(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("row", "format", "message"),
    [
        ({"txt": "a"}, "text", "no column text; it has txt"),
        ({"text": 5}, "text", "column text is not text but int"),
        ({"text": "  \n"}, "text", "empty text"),
        ({"text": "a\ud83d"}, "text", "not valid Unicode"),
        ({"instruction": "a", "output": " "}, "alpaca", "empty response"),
        ({"prompt": "a"}, "prompt_completion", "no column completion or response or answer; it has prompt"),
        ({"prompt": "a", "completion": None}, "prompt_completion", "column completion is null"),
        ({"prompt": [], "completion": [turn("assistant", "x")]}, "prompt_completion", "the prompt is an empty list"),
        ({"prompt": [turn("user", "x")], "completion": []}, "prompt_completion", "the completion is an empty list"),
        ({"prompt": [turn("user", "x")], "completion": " "}, "prompt_completion", "empty response"),
        ({"prompt": [turn("user", "x")], "completion": 4}, "prompt_completion", "not a list of turns but int"),
        ({"prompt": "x", "completion": ["a", "b"]}, "prompt_completion", "a turn is not an object but str"),
        ({"prompt": "x", "completion": [turn("user", "y")]}, "prompt_completion", "completion does not end with an"),
        ({"messages": "hi"}, "messages", "the conversation is text, and not the JSON of a list of turns"),
        ({"messages": '"hi"'}, "messages", "the conversation is not a list of turns but str"),
        ({"messages": []}, "messages", "empty conversation"),
        ({"messages": ["hi"]}, "messages", "a turn is not an object but str"),
        ({"messages": [{"content": "x"}]}, "messages", "a message has no role"),
        ({"messages": [{"role": "user"}]}, "messages", "a message of the role user has no content"),
        ({"messages": [turn("user", "x"), turn("assistant", "")]}, "messages", "empty response"),
        ({"messages": [turn("user", [{"type": "image"}])]}, "messages", "a part of the type image in content"),
        ({"messages": [turn("user", 5)]}, "messages", "content is neither text nor a list of parts but int"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "sharegpt", "'alien' is no known role"),
        ({"conversations": [{"value": "x"}]}, "sharegpt", "a message has no role; it has value"),
        ({"conversations": [{"from": "function_call", "value": "no"}]}, "sharegpt", "a tool call is not JSON"),
        ({"messages": [turn("user", "x")], "tools": "{"}, "messages", "tools: is not JSON"),
    ],
)
def test_bad_rows_say_why(row, format, message):
    with pytest.raises(RowError, match=message):
        normalize(row, format)


@pytest.mark.parametrize("given", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": "null"}])
def test_a_call_without_arguments_has_an_empty_object(given):
    call = {"type": "function", "function": {"name": "now", **given}}
    row = {"messages": [turn("user", "x"), {"role": "assistant", "content": None, "tool_calls": [call]}]}
    [made] = normalize(row, "messages").messages[1]["tool_calls"]
    assert made["function"] == {"name": "now", "arguments": {}}
