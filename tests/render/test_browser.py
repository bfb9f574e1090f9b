"""The page in a real browser: no error, no request, charts drawn, keys, theme, zoom, sorting, phone, no JavaScript."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

AXE = Path(__file__).parents[1] / "vendor" / "axe.min.js"


@pytest.fixture(scope="module")
def address(page, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page, "utf-8")
    return path.as_uri()


@pytest.fixture
def open_page(chromium, address):
    """Opens the report in a fresh context and collects what the browser complains about and asks for."""
    contexts = []

    def opened(fragment="", *, width=1280, theme="light", javascript=True, at=None, charts="live"):
        context = chromium.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=theme,
            java_script_enabled=javascript,
            reduced_motion="reduce",
        )
        contexts.append(context)
        tab = context.new_page()
        tab.complaints, tab.requests = [], []
        tab.on("console", lambda m: tab.complaints.append(m.text) if m.type in ("error", "warning") else None)
        tab.on("pageerror", lambda e: tab.complaints.append(str(e)))
        tab.on("request", lambda r: tab.requests.append(r.url))
        tab.goto((at or address) + fragment)
        if javascript:
            tab.wait_for_selector(f"html[data-charts={charts}]")
        return tab

    yield opened
    for context in contexts:
        context.close()


def ranges(tab):
    """The micro-steps in view in each chart that has the shared axis, by anchor."""
    return tab.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll('figure .live')]
            .filter((e) => !e.hidden && e.layout && e.layout.xaxis.type !== 'category')
            .map((e) => [e.closest('figure').id, e.layout.xaxis.range.map((x) => Math.round(x * 2) / 2)]))"""
    )


def draw_all(tab):
    """Bring every chart near the window, so that it is drawn."""
    for anchor in tab.evaluate("Object.keys(JSON.parse(document.getElementById('chart-data').textContent))"):
        tab.evaluate("(id) => document.getElementById(id).scrollIntoView()", anchor)
        tab.wait_for_selector(f"#{anchor} .live .main-svg", state="attached")
    tab.wait_for_function("!document.querySelector('.plot .static:not([hidden])')")


