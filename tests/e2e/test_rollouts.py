"""Runs whose rows ask several times, by an asynchronous function of the job."""

import json
import logging
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.errors import BatchrunError
from tests.conftest import (
    INSTANT,
    batchrun,
    eventually,
    job_of,
    merged_table,
    parts_of,
    report_of,
    results_of,
    rows_in,
    run_job,
    started,
    write_job,
)
from tests.e2e.test_checked_answers import says
from tests.support.answers import Body, Said
from tests.support.fake_sglang import FakeSGLang, Sent
from tests.support.functions import write_module
from tests.support.runs import failed_rows, until_stored, until_turns_stored

pytestmark = pytest.mark.usefixtures("quick_retries")
PROMPT = {"rollout": "hooks:solve"}
TURNS = """
    async def solve(row, generate):
        texts = []
        for turn in range(5):
            answer = await generate(f"row {row['id']} turn {turn} after {len(texts)}")
            texts.append(answer.text)
        return {"texts": texts}
"""
"""A function of five turns."""


def test_a_conversation_with_a_tool(tmp_path: Path, server: FakeSGLang) -> None:
    """Turns of a chat: the call of a tool is parsed, and results have the columns and sums of the turns."""
    write_module(
        tmp_path,
        """
        from typing import TypedDict

        class Solved(TypedDict):
            answer: str
            city: str
            asked: int

        async def solve(row, generate) -> Solved:
            tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
            messages = [{"role": "user", "content": row["text"]}]
            cities = []
            while True:
                answer = await generate(messages, tools=[tool], temperature=0.5, max_new_tokens=7)
                messages.append(answer.message)
                if not answer.tool_calls:
                    return {"answer": answer.text, "city": cities[0], "asked": len(messages) // 2}
                for call in answer.tool_calls:
                    cities.append(call.arguments["city"])
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        """,
    )
    server.script = lambda sent: "tool call" if sent.prompt.startswith("row") else "answer"
    job = job_of(tmp_path, server, rows=6, prompt=PROMPT, sampling={"top_p": 0.9}, input={"columns": ["id"]})
    run_job(job, tmp_path)
    rows = results_of(job)
    assert [(row["row"], row["id"], row["rollout"], row["turns"]) for row in rows] == [
        (n, n, 0, 2) for n in range(6)
    ]
    assert {(row["city"], row["asked"], row["answer"] == row["output"]) for row in rows} == {
        ("Bern", 2, True)
    }
    sent = [sent.body for sent in server.sent if sent.prompt == "sunny"]
    assert {(body["temperature"], body["top_p"], body["max_completion_tokens"]) for body in sent} == {
        (0.5, 0.9, 7)
    }
    assert [message["role"] for message in sent[0]["messages"]] == ["user", "assistant", "tool"]
    assert sent[0]["messages"][1]["tool_calls"][0]["function"]["name"] == "get_weather"
    report = report_of(job)
    assert (report["rollouts"]["turns"], report["output_tokens"]) == (
        12,
        sum(row["completion_tokens"] for row in rows),
    )


