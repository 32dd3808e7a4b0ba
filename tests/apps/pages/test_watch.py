"""`headrace watch` and the page of a plan. Run: pytest tests/apps/pages/test_watch.py"""

import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError

import pytest
from made_runs import made_machine, made_plan, write_run

from headrace.apps import WatchServer, read_run, summary, write_plan_page
from headrace.plan.forecast.forecast import forecast
from headrace.terms.errors import ConfigError, RunDirectoryError


@contextmanager
def watching(run: Path) -> Iterator[WatchServer]:
    with WatchServer(run, clock=lambda: 0.0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def fetched(server: WatchServer, path: str = "/", host: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(server.address + path, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, ""


def stamp_of(page: str) -> str:
    found = re.search(r'<body data-stamp="([^"]*)"', page)
    assert found is not None
    return found[1]


def test_a_page_is_sent_again_only_when_the_run_has_news(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4, max_steps=10)
    with watching(run) as server:
        status, page = fetched(server)
        assert status == 200
        assert "4 of 10" in page
        assert "time left" in page
        assert fetched(server, f"/?seen={stamp_of(page)}") == (204, "")
        write_run(run, steps=5, max_steps=10)
        status, news = fetched(server, f"/?seen={stamp_of(page)}")
        assert status == 200
        assert "5 of 10" in news


def test_the_page_of_a_finished_run_is_live_no_more_and_has_no_time_left(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4, max_steps=10)
    assert summary(read_run(run))["seconds_left"] == pytest.approx(6 * summary(read_run(run))["step_seconds"])
    (run / "final").mkdir()
    assert summary(read_run(run))["seconds_left"] is None
    with watching(run) as server:
        page = fetched(server)[1]
    assert 'data-finished="yes"' in page
    assert "time left" not in page


def test_only_this_machine_is_answered_and_only_with_the_page(tmp_path: Path) -> None:
    with watching(write_run(tmp_path / "run")) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert fetched(server, host=f"elsewhere.example:{server.server_port}")[0] == 403
        assert fetched(server, "/metrics.jsonl")[0] == 404
        assert "connect-src 'self'" in fetched(server)[1].replace("&#x27;", "'")
        with pytest.raises(ConfigError, match="port: "):
            WatchServer(tmp_path / "run", server.server_port)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no such run directory"):
        WatchServer(tmp_path / "nothing")


def test_a_plan_is_drawn_with_its_lanes_and_memory(tmp_path: Path) -> None:
    plan = made_plan()
    page = write_plan_page(tmp_path / "plan.html", "model", plan, forecast(plan, made_machine()), {"SSDs": 0.1})
    text = page.read_text(encoding="utf-8")
    assert 'class="track planned"' in text
    assert "Memory, planned" in text
    assert "With twice the SSDs the plan" in text
    assert "No step is recorded" not in text
    with pytest.raises(ConfigError, match="html: "):
        write_plan_page(tmp_path / "no" / "plan.html", "model", plan, None, {})
