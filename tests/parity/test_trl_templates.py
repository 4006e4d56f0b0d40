"""Templates of families beside TRL's marked ones: the same conversations train, with the same answers; and all of TRL's
originals, whose tokens and masks are TRL's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
import trl
from trl.chat_template_utils import get_training_chat_template

from jaxtune.conversations.ends import turn_ends
from jaxtune.train.config import ConfigError
from jaxtune.train.data.rendering.formats import Example, normalize
from jaxtune.train.data.rendering.templates import RowEncoder
from jaxtune.train.data.rows.row_errors import RowError
from jaxtune.train.sampled.tool_formats import Call, ToolFormat
from tests.parity.test_trl_masks import TEMPLATES, tokenizer_of
from tests.train.data.conftest import spans
from tests.train.data.test_conversations import TOOLS, answer, rounds, user

FOLDER = Path(trl.__file__).parent / "chat_templates"
THOUGHTS = ("hm", "so", "again", "done")
CHATS = {
    "thoughts": ([user("A?"), answer("Blue", "hm"), user("C?"), answer("Red", "so")], None, ["Blue", "Red"]),
    "a first thought": ([user("A?"), answer("Blue", "hm"), user("C?"), answer("Red")], None, ["Blue", "Red"]),
    "two rounds": (rounds(None, None, None, None), TOOLS, ["add", "It is 2.", "add", "It is 4."]),
    "two rounds with thoughts": (rounds(*THOUGHTS), TOOLS, ["add", "It is 2.", "add", "It is 4."]),
    "a round, then a turn": (
        [*rounds(*THOUGHTS)[:4], user("?"), answer("Yes", "fine")],
        TOOLS,
        ["add", "It is 2.", "Yes"],
    ),
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("qwen3_5_think", "qwen3"),
        ("qwen3_5_nothink", "qwen3"),
        ("qwen3_6", "qwen3"),
        ("qwen3", "qwen3"),
        ("gptoss", "gpt-oss"),
    ],
)
def test_what_trains_there_trains_here(name, folder, chat, test_data):
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(test_data / "tokenizers" / folder)
    messages, tools, expected = CHATS[chat]
    found = []
    for kind in ("", "_training"):
        template = (FOLDER / f"{name}{kind}.jinja").read_text(encoding="utf-8")
        (encoded,) = RowEncoder(tokenizer, template=template).encode([Example(messages=messages, tools=tools)])
        assert not isinstance(encoded, RowError), encoded
        found.append((encoded, spans(tokenizer, encoded.tokens, encoded.mask)))
    (ours, texts), (_, theirs) = found
    assert len(texts) == len(theirs) == len(expected) == ours.ended
    for text, other, wanted in zip(texts, theirs, expected, strict=True):
        assert wanted in text and wanted in other
        # Ours has the answer and its end as TRL's has them; its thought, where the template writes it.
        assert text[text.index(wanted) :] == other[other.index(wanted) :]
    kept = [thought for thought in THOUGHTS if any(thought in text for text in texts)]
    assert bool(ours.left_out) == ("thought" in chat or "then" in chat) or kept


# Special tokens of Gemma 4's template; the tokenizer itself is not among the test data.
GEMMA_4 = ("turn", "channel", "tool", "tool_call", "tool_response")
CALL, SECOND = (f"<|tool_call>call:add{{a:{number}}}<tool_call|><|tool_response>" for number in (1, 3))
HM, SO, AGAIN, DONE = (f"<|channel>thought\n{thought}\n<channel|>" for thought in THOUGHTS)


def gemma_4(test_data):
    """Qwen's tokenizer with Gemma 4's marks."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(test_data / "tokenizers" / "qwen3")
    marks = [f"<{side}>" for name in GEMMA_4 for side in (f"|{name}", f"{name}|")]
    tokenizer.add_special_tokens({"additional_special_tokens": [*marks, '<|"|>', "<|think|>"]})
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    return tokenizer


