"""A Modelfile says to Ollama what the chat template writes: rendered here as Go's text/template and Ollama would."""

import functools
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONFIGS

import jaxtune
from jaxtune import cli
from jaxtune.conversations.templates import render
from jaxtune.export.modelfile import Turns, create_command, modelfile
from jaxtune.models.files.model_folder import load_tokenizer
from jaxtune.models.hf import model_from_config

PACKAGED = Path(__file__).resolve().parents[2] / "jaxtune/train/data/rendering/chat_templates"
TOKENIZERS = {"llama": "llama-3.2", "mistral": "mistral-7b-v0.3", "gpt": "gpt-oss", "phi": "phi-4"}
DATED = {"llama3_2", "gptoss", "gptoss_training"}  # templates that write the day of asking


ACTION = r'\{\{((?:"(?:[^"\\]|\\.)*"|[^"])*?)\}\}'


class Go:
    """The part of Go's text/template that templates of Ollama use: actions, if, else if, else, range, variables."""

    def __init__(self, source):
        self.parts, self.at = re.split(ACTION, source, flags=re.S), 0
        self.program = self._block()[0]

    def _block(self):
        """(statements up to an else or end, that word)."""
        found = []
        while self.at < len(self.parts):
            piece, is_action = self.parts[self.at], self.at % 2
            self.at += 1
            if not is_action:
                found.append(("text", piece))
                continue
            assert not piece.startswith("-") and not piece.endswith("-")  # trims, which are not used
            words = piece.strip()
            if words == "end" or words.startswith("else"):
                return found, words
            if words.startswith("if "):
                found.append(self._branches(words[3:]))
            elif words.startswith("range "):
                body, end = self._block()
                assert end == "end"
                found.append(("range", words[6:], body))
            else:
                found.append(("do", words))
        return found, ""

    def _branches(self, condition):
        body, end = self._block()
        if end == "end":
            return "if", condition, body, []
        if end == "else":
            other, last = self._block()
            assert last == "end"
            return "if", condition, body, other
        return "if", condition, body, [self._branches(end.removeprefix("else if "))]

    def render(self, data):
        self.root, out = data, []
        self._run(self.program, data, {}, out)
        return "".join(out)

    def _run(self, statements, dot, variables, out):
        for kind, *rest in statements:
            if kind == "text":
                out.append(rest[0])
            elif kind == "if":
                self._run(rest[1] if self._value(rest[0], dot, variables) else rest[2], dot, variables, out)
            elif kind == "range":
                names, _, over = rest[0].partition(" := ")
                index, _, item = names.partition(", ")
                for place, each in enumerate(self._value(over, dot, variables)):
                    variables[index], variables[item] = place, each
                    self._run(rest[1], each, variables, out)
            elif assigned := re.fullmatch(r"(\$\w+) (:?=) (.*)", rest[0]):
                assert (assigned[2] == ":=") or assigned[1] in variables
                variables[assigned[1]] = self._value(assigned[3], dot, variables)
            else:
                out.append(self._value(rest[0], dot, variables))

    def _value(self, text, dot, variables):
        words = re.findall(r'"(?:[^"\\]|\\.)*"|[()]|[^\s()]+', text)
        value, after = self._call(words, 0, dot, variables)
        assert after == len(words), text
        return value

    def _call(self, words, at, dot, variables):
        values = []
        while at < len(words) and words[at] != ")":
            if words[at] == "(":
                value, at = self._call(words, at + 1, dot, variables)
            else:
                value = self._term(words[at], dot, variables)
            values.append(value)
            at += 1
        first, *rest = values
        return (first(*rest) if callable(first) else first), at

    def _term(self, word, dot, variables):
        functions = {
            "eq": lambda a, b: a == b,
            "and": lambda *values: next((value for value in values if not value), values[-1]),
            "len": len,
            "slice": lambda values, start: values[start:],
        }
        if word[0] == '"':
            return json.loads(word)
        if word[0] == ".":
            return dot[word[1:]]
        if word.startswith("$."):
            return self.root[word[2:]]
        if word[0] == "$":
            return variables[word]
        return int(word) if word.isdigit() else {"true": True, "false": False}.get(word, functions.get(word))


def read(text):
    """(FROM, TEMPLATE or None, {parameter: values}) of a Modelfile, as Ollama's parser reads it."""
    assert text.count('"""') in (0, 2)
    template = re.search(r'^TEMPLATE """(.*?)"""$', text, re.M | re.S)
    rest = text.replace(template[0], "") if template else text
    parameters = {}
    for line in rest.splitlines():
        assert not line or line.startswith(("FROM ", "#", "PARAMETER "))
        if line.startswith("PARAMETER "):
            _, name, value = line.split(" ", 2)
            parameters.setdefault(name, []).append(json.loads(value))
    return re.search(r"^FROM (.*)$", rest, re.M)[1], template and template[1], parameters


def asked(system, turns):
    """What Ollama gives a template for a conversation."""
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns)]
    messages = ([] if system is None else [{"role": "system", "content": system}]) + messages
    fields = [{"Role": one["role"], "Content": one["content"]} for one in messages]
    return messages, {"System": system or "", "Messages": fields}


def model(generation=None):
    config = json.dumps({"eos_token_id": None})
    source = SimpleNamespace(generation_config=generation and json.dumps(generation), config=config)
    return SimpleNamespace(source=source, config=SimpleNamespace(vocab_size=10**6))


