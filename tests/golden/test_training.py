"""The engine computes what it computed when it was recorded, bit for bit."""

from __future__ import annotations

import copy
import math
import warnings

import pytest

from tests.golden import records, training

RECORD = records.read("training")


@pytest.fixture(scope="module")
def comparable() -> bool:
    """Whether bits of this machine can be compared with those of the record; it is said where they cannot."""
    found = list(records.differences(training.calibration(), RECORD["calibration"]))
    if found:
        warnings.warn(
            "this machine computes otherwise than that of tests/golden/training.json: runs are compared to "
            f"{records.OTHER_MACHINE} ({records.OTHER_MACHINE_ROUNDED} where they round to fewer bits) instead of bit "
            f"for bit; {'; '.join(found)}"
        )
    return not found


def test_every_case_is_recorded():
    assert {name: list(case.plans) for name, case in training.CASES.items()} == {
        name: list(plans) for name, plans in RECORD["cases"].items()
    }


@pytest.mark.parametrize("name", training.CASES)
def test_a_run_is_the_recorded_one(name, comparable):
    tolerances = records.OTHER_MACHINE_ROUNDED if training.CASES[name].rounds else records.OTHER_MACHINE
    got = training.record(name)
    changes = records.training_changes(got, RECORD["cases"][name], None if comparable else tolerances)
    assert not changes, "\n".join(changes[:20])


# ---- that it would be seen


def changed(change) -> tuple[list[str], list[str]]:
    """What is said of a record after `change`: bit for bit, and on another machine."""
    wanted = {"keep": RECORD["cases"]["llama"]["keep"]}
    got = copy.deepcopy(wanted)
    change(got["keep"])
    return (
        records.training_changes(got, wanted),
        records.training_changes(got, wanted, records.OTHER_MACHINE),
    )


NAME = "model.layers.0.self_attn.q_proj.weight"


def test_other_bytes_of_one_gradient_are_said_with_their_error():
    def other_bits(run):
        digest, norm, *rest = run["tensors"][NAME][0]
        run["tensors"][NAME][0] = ["0" * len(digest), norm * (1 + 3e-7), *rest]

    bits, near = changed(other_bits)
    assert bits == [f"keep: gradient of {NAME}: 3.0e-07 of it"] and near == []


def test_an_error_is_seen_on_another_machine_too():
    def wrong(run):
        digest, *numbers, size = run["tensors"][NAME][1]
        run["tensors"][NAME][1] = ["0" * len(digest), *(1.001 * x for x in numbers), size]
        run["losses"][3] *= 1.001

    bits, near = changed(wrong)
    assert len(near) == 2 and bits == near
    assert near[0] == "keep: loss 4: 1.0e-03 of it" and near[1].startswith(f"keep: weight of {NAME}: 1.")


@pytest.mark.parametrize(("factor", "seen"), [(1 + 3e-5, True), (float("inf"), True), (1 + 5e-6, False)])
def test_a_gradient_that_overflows_is_compared_where_it_is_finite(factor, seen):
    """On another machine: a norm that is NaN in both says nothing, and an element that overflows in one only does."""
    wanted = ["a", math.nan, math.nan, 0.25, 64]
    error = records.tensor_error(["b", math.nan, math.nan, 0.25 * factor, 64], wanted)
    assert (error > records.OTHER_MACHINE["gradient"]) == seen


def test_tensors_and_steps_that_are_gone_are_said():
    def gone(run):
        del run["tensors"][NAME]
        run["losses"].pop()

    for said in changed(gone):
        assert said == ["keep: the number of losses: inf of it", f"keep: {NAME} is there only in the record: inf of it"]
