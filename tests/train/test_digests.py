"""Digests of the user's code and of rows' values: what changes them, and what does not."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.train.digests import code_digest, code_of, values_crc32
from jaxtune.train.sampled.reward_functions import READY
from jaxtune.train.user_code.loading import load_from_file

FILE = """
LIMIT = 3


def helper(x):
    return x + LIMIT


def reward(completions):
    return [helper(1.0)] * len(completions)
"""


def of_file(folder, text: str, name: str = "reward") -> str | None:
    (folder / "rewards.py").write_text(text)
    return code_digest(load_from_file(f"{folder / 'rewards.py'}:{name}", "objective.reward_funcs"))


def test_the_whole_file_of_a_function_counts(tmp_path):
    first = of_file(tmp_path, FILE)
    assert first == of_file(tmp_path, FILE) and len(str(first)) == 16
    for old, new in (("LIMIT = 3", "LIMIT = 4"), ("x + LIMIT", "x - LIMIT"), ("[helper(1.0)]", "[-helper(1.0)]")):
        assert of_file(tmp_path, FILE.replace(old, new)) != first


def test_all_kinds_of_callables_have_a_digest_by_their_code(tmp_path):
    kinds = {
        "function": "def reward(x):\n    return {0}\n",
        "class": "class reward:\n    def reset(self):\n        return {0}\n",
        "object": "class C:\n    def __call__(self):\n        return {0}\n\n\nreward = C()\n",
        "method": "class C:\n    def f(self):\n        return {0}\n\n\nreward = C().f\n",
        "partial": "import functools\n\n\ndef f(x):\n    return {0}\n\n\nreward = functools.partial(f, 3)\n",
        "lambda": "reward = lambda x: {0}\n",
        "async": "async def reward(x):\n    return {0}\n",
    }
    seen = set()
    for kind, text in kinds.items():
        one, same, other = (of_file(tmp_path, text.format(value)) for value in (1, 1, 2))
        assert one == same != other and one is not None, kind
        seen |= {one, other}
    assert len(seen) == 2 * len(kinds)


@given(st.integers() | st.text() | st.booleans(), st.integers() | st.text() | st.booleans())
def test_arguments_of_partials_and_values_of_closures_count(one, other):
    def made(value):
        return lambda completions: [value] * len(completions)

    def digests(value):
        return code_digest(made(value)), code_digest(functools.partial(max, value))

    for first, second in zip(digests(one), digests(other), strict=True):
        assert (first == second) == (repr(one) == repr(other))


def test_code_without_a_source_counts_by_its_instructions():
    def made(text):
        names: dict = {}
        exec(text, names)
        return code_digest(names["f"])

    first = made("def f(x):\n    return [v + 1 for v in x]\n")
    assert first == made("\n\ndef f(x):\n    return [v + 1 for v in x]\n")
    assert len({first, *(made(f"def f(x):\n    return [v {what} for v in x]\n") for what in ("+ 2", "- 1"))}) == 3


def test_a_script_counts_by_the_function_alone(tmp_path):
    script = tmp_path / "script.py"
    text = "def reward(x):\n    return 1\n\n\nprint(code_digest(reward))\n"

    def printed(text):
        script.write_text(f"from jaxtune.train.digests import code_digest\n\n\n{text}")
        return subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout

    first = printed(text)
    assert (
        first == printed(text.replace("print(", "steps = 8\nprint(")) != printed(text.replace("return 1", "return 2"))
    )


def test_this_packages_own_code_has_none():
    assert code_of(READY) == {}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.lists(values, max_size=4), st.lists(values, max_size=4))
def test_a_checksum_of_values_is_that_of_what_they_hold(one, other):
    def turned(value):
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return [turned(each) for each in value] if isinstance(value, list) else value

    assert values_crc32(one) == values_crc32([turned(value) for value in one])
    if json.dumps(one, sort_keys=True, default=repr) != json.dumps(other, sort_keys=True, default=repr):
        assert values_crc32(one) != values_crc32(other)


@pytest.mark.parametrize("make", [lambda x: np.full(3, x), lambda x: {x}, lambda x: bytes([x]), lambda x: complex(x)])
def test_values_beyond_json_count(make):
    assert values_crc32([{"a": make(1)}]) == values_crc32([{"a": make(1)}]) != values_crc32([{"a": make(2)}])