loaded = functools.cache(load_tokenizer)


def tokenizer_with(test_data, file):
    name = next((folder for start, folder in TOKENIZERS.items() if file.stem.startswith(start)), "qwen2.5")
    tokenizer = loaded(test_data / "tokenizers" / name)
    tokenizer.chat_template = file.read_text()
    return tokenizer


def all_templates(test_data):
    return [*sorted((test_data / "chat_templates").glob("*.jinja")), *sorted(PACKAGED.glob("*.jinja"))]


@pytest.mark.full
def test_every_template_is_written_as_ollama_reads_it(test_data):
    draw, words = random.Random(7), ["a", "Ω", "{{ .System }}", "}}", '"', "\n", "  ", "<|x|>", "\\", "'", "{", "%}"]
    for file in all_templates(test_data):
        tokenizer = tokenizer_with(test_data, file)
        text, _ = modelfile(model(), tokenizer, "model-q8_0.gguf")
        name, template, parameters = read(text)
        assert name == "./model-q8_0.gguf"
        if file.parent != PACKAGED and file.stem in DATED:
            assert template is None
            continue
        assert template is not None, file
        assert parameters["stop"] and all(stop in tokenizer.get_vocab() for stop in parameters["stop"])
        bos = tokenizer.bos_token if tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id] else ""
        for count in (1, 3, 5, 7):
            for has_system in (False, True):
                if has_system and "no place for a system message" in text:
                    continue
                texts = [f"x{''.join(draw.choices(words, k=draw.randint(0, 6)))}y" for _ in range(count + 1)]
                messages, data = asked(texts[0] if has_system else None, texts[1:])
                expected = render(tokenizer, tokenizer.chat_template, messages, add_generation_prompt=True)
                assert Go(template).render(data) == expected.removeprefix(bos), (file, count, has_system)


TEXTS = st.text(alphabet='ab {}"\n.$-<|>', max_size=8)
PAIRS = st.tuples(TEXTS, TEXTS)


@settings(max_examples=100, deadline=None)
@given(
    st.builds(Turns, TEXTS, st.none() | PAIRS, TEXTS, TEXTS, TEXTS, st.none() | PAIRS),
    st.none() | st.text(min_size=1, max_size=4),
    st.lists(st.text(max_size=4), min_size=1, max_size=7).filter(lambda turns: len(turns) % 2),
)
def test_any_texts_around_messages_are_written(turns, system, contents):
    if turns.system is None:
        turns, system = Turns(turns.begin, None, turns.answered, turns.asked, turns.prompt), None
    source = turns.to_go()
    assert '"""' not in source
    assert Go(source).render(asked(system, contents)[1]) == turns.text(system, contents)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "the model has no chat template"),
        ("{{ strftime_now('%d') }}{{ messages[0].content }}", "the day of asking"),
        ("{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}", "a Go template cannot write the same"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "a Go template cannot write the same"),
        ("{{ raise_exception('no') }}", "a Go template cannot write the same"),
        # What two questions do not show: the third has another mark.
        (
            "{% for m in messages %}{{ '#' if loop.index > 4 else '' }}{{ m.role }}:{{ m.content }}\n{% endfor %}",
            "a Go template cannot write the same",
        ),
    ],
)
def test_what_ollama_cannot_write_is_said(test_data, template, why):
    tokenizer = loaded(test_data / "tokenizers/qwen2.5")
    tokenizer.chat_template = template
    text, [note] = modelfile(model(), tokenizer, "m.gguf")
    assert read(text)[1] is None and why in text and why in note


def test_parameters_are_those_of_the_models_files(test_data):
    tokenizer = tokenizer_with(test_data, PACKAGED / "chatml.jinja")
    generation = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True, "top_p": None}
    parameters = read(modelfile(model(generation), tokenizer, "m.gguf")[0])[2]
    assert parameters.pop("stop") == ["<|im_end|>"]
    assert parameters == {"temperature": [0.7], "top_k": [20], "repeat_penalty": [1.05]}


@pytest.mark.parametrize(("name", "made"), [("My Model_gguf", "my-model_gguf"), ("..", "model"), ("Ünï", "n")])
def test_names_are_those_that_ollama_takes(name, made):
    assert create_command("a folder", name) == f"ollama create {made} -f 'a folder/Modelfile'"


@pytest.mark.full
def test_the_export_writes_it_beside_the_file_and_says_what_is_next(tmp_path, tokenizer, capsys):
    base, out = tmp_path / "base", tmp_path / "My Model"
    config = CONFIGS["llama"] | {"vocab_size": 128, "tie_word_embeddings": False}
    jaxtune.save_pretrained(model_from_config(config, jax.random.key(0)), base, tokenizer)
    assert cli.main(["export", str(base), str(out), "--to", "gguf", "--outtype", "f16"]) == 0
    said = capsys.readouterr().out
    assert f"next: ollama create my-model -f '{out}/Modelfile'" in said
    name, template, parameters = read((out / "Modelfile").read_text())
    assert (out / name).is_file() and parameters["stop"] == ["<|end|>"]
    messages, data = asked("S", ["Q"])
    assert Go(template).render(data) == render(tokenizer, tokenizer.chat_template, messages, add_generation_prompt=True)
