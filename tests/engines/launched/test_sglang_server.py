"""A launched server's command line, as the program sees it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import batchrunner
from tests.conftest import job_of
from tests.support.launchable import launchable

if TYPE_CHECKING:
    from pathlib import Path

ANSWERS = """
Path(os.environ["SEEN"]).write_text(json.dumps(sys.argv[1:]))
if int(dict(zip(sys.argv, sys.argv[1:])).get("--tokenizer-worker-num", 1)) > 1:
    assert "--api-key" not in sys.argv, "API key is not supported in multi-tokenizer mode"

class Handler(Server):
    known = {"/ready": {}, "/model_info": {"model_path": "answers"}, "/server_info": {"version": "0.5.23"}}
    def asked(self, body):
        self.answer("to " + body["text"])
"""


@pytest.mark.parametrize(
    ("args", "has_key"),
    [
        ({}, True),
        ({"tokenizer-worker-num": 1}, True),
        ({"tokenizer-worker-num": 4}, False),
        ({"--tokenizer_worker_num": "2"}, False),
    ],
)
def test_several_tokenizers_have_no_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, args: dict[str, object], *, has_key: bool
) -> None:
    """SGLang starts several tokenizers only without an API key: such a server has none, and that is said."""
    engine = launchable(tmp_path, "from pathlib import Path\n" + ANSWERS, SEEN=str(tmp_path / "seen"))
    assert batchrunner.run(job_of(tmp_path, {**engine, "args": args})).rows_ok == 10
    assert ("--api-key" in json.loads((tmp_path / "seen").read_text())) == has_key
    assert ("every user of this machine can use it" in caplog.text) != has_key
