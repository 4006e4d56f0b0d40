"""No command is silent for long: each one's output is watched while its phases are slow."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.system import progress, terminal, timing
from tests import patience
from tests.faults.command import make_folder, overridden

INTERVAL = 0.5

# Each of these phases, in whichever thread it is, lasts until two lines were printed meanwhile, with its words where
# the test wants them.
DRIVER = f"""
import sys
from jaxtune.system import progress, terminal, timing
from tests import patience

said, passing = [], terminal.say_passing

def say_passing(text, silent_seconds):
    before = terminal._screen.written
    passing(text, silent_seconds)
    if terminal._screen.written != before:
        said.append(text)

terminal.say_passing = say_passing

slow = {{
    "rows": "preparing rows",
    "plan costs": "planning: costs of a step",
    "plan longest row": "planning: whether a row of ",
    "files weights": "reading files",
    "step": "steps: ",
    "compile accumulate": "waiting for programs: ",
    "compile evaluate": "compiling evaluate",
    "check attention": "checking this machine: ",
}} | dict.fromkeys(("compile prefill", "sample", "export"), "")
push = timing.Recorder.push

def slowly(recorder, phase):
    push(recorder, phase)
    for name in {{phase.name, f"{{phase.name}} {{phase.part}}"}} & slow.keys():
        words, before = slow.pop(name), len(said)
        words = words if any(words in each for each in wanted) else ""  # others may be said in its place
        patience.wait_until(lambda: sum(words in line for line in said[before:]) >= 2, told=lambda: (name, said))

timing.Recorder.push = slowly
progress.heartbeat.__wrapped__.__defaults__ = ({INTERVAL},)  # of scripts
"""
COMMAND = DRIVER + f"from jaxtune import cli\nsys.exit(cli.console(sys.argv[1:], {INTERVAL}))\n"
SCRIPT = (
    DRIVER
    + """
from jaxtune.compat import FastLanguageModel, SFTConfig, SFTTrainer

model, rows, output = sys.argv[1:]
model, tokenizer = FastLanguageModel.from_pretrained(model, load_in_4bit=False)
model = FastLanguageModel.get_peft_model(model, r=2)
rows = [{"text": f"red {number}"} for number in range(8)]
trainer = SFTTrainer(model, SFTConfig(output, max_steps=2, report_timing=True), rows, processing_class=tokenizer)
trainer.train()
model.generate(tokenizer("red", return_tensors="np")["input_ids"], max_new_tokens=2)
"""
)


def watched(source: str, arguments: list[str], wanted: tuple[str, ...], until: str = "", text: str = "") -> str:
    """The output of a process, both streams, in which `wanted` must be; after `until` it gets SIGTERM."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    pieces = []
    with subprocess.Popen([sys.executable, "-c", f"wanted = {wanted!r}\n{source}", *arguments], **pipes) as process:
        process.stdin.write(text.encode())
        process.stdin.close()
        while piece := os.read(process.stdout.fileno(), 1 << 16):
            pieces.append(piece.decode())
            if until and until in "".join(pieces):
                process.send_signal(signal.SIGTERM)
                until = ""
    output = "".join(pieces)
    assert process.returncode == 0 and not [words for words in wanted if words not in output], output


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train", ("preparing rows", "waiting for programs: ", " of 3 programs", "steps: ")),
        ("generate", ("reading files weights: 0.00 of 0.00 GB",)),
        ("chat", ("reading files",)),
        ("serve", ("reading files",)),
        ("evaluate", ("importing", "compiling evaluate")),
        ("doctor", ("checking this machine: ", " of 6 checks, ")),
        ("plan", ("planning: costs of a step", "planning: whether a row of ")),
    ],
)
def test_a_command_is_never_silent(command, words, tmp_path):
    recipe, model = make_folder(tmp_path), str(tmp_path / "model")
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    arguments = {
        "train": [str(recipe), *overridden(**{"checkpoint.every_steps": 3})],
        "generate": [model, "--prompt", "red", "--max-new-tokens", "2"],
        "chat": [model, "--max-new-tokens", "2"],
        "serve": [model, "--port", "0", "--slots", "1", "--length", "32"],
        "evaluate": [str(recipe), "adapter=null"],
        "doctor": [],
        "plan": ["qlora-8b", "--plan", "plan.device=RTX 4090"],
    }[command]
    words_of = ["train" if command == "plan" else command, *arguments]
    watched(COMMAND, words_of, words, "http://" if command == "serve" else "", "red\n")


def test_a_script_is_never_silent(tmp_path):
    make_folder(tmp_path)
    arguments = [str(tmp_path / name) for name in ("model", "rows.jsonl", "out")]
    watched(SCRIPT, arguments, ("reading files", "waiting for programs: ", "\nwall clock"))
    assert (tmp_path / "out" / progress.FILE).is_file()


