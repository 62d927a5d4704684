"""The report in a real browser: it draws, fits, obeys the keyboard, follows a run, and runs nothing
of what a model wrote.
"""

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from kagent.review import page
from kagent.review.ablate import CONTROL, Ablation, Contribution, to_event
from kagent.review.live import PageServer
from kagent.runs.events import Stop
from kagent.runs.lineage import Candidate, Lineage, Operator, Proposal
from kagent.runs.store import RunStore, read_history
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from synthetic_lineages import with_compiler_output
from test_report_page import SOFTMAX, hostile

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium with chromedriver here"),
]

LOOK = Path(__file__).with_name("look.js").read_text()


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    with webdriver.Chrome(options=options, service=service) as driver:
        yield driver


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A report of all parts: a race, an ablation, a rejected candidate, compilers' words."""
    store, history = read_history(SOFTMAX)
    worth = Contribution("#14 structure: a stream", 14, True, 1.02, 1.01, 1.03)
    control = Contribution(CONTROL, None, True, 1.001, 0.997, 1.004)
    ablated = to_event(Ablation(14, "toy", (control, worth)))
    events = (*history.events, replace(history.events[-1], kind="ablated", data=ablated))
    refused = Rejected(Stage.BUILD, Status.COMPILE_ERROR, "x.cu(3): error: expected a ';'")
    proposal = Proposal(17, (14,), Operator.TUNE, "cuda_persistent", "# x\n", "more of it")
    said = (with_compiler_output(c) if c.id == 5 else c for c in history.lineage)
    lineage = Lineage([*said, Candidate(proposal, refused)])
    target = tmp_path_factory.mktemp("report") / "report.html"
    full = replace(history, events=events, lineage=lineage)
    target.write_text(page.render("softmax-ask-tell", store.manifest, full))
    return target


def show(browser, url, width=1280, scheme="light"):
    browser.get_log("browser")  # what an earlier page said
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(url)
    drawn(browser)


def drawn(browser, at_least=1):
    WebDriverWait(browser, 30).until(
        lambda b: int(b.execute_script("return document.body.dataset.drawn ?? 0")) >= at_least
    )


@pytest.mark.parametrize(
    ("width", "scheme"), [(1400, "light"), (1400, "dark"), (700, "light"), (390, "dark")]
)
def test_everything_is_drawn_and_fits(browser, file, width, scheme):
    show(browser, file.as_uri(), width, scheme)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    found, texts, whiskers = browser.execute_script(LOOK)
    assert found == []
    assert texts > 300
    assert whiskers == 6 + 4 * 3 + 2  # overall, hidden cases, ablation
    back, ink = browser.execute_script(
        "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
    )
    lightness = [sum(map(int, c.strip("rgba()").split(",")[:3])) for c in (back, ink)]
    assert (lightness[0] < lightness[1]) == (scheme == "dark")


def test_the_first_screen_says_what_won_where_it_loses_whether_to_trust_it_and_why(browser, file):
    show(browser, file.as_uri(), 1400)
    bottoms = {
        part: browser.execute_script(
            "return Math.max(...[...document.querySelectorAll(arguments[0])]"
            ".map((e) => e.getBoundingClientRect().bottom))",
            part,
        )
        for part in (".badge", ".ratio", ".who", ".losses li", ".trust div", ".edits li")
    }
    assert max(bottoms.values()) < 700, bottoms
    assert "taken back: 1.020×" in browser.find_element(By.CSS_SELECTOR, ".edits").text


def test_colours_are_of_verdicts_and_estimates_have_none(browser, file):
    show(browser, file.as_uri(), 1400)

    def looks(part, pseudo=""):
        return set(
            browser.execute_script(
                "return [...document.querySelectorAll(arguments[0])].map((e) => "
                "{ const s = getComputedStyle(e, arguments[1]);"
                " return `${s.backgroundColor} ${s.backgroundImage.slice(0, 9)}`; })",
                part,
                pseudo,
            )
        )

    race, estimates = looks("#race .fill"), looks(".estimate .fill")
    assert len(race) == len(estimates) == 1
    assert "none" in race.pop()
    assert "repeating" in estimates.pop()
    filled, hollow = (
        looks(f"#tree .row{which} > .passed", "::after") for which in (".path", ":not(.path)")
    )
    assert len(filled) == len(hollow) == 1
    assert filled != hollow
    lines = [
        len(browser.find_elements(By.CSS_SELECTOR, f"#tree {part}"))
        for part in (".path > .down-path", ".path > .up-path", ".passed.down-path", "i ~ .up-path")
    ]
    assert lines == [3, 3, 3, 0]  # four candidates on the path, and no line to another one


