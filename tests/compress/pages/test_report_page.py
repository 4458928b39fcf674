"""report.html: whole, offline, well formed, and safe whatever samples and names hold."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from shortcuts import quick_judge
from tiny_bundles import make_bundle
from typer.testing import CliRunner

from compress.cli import app
from compress.commands.report import add_page, make_page
from compress.pages.frontier import Frontier, PlottedTrial
from compress.pages.report import render_report
from runtime.errors import UsageError
from runtime.judge.causes import Cause
from runtime.judge.changes import ConfusedPair, Confusion
from runtime.judge.findings import MetricSlices, PassRow, PassTable, SliceValue
from runtime.judge.gates import GateResult
from runtime.judge.why import Explanation, LayerComparison, OperatorTime, SideTime
from runtime.report.report import Report, to_dict
from runtime.report.stored import read_report
from runtime.report.validate import validate
from runtime.tasks.manifest import verify

HOSTILE = "<script>alert('x')</script> $\\frac{1}{2}$ \"quoted\" & _under \x07"
VOID = {"meta", "link", "img", "br"}
LAYERS = (
    {"layer": "fc.<b>", "type": "Linear", "action": "int8", "sqnr_db": 30.0, "sensitivity": 1e-3},
    {"layer": "conv", "type": "Conv2d", "action": "int8", "sqnr_db": 40.0, "sensitivity": 1e-6},
    {"layer": "head", "type": "Linear", "action": "kept", "reason": f"ignore: {HOSTILE}"},
    {"layer": f"qat: {HOSTILE}", "type": "measured", "action": "measured", "10": 2.0, "20": 0.1},
    {"layer": "", "type": "note", "action": "info", "reason": "a note"},
)
SECTIONS = [
    *(
        "verdict",
        "measurements",
        "times",
        "why",
        "sizes",
        "passes",
        "layers",
        "training",
        "search",
        "slices",
        "samples",
    ),
    "environment",
]

PRODUCT = LayerComparison(f"fc.{HOSTILE}", "MatMul", "uint8", 1.0, 40.0, 12.0, "compute", 0.8, 50.0, 6.0)
SIDE = SideTime(2.0, 1.9, 3, (OperatorTime("MatMul", 2, 1.5, 0.75), OperatorTime("Cast", 1, 0.4, 0.2)), 9.5)
CAUSE = Cause("casts", "1 cast takes 0.4 of 2 ms", HOSTILE, "keep float32", "passes: []", 0.4, 1.25, ("fc",))
EXPLANATION = Explanation(
    *("onnxruntime-cpu", "call", SIDE, SIDE),
    {"float32": 100.0, "uint8": 400.0},
    (PRODUCT, replace(PRODUCT, layer="next", gflops=0.0)),
    {"Cast": OperatorTime("Cast", 1, 0.4, 0.2)},
    (CAUSE,),
)


class Page(HTMLParser):
    """Fails on tags that are not closed in order; collects tags, ids, and what would be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._take(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._take(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        self.text += data

    def _take(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "action", "data", "poster", "srcset"):
                self.loaded.append(value or "")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("page")
    made = {kind: make_bundle(kind, folder / kind) for kind in ("image", "decoder")}
    with quick_judge():
        for root in made.values():
            validate(root)
    return made


@pytest.fixture(scope="module", params=["image", "decoder"])
def bundle(request: pytest.FixtureRequest, bundles: dict[str, Path]) -> Path:
    return bundles[request.param]


@pytest.fixture
def pictures(bundles: dict[str, Path]) -> Path:
    """A bundle of images, for what is the same of every kind."""
    return bundles["image"]


def with_everything(report: Report) -> Report:
    """Return the report as it would be of a build with passes, layers, curves, slices, and hostile names."""
    rows = (
        PassRow("float", size_bytes=1000, latency_ms=2.0),
        PassRow(HOSTILE, 1.5, 500, 2.0, {"top1": 0.5}, {}, 1.0, 2.0, peak_memory_bytes=2**20),
        PassRow("int8", 0.1, 250, 4.0, {"top1": 0.4}, {}, 0.5, 4.0),
    )
    value = SliceValue(n=3, candidate=0.5, interval=(0.1, math.nan), baseline=0.6, difference=-0.1)
    return replace(
        report,
        bundle=HOSTILE,
        layers=LAYERS,
        steps=PassTable(rows, "latency_p50", ("top1",), HOSTILE, report.manifest_digest),
        slices=(MetricSlices("camera", "top1", True, HOSTILE, False, HOSTILE, {HOSTILE: value}),),
        explanation=EXPLANATION,
        confusion=Confusion(2, ("a", HOSTILE), (ConfusedPair(HOSTILE, "a", 1, 2), ConfusedPair("a", "a", 5, 4))),
        gates=(
            GateResult("top1", "max_drop 0.01", 0.1, (-0.1, 0.3), "undecided", False, HOSTILE),
            GateResult("size", "max 1000000", 2e6, (2e6, 2e6), "fail", False, "too large"),
            GateResult(HOSTILE, "min 0.5, worst label", None, None, "fail", False, "not measured", HOSTILE),
        ),
        advice=(HOSTILE,),
        environment={**report.environment, "cpu": HOSTILE},
    )


def draw_everything(bundle: Path) -> str:
    trials = (PlottedTrial(HOSTILE, 1.0, 2.0, on_front=True, chosen=True, about=HOSTILE), PlottedTrial("b", 2.0, 1.0))
    report = with_everything(read_report(bundle / "report.json"))
    return render_report(bundle, report, Frontier("size, MiB", "top1", trials, (HOSTILE,)))


@pytest.fixture(scope="module")
def page(bundle: Path) -> str:
    return draw_everything(bundle)


def test_every_section_is_there_and_in_order(page: str) -> None:
    assert re.findall(r'<section id="(\w+)"', page) == SECTIONS
    assert "<h1>" in page and page.index('id="verdict"') < page.index("Before and after")


def test_it_is_one_small_file_that_asks_for_nothing(page: str) -> None:
    assert len(page.encode()) < 2_000_000
    assert all(address.startswith(("data:", "#")) for address in Page(page).loaded)
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    assert "default-src 'none'" in page


def test_it_is_well_formed_and_its_names_are_unique(page: str) -> None:
    read = Page(page)
    assert max(Counter(read.ids).values()) == 1
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) > 6
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    assert set(re.findall(r"(?:href=\"|url\()#([\w-]+)", page)) <= set(read.ids)


def test_hostile_text_is_shown_and_never_run(page: str) -> None:
    read = Page(page)
    assert not read.tags["script"] and not read.tags["b"] and read.tags["style"] == 1
    assert page.count("&lt;script&gt;") > 12
    assert "$\\frac{1}{2}$" in read.text


def test_charts_take_their_colours_from_the_style_sheet(page: str) -> None:
    drawings = re.findall(r'<div class="plot \w+">(<svg.*?</svg>)', page, re.DOTALL)
    assert drawings and all('role="img" aria-label="' in drawing for drawing in drawings)
    assert not any(re.search(r": #[0-9a-f]{6}", drawing) for drawing in drawings)
    assert any("var(--after)" in drawing for drawing in drawings)


def test_what_was_not_measured_has_no_section(bundle: Path) -> None:
    report = read_report(bundle / "report.json")
    bare = replace(
        report, distributions={}, changes=None, layers=(), steps=None, confusion=None, gates=(), explanation=None
    )
    sections = re.findall(r'<section id="(\w+)"', render_report(bundle, bare))
    assert sections == ["verdict", "measurements", "times", "sizes", "environment"]


def test_a_report_of_before_these_fields_is_drawn(bundle: Path, tmp_path: Path) -> None:
    data = json.loads((bundle / "report.json").read_text())
    new = ("distributions", "changes", "confusion", "recorded", "slices", "ratio_intervals", "steps", "scored_by")
    (tmp_path / "report.json").write_text(json.dumps({k: v for k, v in data.items() if k not in new}))
    written, _ = make_page(bundle, tmp_path)
    assert written == tmp_path / "report.html"
    Page(written.read_text())


def test_numbers_that_are_not_known_are_drawn(pictures: Path) -> None:
    data = json.loads(json.dumps(to_dict(with_everything(read_report(pictures / "report.json")))))

    def forget(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: forget(item) for key, item in value.items()}
        return [None] * len(value) if isinstance(value, list) and all(isinstance(v, float) for v in value) else value

    for part in ("baseline", "candidate", "ratio_intervals", "differences"):
        data[part] = forget(data[part])
    (pictures / "unknown").mkdir(exist_ok=True)
    (pictures / "unknown/report.json").write_text(json.dumps(data))
    Page(render_report(pictures, read_report(pictures / "unknown/report.json")))
    shutil.rmtree(pictures / "unknown")


def test_a_report_of_another_bundle_is_refused(pictures: Path, tmp_path: Path) -> None:
    data = json.loads((pictures / "report.json").read_text())
    (tmp_path / "report.json").write_text(json.dumps({**data, "manifest_digest": "0" * 64}))
    with pytest.raises(UsageError, match="is of another bundle; `compress validate"):
        make_page(pictures, tmp_path)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        make_page(pictures, tmp_path / "nothing")


def test_the_command_writes_it(pictures: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(pictures)])
    assert (done.exit_code, done.stdout) == (0, f"{pictures}/report.html: written\n")
    assert verify(pictures).files, "the page is no file of the bundle's"
    with quick_judge():
        validate(pictures)
    assert not (pictures / "report.html").exists(), "the page of an earlier judgement"


