"""The page at "/" in a real browser, over a server of the packaged model and an adapter."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from pathlib import Path

import pytest

from jaxtune.models.generation.sampler import Sampler
from jaxtune.serve import page as page_module
from tests import patience
from tests.serve.browser import browsing
from tests.serve.running import engine_of, served_models, serving

HOSTILE = "</div><script>document.title = 'gone'</script><img src=x onerror=\"document.title = 'gone'\"><b>bold</b>"
# A script before the page's: no answer ends early.
GOES_ON = """const real = window.fetch;
window.fetch = (path, options) => real(path, options.body === undefined ? options
  : { ...options, body: JSON.stringify({ ...JSON.parse(options.body), ignore_eos: true }) });"""


@pytest.fixture(scope="module")
def models():
    return served_models()


@pytest.fixture(scope="module")
def engine(models):
    engine = engine_of(models)
    yield engine
    assert engine.close(30)


@pytest.fixture(scope="module")
def port(models, engine):
    with serving(models, engine) as (port, _):
        yield port


@pytest.fixture
def page(tmp_path):
    with browsing(tmp_path) as page:
        yield page


@pytest.fixture
def rounds(monkeypatch):
    """The engine decodes a round for each release."""
    gate, step = threading.Semaphore(0), Sampler.step

    def waits(sampler):
        gate.acquire(timeout=patience.SECONDS)
        return step(sampler)

    monkeypatch.setattr(Sampler, "step", waits)
    yield gate
    gate.release(10_000)


def scripted(*chunks: object, status: int = 200, ends: bool = True) -> str:
    """Before the page: the server's answers to chats are these chunks."""
    frames = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"] * ends
    body = json.dumps(frames).replace("<", "\\u003c")
    return f"""const real = window.fetch;
window.fetch = async (path, options) => {{
  if (!path.endsWith("completions")) return real(path, options);
  window.asked = JSON.parse(options.body);
  const bytes = new TextEncoder().encode({body}.join(""));
  return new Response(new ReadableStream({{
    start(controller) {{
      for (let at = 0; at < bytes.length; at += 7) controller.enqueue(bytes.slice(at, at + 7));
      controller.close();
    }},
  }}), {{ status: {status} }});
}};"""


def delta(reason=None, **words) -> dict:
    return {"choices": [{"index": 0, "delta": words, "finish_reason": reason}]}


def shown(page, selector: str) -> list[str]:
    return page.value(f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.innerText)")


def test_two_models_answer_side_by_side_and_one_is_stopped(page, port, rounds):
    boxes = chat_and_stop_one(page, port, rounds, 1200, 900, lambda: page.press("Enter"))
    assert boxes[0]["right"] <= boxes[1]["left"]


def test_on_a_phone_two_models_answer_below_each_other_and_one_is_stopped(page, port, rounds):
    boxes = chat_and_stop_one(page, port, rounds, 390, 780, lambda: page.click("#send"))
    assert boxes[0]["bottom"] <= boxes[1]["top"]


def chat_and_stop_one(page, port, rounds, width, height, send) -> list[dict]:
    """The places of the two answers while they are made."""
    page.open(f"http://127.0.0.1:{port}/", width, height, before=GOES_ON)
    page.until("document.querySelector('#second').value")
    assert page.value("[...document.querySelectorAll('select')].map((each) => each.value)") == ["base", "mine"]
    page.click("#toggle")
    page.click("#tokens")
    page.type("200")
    page.click("#toggle")
    page.click("#message")
    page.type("What is 12 + 30?")
    send()
    page.until("document.querySelectorAll('.running').length === 2")
    texts = "[...document.querySelectorAll('.answer > .text')].map((each) => each.textContent)"
    while not page.value(f"{texts}.every((text) => text)"):
        rounds.release()
        time.sleep(0.1)
    began = page.value(texts)
    assert len(page.value("[...document.querySelectorAll('.running')]")) == 2
    boxes = page.value("[...document.querySelectorAll('.answer')].map((each) => each.getBoundingClientRect().toJSON())")
    assert page.value("document.documentElement.scrollWidth") <= width
    page.click(".answer:nth-child(2) button")
    page.until("document.querySelectorAll('.running').length === 1")
    assert "stopped" in shown(page, ".foot")[1] and page.value("document.querySelector('#send').textContent") == "Stop"
    rounds.release(1000)
    page.until("!document.querySelector('.running')")
    ended = page.value(texts)
    assert ended[0].startswith(began[0]) and len(ended[0]) > len(began[0])
    assert "tokens" in shown(page, ".foot")[0] and page.errors == []
    page.click("#clear")
    assert shown(page, ".answer") == []
    return boxes


def test_errors_are_shown_and_the_message_is_not_lost(page, port):
    page.open(f"http://127.0.0.1:{port}/")
    page.until("document.querySelector('#second').value")
    text = "word " * 400
    page.type(text)
    page.press("Enter")
    page.until("document.querySelectorAll('.answer .bad').length === 2")
    assert all("the prompt has more than 255 tokens" in each for each in shown(page, ".answer .bad"))
    page.until("document.querySelector('#message').value")
    assert page.value("document.querySelector('#message').value") == text.strip()
    assert shown(page, "#status") == ["An answer failed."]


def test_a_temperature_that_cannot_be_is_not_sent(page, port):
    page.open(f"http://127.0.0.1:{port}/", before=scripted(delta(content="yes"), delta("stop")))
    page.until("document.querySelector('#second').value")
    page.click("#toggle")
    page.click("#temperature")
    page.type("7")
    page.click("#toggle")
    page.click("#message")
    page.type("Hello")
    page.press("Enter")
    assert page.value("window.asked === undefined && !document.querySelector('#settings').hidden")


