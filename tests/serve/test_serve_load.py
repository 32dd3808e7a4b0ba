"""Many requests from many clients: none is lost, each has the tokens that it has alone, and memory stays within the plan.

Run: pytest tests/serve
"""

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from served import STANDSTILL_SECONDS
from talking_model import save_talking_model

pytestmark = [pytest.mark.process, pytest.mark.deep]

REQUESTS, CLIENTS = 200, 16
OPTIONS = {"port": 0, "max_requests": CLIENTS, "max_length": 256}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """The address of a server of a model of 67 MB, and what ends it and says its peaks."""
    model = save_talking_model(tmp_path / "model", positions=256, hidden=512, blocks=5)
    words = [sys.executable, str(Path(__file__).with_name("served_under_load.py")), str(model)]
    process = subprocess.Popen([*words, json.dumps({**OPTIONS, "host_memory": "640MiB"})], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    stdout = process.stdout

    def end() -> Any:
        process.send_signal(signal.SIGINT)
        found = json.loads(stdout.readline())
        assert process.wait(STANDSTILL_SECONDS) == 0
        return found

    yield json.loads(stdout.readline()), end
    process.kill()
    process.wait()
    stdout.close()


def test_two_hundred_requests_of_sixteen_clients_are_all_answered(served: tuple[str, Any]) -> None:
    address, end = served
    client = OpenAI(base_url=address, api_key="any", max_retries=0, timeout=STANDSTILL_SECONDS)
    draw = random.Random(5)
    asked = [
        {
            "prompt": "water " * draw.randint(1, 20),
            "max_tokens": draw.randint(1, 24),
            "seed": draw.randint(0, 2),
            "temperature": 0.8,
        }
        for _ in range(REQUESTS // 2)
    ] * 2  # each twice, in other company

    def answer(number: int) -> tuple[str, str | None, int]:
        if number % 3 == 0:
            *events, last = client.completions.create(
                model="model", stream=True, stream_options={"include_usage": True}, **asked[number]
            )
            text, reason = "".join(each.choices[0].text for each in events), events[-1].choices[0].finish_reason
            return text, reason, last.usage.completion_tokens
        found = client.completions.create(model="model", **asked[number])
        return found.choices[0].text, found.choices[0].finish_reason, found.usage.completion_tokens

    with ThreadPoolExecutor(CLIENTS) as threads:
        answers = list(threads.map(answer, range(REQUESTS)))
    client.close()
    for number, (one, other) in enumerate(zip(answers, answers[REQUESTS // 2 :], strict=False)):
        assert one == other, number
        assert one[1] in ("stop", "length")
        assert 0 < one[2] <= asked[number]["max_tokens"]
    found = end()
    assert found["seats"] > 1
    assert found["peak"] <= found["planned"] <= found["allowed"]
