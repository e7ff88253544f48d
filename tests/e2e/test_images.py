"""Prompts with images: what the server gets, which rows fail and why, and that nothing else is lost."""

from __future__ import annotations

import base64
import datetime as dt
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import batchrunner
from batchrunner.dispatch import queue
from tests.conftest import INSTANT, ROOT, batchrun, job_of, report_of, results_of, write_job
from tests.support.fake_sglang import FakeSGLang, Sent
from tests.support.pictures import document, file_of, opened, picture
from tests.support.refusals import refusal, told

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GREEDY = {"temperature": 0, "max_new_tokens": 16}


@pytest.fixture
def eyes() -> Iterator[FakeSGLang]:
    """A server whose model takes images."""
    with FakeSGLang(arguments={"has_image_understanding": True}) as server:
        yield server


def _job(
    directory: Path, engine: Any, prompt: dict[str, Any], columns: dict[str, Any], **more: Any
) -> dict[str, Any]:
    pq.write_table(pa.table(columns), directory / "input.parquet")
    return job_of(directory, engine, prompt=prompt, sampling=GREEDY, **more)


def _run(job: dict[str, Any], directory: Path, code: int = 0) -> list[dict[str, Any]]:
    result = batchrun(write_job(job, directory))
    assert result.exit_code == code, result.output
    return results_of(job)


def _images_in(sent: Sent) -> list[bytes]:
    """Return the images of a request, in order."""
    urls = sent.body.get("image_data") or [
        part["image_url"]["url"]
        for message in sent.body["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]
    assert all(url.startswith("data:image/") for url in urls)
    return [base64.b64decode(url.partition(",")[2]) for url in urls]


def _shape(sent: Sent) -> list[Any]:
    """Return the contents of a chat, with "*" for each image."""
    shapes: list[Any] = []
    for message in sent.body["messages"]:
        content = message["content"]
        if isinstance(content, list):
            content = ["*" if part["type"] == "image_url" else part["text"] for part in content]
        shapes.append(content)
    return shapes


RED, BLUE = picture("red"), picture("blue")


def test_images_before_the_text(tmp_path: Path, eyes: FakeSGLang) -> None:
    """Without a placeholder the images come before the text of the last user message, as they are."""
    columns = {"q": ["a", "b"], "image": [RED, BLUE]}
    prompt = {"system": "Be terse.", "user": "{{ q }}?", "images": ["image"]}
    rows = _run(_job(tmp_path, eyes, prompt, columns), tmp_path)
    assert [row["error"] for row in rows] == [None, None]
    by_text = {_shape(sent)[1][1]: sent for sent in eyes.sent}
    assert {text: _shape(sent) for text, sent in by_text.items()} == {
        "a?": ["Be terse.", ["*", "a?"]],
        "b?": ["Be terse.", ["*", "b?"]],
    }
    assert (_images_in(by_text["a?"]), _images_in(by_text["b?"])) == ([RED], [BLUE])


def test_placeholders(tmp_path: Path, eyes: FakeSGLang) -> None:
    """A column of images stands for them, also those of a list one by one, in any message."""
    columns = {"one": [RED], "more": [[RED, BLUE]], "last": pa.array([None], pa.binary())}
    each = "{% for each in more %}{{ loop.index }}: {{ each }}{% endfor %}"
    template = f"See {{{{ one }}}}.{each}{{% if last %}}{{{{ last }}}}{{% endif %}}"
    messages = [
        {"role": "user", "content": "{{ more }} first"},
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": template},
    ]
    prompt = {"messages": messages, "images": ["one", "more", "last"]}
    assert [row["error"] for row in _run(_job(tmp_path, eyes, prompt, columns), tmp_path)] == [None]
    assert _shape(eyes.sent[0]) == [["*", "*", " first"], "fine", ["See ", "*", ".1: ", "*", "2: ", "*"]]
    assert _images_in(eyes.sent[0]) == [RED, BLUE, RED, RED, BLUE]


def test_conversations_of_a_column(tmp_path: Path, eyes: FakeSGLang) -> None:
    """Parts of type image, `<image>` in texts, or neither; and data URLs of the messages themselves."""
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    talks = [
        [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}, {"type": "image"}]}],
        [
            {"from": "human", "value": "<image>\nWhat?"},
            {"from": "gpt", "value": "Red"},
            {"from": "human", "value": "and <image>"},
        ],
        [{"role": "user", "content": "What?"}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}],
        [{"role": "user", "content": [url]}],
    ]
    images = [[RED, BLUE], [RED, BLUE], [BLUE], [RED, BLUE], []]
    columns = {"talk": [json.dumps(talk) for talk in talks], "images": images}
    prompt = {"messages": "talk", "images": "images"}
    job = _job(tmp_path, eyes, prompt, columns, order="input", window=1)
    rows = _run(job, tmp_path, code=3)
    assert "2 images" in rows[3]["error"]
    assert [row["error"] is None for row in rows] == [True, True, True, False, True]
    assert list(map(_shape, eyes.sent)) == [
        [["x", "*", "*"]], [["*", "What?"], "Red", ["and ", "*"]], [["*", "What?"]], [["*"]],
    ]  # fmt: skip
    assert _images_in(eyes.sent[1]) == [RED, BLUE]


