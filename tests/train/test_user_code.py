"""Where functions of the user's code run, what they get, how long they may take, and what is said of their errors: each
rule over rewards, tools, environments, rollout functions and metrics."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import functools
import gc
import os
import pickle
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from jaxtune.system import waiting
from jaxtune.train.config import ConfigError
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.evaluation import answer_metrics
from jaxtune.train.evaluation.answer_metrics import AnswerMetrics
from jaxtune.train.objectives.sampling import Settings
from jaxtune.train.sampled.answering import Prompt, Sampling
from jaxtune.train.sampled.reward_functions import READY, RewardError, RewardFunctions, Sampled, load_function
from jaxtune.train.sampled.rollout_function import RolloutFunction
from jaxtune.train.sampled.tool_formats import Call
from jaxtune.train.sampled.tools import Tools
from jaxtune.train.user_code import calling, patterns, processes
from jaxtune.train.user_code.copies import own_copy
from jaxtune.train.user_code.errors import UserCodeError
from jaxtune.train.user_code.processes import Isolated
from tests import patience

BACKTRACKS = "(a+)+$", "a" * 40 + "b"


@pytest.fixture(autouse=True)
def ended():
    yield
    calling.close()


def some(count: int = 3, **columns) -> Sampled:
    prompts = [[{"role": "user", "content": f"q{index}"}] for index in range(count)]
    answers = [[{"role": "assistant", "content": f"it is {index}"}] for index in range(count)]
    return Sampled(prompts, answers, [[index] * 3 for index in range(count)], columns)


class Rows:
    """In place of a sampler, for evaluations."""

    def __init__(self, *_, **__): ...

    def run(self, prompts, *_, **__):
        for _ in prompts:
            yield type("Row", (), {"ids": [4, 5], "finish_reason": "stop"})()


# ---- one call in each place that the user's code has: (function) -> what it returned there


def in_reward(function):
    return RewardFunctions.of([lambda **columns: function() or [1.0] * 3])(some())


def in_metric(function):
    metrics = [lambda **columns: function() or [1.0]]
    rewards = RewardFunctions.of(metrics, errors="skip")
    made = AnswerMetrics(
        [Prompt("x", (3,), {})], rewards, 4, 0.0, (1,), lambda prompt, prompt_ids, ids: str(ids), 0, 1, 2, False
    )
    return made(tiny_model()).metrics


def environment_of(reset=lambda: None, tool=lambda: None, reward=lambda: None):
    class Place:
        def reset(self, **row):
            reset()

        def act(self) -> str:
            """Acts."""
            return str(tool())

        def get_reward(self):
            return reward() or 1.0

    return Place


def in_reset(function):
    return Tools([], environment_of(reset=function)).reset([[{"role": "user", "content": "x"}]], [{}])


def in_tool(function):
    tools = Tools([], environment_of(tool=function))
    ((environment, _),) = tools.reset([[{"role": "user", "content": "x"}]], [{}])
    return tools.answer([Call("act", {})], tools.of(environment)).messages[0]["content"]


def in_get_reward(function):
    tools = Tools([], environment_of(reward=function))
    ((environment, _),) = tools.reset([[{"role": "user", "content": "x"}]], [{}])
    return tools.rewards(None)(some(1, environments=[environment]))


def in_rollout(function):
    def play(prompts, model):
        function()
        return dict(prompt_ids=[[3]] * 2, completion_ids=[[2]] * 2, logprobs=[[0.0]] * 2)

    sampling = Sampling(Settings(max_completion_length=8), (1,), str)
    return RolloutFunction(play, sampling, lambda prompt: (3,), 32)(tiny_model(), [Prompt("x", (3,), {})] * 2, [0, 1])


PLACES = [in_reward, in_metric, in_reset, in_tool, in_get_reward, in_rollout]


@pytest.fixture(autouse=True)
def no_sampling(monkeypatch):
    monkeypatch.setattr(answer_metrics, "Sampler", Rows)


@pytest.mark.parametrize("run", PLACES)
def test_synchronous_code_is_in_the_main_thread_and_named(run, monkeypatch):
    seen, named = [], []

    @contextlib.contextmanager
    def users_code(name):
        named.append(name)
        yield

    def function():
        seen.append(threading.current_thread())
        before = signal.signal(signal.SIGALRM, signal.SIG_DFL)  # refused in another thread; math_verify does this
        signal.signal(signal.SIGALRM, before)

    monkeypatch.setattr(waiting, "users_code", users_code)
    run(function)
    assert seen == [threading.main_thread()] and named


@pytest.mark.parametrize("run", PLACES)
@pytest.mark.parametrize("error", [StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_an_exception_of_any_kind_is_the_functions_and_not_the_runs(run, error):
    def function():
        raise error("of mine")

    said = f"{error.__name__}.*of mine"
    if run is in_tool:
        assert re.search("of mine", run(function))
        return
    if run is in_metric:
        assert np.isnan(run(function)["eval_answers/<lambda>"])
        return
    with pytest.raises(UserCodeError, match=said) as told:
        run(function)
    assert "test_user_code.py" in str(told.value) and 'raise error("of mine")' in str(told.value)


@pytest.mark.parametrize("error", [StopAsyncIteration, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_an_async_function_may_raise_anything_and_the_loop_goes_on(error):
    calls = []

    async def judge(completions):
        calls.append(len(completions))
        raise error("of mine")

    async def tool() -> str:
        """Fails."""
        background = asyncio.ensure_future(fail())
        with contextlib.suppress(BaseException):
            await background
        raise error("of mine")

    async def fail():
        raise error("of a task")

    async def fine() -> str:
        """Does not."""
        await asyncio.sleep(0.01)
        return "fine"

    with pytest.raises(RewardError, match=f"judge failed: {error.__name__}: of mine.*\n  prompt: q0") as told:
        RewardFunctions.of([judge])(some())
    assert calls == [3] and 'raise error("of mine")' in str(told.value)  # a call to a judge costs
    assert np.isnan(RewardFunctions.of([judge], errors="skip")(some())).all() and calls == [3, 3]
    tools = Tools([tool, fine])
    answered = tools.answer([Call("tool", {}), Call("fine", {})], tools.of(None))
    assert [message["content"] for message in answered.messages][1] == "fine" and answered.failures == 1
    assert "of mine" in answered.messages[0]["content"]


class Silent(Exception):
    def __str__(self):
        raise ValueError("no text")


def test_an_exception_without_a_text_is_named():
    def silent(**columns):
        raise Silent

    def silent_tool() -> str:
        """Fails."""
        raise Silent

    with pytest.raises(RewardError, match="silent failed: Silent: its text fails with ValueError"):
        RewardFunctions.of([silent])(some())
    tools = Tools([silent_tool])
    assert "its text fails" in tools.answer([Call("silent_tool", {})], tools.of(None)).messages[0]["content"]


@pytest.mark.parametrize("run", PLACES)
def test_a_real_interrupt_ends_the_run(run):
    def function():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        run(function)


def test_the_first_exception_is_shown_if_each_answer_alone_has_none():
    def overloaded(prompts, **columns):
        if len(prompts) > 1:
            raise ConnectionError("too many at once")
        return [1.0]

    with pytest.raises(RewardError) as told:
        RewardFunctions.of([overloaded])(some())
    text = str(told.value)
    assert "each answer alone it rewards without an error: ConnectionError: too many at once" in text
    assert re.search(r"test_user_code.py.* line \d+", text) and 'raise ConnectionError("too many at once")' in text
    assert "jaxtune/train" not in text.replace("tests/train", "") and "unknown" not in text


# ---- one event loop


class Client:
    """Belongs to the loop of its first use, as clients of HTTP do."""

    def __init__(self):
        self.loop, self.lock = None, asyncio.Semaphore(1)

    async def ask(self):
        self.loop = self.loop or asyncio.get_running_loop()
        assert self.loop is asyncio.get_running_loop()
        async with self.lock:  # binds to the loop that waits for it
            await asyncio.sleep(0.001)


def test_async_rewards_tools_and_environments_share_a_loop_over_generations_until_the_run_ends():
    client = Client()

    async def judge(completions, **columns):
        await asyncio.gather(*(client.ask() for _ in completions))
        return [1.0] * len(completions)

    async def look_up() -> str:
        """Asks."""
        await asyncio.gather(client.ask(), client.ask())
        return "yes"

    class Place:
        def reset(self, **row): ...

        async def get_reward(self):
            await client.ask()
            return 2.0

    rewards, tools = RewardFunctions.of([judge, functools.partial(judge)]), Tools([look_up], Place)
    with calling.running():
        for _ in range(3):
            np.testing.assert_array_equal(rewards(some()), [[1, 1]] * 3)
            assert tools.answer([Call("look_up", {})] * 2, tools.of(None)).failures == 0
            environments = [one for one, _ in tools.reset([[{"role": "user", "content": "x"}]] * 3, [{}] * 3)]
            np.testing.assert_array_equal(tools.rewards(None)(some(environments=environments)), [[2]] * 3)
        with calling.running():  # an evaluation within the run ends nothing
            rewards(some())
        assert not client.loop.is_closed()
    assert client.loop.is_closed()


def test_the_end_of_a_run_cancels_tasks_and_ends_generators():
    ends = []

    async def numbers():
        try:
            yield 1
            yield 2
        finally:
            ends.append("generator")

    async def forever():
        try:
            await asyncio.sleep(1000)
        finally:
            ends.append("task")

    async def judge(completions, **columns):
        judge.kept = asyncio.ensure_future(forever()), numbers()
        await asyncio.sleep(0)
        await anext(judge.kept[1])
        return [1.0] * len(completions)

    with calling.running():
        RewardFunctions.of([judge])(some())
    assert sorted(ends) == ["generator", "task"]
    assert not any(thread.name == "user's async functions" for thread in threading.enumerate())


def test_environments_are_rewarded_side_by_side():
    both = asyncio.Barrier(3)

    class Place:
        def reset(self, **row): ...

        async def get_reward(self):
            await asyncio.wait_for(both.wait(), patience.SECONDS)
            return 1.0

    tools = Tools([], Place)
    environments = [one for one, _ in tools.reset([[{"role": "user", "content": "x"}]] * 3, [{}] * 3)]
    np.testing.assert_array_equal(tools.rewards(None)(some(environments=environments)), [[1]] * 3)


def test_fifty_generations_open_no_files():
    async def judge(completions, **columns):
        return [1.0] * len(completions)

    rewards = RewardFunctions.of([judge, READY["regex"]])
    sampled = some(pattern=["is"] * 3)
    rewards(sampled)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        rewards(sampled)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before + 50  # one more for each, whatever other threads have open


@pytest.mark.full
def test_an_async_tool_that_blocks_the_loop_ends_at_its_limit_and_the_next_has_a_new_loop():
    release = threading.Event()

    async def blocks() -> str:
        """Blocks."""
        release.wait(patience.SECONDS)
        return "late"

    async def fine() -> str:
        """Does not."""
        return "fine"

    tools = Tools([blocks, fine], timeout_seconds=0.2)
    try:
        answered = tools.answer([Call("blocks", {})], tools.of(None))
        (message,) = answered.messages
        assert re.search(r"longer than 0.2 s: the event loop was blocked at .*test_user_code.py", message["content"])
        assert answered.is_late
        assert tools.answer([Call("fine", {})], tools.of(None)).messages[0]["content"] == "fine"
    finally:
        release.set()


# ---- environments


def test_an_environment_may_have_objects_of_one_thread():
    class Base:
        def reset(self, **row):
            self.base = sqlite3.connect(":memory:")
            self.base.execute("create table words (word text)")

        def add(self, word: str) -> str:
            """Adds a word.

            Args:
                word: the word.
            """
            self.base.execute("insert into words values (?)", [word])
            return "added"

        def get_reward(self):
            return float(self.base.execute("select count(*) from words").fetchone()[0])

    tools = Tools([], Base)
    ((environment, _),) = tools.reset([[{"role": "user", "content": "x"}]], [{}])
    calls = [Call("add", {"word": "a"}), Call("add", {"word": "b"})]
    assert tools.answer(calls, tools.of(environment)).failures == 0
    np.testing.assert_array_equal(tools.rewards(None)(some(1, environments=[environment])), [[2]])


@pytest.mark.parametrize("is_async", [False, True])
def test_an_environment_is_not_used_again_after_a_timeout(is_async):
    sleep = patience.Sleep()

    class Base:
        def reset(self, **row): ...

        def slow(self) -> str:
            """Takes long."""
            sleep()

        async def slow_later(self) -> str:
            """Takes long."""
            await sleep.later()

    tools = Tools([], Base, timeout_seconds=0.1)
    prompts = [[{"role": "user", "content": "x"}]] * 2
    first, second = (one for one, _ in tools.reset(prompts, [{}] * 2))
    answered = tools.answer([Call("slow_later" if is_async else "slow", {})], tools.of(first))
    assert answered.is_late and "longer than 0.1 s" in answered.messages[0]["content"]
    tools.replace(first)
    again, same = (one for one, _ in tools.reset(prompts, [{}] * 2))
    assert again is not first and same is second and not sleep.over


# ---- copies

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3))
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.tuples(inner, inner),
        st.sets(st.integers(), max_size=3),
        st.lists(inner, max_size=3).map(collections.deque),
        st.dictionaries(st.text(max_size=2), inner, max_size=2).map(collections.OrderedDict),
    ),
    max_leaves=12,
)


def containers(value, found=None):
    found = [] if found is None else found
    if isinstance(value, list | dict | set | collections.deque):
        found.append(id(value))
    if isinstance(value, list | tuple | dict | collections.deque):
        for entry in value.values() if isinstance(value, dict) else value:
            containers(entry, found)
    return found


@settings(max_examples=50, deadline=None)
@given(NESTED)
def test_a_copy_is_equal_and_shares_no_container(value):
    copied = own_copy(value)
    assert copied == value and type(copied) is type(value)
    assert not {*containers(copied)} & {*containers(value)}


def test_a_copy_shares_arrays_pictures_and_other_objects_and_keeps_circles():
    picture, array = object(), np.arange(3)
    pair = collections.namedtuple("Pair", "a b")
    value: list = [picture, {"array": array}, pair([1], 2), (1, "a")]
    value.append(value)
    copied = own_copy(value)
    assert copied[0] is picture and copied[1]["array"] is array and copied[3] is value[3] and copied[4] is copied
    assert type(copied[2]) is pair and copied[2] == ([1], 2) and copied[2].a is not value[2].a


def spoil(*values):
    """Changes all that can be changed."""
    for value in values:
        if isinstance(value, dict):
            spoil(*value.values())
            value.clear()
        elif isinstance(value, list):
            spoil(*value)
            value[:] = ["spoilt"]


def test_a_rewards_changes_are_seen_by_nobody_else():
    shared = [{"role": "user", "content": "x"}]
    columns = [{"facts": {"a": [1, 2]}, "tags": ["t"]}] * 3  # one row for the three answers of a group
    sampled = Sampled.of([shared] * 3, columns, [[1, 2]] * 3, ["answer"] * 3)
    before = pickle.dumps(sampled)
    seen = []

    def spoils(prompts, completions, completion_ids, facts, tags):
        prompts[0].append("only here")
        assert len(prompts[1]) == 1
        facts[0]["a"].append(3)
        assert facts[1] == {"a": [1, 2]}
        spoil(prompts, completions, completion_ids, facts, tags)
        return [0.0] * 3

    async def spoils_later(**columns):
        seen.append(pickle.dumps({name: columns[name] for name in ("prompts", "completions", "facts", "tags")}))
        spoil(*columns.values())
        return [0.0] * 3

    rewards = RewardFunctions.of([spoils, spoils_later])
    for _ in range(2):  # two epochs
        rewards(sampled)
    assert pickle.dumps(sampled) == before and seen[0] == seen[1]


def test_the_prompts_of_a_rollout_are_its_own_for_each_answer():
    lengths = []
    prompt = Prompt([{"role": "user", "content": "x"}], (3,), {"facts": [1]})

    def play(prompts, model):
        for messages in prompts:
            messages.append({"role": "assistant", "content": "y"})
            messages[0]["content"] += "!"
            lengths.append((len(messages), messages[0]["content"]))
        return dict(prompt_ids=[[3]] * 4, completion_ids=[[2]] * 4, logprobs=[[0.0]] * 4)

    sampling = Sampling(Settings(max_completion_length=8), (1,), str)
    rollout = RolloutFunction(play, sampling, lambda prompt: (3,), 32)
    for _ in range(2):
        answers, _ = rollout(tiny_model(), [prompt] * 4, [0, 1, 2, 3])
        assert [one.shown for one in answers] == [[{"role": "user", "content": "x"}]] * 4
    assert lengths == [(2, "x!")] * 8


def test_what_reset_and_a_tool_change_is_theirs():
    class Base:
        def reset(self, prompt, facts):
            spoil(prompt, facts)

        def act(self, words: list[str]) -> str:
            """Acts.

            Args:
                words: some.
            """
            spoil(words)
            return "acted"

    prompt, columns, call = [{"role": "user", "content": "x"}], {"facts": {"a": [1]}}, Call("act", {"words": ["a"]})
    tools = Tools([], Base)
    (environment, shown), _ = tools.reset([prompt] * 2, [columns] * 2)
    assert tools.answer([call], tools.of(environment)).failures == 0
    assert prompt == shown == [{"role": "user", "content": "x"}] and columns == {"facts": {"a": [1]}}
    assert call.arguments == {"words": ["a"]}


# ---- files


def test_a_file_runs_once_and_imports_what_is_beside_it(tmp_path):
    (tmp_path / "helper_of_mine.py").write_text("seen = []\n")
    file = tmp_path / "rewards_of_mine.py"
    file.write_text(
        "from helper_of_mine import seen\nseen.append('run')\n\n"
        "def first(completions):\n    seen.append('first')\n    return [1.0] * len(completions)\n\n"
        "def second(completions):\n    import later_of_mine\n    return [float(len(seen))] * len(completions)\n"
    )
    (tmp_path / "later_of_mine.py").write_text(
        "import rewards_of_mine\nassert rewards_of_mine.seen == ['run', 'first']\n"
    )
    (tmp_path / "link.py").symlink_to(file)
    names = [f"{file}:first", f"{tmp_path}/../{tmp_path.name}/rewards_of_mine.py:second"]
    np.testing.assert_array_equal(RewardFunctions.named(names)(some()), [[1, 2]] * 3)
    assert load_function(f"{tmp_path / 'link.py'}:first") is load_function(names[0])
    file.write_text("def first(completions):\n    return [9.0] * len(completions)\n")  # as in a notebook
    np.testing.assert_array_equal(RewardFunctions.named(names[:1])(some()), [[9]] * 3)


def test_files_of_one_stem_are_modules_of_their_own_with_their_own_helpers(tmp_path):
    functions = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "helper_with_value.py").write_text(f"value = {number}.0\n")
        file = folder / "equal_stem.py"
        file.write_text(
            "import pickle, dataclasses\nfrom helper_with_value import value\n\n"
            "@dataclasses.dataclass\nclass Rule:\n    reward: float\n\n"
            "def f(completions):\n    return [pickle.loads(pickle.dumps(Rule(value))).reward] * len(completions)\n"
        )
        functions.append(load_function(f"{file}:f"))
    assert [function([0]) for function in functions] == [[1.0], [2.0]]
    assert functions[0].__module__ != functions[1].__module__


def test_a_file_that_does_not_run_says_where(tmp_path):
    for name, text, told in (
        ("exits", "x = 1\nraise SystemExit(3)\n", r"SystemExit: 3 \(.*exits.py, line 2\)"),
        ("parses", "x = 1\ny = (\n", r"SyntaxError: .*parses.py, line 2"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(ConfigError, match=told):
            load_function(f"{tmp_path / name}.py:f")


# ---- limits and processes


@pytest.mark.full
def test_a_pattern_that_backtracks_ends_at_its_limit_and_names_the_row(monkeypatch):
    monkeypatch.setattr(patterns, "LIMIT_SECONDS", 1.0)
    pattern, text = BACKTRACKS
    sampled = Sampled(["q0", "q1"], ["fine", text], [[1], [2]], {"pattern": ["fine", pattern]})
    with pytest.raises(RewardError, match=r"regex failed: .*\(a\+\)\+\$.* took longer than 1 s.*\n  prompt: q1"):
        RewardFunctions.of([READY["regex"]])(sampled)
    np.testing.assert_array_equal(RewardFunctions.of([READY["regex"]], errors="skip")(sampled), [[1], [np.nan]])
    monkeypatch.setattr(patterns, "LIMIT_SECONDS", 60.0)
    with pytest.raises(RewardError, match="regex took longer than objective.reward_timeout = 1 s"):
        RewardFunctions.of([READY["regex"]], timeout_seconds=1.0)(sampled)
    for wrong in ("(", "a{99999999999999}"):
        with pytest.raises(RewardError, match="is no regular expression"):
            RewardFunctions.of([READY["regex"]])(some(1, pattern=[wrong]))


@given(
    st.lists(st.tuples(st.sampled_from(["a", "^b", "a+b?$", "[ab]{2}", "é"]), st.text("abé\n", max_size=6)), max_size=8)
)
@settings(max_examples=30, deadline=None)
def test_patterns_are_found_as_re_finds_them(pairs):
    found = patterns.searched([pattern for pattern, _ in pairs], [text for _, text in pairs])
    assert found == [re.search(pattern, text) is not None for pattern, text in pairs]


OWN = """
import asyncio, os, re, signal, threading, time