def test_rows_by_values(tmp_path: Path, server: FakeSGLang) -> None:
    """Without an annotation merged columns are typed by all values; a list is a row for each.

    All of them are the next run's input, also where the run was merged before its end.
    """
    write_module(
        tmp_path,
        """
        async def solve(row, generate):
            if row["id"] == 3:
                return None
            answer = await generate(row["text"])
            return [{"score": number or 0.5, "turns": number, "mixed": [1, "x"][number % 2], "none": None,
                     "tags": [answer.text][:number], "of": {"n": number}} for number in range(row["id"] + 1)]
        """,
    )
    job = job_of(tmp_path, server, rows=4, prompt=PROMPT)
    run_job(job, tmp_path)
    assert report_of(job)["rows_ok"] == 4
    told = batchrun("merge", tmp_path / "run").stderr
    assert re.findall(r"column '(\w+)' of the rollouts' results mixes text with other types", told) == [
        "mixed"
    ]
    merged = merged_table(tmp_path / "run")
    types = {name: merged.schema.field(name).type for name in ("score", "turns", "mixed", "tags", "of")}
    assert types == {
        "score": pa.float64(), "turns": pa.int64(), "mixed": pa.string(), "tags": pa.list_(pa.string()),
        "of": pa.struct([("n", pa.int64())]),
    }  # fmt: skip
    rows = merged.to_pylist()
    assert [(row["row"], row["rollout"]) for row in rows] == [
        (0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, None)
    ]  # fmt: skip
    assert [row["score"] for row in rows[:6]] == [0.5, 0.5, 1.0, 0.5, 1.0, 2.0]
    assert rows[0]["of"] == {"n": 0}
    assert rows[6]["finish_reason"] == "left_out"
    pq.write_table(merged.slice(0, 6), next((tmp_path / "run" / "merged").iterdir()))
    again = batchrunner.generate(str(tmp_path / "run"), prompt={"text": "{{ row }}"}, engine="simulated")
    assert again.num_rows == 7
    next((tmp_path / "run" / "merged").iterdir()).write_bytes(b"cut")
    with pytest.raises(BatchrunError, match="is damaged: move the file away"):
        batchrunner.generate(str(tmp_path / "run"), prompt={"text": "{{ row }}"}, engine="simulated")
    streamed = list(
        batchrunner.stream(
            [{"id": 2, "text": "a"}], prompt=PROMPT | {"rollout": by_value}, engine="simulated"
        )
    )
    assert [(row["rollout"], row["n"]) for row in streamed] == [(0, 0), (1, 1)]


async def by_value(row: Any, generate: Any) -> Any:
    """Make two rows."""
    await generate(row["text"])
    return [{"n": 0}, {"n": 1}]


