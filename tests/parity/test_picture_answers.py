"""Greedy answers to pictures by each command equal those of transformers."""

from __future__ import annotations

import base64
import io
import json

import pytest
import torch
import transformers
from PIL import Image
from tiny_models import shaken

import jaxtune
from jaxtune import cli
from jaxtune.conversations.picture_processors import PictureReader
from jaxtune.conversations.pictures import PictureAccess
from jaxtune.models.files.model_folder import load_tokenizer
from jaxtune.models.generation.pictures import processor_of
from jaxtune.serve.served import ServedModel
from jaxtune.system.terminal import printable
from jaxtune.train.data.rendering.pictures import PictureOptions
from jaxtune.train.evaluation.evaluate import exact_match
from tests.parity.test_pictures import load
from tests.serve.running import ask, engine_of, events, serving
from tests.train.data.pictures import MARKS, SETTINGS, drawn
from tests.train.picture_runs import write_model

NEW = 8  # tokens of an answer
ANSWERED = {"role": "assistant", "content": "none of them"}
SIZES = [(40, 24), (9, 31), (17, 17)]  # pixels; one smaller than the least


class Reference:
    """transformers' model, image processor and template of a folder."""

    def __init__(self, folder):
        self.model, self.tokenizer = load(folder), load_tokenizer(folder)
        names = {name: value for name, value in SETTINGS.items() if name != "image_processor_type"}
        self.processor = transformers.Qwen2VLImageProcessorPil(**names)

    def ids(self, messages, pictures: list[Image.Image]) -> tuple[list[int], dict]:
        given = dict(self.processor(pictures, return_tensors="pt")) if pictures else {}
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        first, *others = text.split(MARKS[1])
        for grid, after in zip(given.get("image_grid_thw", ()), others, strict=True):
            first += MARKS[1] * int(grid.prod() // 4) + after
        return self.tokenizer(first, add_special_tokens=False)["input_ids"], given

    def answer(self, messages, pictures: list[Image.Image]) -> str:
        """Of messages whose pictures are parts {"type": "image"}."""
        ids, given = self.ids(messages, pictures)
        tokens = torch.tensor([ids])
        if pictures:
            given["mm_token_type_ids"] = (tokens == self.tokenizer.convert_tokens_to_ids(MARKS[1])).int()
        self.model.model.rope_deltas = None
        with torch.no_grad():
            made = self.model.generate(input_ids=tokens, **given, max_new_tokens=NEW, do_sample=False)
        return self.tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True)


def question(text: str, count: int) -> list[dict]:
    return [{"role": "user", "content": [{"type": "image"}] * count + [{"type": "text", "text": text}]}]


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("pictures") / "model")


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(folder)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """(Images, their files)."""
    images = [drawn(*size, seed) for seed, size in enumerate(SIZES)]
    files = [tmp_path_factory.mktemp("drawn") / f"{number}.png" for number in range(len(images))]
    for file, image in zip(files, images, strict=True):
        file.write_bytes(png(image))
    return images, [*map(str, files)]


def test_generate_with_images(folder, reference, pictures, capsys):
    images, files = pictures
    flags = ["--max-new-tokens", str(NEW), "--dtype", "float32"]
    for file in files:
        flags += ["--image", file]
    assert cli.main(["generate", str(folder), "--prompt", "Which?", "--prompt", "<image>a<image>b<image>", *flags]) == 0
    content = [part for text in ("", "a", "b") for part in ({"type": "text", "text": text}, {"type": "image"})]
    tagged = [{"role": "user", "content": content}]
    first, second = reference.answer(question("Which?", 3), images), reference.answer(tagged, images)
    assert (
        capsys.readouterr().out == f"--- Which?\n{printable(first)}\n--- <image>a<image>b<image>\n{printable(second)}\n"
    )
    assert first != second


def test_generate_of_a_file_with_pictures(folder, reference, pictures, tmp_path):
    images, files = pictures
    (tmp_path / "near.png").write_bytes(png(images[0]))
    part = {"type": "image_url", "image_url": {"url": data_url(images[1])}}
    asked = [
        ({"prompt": "Which?", "images": ["near.png", files[2]], "id": 1}, [images[0], images[2]]),
        ({"messages": [{"role": "user", "content": [part, {"type": "text", "text": "Which?"}]}]}, [images[1]]),
        ({"prompt": "Which?"}, []),
        ({"prompt": "<image>", "image": files[1]}, [images[1]]),
    ]
    source, output = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row, _ in asked))
    flags = ["--max-new-tokens", str(NEW), "--dtype", "float32"]
    command = ["generate", str(folder), "--prompts", str(source), "--output", str(output), *flags]
    assert cli.main(command) == 0
    texts = ["Which?", "Which?", "Which?", ""]
    want = [reference.answer(question(text, len(i)), i) for text, (_, i) in zip(texts, asked, strict=True)]
    written = output.read_text()
    lines = [json.loads(line) for line in written.splitlines()]
    assert [line["answer"] for line in lines] == want and len(set(want)) > 2
    assert lines[0]["images"] == ["near.png", files[2]]
    output.write_text("".join(written.splitlines(keepends=True)[:2]))
    assert cli.main(command) == 0 and output.read_text() == written
    (tmp_path / "near.png").write_bytes(png(images[1]))  # another picture of the same name
    assert cli.main(command) == 2