calls = []

def hard(completions, **columns):
    return [float(re.match("(a+)+$", text) is not None) for text in completions]

def where(completions, **columns):
    assert threading.current_thread() is threading.main_thread()
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and os.environ["JAX_PLATFORMS"] == "cpu"
    import sys
    assert "jax" not in sys.modules
    calls.append(1)
    return [float(os.getpid())] * len(completions)

async def later(completions, **columns):
    await asyncio.sleep(0.001)
    return [float(len(calls))] * len(completions)

def logs(completions, log_metric, log_extra):
    log_metric("length", 3.0)
    log_extra(column="text", values=[text + "!" for text in completions])
    return [1.0] * len(completions)

def yields(completions, **columns):
    for text in completions:
        yield float(len(text))

async def maps(completions, **columns):
    await asyncio.sleep(0.001)
    return map(len, completions)

def once(completions, **columns):
    yield 1.0

def stops(completions, **columns):
    yield 1.0
    raise LookupError("of the test")

def endless(completions, **columns):
    while True:
        time.sleep(0.001)
        yield 1.0

def dies(completions, **columns):
    os.kill(os.getpid(), signal.SIGKILL)

def leaves(completions, **columns):
    raise SystemExit(completions[0])

def power(base: int, exponent: int) -> int:
    '''Raises a number to a power.

    Args:
        base: the number.
        exponent: the power.
    '''
    return len(str(base**exponent)) if exponent < 10_000 else base ** (base**exponent)