def test_only_the_row_fails(tmp_path: Path, server: FakeSGLang) -> None:
    """Whatever a function does with a row, the others are done; the failed row keeps what was asked."""
    write_module(
        tmp_path,
        """
        import asyncio, ctypes, functools, os, sys, time

        async def solve(row, generate):
            answer = await generate([{"role": "user", "content": row["text"]}])
            match row["id"]:
                case 1: raise ValueError("no")
                case 2: sys.exit(3)
                case 3: os._exit(3)
                case 4: ctypes.string_at(0)
                case 5: time.sleep(1000)
                case 6: await asyncio.sleep(1000)
                case 7:
                    for n in range(10): await generate(f"more {n}")
                case 8: return "text"
                case 9: return {"rollout": 1}
                case 10: await generate([])
                case 11: await generate("x", temperature=-1)
                case 12: await asyncio.gather(asyncio.sleep(0.1), asyncio.to_thread(time.sleep, 0.2))
                case 13:
                    while True:
                        try: await asyncio.sleep(1000)
                        except asyncio.CancelledError: pass
                case 14: await asyncio.to_thread(os._exit, 4)
                case 15: await asyncio.to_thread(asyncio.run, generate("x"))
                case 16: asyncio.get_running_loop().stop()
                case 17:
                    if os.fork() == 0: time.sleep(1000)
                    os._exit(5)
                case 18: return functools.reduce(lambda inner, _: {"a": inner}, range(700), 1)
                case 19: return {"pairs": {(1, 2): 3}}
                case 20: await generate("x", top_k={"column": "id"})
                case 21:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(generate("x", n=2))
            await asyncio.sleep(0)
            return {"text": answer.text}
        """,
    )
    limits = {"python": 1, "rollout": 15, "turns": 5, "max_failed_rows": 22}
    job = job_of(tmp_path, server, rows=40, prompt=PROMPT, limits=limits)
    run_job(job, tmp_path)
    rows = results_of(job)
    errors = {row["row"]: row["error"] for row in rows if row["error"] is not None}
    place, name = "prompt.rollout: hooks.py", "prompt.rollout: hooks:solve"
    assert errors == {
        1: f"{place}:7: ValueError: no",
        2: f"{place}:8: SystemExit: 3",
        3: f"{name}: ended its process (exit code 3)",
        4: f"{name}: ended its process (SIGSEGV)",
        5: f"{name}: took more than 1 s between two awaits (limits.python)",
        6: f"{name}: took more than 15 s (limits.rollout)",
        7: f"{name}: sent more than 5 requests (limits.turns)",
        8: f"{name}: returned a str: return a dict",
        9: f"{name}: results have a column 'rollout' of their own: rename yours",
        10: f"{place}:17: batchrunner.GenerateError: generate: a list is not a prompt: give messages, "
        "a text or token ids",
        11: f"{place}:18: batchrunner.GenerateError: generate: temperature: should be greater than or "
        "equal to 0 (got -1)",
        13: f"{name}: took more than 15 s (limits.rollout)",
        14: f"{name}: ended its process (exit code 4)",
        15: f"{place}:25: batchrunner.GenerateError: generate must be awaited in the event loop of the "
        "rollout",
        16: f"{name}: ended its process (exit code 1)",
        17: f"{name}: ended its process (exit code 5)",
        18: "prompt.rollout: RecursionError: maximum recursion depth exceeded while pickling an object",
        19: f"{name}: Only dicts with str-like or number-like keys are supported",
        20: f"{place}:32: batchrunner.GenerateError: generate: top_k: give a value, not a column",
        21: f"{place}:34: batchrunner.GenerateError: generate: n: must be 1; for several answers, "
        "await several calls with asyncio.gather",
    }
    asked = json.loads(rows[1]["conversation"])
    assert asked["prompt"] == [{"role": "user", "content": "row 1"}]
    assert rows[1]["output"] == "answer 0 to row 1"
    assert rows[0]["conversation"] is None
    assert Counter(sent.prompt for sent in server.sent if sent.prompt.startswith("row")) == Counter(
        f"row {n}" for n in range(40)
    )
    write_module(tmp_path, "async def solve(row, generate): return {'text': (await generate('again')).text}")
    again = batchrun(tmp_path / "job.yaml", "--retry-failed")
    assert again.exit_code == 0, again.stderr
    assert rows_in(job) == list(range(40))
    assert server.prompts.count("again") == 20


def test_a_process_that_starts_slowly(tmp_path: Path, server: FakeSGLang) -> None:
    """The time of a row (limits.rollout) is that of its function, not that of the import before."""
    write_module(
        tmp_path,
        """
        import pathlib, time
        loaded = pathlib.Path(__file__).with_name("loaded")
        if loaded.exists():
            time.sleep(3)
        loaded.touch()
        async def solve(row, generate):
            return {"text": (await generate(row["text"])).text}
        """,
    )
    job = job_of(tmp_path, server, rows=20, prompt=PROMPT, limits={"rollout": 1, "python_processes": 1})
    run_job(job, tmp_path)
    assert report_of(job)["rows_ok"] == 20


@pytest.mark.parametrize("free", ["no JSON", "{}"])
def test_a_good_answer_or_an_exception(tmp_path: Path, server: FakeSGLang, free: str) -> None:
    """Checks are below the function: an answer that is not good is asked for again, and then raises there.

    A call's schema is checked also where the job wants all answers to be JSON.
    """
    write_module(
        tmp_path,
        """
        import asyncio
        from batchrunner import GenerateError

        SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

        async def solve(row, generate):
            good = await generate(f"good {row['id']}", schema=SCHEMA)
            free = await generate("free")
            try:
                await generate(f"bad {row['id']}", schema=SCHEMA)
            except GenerateError as failure:
                return {"good": good.text, "free": free.text, "why": str(failure)}
        """,
    )

    def script(sent: Any) -> Any:
        if sent.prompt.startswith("good"):
            return Said('{"n": 1}') if sent.tries == 2 else Said("{}")
        return Said(free if sent.prompt == "free" else "no JSON")

    server.script = script
    job = job_of(
        tmp_path,
        server,
        rows=3,
        prompt=PROMPT,
        accept={"tries": 2, "json": None if free == "no JSON" else True},
        order="input",
    )
    run_job(job, tmp_path)
    for row in results_of(job):
        made = json.loads(row["returned"])
        assert (made["good"], made["free"]) == ('{"n": 1}', free)
        assert made["why"].startswith("the answer is not JSON")
        assert (row["turns"], row["attempts"]) == (3, 3)
    assert Counter(prompt.split()[0] for prompt in server.prompts) == {"good": 6, "free": 3, "bad": 6}


