"""Prompts with audio and videos: what the server gets, and which rows fail and why.

The server is a stand-in, and so are the videos: their boxes are those of MP4 files.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.job.load import load_job
from tests.conftest import INSTANT, batchrun, job_of, results_of, write_job
from tests.support.fake_sglang import FakeSGLang, Sent
from tests.support.pictures import document, picture
from tests.support.refusals import refusal, told
from tests.support.sounds import sound, video

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GREEDY = {"temperature": 0, "max_new_tokens": 16}
LOW, HIGH, CLIP, OTHER, RED = sound(hertz=220), sound(hertz=880), video(), video(b"others"), picture("red")
TAKES_ALL = {"has_image_understanding": True, "has_audio_understanding": True}


@pytest.fixture
def ears() -> Iterator[FakeSGLang]:
    """A server whose model takes images, audio and videos."""
    with FakeSGLang(arguments=TAKES_ALL) as server:
        yield server


def _job(
    directory: Path, engine: Any, prompt: dict[str, Any], columns: dict[str, Any], **more: Any
) -> dict[str, Any]:
    pq.write_table(pa.table(columns), directory / "input.parquet")
    return job_of(directory, engine, prompt=prompt, **{"sampling": GREEDY, **more})


def _run(job: dict[str, Any], directory: Path, code: int = 0) -> list[dict[str, Any]]:
    result = batchrun(write_job(job, directory))
    assert result.exit_code == code, result.output
    return results_of(job)


def _content(url: str, start: str) -> bytes:
    assert url.startswith(f"data:{start}"), url[:40]
    return base64.b64decode(url.partition(",")[2])


def _shape(sent: Sent) -> list[Any]:
    """Return the contents of a chat: texts, and type, start of the media type, and bytes of each file."""
    shapes: list[Any] = []
    for message in sent.body["messages"]:
        content = message["content"]
        if isinstance(content, list):
            content = [
                part["text"]
                if part["type"] == "text"
                else (part["type"], _content(part[part["type"]]["url"], part["type"].removesuffix("_url")))
                for part in content
            ]
        shapes.append(content)
    return shapes


def test_each_kind_has_its_place(tmp_path: Path, ears: FakeSGLang) -> None:
    """Columns stand for their files in a template; others come before the text, in the order of the job."""
    columns = {"voice": [LOW], "clips": [[CLIP, OTHER]], "photo": [RED], "more": [HIGH]}
    each = "{% for clip in clips %}{{ loop.index }}: {{ clip }}{% endfor %}"
    prompt = {"user": f"Hear {{{{ voice }}}}, see {each}.", "images": "photo", "audio": ["voice", "more"]}
    rows = _run(_job(tmp_path, ears, {**prompt, "videos": ["clips"]}, columns), tmp_path)
    assert [row["error"] for row in rows] == [None]
    assert _shape(ears.sent[0]) == [
        [
            ("image_url", RED), ("audio_url", HIGH), "Hear ", ("audio_url", LOW), ", see 1: ",
            ("video_url", CLIP), "2: ", ("video_url", OTHER), ".",
        ]
    ]  # fmt: skip


def test_text_without_a_chat_template(tmp_path: Path, ears: FakeSGLang) -> None:
    """`prompt.text` goes to /generate with a list for each kind, and the model's own token for each file.

    With several samples each list is one item: SGLang would give each sample one of the files.
    """
    columns = {"voice": [[LOW, HIGH]], "clip": [CLIP]}
    prompt = {
        "text": "{{ clip }}Who says {{ voice }}?",
        "audio": {"columns": ["voice"], "placeholder": "<|AUDIO|>"},
        "videos": {"columns": ["clip"], "placeholder": "<|VIDEO|>"},
    }
    _run(_job(tmp_path, ears, prompt, columns), tmp_path)
    (sent,) = ears.sent
    assert (sent.path, sent.body["text"]) == ("/generate", "<|VIDEO|>Who says <|AUDIO|><|AUDIO|>?")
    assert [_content(url, "audio/wav") for url in sent.body["audio_data"]] == [LOW, HIGH]
    assert [_content(url, "video/mp4") for url in sent.body["video_data"]] == [CLIP]
    assert "image_data" not in sent.body

    ears.forget()
    other = tmp_path / "samples"
    other.mkdir()
    sampling = {"temperature": 1, "n": 2}
    _run(_job(other, ears, prompt, columns, sampling=sampling, output={"path": str(other / "out")}), other)
    (urls,) = ears.sent[0].body["audio_data"]
    assert [_content(url, "audio/wav") for url in urls] == [LOW, HIGH]


def test_samples_of_a_chat(tmp_path: Path, ears: FakeSGLang) -> None:
    """With several samples a chat may have one file of a kind; SGLang gives each sample one of more."""
    prompt = {"user": "What?", "audio": "voice", "images": "photo", "pdf": "doc"}
    columns = {
        "voice": [[LOW], [LOW, HIGH], [LOW]],
        "photo": [[RED], [], [RED]],
        "doc": pa.array([None, None, document(1)], pa.binary()),
    }
    prompt["user"] = "{% if doc %}{{ doc }}{% endif %}What?"
    job = _job(tmp_path, ears, prompt, columns, sampling={"temperature": 1, "n": 2})
    rows = _run(job, tmp_path, code=3)
    assert [row["error"] is None for row in rows] == [True, False, False]
    assert "sampling.n" in rows[1]["error"]
    assert "2 audio" in rows[1]["error"]
    assert "2 images" in rows[2]["error"]
    assert len(ears.sent) == 1


def test_conversations_of_a_column(tmp_path: Path, ears: FakeSGLang) -> None:
    """Parts of each type, marks such as `<video>`, both, or neither; of a kind the numbers must be equal."""
    text = {"type": "text", "text": "x"}
    talks = [
        [
            {"role": "user", "content": [{"type": "audio"}, text, {"type": "video"}]},
            {"role": "assistant", "content": "a cat"},
            {"role": "user", "content": [{"type": "audio"}]},
        ],
        [{"from": "human", "value": "<video>Is it <audio>\nor <audio>?"}],
        [{"role": "user", "content": "<video>What?"}],
        [{"role": "user", "content": [{"type": "audio"}]}],
    ]
    columns = {
        "talk": [json.dumps(talk) for talk in talks],
        "voice": [[LOW, HIGH], [LOW, HIGH], [LOW], []],
        "clip": [[CLIP], [CLIP], [CLIP], []],
    }
    prompt = {"messages": "talk", "audio": "voice", "videos": "clip"}
    rows = _run(_job(tmp_path, ears, prompt, columns, order="input", window=1), tmp_path, code=3)
    assert [row["error"] is None for row in rows] == [True, True, True, False]
    assert "prompt.audio: the messages have 1 parts of type audio" in rows[3]["error"]
    low, high, clip = ("audio_url", LOW), ("audio_url", HIGH), ("video_url", CLIP)
    assert list(map(_shape, ears.sent)) == [
        [[low, "x", clip], "a cat", [high]],
        [[clip, "Is it ", low, "or ", high, "?"]],
        [[low, clip, "What?"]],
    ]


def test_bad_files_fail_their_rows(tmp_path: Path, ears: FakeSGLang) -> None:
    """Each bad file is the error of its row; the others are answered."""
    (tmp_path / "low.wav").write_bytes(LOW)
    (tmp_path / "page.wav").write_text("<html>")
    cases: dict[Any, str | None] = {
        "low.wav": None,
        f"file://{tmp_path}/low.wav": None,
        "data:audio/wav;base64," + base64.b64encode(HIGH).decode(): None,
        "page.wav": "prompt.audio: column 'voice' (page.wav): is no audio file that is known here (6 bytes)",
        "none.wav": "No such file",
        "../low.wav": "leads out of",
        "https://example.org/a.wav": "allow_urls",
        "": "is empty",
        None: "is null",
    }
    job = _job(tmp_path, ears, {"user": "What?", "audio": "voice"}, {"voice": list(cases)})
    rows = _run(job, tmp_path, code=3)
    for row, (place, problem) in zip(rows, cases.items(), strict=True):
        told_why = row["error"]
        assert (told_why is None) if problem is None else (problem in told_why), place
    assert len(ears.sent) == 3


def test_structs_and_cut_videos(tmp_path: Path, ears: FakeSGLang) -> None:
    """Structs of Hugging Face are read; a video that was cut fails its row, with what is missing."""
    clips = [
        {"bytes": CLIP, "path": "a.mp4"},
        {"bytes": CLIP[:-3], "path": "b.mp4"},
        {"bytes": LOW, "path": "c"},
    ]
    rows = _run(_job(tmp_path, ears, {"user": "What?", "videos": "clip"}, {"clip": clips}), tmp_path, code=3)
    assert [row["error"] is None for row in rows] == [True, False, False]
    assert "is a broken video file: it ends after" in rows[1]["error"]
    assert "is no video file that is known here" in rows[2]["error"]
    assert _shape(ears.sent[0]) == [[("video_url", CLIP), "What?"]]


@pytest.mark.parametrize(
    ("field", "told_by_server", "words"),
    [
        ("audio", {"has_image_understanding": True, "has_audio_understanding": False}, "takes no audio"),
        ("videos", {"has_image_understanding": False, "has_audio_understanding": True}, "takes no videos"),
    ],
)
def test_models_without(tmp_path: Path, field: str, told_by_server: dict[str, Any], words: str) -> None:
    """A model that takes no audio, or no videos, is said before anything is sent."""
    with FakeSGLang(arguments=told_by_server) as server:
        job = _job(tmp_path, server, {"user": "What?", field: "file"}, {"file": [LOW]})
        told(refusal(job, tmp_path), f"prompt.{field}", words)
        assert server.sent == []


@pytest.mark.parametrize(
    ("prompt", "column", "words"),
    [
        ({"user": "x", "audio": []}, [LOW], ["prompt.audio", "at least 1 item"]),
        ({"user": "x", "videos": "nowhere"}, [LOW], ["prompt.videos", "'nowhere'"]),
        ({"user": "x", "audio": "file"}, [1], ["prompt.audio", "'file'", "int64"]),
        ({"user": "x", "audio": "file", "videos": "file"}, [LOW], ["both `audio` and `videos`"]),
        ({"text": "{{ file }}", "audio": "file"}, [LOW], ["audio.placeholder"]),
        ({"input_ids": "file", "videos": "file"}, [LOW], ["`videos`", "`input_ids`"]),
        ({"python": "m:f", "audio": "file"}, [LOW], ["`audio`", "audio_url parts"]),
        ({"user": "x", "videos": "file", "truncate": "head"}, [LOW], ["truncate", "videos"]),
        ({"user": "x", "videos": {"columns": ["file"], "max_pixels": 1000}}, [LOW], ["max_pixels"]),
    ],
)
def test_refused_jobs(tmp_path: Path, prompt: dict[str, Any], column: list[Any], words: list[str]) -> None:
    """What cannot mean anything is one line, and exit code 2."""
    told(refusal(_job(tmp_path, INSTANT, prompt, {"file": column}), tmp_path), *words)


def test_gateways(tmp_path: Path) -> None:
    """The gateway refuses chats with audio: so does the job. Texts with audio pass it, and so do videos."""
    gateway = {"kind": "gateway", "url": "http://127.0.0.1:9"}
    chat = _job(tmp_path, gateway, {"user": "x", "audio": "file"}, {"file": [LOW]})
    told(refusal(chat, tmp_path), "prompt.audio: the gateway does not pass it on", "attach")
    placeholder = {"columns": ["file"], "placeholder": "<x>"}
    for prompt in ({"text": "x", "audio": placeholder}, {"user": "x", "videos": "file"}):
        load_job(_job(tmp_path, gateway, prompt, {"file": [LOW]}))


@pytest.mark.parametrize("task", ["embed", "rerank"])
@pytest.mark.parametrize("field", ["audio", "videos"])
def test_tasks_without(tmp_path: Path, field: str, task: str) -> None:
    """Tasks without decoding take no files."""
    prompt = {"text": "x", "documents": "file", field: {"columns": ["file"], "placeholder": "<x>"}}
    if task == "embed":
        del prompt["documents"]
    job = _job(tmp_path, INSTANT, prompt, {"file": ["a"]}, task=task)
    del job["sampling"]
    told(refusal(job, tmp_path), f"prompt.{field}", f"takes no {field}")


def test_rows_of_a_program(tmp_path: Path, ears: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes bytes and paths, wherever these lead."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "low.wav").write_bytes(LOW)
    rows = [{"voice": value} for value in (tmp_path / "low.wav", "low.wav", str(tmp_path / "low.wav"))]
    table = batchrunner.generate(
        rows, prompt={"user": "?", "audio": "voice"}, engine=ears.url, sampling={"temperature": 1}
    )
    assert table["error"].to_pylist() == [None] * 3
    assert {repr(_shape(sent)) for sent in ears.sent} == {repr([[("audio_url", LOW), "?"]])}


def test_check_opens_files(tmp_path: Path) -> None:
    """`batchrun check` shows where files come from, and tells which cannot be sent."""
    (tmp_path / "low.wav").write_bytes(LOW)
    (tmp_path / "cut.wav").write_bytes(LOW[:-100])
    places = {"voice": ["low.wav", "cut.wav"]}
    job = _job(tmp_path, INSTANT, {"user": "What is {{ voice }}?", "audio": "voice"}, places)
    result = batchrun("check", write_job(job, tmp_path))
    assert result.exit_code == 0
    assert "column 'voice' (low.wav)" in result.output
    assert "is a broken audio file" in result.output