def test_text_without_a_chat_template(tmp_path: Path, eyes: FakeSGLang) -> None:
    """`prompt.text` goes to /generate with the images beside it, and the model's own token for each."""
    columns = {"q": ["Who?"], "image": [[RED, BLUE]]}
    prompt = {"text": "{{ image }}{{ q }}", "images": {"columns": ["image"], "placeholder": "<image>"}}
    _run(_job(tmp_path, eyes, prompt, columns), tmp_path)
    (sent,) = eyes.sent
    assert (sent.path, sent.body["text"]) == ("/generate", "<image><image>Who?")
    assert _images_in(sent) == [RED, BLUE]


def test_bad_images_fail_their_rows(tmp_path: Path, eyes: FakeSGLang) -> None:
    """Each bad image is the error of its row; the others are answered, and the run goes to its end."""
    (tmp_path / "good.png").write_bytes(RED)
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "out.png").symlink_to("/etc/hostname")
    cases = {
        "good.png": None,
        f"file://{tmp_path}/good.png": None,
        "data:image/png;base64," + base64.b64encode(BLUE).decode(): None,
        "text.png": "is no image that can be read",
        "nowhere.png": "No such file",
        "sub": "is no file",
        "sub/out.png": "leads out of",
        "../good.png": "leads out of",
        "/etc/hostname": "leads out of",
        "bad\0name.png": "cannot be read",
        "https://example.org/a.png": "allow_urls",
        "HTTP://127.0.0.1/a.png": "allow_urls",
        "s3://bucket/a.png": "is not known here",
        "data:image/png;base64,!": "image",
        "": "is empty",
        None: "is null",
    }
    job = _job(tmp_path, eyes, {"user": "What?", "images": "image"}, {"image": list(cases)})
    rows = _run(job, tmp_path, code=3)
    for row, (place, problem) in zip(rows, cases.items(), strict=True):
        told_why = row["error"]
        assert (told_why is None) if problem is None else (problem in told_why), place
        assert row["attempts"] == (1 if problem is None else 0)
    assert len(eyes.sent) == 3


def test_private_addresses(tmp_path: Path, eyes: FakeSGLang) -> None:
    """Addresses that are not public are refused even where URLs are allowed."""
    places = [
        f"{eyes.url}/a.png", "http://localhost/a.png", "http://169.254.169.254/latest", "http://[::1]/a.png",
        "http://10.0.0.1/a", "https://192.168.1.1/a", "http://0x7f000001/a", "http://[::ffff:127.0.0.1]/a",
    ]  # fmt: skip
    prompt = {"user": "What?", "images": {"columns": ["image"], "allow_urls": True}}
    rows = _run(_job(tmp_path, eyes, prompt, {"image": places}), tmp_path, code=3)
    assert all("is not public" in row["error"] for row in rows)
    assert eyes.sent == []


