"""What comes from outside cannot steer a terminal, nor rich."""

import io
import logging

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jaxtune.system import terminal
from jaxtune.system.terminal import PrintableFormatter, console, fitted, plain, printable, say

ANY_TEXT = st.text(st.characters())  # surrogates too


def test_what_steers_a_terminal_is_shown():
    assert printable("a\x1b[2J\x07b\r\x9b1m") == r"a\x1b[2J\x07b\r\x9b1m"
    assert printable("\ud800 \u202eabc\u2066\u2028") == r"\ud800 \u202eabc\u2066\u2028"


def test_what_people_write_is_kept():
    kept = "tab\tline\nnaïve 日本語\u3000می\u200cخواهم 👩\u200d🚀 [/b] \\x1b"
    assert printable(kept) == kept


@given(ANY_TEXT)
def test_any_text_can_be_encoded_and_is_made_printable_once(text):
    once = printable(text)
    assert "\x1b" not in once and "\r" not in once
    once.encode("utf-8")
    assert printable(once) == once


@given(ANY_TEXT)
def test_rich_takes_any_text_as_it_is(text):
    out = io.StringIO()
    Console(file=out, width=10_000, soft_wrap=True).print(plain("[/b][red]" + text), end="")
    assert out.getvalue().replace("\n", "").startswith("[/b][red]")


def test_log_records_are_made_printable():
    record = logging.LogRecord("x", logging.ERROR, __file__, 1, "%s failed", ("\x1b[2J",), None)
    assert PrintableFormatter().format(record) == r"\x1b[2J failed"


HOSTILE = "OUT[/b]\x1b[2J\u202e"
SHOWN = r"OUT[/b]\x1b[2J\u202e"


def test_a_console_of_ours_draws_text_as_text(capsys):
    out = io.StringIO()
    screen = console(file=out, width=60, force_terminal=True, color_system=None)
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE)
    screen.print(HOSTILE)
    screen.print(Group(Text(HOSTILE), table), f"wrote {HOSTILE} :smile:")
    assert out.getvalue().count(SHOWN) == 6 and ":smile:" in out.getvalue() and "\x1b" not in out.getvalue()
    say(HOSTILE)
    assert capsys.readouterr().out == SHOWN + "\n"


def test_sentences_are_broken_at_spaces_on_a_terminal_only():
    text = "plan: keep, of 8 x 128 tokens\n\n  kept: gate, /a/path/that/is/longer/than/the/line, up"
    assert fitted(text, console(file=io.StringIO(), width=20)) == text
    assert fitted(text, console(file=io.StringIO(), width=20, force_terminal=True)).split("\n") == [
        "plan: keep, of 8 x",
        "  128 tokens",
        "",
        "  kept: gate,",
        "    /a/path/that/is/longer/than/the/line,",
        "    up",
    ]


def test_a_silent_process_still_writes_into_files_that_it_is_given(capsys, monkeypatch):
    """As those from which a text is made, in each process of a run."""
    monkeypatch.setattr(terminal, "_silent", False)  # restored at the end
    terminal.be_silent()
    out = io.StringIO()
    console(file=out).print("of a console")
    say("of say", file=out)
    assert out.getvalue() == "of a console\nof say\n"
    console().print("shown")
    console(stderr=True).print("shown")
    say("shown")
    assert capsys.readouterr() == ("", "")
