"""Prompts with images, pages, audio and videos: what the server gets, and which rows fail and why.

The server is a stand-in, and so are the videos: their boxes are those of MP4 files.
"""

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import batchrunner
from batchrunner.dispatch import queue
from tests.conftest import INSTANT, ROOT, ended, job_of, results_of, run_job
from tests.support.fake_sglang import FakeSGLang, Sent
from tests.support.media import document, opened, picture, sound, video
from tests.support.refusals import refusal, told

GREEDY = {"temperature": 0, "max_new_tokens": 16}
RED, BLUE, LOW, HIGH = picture("red"), picture("blue"), sound(hertz=220), sound(hertz=880)
CLIP, OTHER = video(), video(b"others")
TAKES_ALL = {"has_image_understanding": True, "has_audio_understanding": True}


@pytest.fixture
def senses() -> Iterator[FakeSGLang]:
    """A server whose model takes images, audio and videos."""
    with FakeSGLang(arguments=TAKES_ALL) as server:
        yield server


def _run(
    directory: Path, engine: Any, prompt: dict[str, Any], columns: dict[str, Any], code: int = 0, **more: Any
) -> list[dict[str, Any]]:
    """Run a job on these columns; return its results."""
    pq.write_table(pa.table(columns), directory / "input.parquet")
    job = job_of(directory, engine, prompt=prompt, **{"sampling": GREEDY, **more})
    run_job(job, directory, code=code)
    return results_of(job)


def _content(url: str, start: str) -> bytes:
    assert url.startswith(f"data:{start}"), url[:40]
    return base64.b64decode(url.partition(",")[2])


def _shape(sent: Sent) -> list[Any]:
    """Return the contents of a chat: texts, and for each file its kind and bytes."""
    shapes: list[Any] = []
    for message in sent.body["messages"]:
        content = message["content"]
        if isinstance(content, list):
            kinds = [part["type"].removesuffix("_url") for part in content]
            content = [
                part["text"] if kind == "text" else (kind, _content(part[f"{kind}_url"]["url"], kind))
                for kind, part in zip(kinds, content, strict=True)
            ]
        shapes.append(content)
    return shapes


def _files(sent: Sent) -> list[bytes]:
    return [part[1] for content in _shape(sent) for part in content if isinstance(part, tuple)]


def image(content: bytes) -> tuple[str, bytes]:
    return "image", content


def test_each_kind_has_its_place(tmp_path: Path, senses: FakeSGLang) -> None:
    """Columns stand for their files in a template; others come before the text, in the order of the job."""
    columns = {
        "voice": [LOW], "clips": [[CLIP, OTHER]], "photo": [RED], "more": [HIGH], "both": [[RED, BLUE]],
        "last": pa.array([None], pa.binary()),
    }  # fmt: skip
    each = "{% for clip in clips %}{{ loop.index }}: {{ clip }}{% endfor %}"
    messages = [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "{{ both }} first"},
        {"role": "assistant", "content": "fine"},
        {
            "role": "user",
            "content": f"Hear {{{{ voice }}}}, {each}.{{% if last %}}{{{{ last }}}}{{% endif %}}",
        },
    ]
    prompt = {"messages": messages, "images": ["photo", "both", "last"], "audio": ["voice", "more"]}
    _run(tmp_path, senses, {**prompt, "videos": ["clips"]}, columns)
    assert _shape(senses.sent[0]) == [
        "Be terse.",
        [image(RED), image(BLUE), " first"],
        "fine",
        [
            image(RED), ("audio", HIGH), "Hear ", ("audio", LOW), ", 1: ", ("video", CLIP), "2: ",
            ("video", OTHER), ".",
        ],
    ]  # fmt: skip


def test_conversations_of_a_column(tmp_path: Path, senses: FakeSGLang) -> None:
    """Parts of each type, marks such as `<video>`, or both; of a kind the numbers must be equal."""
    talks: list[Any] = [
        [
            {
                "role": "user",
                "content": [{"type": "audio"}, {"type": "text", "text": "x"}, {"type": "image"}],
            },
            {"role": "assistant", "content": "a cat"},
            {"role": "user", "content": [{"type": "audio"}]},
        ],
        [{"from": "human", "value": "<image>\nIs it <audio> or <audio>?"}],
        [{"role": "user", "content": "<image>What?"}],
        [{"role": "user", "content": [{"type": "audio"}]}],
    ]
    columns = {
        "talk": [json.dumps(talk) for talk in talks],
        "voice": [[LOW, HIGH], [LOW, HIGH], [LOW], []],
        "photo": [[RED], [RED], [BLUE], []],
    }
    prompt = {"messages": "talk", "audio": "voice", "images": "photo"}
    rows = _run(tmp_path, senses, prompt, columns, order="input", window=1, code=3)
    assert [row["error"] is None for row in rows] == [True, True, True, False]
    assert "prompt.audio: the messages have 1 parts of type audio, but the row has 0" in rows[3]["error"]
    low, high = ("audio", LOW), ("audio", HIGH)
    assert list(map(_shape, senses.sent)) == [
        [[low, "x", image(RED)], "a cat", [high]],
        [[image(RED), "Is it ", low, " or ", high, "?"]],
        [[low, image(BLUE), "What?"]],
    ]


