"""What is planned for sampling is what samplers take, on any mesh and in several processes."""

from __future__ import annotations

import random
import re
from pathlib import Path

from drawn import DRAWS
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.plan_of_slots import MESHES, MODELS, WAYS, differences, trainer_of
from tests.train.test_several_processes import run_together


@settings(max_examples=60 if DRAWS else 6, deadline=None)
@given(st.sampled_from(WAYS), st.sampled_from(MODELS), st.sampled_from(MESHES), st.integers(0, 10_000))
def test_plan_and_samplers_agree(tmp_path_factory, way, name, mesh, seed):
    name = MODELS[1] if way == "own samples" and name == MODELS[0] else name
    folder = tmp_path_factory.mktemp("plan") / "run"
    assert differences(trainer_of(folder, way, name, mesh, random.Random(seed))) == []


def test_plan_and_samplers_of_two_processes_agree(tmp_path):
    command = [str(Path(__file__).with_name("plan_of_slots.py")), str(tmp_path)]
    for code, words in run_together([command] * 2):
        assert code == 0 and len(re.findall(r"^of .*: \[\]$", words, re.M)) == 4, words