@pytest.mark.parametrize("tries", [None, 2])
@pytest.mark.parametrize("on_length", [None, "keep"])
def test_an_answer_off_its_schema(
    tmp_path: Path, server: FakeSGLang, tries: int | None, on_length: str | None
) -> None:
    """It is asked again with a section `accept` only, and an answer that is truncated says so."""
    write_module(
        tmp_path,
        """
        from batchrunner import GenerateError

        async def solve(row, generate):
            errors = []
            for prompt in ("prose", "whole", "half"):
                schema = {"type": "object"} if prompt != "prose" else {"type": "integer"}
                try:
                    await generate(f"{prompt} 0", schema=schema)
                    errors.append(None)
                except GenerateError as failure:
                    errors.append(str(failure))
            free = await generate("free 0")
            return {"errors": errors, "free": free.text}
        """,
    )
    texts = {"prose": "seven", "whole": "{}", "half": '{"a": ', "free": "and so"}

    def script(sent: Sent) -> Body:
        name = sent.prompt.split()[0]
        return says(sent, texts[name], "stop" if name == "prose" else "length")

    server.script = script
    job = job_of(tmp_path, server, rows=1, prompt=PROMPT, order="input")
    job |= {"accept": {"tries": tries}} if tries else {}
    job |= {"on_length": on_length} if on_length else {}
    run_job(job, tmp_path)
    made = json.loads(results_of(job)[0]["returned"])
    truncated = "the answer was truncated at max_new_tokens"
    prose, whole, half = made["errors"]
    assert prose.startswith("the answer is not JSON")
    assert (whole, half) == (None if on_length == "keep" else truncated, truncated)
    assert made["free"] == "and so"
    asked = Counter(prompt.split()[0] for prompt in server.prompts)
    often = tries or 1
    assert asked == {"prose": often, "half": often, "whole": 1 if whole is None else often, "free": 1}


def test_nothing_is_asked_twice_after_a_kill(tmp_path: Path, server: FakeSGLang) -> None:
    """What was answered before a SIGKILL, or a Ctrl-C, is not asked again; only what was in flight is.

    Nor is what was answered with an error.
    """
    write_module(
        tmp_path,
        """
        import asyncio
        from batchrunner import GenerateError
        async def solve(row, generate):
            async def branch(name):
                texts = []
                for turn in range(4):
                    texts.append((await generate(f"row {row['id']} branch {name} turn {turn}")).text)
                return texts
            async def judge():
                try:
                    await generate(f"row {row['id']} judge", schema={"type": "object"})
                except GenerateError as failure:
                    return str(failure)
            *samples, judged = await asyncio.gather(
                *(generate(f"row {row['id']} sample") for _ in range(3)), judge()
            )
            both = await asyncio.gather(branch("a"), branch("b"))
            return {"samples": [sample.text for sample in samples], "both": both, "judged": judged}
        """,
    )
    answered = Counter[str]()
    held = 60

    def script(sent: Any) -> Any:
        if sum(answered.values()) >= held:
            return "hold"
        answered[sent.prompt] += 1
        return Said("no JSON") if "judge" in sent.prompt else "answer"

    server.script = script
    job = job_of(tmp_path, server, rows=20, window=8, prompt=PROMPT)
    file = write_job(job, tmp_path)
    for signals in ([signal.SIGKILL], [signal.SIGINT, signal.SIGINT]):
        with started(file) as running:
            eventually(lambda: sum(answered.values()) >= held)  # noqa: B023
            time.sleep(0.5)
            for number in signals:
                running.process.send_signal(number)
                time.sleep(1)
            running.process.wait()
        server.wait_until_left()
        held += 60
    held = 1 << 30
    run_job(job, tmp_path)
    expected = Counter[str]()
    for row in range(20):
        expected[f"row {row} sample"], expected[f"row {row} judge"] = 3, 1
        expected.update(f"row {row} branch {name} turn {turn}" for name in "ab" for turn in range(4))
    assert answered == expected
    rows = results_of(job)
    assert [row["row"] for row in rows] == list(range(20))
    assert {(row["error"], row["turns"]) for row in rows} == {(None, 12)}
    assert all("turn 3" in row["output"] for row in rows)  # what was asked last, whatever was stored before
    assert [*(tmp_path / "run" / "tasks").glob("*/turns-*")] == []