@pytest.mark.parametrize("width", [1280, 390])
def test_page_is_quiet_asks_for_nothing_and_does_not_scroll_sideways(open_page, width):
    tab = open_page(width=width)
    draw_all(tab)
    assert tab.complaints == []
    assert [u for u in tab.requests if not u.startswith(("file:", "data:", "blob:"))] == []
    assert len([u for u in tab.requests if u.startswith("file:")]) == 1
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_every_chart_is_drawn_with_its_points(open_page, model):
    tab = open_page()
    draw_all(tab)
    drawn = tab.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll('figure .live')].map(
            (e) => [e.closest('figure').id, [!!e.querySelector('.main-svg'), e._fullData[0].x.length, e.hidden]]))"""
    )
    charts = [*(c for f in model.findings for c in f.charts), *(c for c in model.charts if not c.missing)]
    for chart in charts:
        assert drawn[chart.id] == [True, len(chart.series[0].x), False], chart.id
    assert set(drawn) == {c.id for c in charts} | {h.id for h in model.parameters.heats}
    assert tab.locator(".static:visible").count() == 0


def test_values_reach_plotly_unchanged(open_page, model):
    tab = open_page("#fig-loss")
    tab.wait_for_selector("#fig-loss .live .main-svg")
    y = tab.evaluate("Array.from(document.querySelector('#fig-loss .live')._fullData[0].y)")
    series = next(c for c in model.charts if c.id == "fig-loss").series[0]
    assert y == pytest.approx(series.y.tolist(), rel=1e-6)


def test_dragging_in_one_chart_zooms_all(open_page):
    tab = open_page("#fig-loss")
    tab.wait_for_selector("#fig-lr .live .main-svg")
    tab.wait_for_function("!document.querySelector('#fig-loss .static:not([hidden])')")
    before = ranges(tab)
    box = tab.locator("#fig-loss .nsewdrag").first.bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + box["height"] / 2)
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + box["height"] / 2, steps=5)
    tab.mouse.up()
    tab.wait_for_selector("#unzoom:not([hidden])")
    after = ranges(tab)
    assert len({tuple(r) for r in after.values()}) == 1
    low, high = after["fig-lr"]
    assert 10 < low < 16
    assert 35 < high < 41
    tab.keyboard.press("a")
    tab.wait_for_selector("#unzoom[hidden]", state="attached")
    assert ranges(tab) == before


def test_link_to_a_step_zooms_all_charts_to_it(open_page):
    tab = open_page("#fig-loss")
    tab.wait_for_selector("#fig-lr .live .main-svg")
    for step in (20, 33):
        tab.evaluate("(step) => { location.hash = `step-${step}`; }", step)
        tab.wait_for_selector("#unzoom:not([hidden])")
        tab.wait_for_function(
            "(low) => document.querySelector('#fig-loss .live').layout.xaxis.range[0] === low", arg=step - 6
        )
        assert {tuple(r) for r in ranges(tab).values()} == {(step - 6, step + 6)}


def test_link_to_a_finding_shows_it_and_zooms_to_its_steps(open_page):
    tab = open_page("#ACC101")
    tab.wait_for_selector("#fig-ACC101-1 .live .main-svg")
    assert abs(tab.evaluate("document.querySelector('#ACC101').getBoundingClientRect().top")) < 100
    assert {tuple(r) for r in ranges(tab).values()} == {(7, 30)}


def test_keys_walk_through_the_findings(open_page):
    tab = open_page()
    places = []
    for key in "jjjkk":
        tab.keyboard.press(key)
        places.append(tab.evaluate("location.hash"))
    assert places == ["#ACC101", "#SCL301", "#SCL301", "#ACC101", "#ACC101"]
    assert tab.evaluate("document.activeElement.id") == "ACC101"


def test_theme_switches_page_and_charts_and_is_remembered(open_page):
    tab = open_page("#fig-loss", theme="dark")
    tab.wait_for_selector("#fig-loss .live .main-svg")
    paper = "getComputedStyle(document.body).backgroundColor"
    plot = "document.querySelector('#fig-loss .live').layout.paper_bgcolor"
    assert (tab.evaluate(paper), tab.evaluate(plot)) == ("rgb(20, 23, 27)", "#14171b")
    tab.keyboard.press("t")
    assert (tab.evaluate(paper), tab.evaluate(plot)) == ("rgb(255, 255, 255)", "#ffffff")
    tab.reload()
    tab.wait_for_selector("#fig-loss .live .main-svg")
    assert (tab.evaluate(paper), tab.evaluate(plot)) == ("rgb(255, 255, 255)", "#ffffff")


def test_filter_and_severities_hide_findings(open_page):
    tab = open_page()
    shown = "[...document.querySelectorAll('article.finding')].filter((f) => !f.hidden).map((f) => f.id)"
    tab.keyboard.press("f")
    tab.keyboard.type("scale settled")
    assert tab.evaluate(shown) == ["SCL301"]
    tab.locator("#filter").fill("")
    tab.locator(".toggle[data-severity=notice]").click()
    assert tab.evaluate(shown) == ["ACC101"]
    assert tab.locator(".toggle[data-severity=notice]").get_attribute("aria-pressed") == "false"


def test_tables_sort_by_number_and_back(open_page, model):
    tab = open_page()
    names = "[...document.querySelectorAll('table.parameters tbody tr')].map((r) => r.cells[0].textContent)"
    head = tab.locator("table.parameters thead th", has_text="grad norm, largest")
    ordered = [r.name for r in sorted(model.parameters.rows, key=lambda r: r.cells[1])]
    assert ordered != [r.name for r in model.parameters.rows]
    head.locator("button").click()
    assert tab.evaluate(names) == ordered
    assert head.get_attribute("aria-sort") == "ascending"
    head.locator("button").click()
    assert tab.evaluate(names) == ordered[::-1]
    assert head.get_attribute("aria-sort") == "descending"


def test_help_opens_and_closes_by_key(open_page):
    tab = open_page()
    tab.keyboard.press("?")
    assert tab.locator("dialog#help").is_visible()
    tab.keyboard.press("Escape")
    assert not tab.locator("dialog#help").is_visible()


def test_without_javascript_pictures_stand_in_for_charts(open_page, model):
    tab = open_page(javascript=False)
    charts = [*(c for f in model.findings for c in f.charts), *(c for c in model.charts if not c.missing)]
    assert tab.locator(".static svg.picture:visible").count() == len(charts) + len(model.parameters.heats)
    assert tab.locator(".tools:visible, .live:visible, .js-only:visible").count() == 0
    assert tab.complaints == []


def test_print_shows_pictures_in_the_light_theme(open_page):
    tab = open_page("#fig-loss", theme="dark")
    tab.wait_for_selector("#fig-loss .live .main-svg")
    tab.emulate_media(media="print", color_scheme="dark")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.locator("#fig-loss .static svg").is_visible()
    assert not tab.locator("#fig-loss .live").is_visible()


def test_hostile_names_stay_text_in_charts(open_page, build, tmp_path):
    from stepscope.render.html import render_html

    name = "<img src=x onerror=alert(1)><b>w</b>"
    path = tmp_path / "nasty.html"
    path.write_text(render_html(build(params=(name, "b"))), "utf-8")
    tab = open_page("#fig-heat-grad", at=path.as_uri())
    tab.wait_for_selector("#fig-heat-grad .live .main-svg")
    labels = tab.evaluate("[...document.querySelectorAll('#fig-heat-grad .ytick text')].map((t) => t.textContent)")
    assert name in labels
    assert tab.complaints == []


def barriers(tab):
    """What axe-core complains about; plotly's drawings are left out, the figure around them is not."""
    tab.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    tab.evaluate(AXE.read_text("utf-8") + "; undefined")
    options = "{ exclude: ['.live svg'] }, { resultTypes: ['violations'] }"
    found = tab.evaluate(f"axe.run({options}).then((r) => r.violations)")
    return [(v["id"], v["help"], [n["html"][:160] for n in v["nodes"][:3]]) for v in found]


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_no_barrier(open_page, theme, width):
    assert barriers(open_page(theme=theme, width=width)) == []


