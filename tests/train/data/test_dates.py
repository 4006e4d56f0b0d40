"""The day that a chat template writes is the run's: in rows, prompts and caches, and after midnight."""

from __future__ import annotations

import dataclasses
import datetime
import json
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model
from transformers.utils import chat_template_utils

from jaxtune.conversations import dates
from jaxtune.models.config import LayerSpec
from jaxtune.models.lora import get_peft_model
from jaxtune.system import processes
from jaxtune.train.config import CheckpointConfig, DataConfig
from jaxtune.train.config.file import load_config
from jaxtune.train.data import prepare
from jaxtune.train.data.rows.reading import Window, open_sources
from jaxtune.train.data.rows.streamed import StreamedRows
from jaxtune.train.evaluation.evaluate import questions_of
from jaxtune.train.folder.record import with_today
from jaxtune.train.sampled.own_samples import _Reading
from jaxtune.train.sampled.prompts import read_prompts
from jaxtune.train.trainer import Trainer
from tests.train.data.conftest import PLAIN_TEMPLATE, make_tokenizer
from tests.train.tiny_runs import assert_same, make_config

FIRST, SECOND = "2026-11-28", "2026-11-29"
# As Llama 3.2, SmolLM3, gpt-oss and Mistral write it.
LLAMA = (
    "{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
    '        {%- set date_string = strftime_now("%d %b %Y") %}\n    {%- endif %}\n{%- endif %}\n'
    "<|im_start|>system\nToday Date: {{ date_string }}<|im_end|>\n"
)
SMOLLM = (
    '{%- set today = strftime_now("%d-%B-%Y") -%}\n<|im_start|>system\n{{- "Today Date: " ~ today ~ "<|im_end|>\n" -}}'
)
GPT_OSS = (
    '{%- macro head() -%}\n{{- "Current date: " + strftime_now("%Y-%m-%d") + "\n" -}}\n{%- endmacro -%}\n{{ head() }}'
)
MISTRAL = '  {%- set when = strftime_now("%-d %A, %j") %}\n\n{{ "Current date: " + when }}'
TEMPLATES = {"llama": LLAMA, "smollm": SMOLLM, "gpt-oss": GPT_OSS, "mistral": MISTRAL}
ROWS = [
    {"messages": [{"role": "user", "content": f"Add {n}:"}, {"role": "assistant", "content": "It is 4." * (1 + n % 2)}]}
    for n in range(24)
]


def rendered(template: str, day: str | None = None) -> str:
    messages = [{"role": "user", "content": "x"}]
    (text,), _ = chat_template_utils.render_jinja_template(
        conversations=[messages], chat_template=dates.dated(template, day), add_generation_prompt=True
    )
    return text