def test_a_gentle_stop_stores_what_is_in_flight(tmp_path: Path, server: FakeSGLang) -> None:
    """The answers that a Ctrl-C waits for are not asked for again by the next start."""
    write_module(tmp_path, TURNS)
    server.script = lambda sent: "hold" if "turn 1" in sent.prompt else "answer"
    file = write_job(job_of(tmp_path, server, rows=4, prompt=PROMPT), tmp_path)
    with started(file) as running:
        eventually(lambda: sum("turn 1" in prompt for prompt in server.prompts) == 4)
        running.process.send_signal(signal.SIGINT)
        time.sleep(1)
        server.script = lambda sent: "answer"
        server.answer_held()
        assert running.process.wait() == 130
    assert batchrun(file).exit_code == 0
    assert {*Counter(server.prompts).values()} == {1}


def test_a_row_that_asks_for_much_at_once(tmp_path: Path) -> None:
    """What nobody waits for any more is not sent; and the windows follow the load while requests wait."""
    write_module(
        tmp_path,
        """
        import asyncio
        async def solve(row, generate):
            async with asyncio.TaskGroup() as group:
                for n in range(300 if row["id"] else 2000):
                    group.create_task(generate(f"row {row['id']} piece {n}", max_new_tokens=5))
                if row["id"] == 0:
                    await generate("x", temperature=-1)
        """,
    )
    limits = {"turns": 5000, "max_failed_rows": 1}
    with FakeSGLang(delay_s=3) as server:
        job = job_of(tmp_path, server, rows=2, window=2, prompt=PROMPT, limits=limits, input={"limit": 1})
        run_job(job, tmp_path)
        assert len(server.sent) < 100
    (row,) = results_of(job)
    assert row["error"].endswith("temperature: should be greater than or equal to 0 (got -1)")
    pieces = {"path": str(tmp_path / "pieces")}
    engine = INSTANT | {"step_s": 0.01, "max_running": 8}
    job = job_of(tmp_path, engine, prompt=PROMPT, limits=limits, output=pieces)
    run_job(job, tmp_path)
    assert report_of(job)["load"]["tail_share"] < 0.5


def test_a_failed_row_is_asked_anew(tmp_path: Path, server: FakeSGLang) -> None:
    """What was stored of a row that failed does not come again with `--retry-failed`."""
    write_module(
        tmp_path,
        """
        async def solve(row, generate):
            first = await generate(f"row {row['id']} first")
            if first.text == "bad":
                raise ValueError("no")
            return {"second": (await generate(f"row {row['id']} second")).text}
        """,
    )
    server.script = lambda sent: (
        "hold" if "second" in sent.prompt else Said("bad" if "row 0" in sent.prompt else "good")
    )
    file = write_job(job_of(tmp_path, server, rows=4, prompt=PROMPT), tmp_path)
    with started(file) as running:
        eventually(lambda: sum("second" in prompt for prompt in server.prompts) == 3)
        until_stored(tmp_path / "run", 1)  # the failed row
        running.kill()
    server.wait_until_left()
    server.script = lambda sent: "answer"
    done = batchrun(file, "--retry-failed")
    assert done.exit_code == 0, done.stderr
    assert [server.prompts.count(f"row {row} first") for row in range(4)] == [2, 1, 1, 1]


