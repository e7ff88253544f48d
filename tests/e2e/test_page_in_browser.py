"""A run's page in a real browser: it renders without a complaint, on a phone too, light and dark."""

from pathlib import Path

import pytest

import batchrunner
from batchrunner.output.run_dir import RunDir
from batchrunner.report.html.page import write_page
from tests.conftest import job_of, write_rows
from tests.support.answers import REFUSALS
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.page import HOSTILE, new_page, require_chromium

pytestmark = pytest.mark.browser

DESKTOP, PHONE = (1280, 900), (360, 740)
CHARTS = ["output", "replicas", "prompt", "queue", "usage", "running", "window", "windows"]

DRAWN = """[...document.querySelectorAll("[data-chart]")].filter((chart) => {
    const box = chart.querySelector("svg").getBoundingClientRect();
    const lines = [...chart.querySelectorAll(".line")].map((line) => line.getTotalLength());
    return box.width > 200 && box.height > 100 && lines.length && Math.min(...lines) > 50;
}).map((chart) => chart.dataset.chart)"""

TOO_WIDE = """[...document.querySelectorAll("body *")].filter((element) => {
    const box = element.getBoundingClientRect(), inside = element.closest(".scroll, pre, svg, .xs");
    return box.width && (box.right > innerWidth + 1 || box.left < -1) && (!inside || inside === element);
}).map((element) => `${element.tagName}.${element.className} ${element.textContent.slice(0, 40)}`)"""

# WCAG 2: the ratio of luminances of every text and of what lies behind it
FAINT = """(() => {
    const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    const behind = (element) => {
        for (; element; element = element.parentElement) {
            const colour = rgb(getComputedStyle(element).backgroundColor);
            if (colour.length === 3 || colour[3] === 1) return colour;
        }
        return [255, 255, 255];
    };
    const own = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    return [...document.querySelectorAll("body *")]
        .filter((element) => !element.matches("script, title, desc") && own(element))
        .map((element) => {
            const colours = [rgb(getComputedStyle(element).color), behind(element)];
            const [a, b] = colours.map(light).sort((x, y) => y - x);
            return [(a + 0.05) / (b + 0.05), element.tagName, element.textContent.slice(0, 30)];
        })
        .filter(([ratio]) => ratio < 4.5);
})()"""


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the address of the page of a run on two replicas, whose texts and name look like HTML."""
    require_chromium()
    directory = tmp_path_factory.mktemp("browser")
    write_rows(directory / "input.parquet", 1500, title=[HOSTILE] * 1500)
    with (
        pytest.MonkeyPatch.context() as patch,
        FakeSGLang(_refuse_some, max_running=32, delay_s=0.05) as server,
        FakeSGLang(_refuse_some, max_running=32, delay_s=0.05) as other,
    ):
        patch.setitem(REFUSALS, "too long", (400, HOSTILE + "x" * 100_000))
        job = job_of(directory, server, limits={"max_failed_rows": 1500})
        job["engine"]["urls"].append(other.url)
        job["input"]["columns"] = ["title"]
        job["prompt"] = {"user": "{{ title }} row {{ id }}"}
        job["output"]["path"] = str(directory / "<img src=x onerror=alert(2)>")
        batchrunner.run(job)
    return write_page(RunDir(directory / "<img src=x onerror=alert(2)>")).as_uri()


def _refuse_some(sent: Sent) -> Behaviour:
    return "too long" if sent.prompt.endswith("77") else "answer"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_the_page_renders(
    hostile_page: str, tmp_path: Path, size: tuple[int, int], *, dark: bool
) -> None:
    """All charts are drawn, texts are readable, nothing sticks out, complains, or asks for another file."""
    async with new_page(tmp_path / "profile") as page:
        await page.open(hostile_page, width=size[0], height=size[1], dark=dark)
        assert await page.run(DRAWN) == CHARTS
        await page.run('document.querySelectorAll("details").forEach((one) => { one.open = true; })')
        assert await page.run(TOO_WIDE) == []
        assert await page.run("document.documentElement.scrollWidth <= innerWidth")
        assert await page.run(FAINT) == []
        assert await page.run('matchMedia("(prefers-color-scheme: dark)").matches') == dark
        assert await page.run('document.querySelectorAll("img").length') == 0
        assert page.complaints == []
        assert page.requested in ([hostile_page], [hostile_page, "data:,"])
        await page.picture(tmp_path / "page.png")


async def test_the_charts_can_be_read_off(hostile_page: str, tmp_path: Path) -> None:
    """Pointing at a chart shows the values of that moment in all of them; a click hides a line."""
    async with new_page(tmp_path / "profile") as page:
        await page.open(hostile_page, width=DESKTOP[0], height=DESKTOP[1], dark=False)
        left, middle, width = await page.run(
            'document.querySelector(".plot").scrollIntoView({block: "center"}),'
            "(({x, y, width, height}) => [x, y + height / 2, width])"
            '(document.querySelector(".plot").getBoundingClientRect())'
        )
        texts: list[str] = []
        for tenth in (5, 4, 6, 3, 7, 2, 8):  # a server that did not answer in time has no value then
            await page.point_at(left + width * tenth / 10, middle)
            texts = await page.run('[...document.querySelectorAll("output")].map((one) => one.textContent)')
            if all(texts):
                break
        assert len(texts) == 15
        assert all(texts)
        assert "After" in await page.run('document.querySelector(".now").textContent')
        await page.run('document.querySelector("[data-chart=window] button").click()')
        hidden = await page.run('document.querySelectorAll(".stroke.hidden").length')
        assert hidden == 1
        await page.point_at(1, 1)
        assert not any(
            await page.run('[...document.querySelectorAll("output")].map((one) => one.textContent)')
        )
        assert page.complaints == []