"""


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own_of_processes.py"
    file.write_text(OWN)
    return file


def test_isolated_rewards_of_a_file_share_a_process_that_is_killed_at_the_limit(own):
    names = [f"{own}:{name}" for name in ("where", "later", "hard")]
    rewards = RewardFunctions.named(names, isolation="process", timeout_seconds=20)
    texts = Sampled(["q0", "q1"], ["aa", "b"], [[1], [2]], {})
    first, again = rewards(texts), rewards(texts)
    assert first[0, 0] == again[0, 0] != os.getpid() and (first[0, 1], again[0, 1]) == (1, 2)
    np.testing.assert_array_equal(first[:, 2], [1, 0])
    slow = Sampled(["q0", "q1"], ["aa", BACKTRACKS[1]], [[1], [2]], {})
    rewards = RewardFunctions.named(names, isolation="process", timeout_seconds=3)
    with pytest.raises(RewardError, match="hard took longer than .* = 3 s; its process was ended.*\n  prompt: q1"):
        rewards(slow)
    assert rewards(texts)[0, 1] == 1  # in a new process


@pytest.mark.parametrize("isolation", [None, "process"])
def test_rewards_may_be_any_iterator(own, isolation):
    """What it gives, raises and takes is the function's: the code of a generator runs while it is read."""
    rewards = RewardFunctions.named([f"{own}:yields", f"{own}:maps"], isolation=isolation)
    np.testing.assert_array_equal(rewards(Sampled(["q"] * 2, ["aa", "b"], [[1]] * 2, {})), [[2, 2], [1, 1]])
    with pytest.raises(RewardError, match="stops failed: LookupError: of the test.*own_of_pr"):
        RewardFunctions.named([f"{own}:stops"], isolation=isolation)(some(2))
    skipping = RewardFunctions.named([f"{own}:stops"], isolation=isolation, errors="skip")
    assert np.isnan(skipping(some(2))).all()
    with pytest.raises(RewardError, match="once returned 1 rewards for 2 answers"):
        RewardFunctions.named([f"{own}:once"], isolation=isolation)(some(2))
    with pytest.raises(RewardError, match="endless took longer than objective.reward_timeout = 1 s"):
        RewardFunctions.named([f"{own}:endless"], isolation=isolation, timeout_seconds=1)(some(1))