def test_equal_images_are_sent_once(tmp_path: Path, eyes: FakeSGLang) -> None:
    """At temperature 0 equal prompts with equal images share an answer; another image is another prompt."""
    columns = {
        "image": [{"bytes": RED, "path": None}, {"bytes": BLUE, "path": "b"}, {"bytes": RED, "path": "c"}]
    }
    rows = _run(_job(tmp_path, eyes, {"user": "What?", "images": "image"}, columns), tmp_path)
    assert len(eyes.sent) == 2
    assert [row["attempts"] for row in rows] == [1, 1, 0]


def test_pages_of_documents(tmp_path: Path, eyes: FakeSGLang) -> None:
    """Pages of a document are images of one row; with a column of page numbers each row is a page."""
    (tmp_path / "a.pdf").write_bytes(document(3))
    prompt = {"user": "Read {{ doc }} now.", "pdf": {"column": "doc", "pages": "1-2", "dpi": 72}}
    _run(_job(tmp_path, eyes, prompt, {"doc": ["a.pdf"]}), tmp_path)
    assert _shape(eyes.sent[0]) == [["Read ", "*", "*", " now."]]
    assert [opened(page).size for page in _images_in(eyes.sent[0])] == [(200, 100)] * 2

    eyes.forget()
    other = tmp_path / "by_page"
    other.mkdir()
    prompt = {
        "user": "Page {{ page }}",
        "pdf": {"column": "doc", "pages": {"column": "page"}, "folder": str(tmp_path)},
    }
    columns = {"doc": ["a.pdf"] * 5, "page": [1, 2, 3, 4, None]}
    rows = _run(_job(other, eyes, prompt, columns), other, code=3)
    assert [row["error"] is None for row in rows] == [True, True, True, False, False]
    assert "has no page 4: it has 3" in rows[3]["error"]
    assert {_shape(sent)[0][1]: len(_images_in(sent)) for sent in eyes.sent} == {
        "Page 1": 1, "Page 2": 1, "Page 3": 1,
    }  # fmt: skip


def test_bad_documents_fail_their_rows(tmp_path: Path) -> None:
    """Broken and empty documents fail their rows."""
    columns = {"doc": [document(1), b"%PDF-1.7", document(2)[:300], RED]}
    rows = _run(_job(tmp_path, INSTANT, {"user": "Read.", "pdf": "doc"}, columns), tmp_path, code=3)
    assert rows[0]["error"] is None
    assert all("is no PDF document" in row["error"] for row in rows[1:])


def test_model_without_eyes(tmp_path: Path) -> None:
    """A model that takes no images is said before anything is sent."""
    with FakeSGLang(arguments={"has_image_understanding": False}) as blind:
        job = _job(tmp_path, blind, {"user": "What?", "images": "image"}, {"image": [RED]})
        told(refusal(job, tmp_path), "prompt.images", "fake/model takes no images")
        assert blind.sent == []


@pytest.mark.parametrize(
    ("prompt", "column", "words"),
    [
        ({"user": "x", "images": []}, [RED], ["prompt.images", "at least 1 item"]),
        ({"user": "x", "images": "nowhere"}, [RED], ["prompt.images", "'nowhere'"]),
        ({"user": "x", "images": "image"}, [1], ["prompt.images", "'image'", "int64"]),
        ({"user": "x", "images": "image"}, [dt.date(2026, 1, 1)], ["prompt.images", "date32"]),
        ({"user": "{{ image }}"}, [RED], ["prompt.user", "bytes"]),
        ({"user": "x", "pdf": "image"}, [[RED]], ["prompt.pdf", "list"]),
        ({"user": "x", "pdf": {"column": "image", "pages": "3-1"}}, [RED], ["prompt.pdf.pages", "3-1"]),
        ({"user": "x", "pdf": {"column": "image", "pages": "last"}}, [RED], ["prompt.pdf.pages", "last"]),
        ({"user": "x", "pdf": "image", "images": "image"}, [RED], ["a column with files is named twice"]),
        ({"text": "{{ image }}", "images": "image"}, [RED], ["prompt.text", "placeholder"]),
        ({"text": "x", "pdf": "image"}, [RED], ["`pdf` has no effect beside `text`"]),
        ({"input_ids": "image", "images": "image"}, [RED], ["`images`", "`input_ids`"]),
        ({"python": "m:f", "images": "image"}, [RED], ["`images`", "`python`"]),
        ({"user": "x", "images": "image", "truncate": "head"}, [RED], ["truncate"]),
        ({"user": "x", "sound": ["image"]}, [RED], ["prompt.sound"]),
        ({"user": "x", "images": {"columns": ["image"], "max_pixels": 10}}, [RED], ["max_pixels", "784"]),
    ],
)  # fmt: skip
def test_refused_jobs(tmp_path: Path, prompt: dict[str, Any], column: list[Any], words: list[str]) -> None:
    """What cannot mean anything is one line, and exit code 2."""
    told(refusal(_job(tmp_path, INSTANT, prompt, {"image": column}), tmp_path), *words)


