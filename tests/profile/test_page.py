"""The page in a real browser: its numbers, sorting and filter, light and dark, and nothing fetched."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from programs import torch_trace

from jaxtune.profile import compare, page, show
from jaxtune.profile.scopes import CATEGORIES

HOSTILE = "</script><b>mlp</b>&amp;"


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine")
    return found


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    slow = torch_trace(slower={"nvjet_tst_256x128": 70.0})
    for row in slow.rows:  # a scope as hostile as can be
        row["name"] = HOSTILE if row["name"] == "mlp" and row["tid"] == slow.AUTOGRAD else row["name"]
    return torch_trace().write(folder / "a.json"), slow.write(folder / "b.json")


class Tables(HTMLParser):
    """Cells of each table by its id, the text of elements with an id, and attributes of every rect."""

    def __init__(self, dom: str):
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: dict[str, str] = {}
        self.rects: list[dict] = []
        self.tags: set[str] = set()
        self._table = self._cell = self._named = ""
        self.feed(dom)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.add(tag)
        if tag == "table":
            self._table = attributes.get("id", "")
            self.tables[self._table] = []
        elif tag == "tr" and self._table:
            self.tables[self._table].append([])
        elif tag in ("td", "th") and self._table:
            self.tables[self._table][-1].append("")
            self._cell = "open"
        elif tag == "rect":
            self.rects.append(attributes)
        self._named = attributes.get("id", self._named if tag in ("li", "b", "span") else "")

    def handle_endtag(self, tag):
        if tag == "table":
            self._table = ""
        elif tag in ("td", "th"):
            self._cell = ""

    def handle_data(self, data):
        if self._table and self._cell:
            self.tables[self._table][-1][-1] += data
        elif self._named:
            self.texts[self._named] = self.texts.get(self._named, "") + data


def run(browser, tmp_path, html: str, *options: str, at: str = "") -> str:
    page = tmp_path / "page.html"
    page.write_text(html, encoding="utf-8")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path / 'user'}",
        "--window-size=1200,1400",
    ]
    done = subprocess.run([browser, *flags, *options, page.as_uri() + at], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_fetches_nothing(traces):
    for html in (compare(*traces).to_html(), show(traces[0]).to_html()):
        assert not re.search(r"""(src|href)=|@import|url\(|fetch\(|XMLHttpRequest|import\s*\(""", html)
        assert set(re.findall(r"https?://[^\s\"'<]+", html)) <= {
            "http://www.w3.org/2000/svg",
            "http://www.w3.org/1999/xhtml",
        }


def test_numbers_of_a_comparison_read_back_from_the_dom(browser, tmp_path, traces):
    comparison = compare(*traces)
    dom = Tables(run(browser, tmp_path, comparison.to_html(), "--dump-dom"))
    rows = {cells[0]: cells[2:] for cells in dom.tables["categories"][1:]}
    for row in [comparison.step, *comparison.categories]:
        assert rows[row.name] == [
            f"{row.a_ms:.2f}",
            f"{row.b_ms:.2f}",
            f"{row.diff_ms:+.2f}",
            f"{row.noise_ms:.2f}",
            row.verdict,
        ]
    kernels = dom.tables["kernels"][1:]
    assert kernels[0][0].startswith("nvjet_tst_256x128")
    assert kernels[0][4] == "+0.070"
    assert len(kernels) == len(comparison.kernels)
    assert any(HOSTILE in cells[0] for cells in kernels)
    drawn = {(r["data-category"]): float(r["data-ms"]) for r in dom.rects if "data-category" in r}
    assert drawn["GEMM"] == pytest.approx(0.28)  # B is drawn last
    assert sum(float(r["data-ms"]) for r in dom.rects if "data-category" in r) == pytest.approx(0.38 + 0.45, abs=2e-3)
    assert comparison.sentences[1] in dom.texts["words"]
    # a rectangle for every stretch of the two timelines, besides bars and the labels' backgrounds
    stretches = sum(len(e) for r in (comparison.a, comparison.b) for e in r.timeline["streams"].values())
    assert sum("data-category" not in r for r in dom.rects) >= stretches


def test_filter_and_order_from_the_address(browser, tmp_path, traces):
    report = show(traces[0])
    page = report.to_html()
    dom = Tables(run(browser, tmp_path, page, "--dump-dom", at="#filter=gemm+mlp&sort=tflops&order=up"))
    rows = dom.tables["kernels"][1:]
    mlp = sorted((r for r in report.kernels if r.category == "GEMM"), key=lambda r: r.tflops)
    assert [cells[0].split("bf16[")[0] for cells in rows] == [row.name for row in mlp]
    assert [float(cells[4]) for cells in rows] == [round(row.ms, 3) for row in mlp]
    assert dom.texts["found"].startswith(f"{len(mlp)} of {len(report.kernels)} kernels: ms/step 0.21")


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark_can_be_read(browser, tmp_path, traces, dark):
    """Text and ground differ by the contrast that WCAG asks of small text, 4.5, and bars from it by 1.2."""
    scheme = "--blink-settings=preferredColorScheme=" + ("0" if dark else "1")
    probe = """<script>{
      const style = (query, key) => getComputedStyle(document.querySelector(query))[key];
      const out = document.body.appendChild(document.createElement("p"));
      out.id = "probe";
      out.textContent = JSON.stringify({
        page: style("body", "backgroundColor"), panel: style(".words", "backgroundColor"),
        ink: style("body", "color"), soft: style(".soft", "color"), slower: style(".slower", "color"),
        bars: [...document.querySelectorAll("rect[data-category]")].map((r) => getComputedStyle(r).fill),
      });
    }</script>"""
    html = compare(*traces).to_html().replace("</body>", probe + "</body>")
    dom = run(browser, tmp_path, html, "--dump-dom", scheme)
    found = json.loads(re.search(r'id="probe">(.*?)</p>', dom).group(1))
    assert (_luminance(found["page"]) < 0.1) == dark
    for ink in ("ink", "soft", "slower"):
        for ground in ("page", "panel"):
            assert _contrast(found[ink], found[ground]) >= 4.5, (ink, ground, found)
    for color in found["bars"]:
        assert _contrast(color, found["page"]) >= 1.2, (color, found["page"])


def _luminance(color: str) -> float:
    channels = [int(x) / 255 for x in re.findall(r"\d+", color)[:3]]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def _contrast(one: str, other: str) -> float:
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_a_screenshot_shows_the_bars(browser, tmp_path, traces):
    import matplotlib.image

    picture = tmp_path / "page.png"
    run(
        browser,
        tmp_path,
        compare(*traces).to_html(),
        f"--screenshot={picture}",
        "--blink-settings=preferredColorScheme=1",
    )
    pixels = (matplotlib.image.imread(picture)[:, :, :3] * 255).round().astype(int)
    for color in ((0x35, 0x67, 0xC8), (0xE5, 0x8A, 0x1F), (0x3C, 0x9A, 0x6B)):  # GEMM, attention, elementwise
        assert (abs(pixels - color).max(axis=2) <= 2).sum() > 300, color


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_two_categories_look_alike(scheme):
    """As far apart as one can tell side by side: 60 of the 441 that lie between black and white."""
    css = (Path(page.__file__).parent / "page.css").read_text()
    light, dark = css.split("@media (prefers-color-scheme: dark)")
    found = re.findall(r"--c(\d+): #([0-9a-f]{6})", light if scheme == "light" else dark)
    colours = {int(number): [int(value[i : i + 2], 16) for i in (0, 2, 4)] for number, value in found}
    assert set(colours) == set(range(len(CATEGORIES)))
    for (a, one), (b, other) in itertools.combinations(colours.items(), 2):
        assert math.dist(one, other) >= 60, (CATEGORIES[a], CATEGORIES[b])
