"""The report as a whole: the same bytes, nothing from outside, nothing that breaks out of the page, nothing hidden."""

import html.parser
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from halfmatch import artifacts, report
from halfmatch.config import Config
from halfmatch.paths import Paths, Run
from halfmatch.report import verdicts
from halfmatch.report.results import collect
from halfmatch.steps import digest


def narrow(config: Config, root: Path) -> Config:
    """One model, one objective, two seeds: quick to draw."""
    values = config.model_dump(mode="json")
    values["output"] = str(root)
    values["mismatch"]["models"] = ["gain120"]
    values["training"] |= {"objectives": ["grpo"], "seeds": [0, 1]}
    return Config.model_validate(values)


@pytest.fixture(scope="module")
def built(synthetic, tmp_path_factory) -> Config:
    """A small run with its report."""
    root = tmp_path_factory.mktemp("built")
    config = narrow(synthetic.config(root), root)
    synthetic.everything(config)
    report.build(config)
    return config


def page_of(config: Config) -> str:
    return Paths(Path(config.output)).of("report").read_text(encoding="utf-8")


def files_of(config: Config) -> dict[str, bytes]:
    folder = Path(config.output) / "report"
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Page(html.parser.HTMLParser):
    """What the tests ask of a page."""

    VOID = frozenset(("meta", "br", "input", "img", "hr", "link"))

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open[-1:]:
            self.text += data

    def attributes(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


# --------------------------------------------------------------------------------------------------------------- bytes
def test_the_same_artefacts_give_the_same_bytes_elsewhere_and_again(built, synthetic, tmp_path):
    other = narrow(built, tmp_path)
    synthetic.everything(other)
    stale = tmp_path / "report" / "figures" / "of-another-report.png"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"")
    report.build(other)
    assert files_of(other) == files_of(built)


def test_every_figure_is_there_as_svg_and_png_and_in_the_page(built):
    files, page = files_of(built), Page(page_of(built))
    names = {Path(name).stem for name in files if name.startswith("figures/")}
    assert names == {Path(name).stem for name in files if name.endswith(".svg")}
    assert names == {Path(name).stem for name in files if name.endswith(".png")}
    assert {figure["id"] for figure in page.attributes("figure")} == {f"figure-{name}" for name in names}
    assert len(names) == 10


def test_headline_says_what_it_came_from(built):
    content = json.loads(Paths(Path(built.output)).of("headline").read_text())
    results = collect(built)
    assert content["claims"] == {verdict.key: verdict.outcome for verdict in verdicts.judge(results)}
    assert content["provenance"]["step"] == "report"
    assert content["provenance"]["inputs"] == digest({one.path: one.sha256 for one in results.artefacts})


# ---------------------------------------------------------------------------------------------------------------- page
def test_page_is_well_formed_and_accessible(built):
    page = Page(page_of(built))
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    anchors = {attributes["href"] for attributes in page.attributes("a")}
    assert {anchor.removeprefix("#") for anchor in anchors} <= set(ids)
    assert all(attributes.get("aria-label") for attributes in page.attributes("svg"))
    assert all(attributes.get("scope") in ("col", "row") for attributes in page.attributes("th"))
    labels = [attributes["aria-labelledby"] for _, attributes in page.tags if "aria-labelledby" in attributes]
    assert labels
    assert set(labels) <= set(ids)
    assert page.attributes("html")[0]["lang"] == "en"
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_page_asks_nothing_of_the_outside(built):
    page = Page(page_of(built))
    assert not page.attributes("script")
    assert not page.attributes("link")
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "action", "data"):
            target = attributes.get(name) or "#"
            assert target.startswith(("#", "data:image/png;base64,")), (tag, name, target[:80])
    assert not re.search(r"@import|url\((?!#)", page_of(built))
    policies = [one["content"] for one in page.attributes("meta") if one.get("http-equiv")]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_numbers_and_verdicts_are_on_the_page(built):
    text, results = Page(page_of(built)).text, collect(built)
    for verdict in verdicts.judge(results):
        assert verdict.claim in text
        assert verdict.rule in text
    for artefact in results.artefacts:
        assert artefact.sha256 in text
    assert report.headline(results, {})["sentence"] in text


