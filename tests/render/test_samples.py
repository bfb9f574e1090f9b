"""The sample reports that lie in the repository: whole, linked, and telling what the gallery says of them."""

from pathlib import Path

import pytest
from bs4 import BeautifulSoup

REPORTS = Path(__file__).parents[2] / "reports"
PAGES = sorted((REPORTS / "samples").glob("*.html"))


@pytest.fixture(scope="module")
def gallery():
    return BeautifulSoup((REPORTS / "index.html").read_text("utf-8"), "html.parser")


def test_gallery_leads_to_every_page_and_nowhere_else(gallery):
    assert sorted(REPORTS / a["href"] for a in gallery.find_all("a")) == PAGES
    assert len(PAGES) >= 10


def test_samples_stay_small():
    assert sum(p.stat().st_size for p in (REPORTS / "samples").iterdir()) < 4_000_000


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_page_is_whole_and_says_what_the_gallery_says(gallery, page):
    soup = BeautifulSoup(page.read_text("utf-8"), "html.parser")
    ids = [e["id"] for e in soup.find_all(id=True)]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for a in soup.find_all("a")} <= set(ids)
    assert [s["src"] for s in soup.find_all(src=True)] == ["plotly-cartesian.min.js"]
    line = gallery.find("a", href=f"samples/{page.name}").parent
    assert soup.h1.get_text(strip=True) in line.get_text(" ", strip=True)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if "-and-" not in p.stem and p.stem != "right"], ids=lambda p: p.stem
)
def test_each_faulty_sample_names_its_fault(page):
    soup = BeautifulSoup(page.read_text("utf-8"), "html.parser")
    assert page.stem in {e.get_text() for e in soup.select("article.finding h3 .name")}