def test_iterators_of_rewards_alone_are_read():
    """An environment may be one, and a tool's text is that of what it returns."""

    class Place:
        def reset(self, **row): ...

        def __iter__(self):
            return self

        def __next__(self):
            raise StopIteration

    ((environment, _),) = Tools([], Place).reset([[{"role": "user", "content": "x"}]], [{}])
    assert isinstance(environment, Place)


def test_how_an_isolated_reward_fails_is_told(own):
    for name, told in (("dies", "the process of dies ended by SIGKILL"), ("leaves", r"SystemExit: it is 1.*own_of_pr")):
        with pytest.raises(RewardError, match=f"{name} failed: {told}"):
            RewardFunctions.named([f"{own}:{name}"], isolation="process")(Sampled(["q"], ["it is 1"], [[1]], {}))


def test_an_isolated_reward_logs(own):
    rewards = RewardFunctions.named([f"{own}:logs"], isolation="process")
    rewards(Sampled(["q"] * 2, ["a", "b"], [[1]] * 2, {}))
    assert rewards.log.taken(2) == ({"length": 3.0}, {"text": ["a!", "b!"]})


def test_what_no_process_can_find_is_refused_by_name(own):
    def local(completions):
        return []

    for function, name in ((local, "local"), (lambda completions: [], "<lambda>")):
        with pytest.raises(UserCodeError, match=f"reward_isolation = process: {name} cannot be sent"):
            RewardFunctions.of([function], isolation="process")
    rewards = RewardFunctions.named([f"{own}:where"], isolation="process")
    lock = threading.Lock()
    rewards(some(1, environments=[lock]))  # where does not name it
    named = Isolated(load_function(f"{own}:where"), "objective.reward_isolation")
    named._named.add("environments")
    with pytest.raises(UserCodeError, match="where has the parameter environments, whose value cannot be sent"):
        named(completions=[], environments=[lock])


