"""Pictures in requests: what is read, what is refused, and hostile ones in the processes that read."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import http.server
import json
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from jaxtune.conversations import pictures
from jaxtune.conversations.picture_processors import PictureReader
from jaxtune.conversations.pictures import PictureAccess
from jaxtune.serve import bodies
from jaxtune.serve.bodies import read_chat, read_tokenize
from jaxtune.serve.errors import ApiError
from jaxtune.serve.readers import Readers
from jaxtune.serve.responses import read_responses
from jaxtune.serve.served import Readable
from tests import patience
from tests.train.data.pictures import drawn, file_of, picture_options, picture_tokenizer

CHAT, LENGTHS = "/v1/chat/completions", {"eyes": 4096, "blind": 4096}
ACCESS = PictureAccess(files=False, remote_option="--remote-images")


@pytest.fixture(scope="module")
def models():
    tokenizer = picture_tokenizer()
    reader = PictureReader(picture_options(tokenizer).processor, ACCESS)
    return {"eyes": Readable("eyes", tokenizer, {}, reader), "blind": Readable("blind", tokenizer)}


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def chat(*parts: object, model: str = "eyes") -> dict:
    return {"model": model, "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]}


def part(address: str, **keys: object) -> dict:
    return {"type": "image_url", "image_url": {"url": address, **keys}}


GOOD = file_of(drawn(24, 16))


def test_both_forms_have_the_pictures_tokens_patches_and_positions(models):
    asked = read_chat(chat(part(url(GOOD), detail="auto")) | {"n": 2}, models, LENGTHS)
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url(GOOD), "detail": "high"}]}
    item["content"].append({"type": "input_text", "text": "What?"})
    other = read_responses({"model": "eyes", "input": [item]}, models, LENGTHS)
    processor = models["eyes"].pictures.processor
    grid = processor.grid(drawn(24, 16))
    first, second, third = *asked.rows, *other.rows
    assert first.prompt == third.prompt and first.prompt.count(processor.token) == processor.features(grid) == 6
    assert (
        asked.prompt_tokens
        == len(first.prompt)
        == read_tokenize({"model": "eyes", "messages": chat(part(url(GOOD)))["messages"]}, models, LENGTHS)["count"]
    )
    assert first.pictures is second.pictures
    for name, array in first.pictures.items():
        np.testing.assert_array_equal(array, third.pictures[name])
    np.testing.assert_array_equal(first.pictures["patches"][0], processor.patches(drawn(24, 16)))
    begin = first.prompt.index(processor.token)
    expected = processor.positions(len(first.prompt), [begin], [grid])
    np.testing.assert_array_equal(first.pictures["positions"], expected)
    assert asked.picture_bytes == first.pictures["patches"].nbytes
    assert read_chat(chat(), models, LENGTHS).rows[0].pictures is None


def frames() -> bytes:
    return file_of(drawn(9, 9), "GIF", save_all=True, append_images=[drawn(9, 9, 1)])


def bomb(side: int) -> bytes:
    return file_of(Image.new("1", (side, side)))


REFUSED = {
    "a file": (part("/etc/passwd"), "is a file's name, which is not read here: send the picture as a data URL"),
    "a file's address": (part("file:///etc/passwd"), "is a file's name, which is not read here"),
    "remote": (part("http://127.0.0.1:9/a.png"), "is remote, and fetched only with --remote-images"),
    "no base64": (part("data:image/png;base64,???"), "is no base64"),
    "no picture": (part(url(b"some text")), "picture 1: the picture is no picture of a known kind"),
    "broken": (part(url(GOOD[:60])), "picture 1: the picture"),
    "several frames": (part(url(frames())), "has several frames"),
    "a bomb": (part(url(bomb(10_000))), "has 10,000 x 10,000 pixels; at most"),
    "a larger bomb": (part(url(bomb(20_000))), "could be decompression bomb"),
    "too thin": (part(url(file_of(drawn(2, 900)))), "picture 1: a picture of 2 x 900 pixels"),
    "a low detail": (part(url(GOOD), detail="low"), "detail = 'low': the server's --max-pixels"),
    "a size": ({"type": "image", "image": url(GOOD), "max_pixels": 9}, "max_pixels = 9 of one picture"),
    "a stored file": ({"type": "input_image", "file_id": "file-1"}, "file_id is not supported"),
    "none": ({"type": "image_url"}, "0 pictures for 1 parts of the type image without one"),
    "a video": ({"type": "video_url", "video_url": {"url": "a"}}, "a part of the type video_url"),
}


def test_what_is_refused_is_told_by_the_processes_that_read(models):
    """One process reads all of them, and a good picture after each."""
    with Readers(1) as readers:
        readers.serve(models)

        def read(body: dict):
            return asyncio.run(readers.read(CHAT, json.dumps(body).encode(), LENGTHS))

        for name, (content, why) in REFUSED.items():
            with pytest.raises(ApiError) as refused:
                read(chat(content))
            assert refused.value.status == 400 and why in refused.value.message, (name, refused.value.message)
        with pytest.raises(ApiError, match=r"messages.0.content.0: blind reads no pictures .*: send text alone"):
            read(chat(part(url(GOOD)), model="blind"))
        [process] = [reader._process.pid for reader in readers._readers]
        [row] = read(chat(part(url(GOOD)), part(url(GOOD)))).rows
        assert row.pictures["patches"].shape[1] == 24  # equal pictures once
        assert [process] == [reader._process.pid for reader in readers._readers]


class _Held(http.server.BaseHTTPRequestHandler):
    """/good has a picture; other addresses answer when they are let go."""

    go = threading.Event()

    def do_GET(self):
        if self.path != "/good":
            self.go.wait(patience.SECONDS)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(GOOD if self.path == "/good" else b"no picture")

    def log_message(self, *arguments):
        pass


def test_addresses_that_hang_keep_no_process_that_reads(models, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(pictures, "_SECONDS", patience.SECONDS)
    access = dataclasses.replace(ACCESS, remote=True)
    remote = dataclasses.replace(models["eyes"], pictures=dataclasses.replace(models["eyes"].pictures, access=access))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Held)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"

    async def ask(readers: Readers) -> None:
        def read(*parts: object, user: str = ""):
            return readers.read(CHAT, json.dumps(chat(*parts) | {"user": user}).encode(), LENGTHS, count=sizes.append)

        sizes: list[int] = []
        processor = remote.pictures.processor
        hanging = [
            asyncio.ensure_future(read(*(part(f"{address}/{number}/{each}") for each in range(2)), user="slow"))
            for number in range(12)
        ]
        [here] = (await read(part(url(GOOD)))).rows
        [there] = (await read(part(f"{address}/good"), part(f"{address}/good"))).rows
        assert there.prompt.count(processor.token) == 2 * here.prompt.count(processor.token) == 12
        np.testing.assert_array_equal(here.pictures["patches"], there.pictures["patches"])
        assert sizes == [len(GOOD)] and not any(each.done() for each in hanging)
        with pytest.raises(ApiError, match="17 addresses of pictures; a request may have 16"):
            await read(*(part(f"{address}/{number}") for number in range(17)))
        _Held.go.set()
        for each in hanging:
            with pytest.raises(ApiError, match="no picture of a known kind"):
                await each

    try:
        with Readers(1) as readers:
            readers.serve({"eyes": remote})
            asyncio.run(ask(readers))
    finally:
        _Held.go.set()
        server.shutdown()
        server.server_close()


def test_too_many_patches_and_tokens_are_refused(models, monkeypatch):
    with pytest.raises(ApiError, match="the prompt has more than 29 tokens") as refused:
        read_chat(chat(*[part(url(GOOD))] * 4), models, {"eyes": 30})
    assert refused.value.code == "context_length_exceeded"
    monkeypatch.setattr(bodies, "_MOST_PATCHES", 30)
    read_chat(chat(part(url(GOOD))), models, LENGTHS)
    with pytest.raises(ApiError, match="48 patches of pictures; a request may have 30"):
        read_chat(chat(part(url(GOOD)), part(url(file_of(drawn(24, 16, 1))))), models, LENGTHS)


@settings(max_examples=60, deadline=None, database=None)
@given(st.integers(0, len(GOOD)), st.binary(max_size=30), st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "BMP"]))
def test_damaged_pictures_are_read_or_refused(at, damage, kind):
    tokenizer = picture_tokenizer()
    served = {"eyes": Readable("eyes", tokenizer, {}, PictureReader(picture_options(tokenizer).processor, ACCESS))}
    data = bytearray(file_of(drawn(24, 16), kind))
    data[at : at + len(damage)] = damage
    try:
        asked = read_chat(chat(part(url(bytes(data)))), served, LENGTHS)
        assert asked.rows[0].pictures["patches"].shape[1] % 4 == 0
    except ApiError as error:
        assert error.status == 400


@given(
    st.lists(
        st.one_of(
            st.just(part(url(GOOD))),
            st.dictionaries(
                st.sampled_from(["type", "image", "image_url", "text", "detail", "file_id", "data", "url"]),
                st.one_of(
                    st.none(), st.integers(), st.text(max_size=5), st.sampled_from(["image_url", "text", "image"])
                ),
                max_size=4,
            ),
        ),
        max_size=3,
    )
)
@settings(max_examples=80, deadline=None, database=None)
def test_any_parts_are_read_or_refused(models, parts):
    for model in ("eyes", "blind"):
        try:
            read_chat(chat(*parts, model=model), models, LENGTHS)
        except ApiError as error:
            assert error.status == 400
