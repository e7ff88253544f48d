"""Whatever becomes of tasks in one process, every row is done once."""

import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import eventually, examples, job_of, parts_of
from tests.support.runs import Task


@examples(10)
@given(data=st.data())
def test_whatever_becomes_of_tasks(data: st.DataObject) -> None:
    """In any sequence of starts, work, stops and deaths, all rows end up in parts, none of them twice."""
    with tempfile.TemporaryDirectory() as directory:
        rows = data.draw(st.integers(1, 2000))
        job = job_of(Path(directory), rows=rows, order=data.draw(st.sampled_from(["input", "prefix"])))
        tasks: list[Task] = []
        dead: list[Task] = []
        for number in range(data.draw(st.integers(1, 25))):
            what = data.draw(st.sampled_from(["start", "work", "work", "work", "end", "die", "come back"]))
            if what == "come back" and dead:
                dead.pop().come_back()
            elif what == "start" or not tasks:
                tasks.append(Task(job, f"n{number}"))
            elif what == "work":
                data.draw(st.sampled_from(tasks)).work(data.draw(st.integers(1, 3)))
            else:
                task = tasks.pop(data.draw(st.integers(0, len(tasks) - 1)))
                task.end() if what == "end" else task.die()
                dead += [task] if what == "die" else []
        for task in tasks:
            task.end()
        Task(job, "last").work(10_000)
        found = Counter(row for part in parts_of(Path(directory) / "run") for row in part["row"].to_pylist())
        assert found == Counter(range(rows))


def test_few_rows_are_shared(tmp_path: Path) -> None:
    """Few rows that take long are shared: no task takes them all, though its engine could run them."""
    job = job_of(tmp_path, rows=128)
    first, second = Task(job, "first"), Task(job, "second")
    assert second.take_first()
    assert first.take_first()
    counts = dict.fromkeys((first, second), 0)
    finished = False

    def read(task: Task) -> None:
        for batch in task.rows.batches():
            counts[task] += len(batch)
            task.counts.ok = counts[task] if finished else 0

    with ThreadPoolExecutor() as pool:
        readers = [pool.submit(read, first)]
        eventually(lambda: counts[first] >= 60)  # half of them: alone it takes no more
        readers.append(pool.submit(read, second))
        eventually(lambda: sum(counts.values()) >= 110)  # the second has what it takes before others are done
        finished = True
        for task in (first, second):
            task.counts.ok = counts[task]
        for reader in readers:
            reader.result()
    assert sum(counts.values()) == 128
    assert min(counts.values()) >= 40