@contextlib.contextmanager
def screen():
    """A terminal that is stdout and stderr: yields a function that returns what it was sent since the last call."""
    above, below = pty.openpty()

    def sent() -> str:
        text = b""
        while select.select([above], [], [], 0.05)[0]:
            text += os.read(above, 1 << 16)
        return text.decode().replace("\r\n", "\n")

    with both_streams(below):
        yield sent
    os.close(above)
    os.close(below)


@contextlib.contextmanager
def both_streams(descriptor: int):
    """stdout and stderr, as a command has them, write to the descriptor."""
    before = sys.stdout, sys.stderr
    with (
        open(descriptor, "w", newline="", closefd=False) as out,
        open(descriptor, "w", newline="", closefd=False) as err,
    ):
        sys.stdout, sys.stderr = out, err
        try:
            with terminal.outliving():
                yield
        finally:
            sys.stdout, sys.stderr = before


def test_a_terminal_has_one_line_that_the_next_output_replaces():
    with screen() as sent:
        for words in ("compiling, 3 s", "compiling, 4 s"):
            terminal.say_passing(words, 0.0)
        assert sent() == "compiling, 3 s\r\x1b[2Kcompiling, 4 s"
        terminal.say("an answer", flush=True)
        assert sent() == "\r\x1b[2Kan answer\n"
        terminal.say_passing("compiling, 3 s", 60.0)  # something was just printed
        terminal.say_passing("an\x1b[2Jother\u202e", 0.0)
        terminal.end_passing()
        terminal.say("the end", flush=True)
        assert sent() == "an\\x1b[2Jother\\u202e\r\x1b[2Kthe end\n"


@given(st.lists(st.tuples(st.sampled_from(("stdout", "stderr")), st.text("ab\n\r", max_size=4)), max_size=12))
def test_a_line_never_stands_within_a_text(pieces):
    """On a pipe that is both streams, whatever was written before."""
    reading, writing = os.pipe()
    with both_streams(writing):
        for name, text in pieces:
            stream = getattr(sys, name)
            stream.write(text)
            stream.flush()
        terminal.say_passing("LINE", 0.0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        shown = pipe.read().decode()
    written = "".join(text for _, text in pieces)
    assert shown.replace("LINE\n", "") == written
    if "LINE" in shown:
        assert shown.endswith("LINE\n") and written[-1:] in ("", "\n", "\r")


def test_a_full_pipe_keeps_nobody_waiting():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    with both_streams(writing):
        terminal.say_passing("LINE", 0.0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert set(pipe.read()) == set(b"x")


def test_a_heartbeat_speaks_only_while_there_is_silence_and_work(monkeypatch, capsys):
    monkeypatch.setattr(timing, "_recorder", timing.Recorder(time.monotonic()))

    said, looks, doing = [], [], progress.doing
    monkeypatch.setattr(progress, "doing", lambda *given: looks.append(words := doing(*given)) or words)

    def told() -> list[str]:
        said.extend(capsys.readouterr().err.splitlines())
        return said

    with progress.heartbeat(0.1):
        with timing.phase("files", "weights", total=4, unit="files") as work:
            work.advance(3)
            patience.wait_until(lambda: "reading files weights: 3 of 4 files" in told())
        with timing.phase("input"):
            seen = len(looks) + 1  # one may be under way
            patience.wait_until(lambda: len(looks) >= seen + 3)
            assert {*looks[seen:]} == {""}
        with progress.heartbeat(0.01):  # within itself
            assert sum(thread.name == "heartbeat" for thread in threading.enumerate()) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def phases(*names: str, total: int = 0) -> list[timing.Phase]:
    made = [timing.Phase(None, name, "", "", total if name == "step" else 0, "") for name in names]
    for phase in made:
        phase.began = 10.0
    return made


@pytest.mark.parametrize(
    ("stacks", "words"),
    [
        ([[]], "working, 7 s"),
        ([[], phases("compile")], "working, compiling, 7 s"),
        ([phases("else", "input")], ""),
        ([phases("else", "rows")], "preparing rows, 12 s"),
        ([phases("else"), phases("compile")], "else, compiling, 12 s"),
        ([phases("step", "wait", total=9)], "steps: 0 of 9, waiting for, 12 s"),
        (
            [phases("wait"), *[phases("files"), phases("compile"), phases("save")]],
            "waiting for, reading files, compiling, 12 s",
        ),
    ],
)
def test_what_is_being_done_in_words(stacks, words):
    assert progress.doing(stacks, 22.4, 15.0) == words


def test_a_silent_process_stays_silent(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "_silent", True)
    with terminal.outliving():
        terminal.say_passing("compiling", 0.0)
    assert capsys.readouterr().err == ""