@pytest.mark.parametrize(
    ("chat", "trained"),
    [
        ("thoughts", ["Blue<turn|>", f"{SO}Red<turn|>"]),
        ("two rounds", [CALL, "It is 2.<turn|>", SECOND, "It is 4.<turn|>"]),
        ("two rounds with thoughts", [CALL, "It is 2.<turn|>", AGAIN + SECOND, f"{DONE}It is 4.<turn|>"]),
        ("a round, then a turn", [CALL, "It is 2.<turn|>", "<|channel>thought\nfine\n<channel|>Yes<turn|>"]),
    ],
)
def test_what_trains_of_gemma_4s_template(chat, trained, test_data):
    """Google's template of July 2026, without marks: calls train with the token at which the model stops for a result,
    results never, thoughts where the template writes them, and rows that lost a thought say so. An answer goes on in
    the turn of the tool's result, so that nothing stands before it."""
    tokenizer, (messages, tools, _) = gemma_4(test_data), CHATS[chat]
    template = (FOLDER / "gemma4_v5.jinja").read_text(encoding="utf-8")
    (encoded,) = RowEncoder(tokenizer, template=template).encode([Example(messages=messages, tools=tools)])
    assert not isinstance(encoded, RowError), encoded
    assert spans(tokenizer, encoded.tokens, encoded.mask) == trained and encoded.ended == len(trained)
    text = tokenizer.decode(encoded.tokens)
    assert text == tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False)
    assert tools is None or text.count("<|tool>declaration:add{") == 1
    lost = {"two rounds": 0, "thoughts": 1}.get(chat, 2)
    assert encoded.left_out.count("reasoning_content") == lost


def test_sampling_with_tools_in_gemma_4s_form(test_data):
    """What its template writes of a call is parsed as that call; what a tool answers follows within the same turn; and
    a model that does not end its turn where the answer belongs is refused."""
    tokenizer = gemma_4(test_data)
    tokenizer.chat_template = (FOLDER / "gemma4_v5.jinja").read_text(encoding="utf-8")
    stop, end = tokenizer.convert_tokens_to_ids(["<|tool_response>", "<turn|>"])
    form = ToolFormat(tokenizer, None, [end, stop])
    arguments = {"a": -1.5, "list": ["x", {"deep": None}], "text": 'two {words}: "so"', "yes": True}
    asked = [user("Add."), answer("", "hm") | {"tool_calls": [Call("add", arguments).message]}]
    text = tokenizer.apply_chat_template(asked, tokenize=False).removesuffix("<|tool_response>")
    written = text[text.index("<|channel>") :]
    message, calls = form.parsed(form._ids(written), {})
    assert calls == [Call("add", arguments)] and message["content"] == ""
    told = form.decode(form.suffix([{"role": "tool", "name": "add", "content": "2"}]))
    assert told == 'response:add{value:<|"|>2<|"|>}<tool_response|>'
    with pytest.raises(ConfigError, match="no token that ends an answer"):
        ToolFormat(tokenizer, None, [end])


def test_sampling_with_tools_in_glms_form(test_data):
    """The token of the tool's role ends the call, and stands before the result once."""
    tokenizer = original("glm4moe", test_data)
    form = ToolFormat(tokenizer, None, turn_ends(tokenizer))
    asked = [user("Add."), answer("") | {"tool_calls": [Call("add", {"a": 1}).message]}]
    results = [{"role": "tool", "name": "add", "content": "2"}]
    before = tokenizer.apply_chat_template(asked, tokenize=False)
    whole = tokenizer.apply_chat_template([*asked, *results], tokenize=False, add_generation_prompt=True)
    assert f"{before}<|observation|>{form.decode(form.suffix(results))}" == whole
    message, calls = form.parsed(form._ids(before.rpartition("<|assistant|>")[2]), {})
    assert calls == [Call("add", {"a": 1})] and message["content"] == ""


# ---- all originals of TRL