def test_text_of_models_and_files_stays_text(built, synthetic, tmp_path):
    hostile = '<script>alert("x")</script><img src=http://example.org/x>'
    values = narrow(built, tmp_path).model_dump(mode="json")
    values["report"]["title"] = hostile
    values["prompt"] = {"template": "chat", "system": hostile}
    config = Config.model_validate(values | {"training": None, "evaluation": None})
    paths = Paths(tmp_path)
    artifacts.write(
        paths.of("excluded", problems="train"), "excluded", [{"row": 1, "reason": hostile, "problem": hostile}], {}
    )
    report.build(config)
    page = Page(page_of(config))
    assert not page.attributes("script")
    assert not page.attributes("img")
    assert page.text.count('<script>alert("x")</script>') >= 4  # title, heading, row, configuration


def test_a_report_of_nothing_names_all_that_is_missing(synthetic, tmp_path):
    config = synthetic.config(tmp_path)
    content = report.build(config)
    page = Page(page_of(config))
    assert content["mismatch"] == {}
    assert content["missing"] > 20
    assert "halfmatch train --run fp16_pg-seq-is_seed2" in page.text
    assert page.text.count("Nothing that bears on it has been measured here.") == len(verdicts.CLAIMS)
    assert not page.attributes("svg")


def test_a_missing_run_is_named_and_the_others_are_shown(built, synthetic, tmp_path):
    config = narrow(built, tmp_path)
    for run in ("bf16_grpo_seed0", "fp16_grpo_seed0"):
        synthetic.training(config, Run.parse(run))
    report.build(config)
    page = Page(page_of(config))
    assert "halfmatch train --run fp16_grpo_seed1" in page.text
    assert "halfmatch train --run fp16_grpo_seed0" not in page.text
    assert {figure["id"] for figure in page.attributes("figure")} == {
        "figure-training-reward",
        "figure-training-health",
    }


def test_differences_from_the_paper_are_listed_where_its_preset_is_at_hand(built, synthetic, tmp_path):
    preset = tmp_path / "paper.yaml"
    preset.write_text("seed: 3  # T1\n")
    config = narrow(built, tmp_path / "run").model_copy(update={"training": None, "evaluation": None})
    report.build(config, preset=preset)
    assert "seed: 0; paper 3 [T1]" in Page(page_of(config)).text


# ------------------------------------------------------------------------------------------------------------- browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome here")


def browse(page: Path, scratch: Path) -> tuple[str, set[str]]:
    """The document as a browser has it, and the addresses that it asked for (not the browser, on its own errands).
    No name resolves, so nothing leaves this machine."""
    log = scratch / "requests.json"
    command = [
        str(CHROMIUM),
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
        *("--disable-component-update", "--disable-default-apps", "--disable-extensions", "--disable-sync"),
        *("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={scratch / 'profile'}", f"--log-net-log={log}"),
        *("--virtual-time-budget=5000", "--dump-dom", page.as_uri()),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout
    request = re.compile(r'"initiator":"(?!not an origin)[^"]*".*"url":"(https?://[^"]+)"')
    return shown, set(request.findall(log.read_text(encoding="utf-8")))


@in_a_browser
def test_a_browser_shows_tables_and_figures_and_asks_for_nothing(built, tmp_path):
    shown, asked = browse(Paths(Path(built.output)).of("report"), tmp_path)
    page = Page(shown)
    assert len(page.attributes("figure")) == 10
    assert len(page.attributes("svg")) == 10
    tables = {attributes.get("id") for attributes in page.attributes("table")}
    assert {"table-headline", "table-training", "table-evaluation", "table-paper-offline", "table-artefacts"} <= tables
    assert not asked


@in_a_browser
def test_the_browser_would_have_said_so(tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<img src="http://example.invalid/pixel.png">')
    assert browse(page, tmp_path)[1] == {"http://example.invalid/pixel.png"}