@pytest.mark.parametrize("samples", [1, 2])
def test_text_without_a_chat_template(tmp_path: Path, senses: FakeSGLang, samples: int) -> None:
    """`prompt.text` goes to /generate with a list for each kind, and the model's own token for each file.

    With several samples each list is one item: SGLang would give each sample one of the files.
    """
    columns = {"voice": [[LOW, HIGH]], "clip": [CLIP]}
    prompt = {
        "text": "{{ clip }}Who says {{ voice }}?",
        "audio": {"columns": ["voice"], "placeholder": "<|AUDIO|>"},
        "videos": {"columns": ["clip"], "placeholder": "<|VIDEO|>"},
    }
    _run(tmp_path, senses, prompt, columns, sampling={"temperature": 1, "n": samples})
    (sent,) = senses.sent
    assert (sent.path, sent.body["text"]) == ("/generate", "<|VIDEO|>Who says <|AUDIO|><|AUDIO|>?")
    urls = sent.body["audio_data"] if samples == 1 else sent.body["audio_data"][0]
    assert [_content(url, "audio/wav") for url in urls] == [LOW, HIGH]
    assert "image_data" not in sent.body


def test_samples_of_a_chat(tmp_path: Path, senses: FakeSGLang) -> None:
    """With several samples a chat may have one file of a kind; SGLang gives each sample one of more."""
    columns = {
        "voice": [[LOW], [LOW, HIGH], [LOW]],
        "photo": [[RED], [], [RED]],
        "doc": pa.array([None, None, document(1)], pa.binary()),
    }
    prompt = {"user": "{% if doc %}{{ doc }}{% endif %}?", "audio": "voice", "images": "photo", "pdf": "doc"}
    rows = _run(tmp_path, senses, prompt, columns, sampling={"temperature": 1, "n": 2}, code=3)
    assert rows[0]["error"] is None
    told(rows[1]["error"], "sampling.n", "2 audio")
    told(rows[2]["error"], "sampling.n", "2 images")


def test_bad_files_fail_their_rows(tmp_path: Path, senses: FakeSGLang) -> None:
    """Each bad file is the error of its row; the others are answered, and the run goes to its end."""
    (tmp_path / "good.png").write_bytes(RED)
    (tmp_path / "page.png").write_text("<html>")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "out.png").symlink_to("/etc/hostname")
    cases = {
        "good.png": None,
        f"file://{tmp_path}/good.png": None,
        "data:image/png;base64," + base64.b64encode(BLUE).decode(): None,
        "page.png": "prompt.images: column 'photo' (page.png): cannot be read as an image (6 bytes)",
        "nowhere.png": "No such file",
        "sub": "is not a regular file",
        "sub/out.png": "is outside of",
        "bad\0name.png": "cannot be read",
        "HTTP://127.0.0.1/a.png": "allow_urls",
        "s3://bucket/a.png": "is not supported",
        "data:image/png;base64,!": "image",
        "": "is empty",
        None: "is null",
    }
    rows = _run(tmp_path, senses, {"user": "?", "images": "photo"}, {"photo": list(cases)}, code=3)
    for row, (place, problem) in zip(rows, cases.items(), strict=True):
        error = row["error"]
        assert (error is None) if problem is None else (problem in error), place
        assert row["attempts"] == (1 if problem is None else 0)
    assert len(senses.sent) == 3