def test_a_function_that_asks_otherwise_when_it_is_run_again(tmp_path: Path, server: FakeSGLang) -> None:
    """That is said, and the row starts anew."""
    write_module(
        tmp_path,
        """
        import os
        async def solve(row, generate):
            first = await generate(f"row {row['id']} {os.getppid()} first")
            second = await generate(f"row {row['id']} {os.getppid()} second")
            return {"both": [first.text, second.text]}
        """,
    )
    server.script = lambda sent: "hold" if "second" in sent.prompt else "answer"
    job = job_of(tmp_path, server, rows=2, prompt=PROMPT)
    file = write_job(job, tmp_path)
    with started(file) as running:
        eventually(lambda: len(server.sent) == 4)
        running.kill()
    server.script = lambda sent: "answer"
    done = batchrun(file)
    assert done.exit_code == 0
    told = [line for line in done.stderr.splitlines() if "starts anew" in line]
    assert len(told) == 2
    assert all("hooks:solve sent other requests when it was run again" in line for line in told)
    for row in results_of(job):
        texts = json.loads(row["returned"])["both"]
        assert all(f"row {row['row']} {os.getpid()}" in text for text in texts)


def test_a_blocked_loop_costs_no_answer(tmp_path: Path, server: FakeSGLang) -> None:
    """The other rows of a process that was killed are run again with the answers that they have had.

    So is a row that was at work when something else killed the process.
    """
    write_module(
        tmp_path,
        """
        import asyncio, os, pathlib, time
        killed = pathlib.Path(__file__).with_name("killed")
        async def solve(row, generate):
            texts = []
            for turn in range(3):
                texts.append((await generate(f"row {row['id']} turn {turn}")).text)
                if row["id"] % 7 == 3 and turn == 1:
                    time.sleep(100)
                if row["id"] == 5 and turn == 1 and not killed.exists():
                    killed.touch()
                    os.kill(os.getpid(), 9)
                await asyncio.sleep(0.05)
            return {"texts": texts}
        """,
    )
    job = job_of(
        tmp_path,
        server,
        rows=30,
        prompt=PROMPT,
        limits={"python": 1, "max_failed_rows": 10, "python_processes": 2},
    )
    run_job(job, tmp_path)
    assert failed_rows(job) == [3, 10, 17, 24]
    assert max(Counter(server.prompts).values()) == 1
    assert len(server.sent) == 26 * 3 + 4 * 2