def at(monkeypatch, day: str) -> None:
    """It is that day, here and for transformers."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.combine(datetime.date.fromisoformat(day), datetime.time())

    monkeypatch.setattr(dates, "today", lambda: day)
    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("begin", ["", "\n", "\n\n", "  ", " \n ", "a\n"])
def test_a_dated_template_writes_what_transformers_writes_on_that_day(monkeypatch, name, begin):
    template = begin + TEMPLATES[name] + PLAIN_TEMPLATE
    for day in (FIRST, SECOND, "2024-02-29"):
        at(monkeypatch, day)
        want = rendered(template)
        at(monkeypatch, "1999-01-01")
        assert rendered(template, day) == want != rendered(template)


DIRECTIVES = [*"aAbBdmyYjUWwHIMSpcxXeDFGgVu%", "-d", "-m", "-j", "_d", "^a"]


@settings(max_examples=100, deadline=None)
@given(
    day=st.dates(datetime.date(1000, 1, 1)),
    form=st.lists(st.sampled_from([*(f"%{one}" for one in DIRECTIVES), " ", ", ", "d", "Y", "é"]), min_size=1),
)
def test_any_format_is_that_of_strftime(day, form):
    text = "".join(form)
    want = datetime.datetime.combine(day, datetime.time()).strftime(text)
    assert rendered(f"{{{{ strftime_now({text!r}) }}}}", day.isoformat()) == want


def test_a_template_that_writes_no_date_is_left_alone():
    assert dates.dated(PLAIN_TEMPLATE, FIRST) == PLAIN_TEMPLATE and dates.dated(LLAMA, None) == LLAMA
    assert not dates.writes_date(PLAIN_TEMPLATE) and dates.writes_date(LLAMA)


@pytest.mark.parametrize("day", ["28.11.2026", "2026-11-31", "2026-1-1", "today", "20261128", ""])
def test_another_form_of_a_day_is_refused(day):
    with pytest.raises(ValueError, match=r"data.today = .*: must be a day such as 2026-11-28"):
        DataConfig(train="rows.jsonl", today=day)
    assert load_config("quickstart", ["data.today=2026-11-28"]).data.today == FIRST


def texts(data, tokenizer) -> str:
    return tokenizer.decode(data.documents.tokens)


def test_cached_tokens_are_of_their_day(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tokenizer = make_tokenizer(LLAMA + PLAIN_TEMPLATE)

    def made(day: str | None, tokenizer: Any = tokenizer, template: str | None = None):
        options: dict[str, Any] = dict(length=64, cache_dir=tmp_path / "cache", num_workers=1, template=template)
        return prepare(tmp_path / "rows.jsonl", tokenizer, today=day, **options)

    first, again, second = made(FIRST), made(FIRST), made(SECOND)
    assert (first.cached, again.cached, second.cached) == (False, True, False)
    assert "Date: 28 Nov 2026" in texts(again, tokenizer) and "Date: 29 Nov 2026" in texts(second, tokenizer)
    at(monkeypatch, SECOND)
    assert made(None).cached  # of the second day
    at(monkeypatch, "2026-11-30")
    assert not made(None).cached
    plain = make_tokenizer()
    assert not made(FIRST, plain).cached and made(SECOND, plain).cached and made(None, plain).cached
    assert "29 Nov 2026" in texts(made(SECOND, plain, LLAMA + PLAIN_TEMPLATE), plain)


@pytest.mark.parametrize("template", [None, "given"])
def test_prompts_questions_and_streams_have_the_day_of_the_run(template, tmp_path, monkeypatch):
    at(monkeypatch, "2026-11-30")
    tokenizer = make_tokenizer(LLAMA + PLAIN_TEMPLATE if template is None else PLAIN_TEMPLATE)
    template = None if template is None else LLAMA + PLAIN_TEMPLATE
    data = DataConfig(train="rows", template=template, today=FIRST)
    [prompt, *_] = read_prompts(ROWS, tokenizer, data, 64)
    [question, *_] = questions_of(tokenizer, ROWS, 4, template, 128, FIRST)
    asked = _Reading(tokenizer, data, 96, 64, True)(ROWS[0], "")

    def tokenised(window: Window):
        return prepare(window, tokenizer, length=64, template=template, today=FIRST, num_workers=1)

    stream = StreamedRows("rows", open_sources(ROWS), tokenised, 8)
    found = [prompt.ids, question.prompt, asked.prompt, stream.first.documents.tokens]
    assert all("Date: 28 Nov 2026" in tokenizer.decode(ids) for ids in found)
    now = questions_of(tokenizer, ROWS, 4, template, 128)[0].prompt
    assert "Date: 30 Nov 2026" in tokenizer.decode(now)


def test_all_processes_take_the_day_of_the_first(tmp_path, monkeypatch):
    at(monkeypatch, SECOND)
    data, tokenizer = make_config(tmp_path).data, make_tokenizer(LLAMA + PLAIN_TEMPLATE)
    assert with_today(data, tmp_path, tokenizer).today == SECOND
    monkeypatch.setattr(processes, "of_first", lambda value: FIRST)
    assert with_today(data, tmp_path, tokenizer).today == FIRST
    assert with_today(data, tmp_path, make_tokenizer()) == with_today(data, tmp_path, None) == data
    dated = dataclasses.replace(data, today="2020-02-20")
    assert with_today(dated, tmp_path, tokenizer) == dated


@pytest.mark.full
def test_a_run_goes_on_after_midnight(tmp_path, monkeypatch):
    """With rows that no cache holds, to the bits of a run that no night interrupted; held-out rows stay the same."""
    tokenizer = make_tokenizer(LLAMA + PLAIN_TEMPLATE)
    shape: dict[str, Any] = dict(layers=(LayerSpec(),), vocab_size=len(tokenizer))
    given = get_peft_model(tiny_model("float32", **shape), r=2)

    def trainer(output: str, steps: int, **data) -> Trainer:
        settings: dict[str, Any] = dict(train="rows", length=64, eval_rows=4, num_workers=1) | data
        config = make_config(
            tmp_path / output,
            steps=steps,
            data=DataConfig(**settings),
            checkpoint=CheckpointConfig(every_minutes=None, every_steps=2),
        )
        return Trainer(given, tokenizer, config, ROWS)

    at(monkeypatch, FIRST)
    begun = trainer("run", 2)
    said = begun.data_summary().splitlines()
    assert said[-1] == (
        "the chat template writes today's date: 28 Nov 2026 in all rows (data.today); the saved template, chat and "
        "serve write the day of asking"
    )
    begun.train()
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["data"]["today"] == FIRST
    assert begun.tokenizer.chat_template == LLAMA + PLAIN_TEMPLATE  # the one that is saved
    at(monkeypatch, SECOND)
    ended = trainer("run", 4)
    assert ended.config.data.today == FIRST and ended.eval_data is not None and begun.eval_data is not None
    assert ended.eval_data.documents.identity == begun.eval_data.documents.identity
    whole = trainer("whole", 4, today=FIRST)
    assert_same(ended.train(), whole.train())
    with pytest.raises(ValueError, match="this run cannot continue that checkpoint"):
        trainer("run", 4, today=SECOND).train()