def test_the_check_of_barriers_sees_one(open_page):
    tab = open_page()
    tab.evaluate("document.querySelector('label[for=filter]').remove(); filter.placeholder = ''")
    assert "label" in [v[0] for v in barriers(tab)]


def test_page_of_a_comparison_is_quiet_and_free_of_barriers(open_page, factory, tmp_path):
    from stepscope.render.comparison import comparison_model
    from stepscope.render.comparison_formats import render_comparison

    runs = {"before": factory.make(), "after": factory.make(clip=0.01)}
    path = tmp_path / "compare.html"
    path.write_text(render_comparison(comparison_model(runs), "html"), "utf-8")
    tab = open_page("#pair-1", at=path.as_uri())
    assert barriers(tab) == []
    tab.evaluate("document.querySelector('#fig-grad-norm-clipped').scrollIntoView()")
    tab.wait_for_selector("#fig-grad-norm-clipped .live .main-svg")
    assert ranges(tab)["fig-grad-norm-clipped"] == [0.5, 10], "the first difference is at 4"
    assert tab.complaints == []


def test_bundle_beside_the_page_is_allowed_to_run(open_page, model, tmp_path):
    from stepscope.render.html import PLOTLY, asset, render_html

    (tmp_path / PLOTLY).write_text(asset(PLOTLY), "utf-8")
    path = tmp_path / "report.html"
    path.write_text(render_html(model, plotly=PLOTLY), "utf-8")
    tab = open_page("#fig-loss", at=path.as_uri())
    tab.wait_for_selector("#fig-loss .live .main-svg")
    assert tab.complaints == []


def test_where_plotly_cannot_be_loaded_the_pictures_stay(open_page, model, tmp_path):
    from stepscope.render.html import PLOTLY, render_html

    path = tmp_path / "alone.html"
    path.write_text(render_html(model, plotly=PLOTLY), "utf-8")
    tab = open_page("#fig-loss", at=path.as_uri(), charts="static")
    assert tab.locator("#fig-loss .static svg").is_visible()
    tab.keyboard.press("j")
    assert tab.evaluate("location.hash") == "#ACC101"