@pytest.mark.parametrize("call", ["time.sleep(0.1)", "await asyncio.to_thread(time.sleep, 0.1)"])
def test_a_tool_that_blocks(
    tmp_path: Path, server: FakeSGLang, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it blocks, the other rows of its process wait: a line says so, and what to write."""
    monkeypatch.setattr("batchrunner.dispatch.rollouts.CHECK_S", 0.01)
    blocks = call.startswith("time")
    seen = tmp_path / "seen"

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "hooks:solve blocks" in record.getMessage():
                seen.touch()

    write_module(
        tmp_path,
        f"""
        import asyncio, pathlib, time
        seen = pathlib.Path(__file__).with_name("seen")
        async def solve(row, generate):
            await generate(row["text"])
            while {blocks} and not seen.exists():
                {call}
                await asyncio.sleep(0)
            {call}
            return {{}}
        """,
    )
    handler, logger = Seen(), logging.getLogger("batchrunner.dispatch.rollouts")
    logger.addHandler(handler)
    try:
        job = job_of(tmp_path, server, prompt=PROMPT, limits={"python_processes": 1})
        done = run_job(job, tmp_path)
    finally:
        logger.removeHandler(handler)
    lines = [line for line in done.stderr.splitlines() if "blocks: all rows of its process wait" in line]
    assert len(lines) == blocks
    assert all("write `await asyncio.to_thread(tool, …)`" in line.lower() for line in lines)


def test_turns_go_before_new_rows_and_where_their_prefix_is(tmp_path: Path) -> None:
    """All turns of a row go to one replica, and few more rows are open than there are slots."""
    write_module(
        tmp_path,
        """
        import asyncio
        open_rows = most = 0
        async def solve(row, generate):
            global open_rows, most
            open_rows += 1
            most = max(most, open_rows)
            for turn in range(4):
                await generate(f"row {row['id']} turn {turn}")
                await asyncio.sleep(0.01)
            open_rows -= 1
            return {"most": most}
        """,
    )
    with FakeSGLang(delay_s=0.01) as one, FakeSGLang(delay_s=0.01) as two:
        engine = [one, two]
        job = job_of(tmp_path, engine, rows=200, window=16, prompt=PROMPT, limits={"python_processes": 1})
        run_job(job, tmp_path)
        homes = [{prompt.split(" turn")[0] for prompt in each.prompts} for each in (one, two)]
        assert min(len(one.sent), len(two.sent)) > 200
        assert len(homes[0] & homes[1]) <= 40  # of 200: rows that an idle replica has taken
    # New rows take the slots of rows that are busy between two turns, so a slow machine opens more of them.
    assert max(json.loads(row["returned"])["most"] for row in results_of(job)) < 180


@pytest.mark.parametrize("signals", [[signal.SIGKILL], [signal.SIGINT, signal.SIGINT]])
def test_tasks_share_rollouts(tmp_path: Path, server: FakeSGLang, signals: list[signal.Signals]) -> None:
    """A task that takes the rows of one that died, or gave them back, has its answers."""
    write_module(tmp_path, TURNS)
    job = job_of(tmp_path, server, rows=40, window=8, prompt=PROMPT)
    server.script = lambda sent: "hold" if int(re.findall(r"\d+", sent.prompt)[1]) >= 3 else "answer"
    file = write_job(job, tmp_path)
    with started(file, "--join") as running:
        eventually(lambda: sum("turn 3" in prompt for prompt in server.prompts) == 8)
        until_turns_stored(tmp_path / "run", sum("turn 3" not in prompt for prompt in server.prompts))
        for number in signals:
            running.process.send_signal(number)
            time.sleep(1)
        running.process.wait()
    server.wait_until_left()
    server.script = lambda sent: "answer"
    done = batchrun(file, "--join")
    assert done.exit_code == 0, done.stderr
    assert rows_in(job) == list(range(40))
    counts = Counter(server.prompts)
    assert {counts[prompt] for prompt in counts if "turn 3" not in prompt} == {1}
    assert [*(tmp_path / "run" / "tasks").glob("*/turns-*")] == []


def test_functions_of_a_program(tmp_path: Path) -> None:
    """`run` and `generate` take the function itself, and a program's rows go through it."""
    words = ["a", "b"]

    async def solve(row: dict[str, Any], generate: Any) -> dict[str, Any]:
        answer = await generate([{"role": "user", "content": row["text"]}], max_new_tokens=5)
        return {"text": row["text"], "known": row["text"] in words, "tokens": answer.completion_tokens}

    table = batchrunner.generate(["a", "c"], rollout=solve, engine="simulated")
    assert table.column("known").to_pylist() == [True, False]
    assert table.column("tokens").type == pa.int64()
    job = job_of(tmp_path, INSTANT, rows=5)
    del job["prompt"]
    report = batchrunner.run(job, rollout=solve)
    assert (report.rows_ok, report.rollouts["turns"]) == (5, 5)


TYPED = "from typing import TypedDict\nclass A(TypedDict):\n  error: str\n"
REFUSED = [
    ("def solve(row, generate): pass", {}, "hooks:solve is not asynchronous: write async def"),
    (
        TURNS,
        {"sampling": {"n": 2}},
        "prompt.rollout cannot be combined with sampling.n, parse or output.reuse",
    ),
    (
        TYPED + "async def solve(r, g) -> list[A]: pass",
        {},
        "prompt.rollout: the results already have a column 'error'",
    ),
    (
        "from __future__ import annotations\nasync def solve(r: dict, g) -> Unknown: pass",
        {},
        "hooks:solve has an annotation that cannot be read: name 'Unknown' is not defined",
    ),
]


@pytest.mark.parametrize(("code", "fields", "says"), REFUSED)
def test_what_is_no_rollout_is_refused(tmp_path: Path, code: str, fields: dict[str, Any], says: str) -> None:
    """`check` says so in one line."""
    write_module(tmp_path, code)
    done = batchrun("check", write_job(job_of(tmp_path, prompt=PROMPT, **fields), tmp_path))
    assert (done.exit_code, says in done.stderr) == (2, True), done.stderr


def test_chats_are_typed_without_an_annotation(tmp_path: Path, server: FakeSGLang) -> None:
    """Messages become structs, so that merging writes JSON Lines as training tools read them.

    A property with values of several types, and an object of many properties, are JSON.
    """
    write_module(
        tmp_path,
        """
        async def solve(row, generate):
            messages = [{"role": "user", "content": row["text"]}]
            answer = await generate(messages)
            call = {"name": "look", "arguments": {"x": row["id"]} if row["id"] else {}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "assistant", "content": answer.text, "tool_calls": []})
            return {
                "messages": messages,
                "parts": [{"content": "text" if row["id"] else ["text"]}],
                "counts": {f"word {row['id']} {n}": n for n in range(60)},
                "empty": {},
            }
        """,
    )
    job = job_of(tmp_path, server, rows=2, prompt=PROMPT)
    run_job(job, tmp_path)
    assert batchrun("merge", tmp_path / "run", tmp_path / "chats.jsonl").exit_code == 0
    first, second = map(json.loads, (tmp_path / "chats.jsonl").read_text().splitlines())
    assert first["messages"][0] == {"role": "user", "content": "row 0", "tool_calls": None}
    assert first["messages"][1]["tool_calls"] == [{"name": "look", "arguments": {"x": None}}]
    assert second["messages"][1]["tool_calls"] == [{"name": "look", "arguments": {"x": 1}}]
    assert second["messages"][2] == {"role": "assistant", "content": second["output"], "tool_calls": []}
    assert [*map(json.loads, second["parts"])] == [{"content": "text"}]
    assert json.loads(first["counts"])["word 0 7"] == 7
    assert first["empty"] == "{}"


@pytest.mark.parametrize("module", ["typing", "typing_extensions"])
def test_a_declared_type_is_the_column_s(tmp_path: Path, module: str) -> None:
    """A TypedDict within another is a struct, whichever module it comes from."""
    write_module(
        tmp_path,
        f"""
        from __future__ import annotations
        from typing import TYPE_CHECKING
        from {module} import TypedDict

        if TYPE_CHECKING:
            from nowhere import Generate

        class Place(TypedDict):
            page: int

        class Quote(TypedDict):
            places: list[Place]

        async def solve(row: dict, generate: Generate) -> Quote:
            await generate("Where?")
            return {{"places": [{{"page": row["id"]}}]}}
        """,
    )
    job = job_of(tmp_path, rows=2, prompt=PROMPT)
    checked = batchrun("check", write_job(job, tmp_path))
    assert checked.exit_code == 0, checked.stderr
    run_job(job, tmp_path)
    (part,) = parts_of(tmp_path / "run")
    assert part.schema.field("places").type == pa.list_(pa.struct([("page", pa.int64())]))
    assert part.column("places").to_pylist() == [[{"page": 0}], [{"page": 1}]]