def test_rows_of_a_program(tmp_path: Path, eyes: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes bytes, images of Pillow, and paths, wherever these lead."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "red.png").write_bytes(RED)
    grey = Image.new("F", (40, 40), 7.0)
    values = [
        RED,
        Image.new("RGB", (64, 48), "red"),
        "red.png",
        tmp_path / "red.png",
        str(tmp_path / "red.png"),
        grey,
    ]
    rows = [{"image": value} for value in values]
    for some in ([rows[0], rows[1], rows[5]], rows[2:5]):
        eyes.forget()
        table = batchrunner.generate(
            some, prompt={"user": "What?", "images": "image"}, engine=eyes.url, sampling={"temperature": 1}
        )
        assert table["error"].to_pylist() == [None] * 3
        pictures = [
            opened(image).convert("RGB").getpixel((5, 5)) for sent in eyes.sent for image in _images_in(sent)
        ]
        assert pictures.count((255, 0, 0)) >= 2


async def test_stream_of_images(eyes: FakeSGLang) -> None:
    """A stream takes images too."""
    rows = [{"image": [Image.new("RGB", (9, 9), "red"), BLUE]}, {"image": [RED]}, {"image": [b"no"]}]
    found = {}
    async for row in batchrunner.stream(rows, prompt={"user": "?", "images": "image"}, engine=eyes.url):
        found[row["row"]] = row["error"]
    assert (found[0], found[1]) == (None, None)
    assert "item 1: is no image" in found[2]
    assert sorted(len(_images_in(sent)) for sent in eyes.sent) == [1, 2]


def test_check_shows_where_images_come_from(tmp_path: Path) -> None:
    """`batchrun check` names the images of a prompt, and sends nothing."""
    (tmp_path / "red.png").write_bytes(RED)
    job = _job(tmp_path, INSTANT, {"user": "What is {{ image }}?", "images": "image"}, {"image": ["red.png"]})
    result = batchrun("check", write_job(job, tmp_path))
    assert result.exit_code == 0
    assert "column 'image' (red.png)" in result.output


def test_check_opens_images(tmp_path: Path) -> None:
    """A broken image and a file that is missing are told before anything is sent; URLs are not loaded."""
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "half.png").write_bytes(RED[: len(RED) // 2])
    images = {"columns": ["image"], "allow_urls": True}
    places = ["red.png", "half.png", "nowhere.png", "https://example.invalid/a.png"]
    job = _job(tmp_path, INSTANT, {"user": "What?", "images": images}, {"image": places})
    result = batchrun("check", write_job(job, tmp_path))
    assert result.exit_code == 0
    assert "2 of the first 4 rows cannot be sent" in result.output
    assert "No such file" in result.output
    job = _job(tmp_path, INSTANT, {"user": "What?", "images": images}, {"image": places[1:3]})
    assert batchrun("check", write_job(job, tmp_path)).exit_code == 3


def test_large_images_are_made_smaller(tmp_path: Path, eyes: FakeSGLang) -> None:
    """`max_pixels` bounds what is sent, and a photo on its side is turned."""
    exif = Image.Exif()
    exif[0x0112] = 8
    photo = file_of(Image.new("RGB", (400, 200), "red"), "JPEG", exif=exif)
    prompt = {"user": "What?", "images": {"columns": ["image"], "max_pixels": 20_000}}
    _run(_job(tmp_path, eyes, prompt, {"image": [photo]}), tmp_path)
    assert opened(_images_in(eyes.sent[0])[0]).size == (100, 200)


def test_resume(tmp_path: Path) -> None:
    """A run with images resumes, in prefix order too; the order by prefix finds equal images."""
    images = [picture((number % 50, 0, 0), (28, 28)) for number in range(300)]
    columns = {"q": [f"{number % 3}" for number in range(300)], "image": images}
    prompt = {"user": "{{ image }} {{ q }}", "images": "image"}
    job = _job(tmp_path, INSTANT, prompt, columns, order="prefix", dedupe=False)
    assert len(_run({**job, "input": {**job["input"], "limit": 100}}, tmp_path)) == 100
    rows = _run(job, tmp_path)
    assert [row["row"] for row in rows] == list(range(300))
    assert report_of(job)["rows_ok"] == 300


def test_bytes_in_flight_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests the window allows, no more is sent while enough images are in flight."""
    monkeypatch.setattr(queue, "MOST_MEDIA_BYTES", 1)
    with FakeSGLang(arguments={"has_image_understanding": True}, delay_s=0.01) as eyes:
        images = [picture((number, 0, 0)) for number in range(12)]
        job = _job(tmp_path, eyes, {"user": "?", "images": "image"}, {"image": images}, window=8)
        rows = _run(job, tmp_path)
        assert [row["error"] for row in rows] == [None] * 12
        assert eyes.most_in_flight == 1


def test_failed_tries_are_sent_again(tmp_path: Path) -> None:
    """A row whose try fails is sent again with its images."""
    with FakeSGLang(
        lambda sent: "answer" if sent.tries > 1 else "broken 500",
        arguments={"has_image_understanding": True},
    ) as eyes:
        job = _job(tmp_path, eyes, {"user": "?", "images": "image"}, {"image": [RED]})
        assert [row["error"] for row in _run(job, tmp_path)] == [None]
        assert [_images_in(sent) for sent in eyes.sent] == [[RED], [RED]]


def test_checked_answers_keep_the_images(tmp_path: Path, eyes: FakeSGLang) -> None:
    """A row that is asked again, and told what was wrong, has its image in each try."""
    check = {"regex": "[0-9]{40}", "tries": 2, "feedback": True}
    job = _job(tmp_path, eyes, {"user": "?", "images": "image"}, {"image": [RED]}, check=check)
    assert _run(job, tmp_path, code=3)[0]["error"]
    assert [_images_in(sent) for sent in eyes.sent] == [[RED], [RED]]


def test_the_job_that_reads_pages(tmp_path: Path) -> None:
    """jobs/list_pages.py lists the pages of a folder, and jobs/read_pages.yaml reads them."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.pdf").write_bytes(document(3))
    (tmp_path / "in" / "b.PDF").write_bytes(document(1))
    (tmp_path / "in" / "broken.pdf").write_bytes(b"%PDF-1.7")
    table = tmp_path / "pages.parquet"
    listed = subprocess.run(
        [sys.executable, ROOT / "jobs" / "list_pages.py", tmp_path / "in", table],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "5 pages of 3 documents" in listed.stdout
    assert "broken.pdf" in listed.stderr
    report = batchrunner.run(
        ROOT / "jobs" / "read_pages.yaml",
        overrides=[f"input.path={table}", f"output.path={tmp_path / 'run'}", f"engine={json.dumps(INSTANT)}"],
    )
    assert (report.rows_ok, report.rows_failed) == (4, 1)
    found = pq.read_table(tmp_path / "run" / "parts").to_pylist()
    rows = {(row["path"], row["page"]): row["error"] for row in found}
    assert "is no PDF document" in rows.pop(("in/broken.pdf", 1))
    assert rows == {
        ("in/a.pdf", 1): None,
        ("in/a.pdf", 2): None,
        ("in/a.pdf", 3): None,
        ("in/b.PDF", 1): None,
    }