def test_a_page_that_cannot_be_drawn_leaves_the_verdict(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken: Any = replace(read_report(pictures / "report.json"), candidate=None)
    assert add_page(pictures, broken, tmp_path) is None
    assert "report.html could not be written: AttributeError" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_hostile_samples_are_escaped(tmp_path: Path) -> None:
    root = make_bundle("decoder", tmp_path / "b")
    with quick_judge():
        report = validate(root)
    assert report.changes is not None and report.changes.samples
    n_samples = report.n_samples
    texts = [HOSTILE.replace("\x07", "")] * n_samples
    (root / "evaluation/samples.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    page = render_report(root, report)
    assert "<blockquote>&lt;script&gt;alert" in page and not Page(page).tags["script"]


def test_images_that_changed_are_shown_small(pictures: Path) -> None:
    report = read_report(pictures / "report.json")
    page = render_report(pictures, report)
    assert report.changes is not None
    assert page.count("data:image/png;base64,") == len(report.changes.samples) > 0
    assert "<dt>truth</dt>" in page and "<dt>before</dt>" in page


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on PATH")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it_without_scrolling_sideways(bundle: Path, tmp_path: Path, width: int) -> None:
    page = escape(draw_everything(bundle).replace("<details>", "<details open>"))
    measure = "document.title = `${f.clientWidth} ${f.contentDocument.documentElement.scrollWidth}`"
    frame = f'<iframe id="f" style="width:{width}px;height:900px;border:0" srcdoc="{page}"></iframe>'
    file = tmp_path / "frame.html"
    file.write_text(f"<!doctype html><title></title>{frame}<script>onload = () => {{ {measure} }}</script>")
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    asked = [*browser, "--enable-logging=stderr", "--window-size=1400,900", "--dump-dom", f"file://{file}"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=True)
    shown = re.search(r"<title>(\d+) (\d+)</title>", done.stdout)
    assert shown is not None and shown[1] == str(width) and int(shown[2]) <= width
    assert "CONSOLE" not in done.stderr
