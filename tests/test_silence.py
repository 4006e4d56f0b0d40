"""No command is silent for long: each one's output is watched while its phases are slow."""

from __future__ import annotations

import contextlib
import itertools
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
from tests.faults.command import make_folder, overridden

INTERVAL = 0.5
SLOW = 5.0
MARGIN = 3.0  # a thread that imports or traces may keep Python's lock, and other processes the CPUs

# Each of these phases takes five seconds longer, in whichever thread it is.
DRIVER = f"""
import sys, time
from jaxtune.system import progress, timing

slow = {{"plan costs", "files weights", "step", "sample", "export"}}
slow |= {{f"compile {{name}}" for name in ("accumulate", "evaluate", "prefill")}}
push = timing.Recorder.push

def slowly(recorder, phase):
    push(recorder, phase)
    for name in {{phase.name, f"{{phase.name}} {{phase.part}}"}} & slow:
        slow.remove(name)
        time.sleep({SLOW})

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


def watched(source: str, arguments: list[str], until: str = "", text: str = "") -> list[tuple[float, str]]:
    """[(seconds since the start, output)] of a process, both streams; after `until` it gets SIGTERM."""
    began = time.monotonic()
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    pieces = []
    with subprocess.Popen([sys.executable, "-c", source, *arguments], **pipes) as process:
        process.stdin.write(text.encode())
        process.stdin.close()
        while piece := os.read(process.stdout.fileno(), 1 << 16):
            pieces.append((time.monotonic() - began, piece.decode()))
            if until and until in piece.decode():
                process.send_signal(signal.SIGTERM)
                until = ""
    assert process.returncode == 0, pieces
    return pieces


def require_no_silence(pieces: list[tuple[float, str]]) -> str:
    """No silence longer than the interval and the margin from the first output to the last; returns the output."""
    for (before, _), (after, piece) in itertools.pairwise(pieces):
        assert after - before < INTERVAL + MARGIN, (before, after, piece, pieces)
    return "".join(piece for _, piece in pieces)


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
    output = require_no_silence(watched(COMMAND, words_of, "http://" if command == "serve" else "", "red\n"))
    assert not [word for word in words if word not in output], output


def test_a_script_is_never_silent(tmp_path):
    make_folder(tmp_path)
    arguments = [str(tmp_path / name) for name in ("model", "rows.jsonl", "out")]
    output = require_no_silence(watched(SCRIPT, arguments))
    assert "reading files" in output and "waiting for programs" in output and "\nwall clock" in output
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

    def said() -> list[str]:
        return capsys.readouterr().err.splitlines()

    with progress.heartbeat(0.1):
        with timing.phase("files", "weights", total=4, unit="files") as work:
            work.advance(3)
            time.sleep(0.5)
            assert "reading files weights: 3 of 4 files" in said()
            for _ in range(10):
                terminal.say("busy")
                time.sleep(0.03)
        said()
        with timing.phase("input"):
            time.sleep(0.4)
            assert said() == []
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