def test_texts_are_no_html_and_thoughts_are_folded(page, port):
    thought = delta(reasoning_content="I think " + HOSTILE)
    chunks = [delta(role="assistant", content=""), thought, delta(content="Größe 🎉 " + HOSTILE), delta("length")]
    page.open(f"http://127.0.0.1:{port}/", before=scripted(*chunks))
    page.until("document.querySelector('#second').value")
    page.value("document.querySelector('#second').value = ''")
    page.value("document.querySelector('#system').value = 'Be short.'")
    for turn in (1, 2):
        page.type("Two\nlines")
        page.press("Enter", shift=True)
        page.type(HOSTILE)
        page.press("Enter")
        page.until(f"document.querySelectorAll('.answer:not(.running)').length === {turn}")
    assert shown(page, ".answer > .text") == ["Größe 🎉 " + HOSTILE] * 2
    assert shown(page, ".user .text") == ["Two\nlines\n" + HOSTILE] * 2
    assert page.value("document.querySelector('details').open") is False
    page.click("summary")
    assert shown(page, "details .text")[0] == "I think " + HOSTILE
    assert "cut at the most tokens" in shown(page, ".foot")[0]
    assert (
        page.value("document.title") == "jaxtune"
        and page.value("document.querySelectorAll('#log img, #log b').length") == 2
    )
    turns = [
        {"role": "user", "content": "Two\nlines\n" + HOSTILE},
        {"role": "assistant", "content": "Größe 🎉 " + HOSTILE},
    ]
    asked = page.value("window.asked")
    assert asked["messages"] == [{"role": "system", "content": "Be short."}, *turns, turns[0]]
    assert "temperature" not in asked and "max_tokens" not in asked and page.errors == []


@pytest.mark.parametrize(
    ("chunks", "ends", "words"),
    [
        ([delta(content="half"), {"error": {"message": "it took too long"}}], True, "it took too long"),
        ([delta(content="half")], False, "The connection ended before the answer."),
    ],
)
def test_an_error_in_a_stream_and_a_stream_that_breaks_off(page, port, chunks, ends, words):
    page.open(f"http://127.0.0.1:{port}/", before=scripted(*chunks, ends=ends))
    page.until("document.querySelector('#second').value")
    page.type("Hello")
    page.press("Enter")
    page.until("document.querySelectorAll('.answer .bad').length === 2")
    assert shown(page, ".answer .bad") == [words] * 2 and shown(page, ".answer > .text") == ["half"] * 2


def test_a_key_is_asked_for_and_is_not_in_the_page(page, models, engine):
    key = "öffne dich"
    with serving(models, engine, key=key) as (port, _):
        page.open(f"http://127.0.0.1:{port}/")
        page.until("!document.querySelector('#locked').hidden")
        assert "API key" in shown(page, "#status")[0] and shown(page, "option") == []
        page.type("wrong")
        page.press("Tab")
        page.until("document.querySelector('#status').textContent === 'The API key is wrong.'")
        page.value("document.querySelector('#key').select()")
        page.type(key)
        page.press("Tab")
        page.until("document.querySelector('#first').value === 'base'")
        assert key not in page.value("document.documentElement.outerHTML")


def head(port: int, path: str = "/", **headers: str) -> tuple[int, str | None, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience.SECONDS)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    return response.status, response.headers["content-security-policy"], response.read()


def test_the_page_is_answered_without_a_key_but_no_other_site(models, engine):
    with serving(models, engine, key="open sesame") as (port, _):
        status, policy, data = head(port)
        assert status == 200 and b"sesame" not in data
        assert "default-src 'none'" in policy and "unsafe" not in policy and "require-trusted-types-for" in policy
        assert head(port, Host="example.com")[0] == head(port, Origin="https://example.com")[0] == 403
        assert head(port, "/v1/models", Host=f"127.0.0.1:{port}")[0] == 401


def test_the_page_fetches_nothing_from_elsewhere():
    html = (Path(page_module.__file__).parent / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"""https?:|src=|@import|url\(|innerHTML|insertAdjacent|eval\(|style=|\son\w+=""", html)


def test_light_and_dark_can_be_read(page, port):
    """Text and ground differ by the contrast that WCAG asks of small text."""
    colours = {}
    for dark in (False, True):
        page.open(f"http://127.0.0.1:{port}/", dark=dark)
        names = ["page", "panel", "user", "ink", "soft", "bad", "act", "on-act"]
        script = "(name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim()"
        colours[dark] = dict(zip(names, page.value(f"{json.dumps(names)}.map({script})"), strict=True))
        for ground, inks in (("page", "ink soft bad"), ("panel", "ink soft bad"), ("user", "ink"), ("act", "on-act")):
            for ink in inks.split():
                assert contrast(colours[dark][ink], colours[dark][ground]) >= 4.5, (dark, ink, ground)
    assert luminance(colours[False]["page"]) > 0.8 and luminance(colours[True]["page"]) < 0.05


def luminance(colour: str) -> float:
    digits = "".join(digit * (2 if len(colour) == 4 else 1) for digit in colour[1:])
    channels = (int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(colour: str, other: str) -> float:
    low, high = sorted((luminance(colour), luminance(other)))
    return (high + 0.05) / (low + 0.05)