def test_pages_of_documents(tmp_path: Path, senses: FakeSGLang) -> None:
    """Pages of a document are images of one row; with a column of page numbers each row is a page."""
    (tmp_path / "a.pdf").write_bytes(document(3))
    columns = {"doc": ["a.pdf"] * 5, "page": ["1-2", "2", "3", "4", None]}
    pdf = {"column": "doc", "pages": {"column": "page"}, "dpi": 72, "max_pixels": 5000}
    prompt = {"user": "Page {{ page }} {{ doc }} now.", "pdf": pdf}
    rows = _run(tmp_path, senses, prompt, columns, code=3)
    assert [row["error"] is None for row in rows] == [True, True, True, False, False]
    assert "has no page 4, but only 3 pages" in rows[3]["error"]
    assert sorted(len(_files(sent)) for sent in senses.sent) == [1, 1, 2]
    assert {opened(page).size for sent in senses.sent for page in _files(sent)} == {(100, 50)}


@pytest.mark.parametrize(("field", "lacks"), [("images", "image"), ("audio", "audio"), ("videos", "image")])
def test_models_without(tmp_path: Path, field: str, lacks: str) -> None:
    """A model that takes no images, and so no videos, or no audio, is said before anything is sent."""
    with FakeSGLang(arguments={**TAKES_ALL, f"has_{lacks}_understanding": False}) as server:
        job = job_of(tmp_path, server, prompt={"user": "What?", field: "text"})
        told(refusal(job, tmp_path), f"prompt.{field}", f"does not accept {field}")
        assert server.sent == []


async def test_rows_of_a_program(tmp_path: Path, senses: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes bytes, images of Pillow, and paths, wherever these lead; so does a stream."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "red.png"
    path.write_bytes(RED)
    prompt = {"user": "What?", "images": "photo"}
    photos = ["red.png", path, RED, Image.new("RGB", (64, 48), "red")]
    rows: list[Any] = [{"photo": photo} for photo in photos]
    options: dict[str, Any] = {"prompt": prompt, "engine": senses.url, "sampling": {"temperature": 1}}
    for row in rows:  # a column has values of one type
        assert batchrunner.generate([row], **options)["error"].to_pylist() == [None]
    files = [opened(content).convert("RGB") for sent in senses.sent for content in _files(sent)]
    assert [file.getpixel((5, 5)) for file in files] == [(255, 0, 0)] * 4
    found = {}
    async for row in batchrunner.stream([*rows, {"photo": [b"no"]}], **options):
        found[row["row"]] = row["error"]
    assert "cannot be read as an image" in found.pop(4)
    assert found == dict.fromkeys(range(4))


def test_bytes_in_flight_are_bounded(
    tmp_path: Path, senses: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests the window allows, no more is sent while enough images are in flight."""
    monkeypatch.setattr(queue, "MOST_MEDIA_BYTES", 1)
    senses.delay_s = 0.01
    images = [picture((number, 0, 0)) for number in range(12)]
    _run(tmp_path, senses, {"user": "?", "images": "photo"}, {"photo": images}, window=8)
    assert senses.most_in_flight == 1


@pytest.mark.parametrize("accept", [None, {"regex": "[0-9]{40}", "tries": 2, "feedback": True}])
def test_each_try_has_the_images(tmp_path: Path, senses: FakeSGLang, accept: Any) -> None:
    """Also that of a row whose answer is no good, and which is told what was wrong."""
    if accept is None:
        senses.script = lambda sent: "answer" if sent.tries > 1 else "broken 500"
    prompt, more = {"user": "?", "images": "photo"}, {"accept": accept} if accept else {}
    _run(tmp_path, senses, prompt, {"photo": [RED]}, code=3 if accept else 0, **more)
    assert [_files(sent) for sent in senses.sent] == [[RED], [RED]]


def test_the_job_that_reads_pages(tmp_path: Path) -> None:
    """jobs/list_pages.py lists the pages of a folder, and jobs/read_pages.yaml reads them."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.pdf").write_bytes(document(3))
    (tmp_path / "in" / "broken.pdf").write_bytes(b"%PDF-1.7")
    table = tmp_path / "pages.parquet"
    listed = ended(sys.executable, ROOT / "jobs" / "list_pages.py", tmp_path / "in", table)
    assert "4 pages of 2 documents" in listed.stdout
    assert "broken.pdf" in listed.stderr
    report = batchrunner.run(
        ROOT / "jobs" / "read_pages.yaml",
        overrides=[f"input.path={table}", f"output.path={tmp_path / 'run'}", f"engine={json.dumps(INSTANT)}"],
    )
    assert (report.rows_ok, report.rows_failed) == (3, 1)
    found = pq.read_table(tmp_path / "run" / "parts").to_pylist()
    rows = {(row["path"], row["page"]): row["error"] for row in found}
    assert "cannot be read as a PDF document" in rows.pop(("in/broken.pdf", 1))
    assert rows == {("in/a.pdf", page): None for page in (1, 2, 3)}