ORIGINALS = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}, "required": ["a"]}
ADD = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}]
CALLS = [{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
ASKED, ADDED = user("Add."), {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "2"}
CONVERSATIONS = {
    "plain": {"messages": [user("A?"), answer("Blue.")]},
    "system": {"messages": [{"role": "system", "content": "Be kind."}, user("A?"), answer("Blue.")]},
    "thoughts": {"messages": [user("A?"), {**answer("Blue."), "reasoning_content": "Hm."}]},
    "tools": {"messages": [ASKED, {**answer(""), "tool_calls": CALLS}, ADDED, answer("It is 2.")], "tools": ADD},
    "turns": {"messages": [user("A?"), answer("Blue."), user("C?"), answer("Red."), user("E?"), answer("Green.")]},
}
_KEPT = (
    "TRL's version writes a thought, if only an empty one, into every answer; jaxtune keeps the model's own template"
)
_REFUSED = "the template refuses it"
_PARTS = "the template takes contents in parts, and is of a model with pictures that is not supported"
# {(template, conversation): why our tokens or marks are not TRL's}
OTHERWISE = {
    **{(name, "turns"): _KEPT for name in ("qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6")},
    ("qwen3", "tools"): _KEPT,
    ("deepseekv3", "tools"): "it takes arguments as text alone; TRL's version as an object too",
    ("diffusion_gemma", "tools"): "TRL does not train the token at which the model waits for a result",
    **{(name, "tools"): _REFUSED for name in ("cohere", "cohere2", "gemma", "gemma3", "idefics3", "smolvlm")},
    ("gemma", "system"): _REFUSED,
    **{("llava_next", chat): _PARTS for chat in CONVERSATIONS},
}
_SPECIAL = re.compile(
    r"<\|[A-Za-z_ ]+\|?>|<[a-z_]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_(?:turn|utterance|image)>|\[gMASK\]|<sop>|</?think>"
)
_ENDS = ("<|im_end|>", "<|return|>", "<end_of_turn>", "<turn|>", "<|eot_id|>", "<|END_OF_TURN_TOKEN|>")
_ENDS = (*_ENDS, "<｜end▁of▁sentence｜>", "<end_of_utterance>", "<|eot|>", "<|end|>")


def original(name: str, test_data: Path):
    """A tokenizer with the special tokens of one of TRL's original templates."""
    folder = "gpt-oss" if name == "gptoss" else "qwen3"
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(test_data / "tokenizers" / folder)
    tokenizer.chat_template = template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer.add_special_tokens({"additional_special_tokens": sorted({*_SPECIAL.findall(template)})})
    tokenizer.eos_token = next((end for end in _ENDS if end in template), "<|endoftext|>")
    if "bos_token" in template:
        tokenizer.add_special_tokens({"bos_token": "<|begin_of_text|>"})
    return tokenizer


def of_ours(tokenizer, row, train_on):
    """(Ids, mask), without the BOS that no template wrote; RowError for a row that is refused."""
    [encoded] = RowEncoder(tokenizer, train_on=train_on).encode([normalize(row, "messages")])
    if isinstance(encoded, RowError):
        raise encoded
    assert encoded.ended == encoded.responses
    ids, mask = encoded.tokens.tolist(), encoded.mask.tolist()
    return (ids[1:], mask[1:]) if ids[0] == tokenizer.bos_token_id else (ids, mask)


def of_trl(tokenizer, row, template):
    options = dict(tokenize=True, return_dict=True, return_assistant_tokens_mask=True, chat_template=template)
    made = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), **options)
    ids, mask = list(made["input_ids"]), [bool(on) for on in made["assistant_masks"]]
    return (ids[1:], mask[1:]) if ids[0] == tokenizer.bos_token_id else (ids, mask)


@pytest.mark.parametrize("name", ORIGINALS)
def test_tokens_and_marks_of_all_originals(name, test_data):
    tokenizer = original(name, test_data)
    try:
        marked = get_training_chat_template(tokenizer) or tokenizer.chat_template
    except ValueError:  # TRL has no marked version: the text is compared
        marked = None
    for chat, row in CONVERSATIONS.items():
        try:
            whole = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
            found = of_ours(tokenizer, row, "turns" if marked else "responses")
        except RowError as error:
            assert (name, chat) in OTHERWISE, error
            continue
        except Exception as error:  # transformers has it from the template
            assert OTHERWISE.get((name, chat)) in (_REFUSED, _PARTS, OTHERWISE["deepseekv3", "tools"]), error
            with pytest.raises(RowError, match="the chat template fails"):
                of_ours(tokenizer, row, "responses")
            continue
        text = tokenizer.decode(found[0])
        assert text.removesuffix("<|user|>") == whole.removeprefix(tokenizer.bos_token or "<none>")
        if marked is not None:
            theirs = of_trl(tokenizer, row, marked)
            alike = found == theirs
            words = [spans(tokenizer, *one) for one in (found, theirs)]
            assert alike == ((name, chat) not in OTHERWISE), (name, chat, words)


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_of_stored_templates(name, test_data):
    """Their tokens are those of transformers, or both refuse the row; each response has its end."""
    tokenizer = tokenizer_of(test_data, name)
    marks = sorted({*_SPECIAL.findall(tokenizer.chat_template)} - {*tokenizer.get_vocab()})
    tokenizer.add_tokens([transformers.AddedToken(mark, special=True, normalized=False) for mark in marks])
    for chat, row in CONVERSATIONS.items():
        options = dict(tools=row.get("tools"), return_dict=False)
        try:
            theirs = tokenizer.apply_chat_template(row["messages"], **options)
        except Exception:  # of the template
            with pytest.raises(RowError, match="the chat template fails"):
                of_ours(tokenizer, row, "turns")
            assert chat in ("tools", "system")
            continue
        ids, mask = of_ours(tokenizer, row, "turns")
        assert ids == theirs[theirs[0] == tokenizer.bos_token_id :]
        answers = [turn["content"] for turn in row["messages"] if turn["role"] == "assistant" and turn["content"]]
        texts = spans(tokenizer, ids, mask)
        assert all(any(text in said for said in texts) for text in answers)