def test_an_isolated_tool_is_killed_at_its_limit(own):
    tools = Tools.named([f"{own}:power"], None, 1.0, "process")
    assert [schema["function"]["name"] for schema in tools.schemas({})] == ["power"]
    calls = [Call("power", {"base": 10, "exponent": 3}), Call("power", {"base": 10, "exponent": 10_000_000})]
    answered = tools.answer([*calls, calls[0]], tools.of(None))
    contents = [message["content"] for message in answered.messages]
    assert contents[0] == contents[2] == "4" and "power took longer than 1 s" in contents[1] and answered.failures == 1


@pytest.mark.parametrize("key", ["reward_isolation", "tool_isolation"])
def test_a_key_without_functions_is_refused(key):
    with pytest.raises(ConfigError, match=f"objective.{key}.*there are no such functions"):
        ObjectiveConfig("grpo", environment_factory="own.py:Game", **{key: "process"})


def test_a_limit_ends_waits_and_code_in_the_main_thread_and_leaves_sigalrm_alone():
    rang, sleep, ended = [], patience.Sleep(), []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))

    def sleeps(completions):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            sleep()
        finally:
            ended.append(1)

    def computes(completions):
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))

    try:
        for function in (sleeps, computes):
            with pytest.raises(RewardError, match=f"{function.__name__} took longer than .*reward_isolation=process"):
                RewardFunctions.of([function], timeout_seconds=0.3)(some())
    finally:
        signal.signal(signal.SIGALRM, before)
    assert rang == ended == [1] and not sleep.over


