"""Adapters that clients load into a running server and take away again."""

from __future__ import annotations

import contextlib
import copy
import http.client
import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import adapted_model

import jaxtune
from jaxtune.models.generation.sampler import Sampler
from jaxtune.serve.errors import ApiError
from jaxtune.serve.loading import AdapterFolder
from jaxtune.serve.metrics import Metrics
from jaxtune.serve.readers import Readers
from tests import patience
from tests.patience import wait_until
from tests.serve.running import ask, engine_of, events, served_models, serving

PLAIN, LOAD, UNLOAD = "/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def models():
    return served_models()


@pytest.fixture(scope="module")
def root(models, tmp_path_factory) -> Path:
    """A folder of adapters, and one beside it."""
    above = tmp_path_factory.mktemp("above")
    root, base = above / "root", models["base"].model
    (root / "deep").mkdir(parents=True)
    other = copy.deepcopy(models["base"].tokenizer)
    other.chat_template = "{% for m in messages %}a long way to say {{ m.content }}{% endfor %}"
    jaxtune.save_adapter(adapted_model(base, seed=5, r=4), root / "a")
    jaxtune.save_adapter(adapted_model(base, seed=6, r=24, target_modules=["q_proj", "down_proj"]), root / "deep" / "b")
    jaxtune.save_adapter(adapted_model(base, seed=7, r=2), root / "spoken", other)
    jaxtune.save_adapter(adapted_model(base, seed=8, r=2, use_dora=True), root / "dora")
    jaxtune.save_adapter(adapted_model(base, seed=9, r=300), root / "wide")
    jaxtune.save_adapter(adapted_model(base, seed=9, r=2), above / "outside")
    (root / "link").symlink_to(above / "outside")
    (root / "inner").symlink_to(root / "deep" / "b")
    (root / "loop").symlink_to(root / "loop")
    (root / "empty").mkdir()
    (root / "part").mkdir()
    (root / "part" / "adapter_config.json").write_bytes((root / "a" / "adapter_config.json").read_bytes())
    (root / "part" / "adapter_model.safetensors").symlink_to(above / "outside" / "adapter_model.safetensors")
    (root / "file").write_text("no folder")
    return root


@pytest.fixture
def served(models, root):
    """(port, engine) of a server with processes of its own."""
    engine = engine_of(models, 4, 256, adapter_ranks=64)
    with (
        Readers(1) as readers,
        serving(models, engine, readers=readers, folder=AdapterFolder(root)) as (port, _),
    ):
        readers.serve({name: one.readable for name, one in models.items()})
        yield port, engine
    assert engine.close(60)


def post(port: int, path: str, **body) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience.SECONDS)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body).encode("utf-8", "surrogatepass"))
        response = connection.getresponse()
        return response.status, response.read().decode()


def names(port: int) -> list[str]:
    return [card["id"] for card in ask(port, "/v1/models")[1]["data"]]


def said(port: int, model: str, new: int = 16, **settings) -> str:
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": new, "temperature": 0, **settings}
    if settings.get("stream"):
        return "".join(event["choices"][0]["text"] for event in events(port, PLAIN, body))
    status, answer = ask(port, PLAIN, body)
    assert status == 200, answer
    return answer["choices"][0]["text"]


def expected(models, folder: Path | None, new: int = 16) -> str:
    base = models["base"]
    model = base.model if folder is None else jaxtune.load_adapter(base.model, folder)
    [ids] = jaxtune.generate(model, [base.tokenizer("Once upon a time")["input_ids"]], new)
    return base.tokenizer.decode(ids, skip_special_tokens=True)


def test_adapters_come_and_go_while_others_answer(models, root, served):
    port, engine = served
    whole = {name: said(port, name, 200) for name in ("base", "mine")}
    streams: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda name=name: streams.update({name: said(port, name, 200, stream=True)}))
        for name in whole
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(engine._of_request) == 2)
    assert post(port, LOAD, lora_name="a", lora_path="a") == (200, "Success: LoRA adapter 'a' added successfully.")
    assert post(port, LOAD, lora_name="org/b", lora_path=str(root / "deep" / "b"))[0] == 200
    assert names(port) == ["base", "mine", "a", "org/b"]
    assert ask(port, "/v1/models/org/b")[1]["parent"] == "base"
    found = {name: said(port, name) for name in ("base", "a", "org/b")}
    folders = {"base": None, "a": root / "a", "org/b": root / "deep" / "b"}
    assert found == {name: expected(models, folder) for name, folder in folders.items()} and len({*found.values()}) == 3
    for thread in threads:
        thread.join()
    assert streams == whole

    long = threading.Thread(target=lambda: streams.update(a=said(port, "a", 200, stream=True)))
    long.start()
    wait_until(lambda: any(answers.served.name == "a" for answers, _ in [*engine._of_request.values()]))
    assert post(port, UNLOAD, lora_name="a") == (200, "Success: LoRA adapter 'a' removed successfully.")
    assert names(port) == ["base", "mine", "org/b"]
    status, answer = ask(port, PLAIN, {"model": "a", "prompt": "b"})
    assert status == 404 and answer["error"]["code"] == "model_not_found"
    long.join()
    assert streams["a"] == expected(models, root / "a", 200)
    assert engine._sampler._model.bank.ranks == 4 + 24
    assert post(port, LOAD, lora_name="a", lora_path="deep/b")[0] == 200  # the name is free
    assert said(port, "a") == found["org/b"]


