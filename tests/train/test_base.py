"""What a run keeps of its base and compares: a resume, a finished run, a kept reference, and the first step of DPO."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from checks import shapes_of
from random_weights import write_checkpoint
from tiny import CONFIGS

from jaxtune.models.hf import from_pretrained
from jaxtune.models.lora import get_peft_model, matrices
from jaxtune.system.sealed import sealed
from jaxtune.train.callbacks import TrainingStopped
from jaxtune.train.config import AdapterConfig, CheckpointConfig, QatConfig
from jaxtune.train.config.file import config_keys
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.data.packing.pairs import PairDataset
from jaxtune.train.data.tokens.cache import Summary
from jaxtune.train.data.tokens.documents import Document, Documents
from jaxtune.train.folder.checkpoint import CheckpointError
from jaxtune.train.folder.record import LENGTHENED, digest, is_digest_of, same_run
from jaxtune.train.folder.results import require_own, write_result
from jaxtune.train.folder.translations import DIGESTED
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.planning import plan_text
from jaxtune.train.references import references
from jaxtune.train.trainer import Trainer
from tests.models.test_digests import flip_an_unsampled_bit, say
from tests.train.tiny_runs import dataset, documents, lora_model, make_config

CONFIG = CONFIGS["llama"] | {"vocab_size": 4096, "num_hidden_layers": 1}


@pytest.fixture
def base(tmp_path) -> Path:
    write_checkpoint(tmp_path / "base", CONFIG, shapes_of(CONFIG))
    return tmp_path / "base"


def adapted(base: Path):
    return get_peft_model(from_pretrained(base, "float32")[0], r=2)


def pair_rows() -> PairDataset:
    draw = np.random.default_rng(0)
    made = [Document(draw.integers(0, 48, 9).astype(np.int32), np.arange(9) >= 3) for _ in range(16)]
    return PairDataset(Documents.gather(made), Summary(rows=8, documents=16), 24, True)


def dpo(base: Path, output: Path, **settings) -> Trainer:
    config = make_config(
        output, steps=2, rows_per_step=4, objective=ObjectiveConfig("dpo", precompute_ref_log_probs=True)
    )
    data = dataclasses.replace(config.data, length=24, cache_dir=str(output.parent / "cache"))
    return Trainer(adapted(base), None, dataclasses.replace(config, data=data, **settings), pair_rows())


def test_how_long_the_reference_takes_is_said_before_it_is_computed(base, tmp_path, monkeypatch):
    said: list[int] = []

    def pass_lines(plan, costs, device, rows):
        said.append(rows["the reference's"])
        return []

    monkeypatch.setattr(plan_text, "pass_lines", pass_lines)
    dpo(base, tmp_path / "run").train()
    assert len(said) == 1 and said[0] > 0


# ---- a run


def tuned(base: Path, output: Path, steps: int = 2) -> Trainer:
    config = make_config(output, steps=steps, checkpoint=CheckpointConfig(every_steps=1, every_minutes=None))
    return Trainer(adapted(base), None, config, dataset(documents(12)))


CHANGES = {"weights": flip_an_unsampled_bit, "config.json": lambda folder: say(folder, rope_theta=5e5)}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_is_not_resumed_on_another_base(change, base, tmp_path):
    tuned(base, tmp_path / "run").train()
    CHANGES[change](base)
    with pytest.raises(CheckpointError, match="base_digest: saved "):
        tuned(base, tmp_path / "run", steps=3).train()
    with pytest.raises(CheckpointError, match="base_digest: saved "):  # nor is it complete
        tuned(base, tmp_path / "run").train()


@pytest.mark.full
def test_a_result_is_not_that_of_a_run_on_another_base(base, tmp_path):
    """As a run sees it that has lost its checkpoints."""
    write_result(tmp_path / "adapter", tuned(base, tmp_path / "a")._same_run(), 2, lambda folder: None)
    assert require_own(tmp_path / "adapter", tuned(base, tmp_path / "b")._same_run(), 2).step == 2
    flip_an_unsampled_bit(base)
    with pytest.raises(ValueError, match="another run.*\n  base_digest: saved"):
        require_own(tmp_path / "adapter", tuned(base, tmp_path / "b")._same_run(), 2)


def without_digest(checkpoint: Path) -> None:
    """Makes of a checkpoint one of an older version, which recorded a fingerprint alone."""
    record = json.loads((checkpoint / "meta.json").read_text())
    del record["meta"]["base_digest"], record["meta"]["version"]
    content = json.dumps(record).encode()
    (checkpoint / "meta.json").write_bytes(content)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["meta.json"] = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.full
def test_a_run_of_an_older_version_is_compared_by_what_it_recorded(base, tmp_path):
    tuned(base, tmp_path / "run").train()
    (last,) = {path for path in (tmp_path / "run" / "checkpoints").glob("step_*") if path.name.endswith("2")}
    without_digest(last)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    got, want = tuned(base, tmp_path / "run", steps=3), tuned(base, tmp_path / "straight", steps=3)
    got.train()
    want.train()
    assert got.history[-1]["loss"] == want.history[-1]["loss"]
    write_checkpoint(base, CONFIG, shapes_of(CONFIG), np.float16)
    with pytest.raises(CheckpointError, match="base_fingerprint: saved "):
        tuned(base, tmp_path / "other", steps=3).train()


def sha256(values: dict) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


KEYS = [{f"{name}.{key}".lstrip(".") for name in new for key in new[name].split()} for new in DIGESTED]


def test_numbers_that_any_older_version_wrote_are_still_the_run_s(base, tmp_path):
    run = same_run(tuned(base, tmp_path / "run").record())
    run.pop("version")
    known: set[str] = set()
    for new in KEYS:
        known |= {f"config.{key}" for key in new}
        recorded = {key: value for key, value in run.items() if key in known or not key.startswith("config.")}
        older = {key: value for key, value in recorded.items() if key != "base_digest"}
        assert len(older) < len(recorded) <= len(run)
        for values in (older, recorded):
            short = {key: value for key, value in values.items() if key not in LENGTHENED}
            assert is_digest_of(sha256(short), run)
            assert is_digest_of(sha256(values), run)  # with the number of steps, which is no part of it any more
            assert not is_digest_of(sha256(short | {"base_fingerprint": "other"}), run)
    every = {key: value for key, value in run.items() if key not in LENGTHENED and key not in UNDIGESTED}
    assert run["base_digest"] and is_digest_of(digest(run), run) and is_digest_of(sha256(every), run)


# Identifying keys of a digest only with another value than their default.
_SINCE = "cache f_divergence_type f_alpha_divergence_coef discopop_tau reward_clip_range"
UNDIGESTED = {
    f"config.{key}"
    for key in (
        *("model.tower", "data.max_pixels", "data.patches_per_row"),
        *(f"objective.{name}" for name in _SINCE.split()),
    )
}


def test_a_newer_key_changes_no_digest_at_its_default(base, tmp_path):
    """The list of keys that old digests have is closed; what it lacks is left out while nobody sets it."""
    run = same_run(tuned(base, tmp_path / "run").record())
    config = {key.name for key in config_keys()}
    assert set.union(*KEYS) <= config and sum(map(len, KEYS)) == len(set.union(*KEYS)) == 126
    first = digest(run)
    for key, value in run.items():
        plain = {name: run[name] for name in run if name != key}
        listed = key.removeprefix("config.") in KEYS[0] or not key.startswith("config.")
        assert (digest(plain) == first) == (not listed or key in LENGTHENED or key == "version"), key
        if key.startswith("config.") and key not in LENGTHENED:
            other = run | {key: [value, "another"]}
            assert digest(other) != first and not is_digest_of(first, other) and not is_digest_of(digest(other), run)


# ---- a reference


def kept(tmp_path: Path) -> set[Path]:
    return set((tmp_path / "cache").glob("reference_*.npy"))


@pytest.mark.full
@pytest.mark.parametrize("change", CHANGES)
def test_a_kept_reference_is_of_the_very_base(change, base, tmp_path, capsys):
    dpo(base, tmp_path / "one").train()
    (first,) = kept(tmp_path)
    dpo(base, tmp_path / "two").train()
    assert kept(tmp_path) == {first} and f"reference:{first}" in "".join(capsys.readouterr().err.split())
    CHANGES[change](base)
    dpo(base, tmp_path / "three").train()
    assert len(kept(tmp_path)) == 2


@pytest.mark.full
def test_a_kept_reference_is_checked(base, tmp_path, capsys):
    dpo(base, tmp_path / "one").train()
    (file,) = kept(tmp_path)
    whole = file.read_bytes()
    changed = bytearray(whole)
    changed[-30] ^= 1  # the last digits of a number
    elsewhere = sealed("reference_of_others.npy", bytes(changed[:-16]))
    for damaged in (bytes(changed), elsewhere, whole[:-1], whole[:-16], b""):
        file.write_bytes(damaged)
        capsys.readouterr()
        dpo(base, tmp_path / f"again {len(damaged)} {damaged == elsewhere}").train()
        assert file.read_bytes() == whole
        assert "is damaged and not used" in " ".join(capsys.readouterr().err.split())


@pytest.mark.full
def test_the_first_loss_is_ln_2_or_the_run_is_refused(base, tmp_path):
    """Numbers of another model in a file whose checksum holds."""
    trainer = dpo(base, tmp_path / "one")
    trainer.train()
    assert trainer.history[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    (file,) = kept(tmp_path)
    right = np.load(file)
    for number, wrong in enumerate((right - 3.0, right[::-1] + np.tile([40, -40], 8), np.roll(right, 2) * 1.1)):
        file.unlink()
        with open(file, "wb") as stream:
            np.save(stream, wrong.astype(np.float32))
        file.write_bytes(sealed(file.name, file.read_bytes()))
        with pytest.raises(TrainingStopped, match=r"step 1: .* must give the answers the same log-probabilities"):
            dpo(base, tmp_path / f"wrong {number}").train()


def metrics(**changes) -> dict[str, float]:
    line = {"loss": float(np.log(2)), "logps/chosen": -100.0, "logps/rejected": -90.0}
    return line | {"rewards/chosen": 0.0, "rewards/rejected": 0.0} | changes


def test_what_the_first_step_is_held_to(tmp_path):
    made = objective_of(ObjectiveConfig("dpo"))
    check = references.first_check(made, None, None, None, lambda: True)
    check(metrics())
    check(metrics(**{"rewards/chosen": 0.02, "loss": 0.7}))  # 16 bits
    for wrong in ({"rewards/chosen": 0.2}, {"rewards/rejected": -0.2}, {"loss": 1.0}):
        with pytest.raises(TrainingStopped, match="step 1: "):
            check(metrics(**wrong))
    # What is known to differ, or of which nothing is known.
    wrong = metrics(loss=5.0)
    references.first_check(made, None, None, None, lambda: False)(wrong)
    references.first_check(made, None, 5.0, None, lambda: True)(wrong)
    references.first_check(made, QatConfig("int4"), None, None, lambda: True)(wrong)
    given = dataclasses.replace(pair_rows(), reference=np.zeros(16, np.float32))
    references.first_check(made, None, None, given, lambda: True)(wrong)


@pytest.mark.full
def test_an_adapter_that_has_trained_is_not_fresh(tmp_path):
    model = lora_model()
    for _, matrix in matrices(model):
        matrix.lora.b.set_value(jnp.ones_like(matrix.lora.b[...]))
    config = make_config(
        tmp_path / "a", steps=1, objective=ObjectiveConfig("dpo"), adapter=AdapterConfig(r=4, lora_alpha=8)
    )
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, length=24))
    trained = Trainer(model, None, config, pair_rows())
    trained.train()
    assert not trained.model.fresh and abs(trained.history[0]["loss"] - np.log(2)) > 0.01
    fresh = Trainer(lora_model(), None, dataclasses.replace(config, output=str(tmp_path / "b")), pair_rows())
    fresh.train()
    assert fresh.model.fresh