def test_the_keyboard_opens_turns_and_closes_a_candidate(browser, file):
    show(browser, file.as_uri())
    first = browser.find_element(By.CSS_SELECTOR, '#table [data-candidate="4"]')
    first.send_keys(Keys.ENTER)
    title = browser.find_element(By.ID, "candidate-title")
    assert title.text.startswith("#4 ")
    title.send_keys(Keys.ARROW_RIGHT)
    assert title.text.startswith("#5 ")
    assert browser.find_elements(By.CSS_SELECTOR, "#candidate-body .d2h-ins")
    source = browser.execute_script(
        "return [...document.querySelectorAll('#candidate-body ol.source li')]"
        ".map((line) => line.textContent)"
    )
    _, history = read_history(SOFTMAX)
    messages = browser.find_elements(By.CSS_SELECTOR, "#candidate-body .message")
    assert [m.text.partition(";")[0] for m in messages] == [
        "rows: ptxas: (C7511) wgmma.mma_async instructions are serialized",
        "rows at 0x40: 9 instructions",
    ]
    assert all(m.size["height"] > 20 for m in messages)
    original = history.lineage[5].proposal.source.rstrip("\n").splitlines()
    assert [line or " " for line in original] == source
    title.send_keys(Keys.ESCAPE)
    assert not browser.find_element(By.ID, "candidate").is_displayed()


def test_candidates_are_filtered_and_sorted(browser, file):
    show(browser, file.as_uri())

    def ids():
        cells = browser.find_elements(By.CSS_SELECTOR, "#table tbody [data-candidate]")
        return [int(c.text.lstrip("#")) for c in cells]

    _, history = read_history(SOFTMAX)
    browser.find_element(By.CSS_SELECTOR, '[data-sort="speed"]').send_keys(Keys.ENTER)
    assert ids()[0] == max(ids(), key=lambda i: history.lineage.log_speed(i))
    browser.find_element(By.ID, "filter").send_keys("new bests")
    assert set(ids()) == {c.id for c in history.lineage.promotions}


def test_nothing_that_a_model_wrote_is_run(browser, tmp_path):
    store, history = read_history(SOFTMAX)
    target = tmp_path / "hostile.html"
    target.write_text(page.render("hostile", store.manifest, hostile(history)))
    show(browser, target.as_uri())
    last = len(history.lineage)
    browser.find_element(By.CSS_SELECTOR, f'#table [data-candidate="{last}"]').send_keys(Keys.ENTER)
    body = browser.find_element(By.ID, "candidate-body")
    assert "<script>" in body.get_attribute("innerText")
    assert browser.title == "hostile · kagent"
    assert browser.find_elements(By.TAG_NAME, "img") == []
    assert browser.get_log("browser") == []


@pytest.mark.nightly
def test_paper_gets_all_of_it(browser, file):
    show(browser, file.as_uri(), scheme="dark")
    pdf = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    assert len(pdf) > 100_000
    assert browser.get_log("browser") == []


def test_a_live_page_follows_its_run(browser, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(SOFTMAX, folder)
    with PageServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            show(browser, server.url)
            before = browser.execute_script("return document.body.dataset.live")
            browser.execute_script("document.querySelector('#path details').open = true")
            with RunStore.open(folder) as store:
                store.stop(Stop.INTERRUPTED)
            WebDriverWait(browser, 30).until(
                lambda b: b.execute_script("return document.body.dataset.live") != before
            )
            WebDriverWait(browser, 10).until(
                lambda b: Stop.INTERRUPTED.value in b.find_element(By.ID, "result").text
            )
            assert browser.find_elements(By.CSS_SELECTOR, "#race .whisker")
            assert browser.find_elements(By.CSS_SELECTOR, "#path details[open] .d2h-ins")
            assert browser.get_log("browser") == []
        finally:
            server.shutdown()
            thread.join()