def test_a_failed_round_loses_no_adapter(models, root, served, monkeypatch, capsys):
    port, _ = served
    assert post(port, LOAD, lora_name="b", lora_path="inner")[0] == 200
    before = said(port, "b")

    def fails(_):
        raise RuntimeError("RESOURCE_EXHAUSTED: of the test")

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "step", fails)
        assert ask(port, PLAIN, {"model": "b", "prompt": "a"})[0] == 500
    capsys.readouterr()
    assert said(port, "b") == before == expected(models, root / "deep" / "b")
    assert said(port, "base") == expected(models, None)


def test_an_adapter_s_tokenizer_reads_its_requests(served):
    port, _ = served
    messages = [{"role": "user", "content": "hello"}]
    counts = {}
    for name in ("base", "spoken"):
        assert name == "base" or post(port, LOAD, lora_name=name, lora_path=name)[0] == 200
        status, answer = ask(port, "/tokenize", {"model": name, "messages": messages})
        assert status == 200
        counts[name] = ask(port, "/detokenize", {"model": name, "tokens": answer["tokens"]})[1]["prompt"]
    assert "a long way to say hello" in counts["spoken"] and "a long way" not in counts["base"]


WRONG = [
    (LOAD, dict(lora_name="x", lora_path="../outside"), 403, "not below"),
    (LOAD, dict(lora_name="x", lora_path="a/../../outside"), 403, "not below"),
    (LOAD, dict(lora_name="x", lora_path="/etc"), 403, "not below"),
    (LOAD, dict(lora_name="x", lora_path="link"), 403, "not below"),
    (LOAD, dict(lora_name="x", lora_path="part"), 403, "not below"),
    (LOAD, dict(lora_name="x", lora_path="."), 403, "not below"),
    (LOAD, dict(lora_name="x", lora_path="loop"), 404, "no such folder"),
    (LOAD, dict(lora_name="x", lora_path="file"), 404, "no such folder"),
    (LOAD, dict(lora_name="x", lora_path="nowhere"), 404, "no such folder"),
    (LOAD, dict(lora_name="x", lora_path="a\0b"), 400, "no path"),
    (LOAD, dict(lora_name="x", lora_path="a\ud800"), 400, "lora_path"),
    (LOAD, dict(lora_name="x", lora_path="y" * 4000), 400, "lora_path"),
    (LOAD, dict(lora_name="x", lora_path=""), 400, "lora_path"),
    (LOAD, dict(lora_name="x", lora_path="empty"), 400, "adapter_config.json"),
    (LOAD, dict(lora_name="x", lora_path="dora"), 400, "DoRA"),
    (LOAD, dict(lora_name="x", lora_path="wide"), 400, "adapter_ranks is 64"),
    (LOAD, dict(lora_name="x"), 400, "lora_path is missing"),
    (LOAD, dict(lora_name="a\nb", lora_path="a"), 400, "not printable"),
    (LOAD, dict(lora_name="mine", lora_path="a"), 400, "is served already"),
    (LOAD, dict(lora_name="base", lora_path="a"), 400, "is served already"),
    (LOAD, dict(lora_name="x", lora_path="a", load_inplace=True), 400, "load_inplace"),
    (UNLOAD, dict(lora_name="x"), 404, "there are base, mine"),
    (UNLOAD, dict(lora_name="base"), 400, "is no adapter"),
    (UNLOAD, dict(), 400, "lora_name is missing"),
]


def test_what_cannot_be_loaded_is_said_and_loses_nothing(models, served, root):
    port, engine = served
    before = said(port, "mine")
    for path, body, status, words in WRONG:
        found, text = post(port, path, **body)
        assert found == status and words in json.loads(text)["error"]["message"], (body, text)
        assert str(root) not in text
    assert names(port) == ["base", "mine"] and said(port, "mine") == before
    assert engine._sampler.adapters == ["mine"]


def test_without_a_folder_nothing_is_loaded(models, served):
    _, engine = served
    with serving(models, engine) as (port, _):
        for path in (LOAD, UNLOAD):
            status, text = post(port, path, lora_name="mine", lora_path="a")
            assert status == 403 and "--adapters-below" in json.loads(text)["error"]["message"]
        assert names(port) == ["base", "mine"]


STEPS = st.sampled_from(
    ["..", ".", "", "a", "deep", "b", "link", "inner", "outside", "root", "part", "loop", "/", "\0"]
)


@given(st.lists(STEPS, max_size=6), st.booleans())
def test_no_path_leads_out(root, steps, absolute):
    folder = AdapterFolder(root)
    path = (f"{root}/" if absolute else "") + "/".join(steps)
    try:
        found = folder._folder(path)
    except ApiError as error:
        assert error.status in (400, 403, 404)
        return
    assert os.path.realpath(root / path) == str(found) and root.resolve() in found.parents
    assert not any("outside" in os.path.realpath(entry) for entry in found.rglob("*"))


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="--adapters-below .*no folder"):
        AdapterFolder(tmp_path / "none")


def test_an_adapters_numbers_go_with_it(models):
    numbers = Metrics(engine := engine_of(models, 4, 256))
    for name in ("base", "gone"):
        progress = numbers.answer(name, 3, 0.0)
        progress.add(1)
    numbers.forget("gone")
    numbers.forget("never there")
    progress.add(1)  # under way
    text = numbers.text().decode()
    assert "gone" not in text and 'model="base"' in text
    assert engine.close(60)