def test_code_that_keeps_the_lock_past_its_limit_is_not_taken_for_quick():
    def keeps(completions):
        ctypes.PyDLL(None).usleep(1_800_000)
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match="it ended after .* s, as C code kept Python's lock"):
        RewardFunctions.of([keeps], timeout_seconds=0.4)(some())  # a signal before the sleep would end it


def test_a_process_dies_with_a_killed_run(own, tmp_path):
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from jaxtune.train.user_code.modules import module_of\n"
        "from jaxtune.train.user_code.processes import Isolated\n"
        f"where = Isolated(module_of(Path({str(own)!r})).where, 'key')\n"
        "print(int(where(completions=[0])[0]), flush=True)\n"
        "Isolated(module_of(Path(sys.argv[1])).hard, 'key')(completions=['a' * 60 + 'b'])\n"
    )
    run = subprocess.Popen([sys.executable, "-c", script, str(own)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    child = int(run.stdout.readline())
    time.sleep(0.3)  # in the pattern
    os.kill(child, 0)
    run.kill()
    run.wait()
    run.stdout.close()
    patience.wait_until(lambda: has_ended(child))


def has_ended(number: int) -> bool:
    """Also where nobody has waited for it."""
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{number}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"
    return True


def test_a_process_that_only_closes_its_connection_has_no_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_END_SECONDS", 0.2)
    file = tmp_path / "closes.py"
    file.write_text("import os, time\n\ndef closes(completions):\n    os.closerange(3, 256)\n    time.sleep(600)\n")
    with pytest.raises(RewardError, match="closes.* ended its connection, and was killed"):
        RewardFunctions.named([f"{file}:closes"], isolation="process", timeout_seconds=60)(some())
    number = processes.process_of(str(file.resolve())).number
    assert number is None


def test_processes_end_with_the_run(own):
    with calling.running():
        RewardFunctions.named([f"{own}:where"], isolation="process")(some())
        process = processes.process_of(str(own.resolve()))
        assert process.number is not None
    assert process.number is None


FORKS = """
import multiprocessing, os, signal, sys, time

def ends_its_child(completions):
    own = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    own.start()
    own.terminate()
    own.join()
    return [float(-own.exitcode)] * len(completions)

def pools(completions):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(len, completions)

def comes_back(completions):
    children = [os.fork() for _ in range(2)]
    if all(children):
        [os.waitpid(child, 0) for child in children]
    return [float(len(text)) for text in completions]

def closes_stdout(completions):
    sys.stdout.close()
    return [1.0] * len(completions)

def has_no_stdout(completions):
    sys.stdout = None
    return [1.0] * len(completions)

def sends(completions):
    import pickle
    for descriptor in range(3, 64):
        try:
            message = pickle.dumps((-1, True, b""))
            os.write(descriptor, len(message).to_bytes(8, "big") + message)
        except OSError:
            pass
    return [1.0] * len(completions)
"""
FORKED = {
    "ends_its_child": [15.0, 15.0],
    "pools": [2.0, 1.0],
    "comes_back": [2.0, 1.0],
    "closes_stdout": [1.0, 1.0],
    "has_no_stdout": [1.0, 1.0],
}


@pytest.mark.parametrize("name", FORKED)
def test_an_isolated_function_may_fork_and_close(name, tmp_path):
    """Its answers stay those of their own calls."""
    file = tmp_path / "forks.py"
    file.write_text(FORKS)
    rewards = RewardFunctions.named([f"{file}:{name}"], isolation="process", timeout_seconds=30)
    for _ in range(3):
        assert rewards(Sampled(["q"] * 2, ["aa", "b"], [[1]] * 2, {}))[:, 0].tolist() == FORKED[name]


def test_what_is_no_answer_to_a_call_is_told(tmp_path):
    file = tmp_path / "forks.py"
    file.write_text(FORKS)
    texts = Sampled(["q"] * 2, ["aa", "b"], [[1]] * 2, {})
    with pytest.raises(RewardError, match="sends sent what is no answer to this call"):
        RewardFunctions.named([f"{file}:sends"], isolation="process", timeout_seconds=30)(texts)
    again = RewardFunctions.named([f"{file}:comes_back"], isolation="process", timeout_seconds=30)
    assert again(texts)[:, 0].tolist() == [2.0, 1.0]


def test_a_file_that_does_not_load_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_LOAD_SECONDS", 1.0)
    file = tmp_path / "loads.py"
    file.write_text("def f(completions):\n    return [1.0] * len(completions)\n")
    rewards = RewardFunctions.named([f"{file}:f"], isolation="process", timeout_seconds=1)
    file.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(RewardError, match="the file of f was not loaded within 1 s"):
        rewards(Sampled(["q"], ["a"], [[1]], {}))


def test_a_reward_that_changes_the_folder_moves_no_file_of_a_run(tmp_path, monkeypatch):
    from tests.train.test_tools import trainer_of

    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "moves.py"
    folder = str(tmp_path / "elsewhere")
    file.write_text(
        f"import os\n\ndef f(completions):\n    os.chdir({folder!r})\n    return [1.0] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    trainer = trainer_of("out", {"reward_funcs": (f"{file}:f",)}, steps=1)
    trainer.train()
    assert os.getcwd() == folder and not os.listdir(folder)
    assert {"metrics.jsonl", "rollouts.jsonl", "state.json"} <= {*os.listdir(tmp_path / "out")}
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) >= 1
