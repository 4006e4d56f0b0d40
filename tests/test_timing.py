"""Where the seconds go: phases of threads against a count by hand, and the tables of real runs."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune import cli
from jaxtune.system import progress, timing
from jaxtune.system.program_cache import use_program_cache
from tests import patience
from tests.faults.command import make_folder, overridden

TICK = 0.02  # of the time that the system says a process began, and of the table's rounding
NAMES = ("rows", "files", "wait", "a new one")


class Hand(threading.Thread):
    """A thread that does what it is told."""

    def __init__(self):
        super().__init__(daemon=True)
        self.tasks, self.done = queue.SimpleQueue(), queue.SimpleQueue()
        self.start()

    def run(self):
        while (task := self.tasks.get()) is not None:
            self.done.put(task())

    def __call__(self, task):
        self.tasks.put(task)
        return self.done.get()


@pytest.fixture(scope="module")
def hands():
    hands = [Hand() for _ in range(3)]
    yield hands
    for hand in hands:
        hand.tasks.put(None)


moves = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 2), st.sampled_from(NAMES), st.sampled_from(("", "a", "b"))),
    st.tuples(st.just("end"), st.integers(0, 2), st.integers(0, 3)),
    st.tuples(st.just("pass"), st.integers(0, 1_000)),
    st.tuples(st.just("table")),
)


def flat(seconds: timing.Seconds) -> dict[tuple[str, str], float]:
    return {(name, part): count for name, parts in seconds.items() for part, count in parts.items() if count}


@given(script=st.lists(moves, max_size=60))
def test_each_second_is_the_innermost_phase_s_of_its_thread(hands, script):
    now = [0.0]
    recorder = timing.Recorder(0.0, lambda: now[0], hands[0].ident)
    stacks: list[list[timing.Phase]] = [[], [], []]
    counted: list[dict[tuple[str, str], float]] = [{}, {}, {}]
    wall = 0.0

    def require_table():
        taken = recorder.taken()
        beside = {
            key: count for key in {**counted[1], **counted[2]} if (count := sum(c.get(key, 0) for c in counted[1:]))
        }
        assert flat(taken.main) == {key: count for key, count in counted[0].items() if count}
        assert flat(taken.beside) == beside
        assert taken.wall_seconds == wall == sum(flat(taken.main).values())
        assert taken.lines()[-1].split() == ["wall", "clock", f"{wall:.2f}"]

    for kind, *facts in [*script, ("table",)]:
        if kind == "begin":
            number, name, part = facts
            phase = timing.Phase(recorder, name, part, "", 0, "")
            hands[number](phase.__enter__)
            stacks[number].append(phase)
        elif kind == "end":
            number, depth = facts  # the innermost, or one further out, with those within it
            if depth < len(stacks[number]):
                hands[number](stacks[number][-1 - depth].__exit__)
                del stacks[number][len(stacks[number]) - 1 - depth :]
        elif kind == "pass":
            now[0] += facts[0]
            wall += facts[0]
            for number, stack in enumerate(stacks):
                key = (stack[-1].name, stack[-1].part) if stack else (timing.ELSE, "")
                if stack or number == 0:
                    counted[number][key] = counted[number].get(key, 0.0) + facts[0]
        else:
            require_table()
            counted, wall = [{}, {}, {}], 0.0
        main, *others = recorder.doing()
        assert main == stacks[0] and {*map(tuple, others)} == {tuple(stack) for stack in stacks[1:] if stack}


def test_the_end_of_a_phase_that_is_not_open_changes_nothing():
    recorder = timing.Recorder(0.0, lambda: 1.0)
    stray = timing.Phase(recorder, "rows", "", "", 0, "")
    recorder.pop(stray)
    with timing.Phase(recorder, "files", "", "", 0, "") as phase:
        recorder.pop(stray)
        assert recorder.doing() == [[phase]]
    assert recorder.doing() == [[]]


@pytest.mark.parametrize(
    ("arguments", "done", "words"),
    [
        (("rows",), 0, "preparing rows"),
        (("rows", "", "tokenising rows"), 1_024, "tokenising rows: 1,024"),
        (("wait", "programs", "", 5, "programs"), 2, "waiting for programs: 2 of 5 programs"),
        (("files", "weights", "", 16_060_000_000, "B"), 1_200_000_000, "reading files weights: 1.20 of 16.06 GB"),
    ],
)
def test_a_phase_in_words(arguments, done, words, monkeypatch):
    monkeypatch.setattr(timing, "_recorder", timing.Recorder(0.0))
    phase = timing.phase(*arguments)
    phase.advance(done)
    assert str(phase) == words


def test_nothing_is_recorded_before_it_begins_and_that_costs_nothing(monkeypatch):
    """A step of a millisecond has about ten phases: each reads the clock at its begin and its end, or never."""
    monkeypatch.setattr(timing, "_recorder", None)
    read = []
    phase = timing.phase("rows")
    with phase as work:
        work.advance(3)
    assert timing.phase("files") is phase  # one object for all

    monkeypatch.setattr(timing, "time", None)  # whoever reads the clock fails
    for count in (0, 2):
        with timing.phase("step", "a part"):
            pass
        assert len(read) == count
        monkeypatch.setattr(timing, "_recorder", timing.Recorder(0.0, lambda: read.append(1) or 0.0))
        read.clear()


def test_programs_of_jax_are_phases(monkeypatch, tmp_path):
    use_program_cache()
    monkeypatch.setattr(timing, "_recorder", None)
    cache = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    try:
        with timing.recording(time.monotonic()):
            timing.imported()
            tables = []
            for _ in range(2):

                def a_program(x):
                    return jnp.sin(x) * 3

                jax.jit(a_program).lower(jax.ShapeDtypeStruct((7,), "float32")).compile()
                jax.clear_caches()
                tables.append(timing.current().taken())
    finally:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()
    for taken in tables:
        assert all(taken.main[name]["a_program"] > 0 for name in ("trace", "lower"))
    first, again = tables
    assert "a_program" in first.main["compile"] and "cached" not in first.main
    assert "a_program" in again.main["cached"] and "compile" not in again.main


def test_this_process_has_begun_before_it_was_asked():
    began = time.monotonic()
    source = "import time; from jaxtune.system import timing; print(timing.process_start())"
    start = float(subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout)
    assert patience.in_order(began - TICK, start, time.monotonic())


def require_whole(content: dict, seconds: float) -> None:
    """The table adds up to its wall clock, which was measured within `seconds`."""
    wall, main = content["wall_seconds"], content["main"]
    assert sum(sum(parts.values()) for parts in main.values()) == pytest.approx(wall, rel=1e-6)
    assert patience.in_order(0, wall, seconds)


def test_a_run_in_this_process_adds_up(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(timing, "_recorder", None)
    recipe, began = make_folder(tmp_path), time.monotonic()
    assert cli.main(["train", str(recipe), "checkpoint.every_steps=3", "--timing"]) == 0
    seconds = time.monotonic() - began
    content = json.loads((tmp_path / "run" / progress.FILE).read_text())
    require_whole(content, seconds)
    assert {"import", "rows", "files", "trace", "lower", "step", "wait", "save", "export", "plot"} <= content[
        "main"
    ].keys()
    programs = {**content["beside"].get("compile", {}), **content["beside"].get("cached", {})}
    assert {"accumulate", "update"} <= programs.keys()
    table = capsys.readouterr().err.splitlines()
    assert [line for line in table if line.split() == ["wall", "clock", f"{content['wall_seconds']:.2f}"]]
    assert timing.current() is None  # it ends with the command


def lines_of(arguments: list[str], programs: Path, text: str = "") -> list[tuple[float, str]]:
    """[(seconds since its start, line of stderr)] of the command in a process of its own, with programs in a folder."""
    began = time.monotonic()
    command = [sys.executable, "-m", "jaxtune", *arguments]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(programs)}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        with contextlib.closing(process.stdin):
            process.stdin.write(text)
        lines = [(time.monotonic() - began, line.rstrip("\n")) for line in process.stderr]
    assert process.returncode == 0, lines
    return lines


@pytest.mark.parametrize("command", ["generate", "chat", "evaluate", "train"])
def test_a_command_adds_up(command, tmp_path):
    recipe, model = make_folder(tmp_path), str(tmp_path / "model")
    arguments = {
        "train": [str(recipe), *overridden(**{"export.merged": False})],
        "generate": [model, "--prompt", "red", "--max-new-tokens", "2", "--raw"],
        "chat": [model, "--max-new-tokens", "2"],
        "evaluate": [str(recipe), "adapter=null", "data.eval_rows=0"],
    }[command]
    lines = lines_of([command, *arguments, "--timing"], tmp_path / "programs", "red\n")
    [(seconds, total)] = [(at, line) for at, line in lines if line.startswith("wall clock")]
    assert patience.in_order(0, float(total.split()[-1]) - TICK, seconds)
    words = [line.split("  ")[0] for _, line in lines]
    assert not {"importing", "reading files", "tracing", "lowering"}.difference(words)
