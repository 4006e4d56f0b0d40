"""A base is known by all bytes of its weights and by what its config.json says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from checks import shapes_of
from random_weights import rewrite, write_checkpoint
from safetensors import safe_open
from tiny import CONFIGS
from tiny_models import adapted_model, tiny_model

from jaxtune.models.adapters.adapter_files import load_adapter, save_adapter
from jaxtune.models.files import digests, headers
from jaxtune.models.hf import Pretrained, from_pretrained, model_from_config
from jaxtune.models.placement import partition

CONFIG = CONFIGS["llama"] | {"vocab_size": 4096}  # an embedding of which samples leave out much
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def big(tmp_path) -> Path:
    write_checkpoint(tmp_path / "big", CONFIG, shapes_of(CONFIG))
    return tmp_path / "big"


def flip_an_unsampled_bit(folder: Path) -> None:
    """In place: what a sample of 64 blocks of the embedding does not see, nor anything but its times."""
    entry = headers.read_header(folder / "model.safetensors")[EMBEDDING]
    with open(folder / "model.safetensors", "r+b") as file:
        place = entry.offset + 4096 + 64  # after the first block; the second begins at a 63rd
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def say(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def digest(folder: Path, **options) -> str:
    return from_pretrained(folder, "float32", **options)[0].base_digest


def test_one_bit_anywhere_is_another_base(big):
    before = from_pretrained(big, "float32")[0]
    flip_an_unsampled_bit(big)
    after = from_pretrained(big, "float32")[0]
    assert after.base_fingerprint == before.base_fingerprint  # all that older versions see
    assert after.base_digest != before.base_digest and len(after.base_digest) == 64


@pytest.mark.parametrize("changes", [{"rope_theta": 5e5}, {"rms_norm_eps": 1e-3}, {"hidden_act": "gelu"}])
def test_a_config_that_computes_otherwise_is_another_base(changes, folder):
    before = digest(folder)
    say(folder, **changes)
    assert digest(folder) != before


@pytest.mark.full
def test_what_computes_nothing_is_the_same_base(folder, sharded):
    """Nor does the dtype that it is cast to, or what the linears are quantised to, which a run records itself."""
    before = digest(folder)
    assert digest(sharded) == before
    assert digest(folder, load_in="nf4") == before
    assert from_pretrained(folder, "bfloat16")[0].base_digest == before
    say(folder, transformers_version="0.0", _name_or_path="elsewhere", use_cache=False)
    rewrite(folder, lambda tensors: None)
    assert digest(folder) == before


def test_a_feature_of_later_versions_changes_nothing_of_a_config_without_it():
    config = tiny_model().config
    said = json.loads(digests._config_json(config))
    assert said[0] == "DecoderConfig" and said[1]["hidden_size"] == config.hidden_size
    assert "moe" not in said[1] and "norm_offset" not in said[1]  # they have their defaults


def test_random_weights_are_known_by_config_and_key():
    def made(seed=0, dtype="float32", **changes):
        return model_from_config(CONFIGS["llama"] | changes, jax.random.key(seed), dtype).base_digest

    assert made() == made()
    assert len({made(), made(seed=1), made(dtype="bfloat16"), made(rms_norm_eps=1e-3)}) == 4
    shapes = jax.eval_shape(
        lambda key: model_from_config(CONFIGS["llama"], key).embedding.weight[...], jax.random.key(0)
    )
    assert shapes.shape[0] == CONFIGS["llama"]["vocab_size"]  # made under a trace, whose key has no bits


# ---- adapters


def test_an_adapter_refuses_a_base_that_a_sample_does_not_tell_apart(big, tmp_path):
    base = from_pretrained(big, "float32")[0]
    save_adapter(adapted_model(base, r=2), tmp_path / "a")
    load_adapter(from_pretrained(big, "float32")[0], tmp_path / "a")
    flip_an_unsampled_bit(big)
    other = from_pretrained(big, "float32")[0]
    with pytest.raises(ValueError, match=rf"another base .digest {base.base_digest}, .*weights or its config.json"):
        load_adapter(other, tmp_path / "a")


def test_an_adapter_of_an_older_version_is_compared_by_what_it_recorded(big, tmp_path):
    base = from_pretrained(big, "float32")[0]
    base.base_digest = None  # as they wrote it
    save_adapter(adapted_model(base, r=2), tmp_path / "a")
    with safe_open(tmp_path / "a" / "adapter_model.safetensors", "numpy") as file:
        assert set(file.metadata()) == {"format", "jaxtune_base_fingerprint", "jaxtune_trained_over"}
    flip_an_unsampled_bit(big)
    load_adapter(from_pretrained(big, "float32")[0], tmp_path / "a")
    rewrite(big, lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING] * np.float32(1.01)}))
    with pytest.raises(ValueError, match=f"another base .fingerprint {base.base_fingerprint}"):
        load_adapter(from_pretrained(big, "float32")[0], tmp_path / "a")


# ---- what is kept


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Names of tensors that are read for their digest alone."""
    found, made = [], digests.Digest.read.__func__

    def read(cls, name, dtype, shape, size, read, kept=None):
        if kept is None:
            found.append(name)
        return made(cls, name, dtype, shape, size, read, kept)

    monkeypatch.setattr(digests.Digest, "read", classmethod(read))
    return found


@pytest.fixture
def settled(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_SETTLED_SECONDS", -1.0)


def divided(folder: Path) -> str:
    return Pretrained(folder, "float32").load(mesh=partition.make_mesh(1, 2)).base_digest


@pytest.mark.full
def test_digests_of_divided_tensors_are_kept_until_a_file_changes(big, reads, settled, tmp_path):
    whole = digest(big)
    assert divided(big) == whole and reads
    (kept,) = (tmp_path / "cache" / "weights").iterdir()
    reads.clear()
    assert divided(big) == whole and not reads
    # Its size, and the time that one can set, as before.
    before = os.stat(big / "model.safetensors")
    flip_an_unsampled_bit(big)
    os.utime(big / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = divided(big)
    assert changed == digest(big) != whole and reads
    flipped = bytearray(kept.read_bytes())
    flipped[-40] ^= 1  # a digit of a digest
    for damage in (b"", b"{", b'{"format": 1}', kept.read_bytes()[:-9], bytes(flipped)):
        kept.write_bytes(damage)
        reads.clear()
        assert divided(big) == changed and reads


def test_nothing_is_kept_of_a_file_that_was_just_written(big, reads, monkeypatch, tmp_path):
    """It could be written again within one tick of its clock."""
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_SETTLED_SECONDS", 1e9)
    divided(big)
    assert reads and not (tmp_path / "cache").exists()


def test_a_file_that_is_deleted_during_a_load_is_left(big, settled, tmp_path):
    cache = digests.DigestCache([big / "model.safetensors"])
    cache.put(EMBEDDING, b"digest")
    (big / "model.safetensors").unlink()
    cache.save()
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_left(big, reads, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(digests, "_SETTLED_SECONDS", -1.0)
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path / "file"))
    assert divided(big) == divided(big) and reads
