"""The planner chooses what it chose when it was recorded, and predicts the same bytes and seconds."""

from __future__ import annotations

import pytest

from tests.golden import planning, records

RECORD = records.read("planning")["cases"]


@pytest.mark.parametrize("model", planning.CASES)
def test_choices_and_predictions_are_the_recorded_ones(model):
    changes = list(records.differences(planning.record(model), RECORD[model], records.PREDICTIONS))
    assert not changes, "\n".join(changes)


def test_every_model_is_recorded():
    assert RECORD.keys() == planning.CASES.keys()


def test_another_choice_and_another_prediction_are_said():
    case, wanted = next(iter(RECORD["8B"].items()))
    got = wanted | {"residuals": "recompute", "step_seconds": wanted["step_seconds"] * (1 + 2e-6)}
    residuals, seconds = records.differences({case: got}, {case: wanted}, records.PREDICTIONS)
    assert residuals == f"{case}: residuals: recompute for {wanted['residuals']}"
    assert seconds.startswith(f"{case}: step_seconds: ") and seconds.endswith("(+2.00e-06 of it)")