def test_generate_with_an_adapter_and_a_merged_model(folder, pictures, tmp_path, capsys):
    model, tokenizer = jaxtune.from_pretrained(folder, dtype="float32", pictures=True)
    adapted = shaken(jaxtune.get_peft_model(model, r=2, target_modules=["q_proj", "linear_fc1", "gate_proj"]))
    jaxtune.save_adapter(adapted, tmp_path / "adapter", tokenizer)
    jaxtune.save_pretrained(jaxtune.merge_adapter(adapted), tmp_path / "merged", tokenizer)
    want = Reference(tmp_path / "merged").answer(question("Which?", 2), pictures[0][:2])
    flags = ["--max-new-tokens", str(NEW), "--dtype", "float32", "--prompt", "Which?"]
    for name in ("adapter", "merged"):
        images = [word for file in pictures[1][:2] for word in ("--image", file)]
        assert cli.main(["generate", str(tmp_path / name), *flags, *images]) == 0
        assert capsys.readouterr().out == f"{printable(want)}\n"
    assert cli.main(["generate", str(tmp_path / "adapter"), *flags]) == 0  # its tower is loaded without being asked for


def test_a_server_answers(folder, reference, pictures):
    images, _ = pictures
    model, tokenizer = jaxtune.from_pretrained(folder, dtype="float32", pictures=True)
    reader = PictureReader(processor_of(model.source, tokenizer), PictureAccess(files=False))
    models = {"eyes": ServedModel("eyes", model, tokenizer, pictures=reader)}
    engine = engine_of(models)
    asked = {"model": "eyes", "temperature": 0, "max_tokens": NEW}
    with serving(models, engine) as (port, _):
        for count in (2, 1, 0):
            parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images[:count]]
            items = [{"type": "input_image", "image_url": data_url(image)} for image in images[:count]]
            turn = {"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}
            want = reference.answer(question("Which?", count), images[:count])
            tokens = len(reference.ids(question("Which?", count), images[:count])[0])
            status, whole = ask(port, "/v1/chat/completions", asked | {"messages": [turn], "n": 2})
            assert status == 200, whole
            assert [choice["message"]["content"].strip() for choice in whole["choices"]] == [want.strip()] * 2
            assert whole["usage"]["prompt_tokens"] == tokens
            streamed = events(port, "/v1/chat/completions", asked | {"messages": [turn]})
            text = "".join(c["delta"].get("content") or "" for event in streamed for c in event["choices"])
            assert text.strip() == want.strip()
            turn = {"role": "user", "content": [*items, {"type": "input_text", "text": "Which?"}]}
            body = {"model": "eyes", "temperature": 0, "max_output_tokens": NEW, "input": [turn]}
            status, answer = ask(port, "/v1/responses", body)
            assert status == 200 and answer["output"][-1]["content"][0]["text"].strip() == want.strip()
            assert answer["usage"]["input_tokens"] == tokens
    assert engine.close(60)


def test_held_out_questions(folder, reference, pictures):
    images, files = pictures
    model, tokenizer = jaxtune.from_pretrained(folder, dtype="float32", pictures=True)
    parts = [[{"type": "image", "image": file} for file in files[:count]] for count in (2, 0, 1)]
    rows = [
        {"messages": [{"role": "user", "content": [*shown, {"type": "text", "text": "Which?"}]}, ANSWERED]}
        for shown in parts
    ]
    options = PictureOptions(processor_of(model.source, tokenizer))
    score, answers = exact_match(model, tokenizer, rows, NEW, pictures=options)
    want = [reference.answer(question("Which?", len(shown)), images[: len(shown)]).strip() for shown in parts]
    assert score == 0 and answers == [
        ("<image>" * len(shown) + "Which?", "none of them", text) for shown, text in zip(parts, want, strict=True)
    ]


def test_chat_about_pictures(folder, reference, pictures, monkeypatch, capsys):
    images, files = pictures
    lines = iter([f"/image {files[0]}", "Which?", "/image nowhere.png", f"/image {files[1]}", "And?", "Well?"])

    def typed(prompt=""):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    flags = ["--temperature", "0", "--max-new-tokens", str(NEW), "--dtype", "float32"]
    assert cli.main(["chat", str(folder), *flags]) == 0
    said, told = capsys.readouterr()
    turns, expected = [], []
    for text, count in (("Which?", 1), ("And?", 1), ("Well?", 0)):
        turns += question(text, count) if count else [{"role": "user", "content": text}]
        seen = sum(part["type"] == "image" for turn in turns for part in turn["content"] if isinstance(part, dict))
        expected.append(reference.answer(turns, images[:seen]))
        turns.append({"role": "assistant", "content": expected[-1].strip()})
    assert [line.rstrip() for line in said.split("\n")] == [*(printable(line).rstrip() for line in expected), ""]
    assert "a picture of 15 tokens" in told and "there is no file 'nowhere.png'" in told
