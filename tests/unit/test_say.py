"""Messages: a key and facts on each record, once for each cause, again after a while, and when it is over."""

from __future__ import annotations

import itertools
import json
import logging
import re
import subprocess
import sys
from datetime import datetime
from types import SimpleNamespace

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_spot.say import AGAIN_S, Messages
from tests.support.server import StartServer

KEY, TEXT = "storage-slow", "{about} is slow ({took_s:.1f} s)"


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now_s=0.0)


@pytest.fixture
def messages(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> Messages:
    caplog.set_level(logging.INFO)
    return Messages(lambda: clock.now_s)


def test_a_message_has_its_key_its_facts_and_its_source(messages: Messages, caplog: pytest.LogCaptureFixture) -> None:
    messages.say(logging.WARNING, KEY, TEXT, about="s3://{b}", took_s=2)
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.WARNING, "[spot] s3://{b} is slow (2.0 s)")
    assert (record.spot_key, record.spot_facts) == (KEY, {"about": "s3://{b}", "took_s": 2})  # type: ignore[attr-defined]
    assert record.filename == "test_say.py"


def test_a_cause_is_logged_once_then_every_ten_minutes_counted(
    messages: Messages, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    for clock.now_s in range(int(AGAIN_S) + 1):
        messages.say(logging.WARNING, KEY, TEXT, about="s3://b", took_s=clock.now_s)
    first, again = caplog.messages
    assert "times" not in first
    assert f"({int(AGAIN_S)} times" in again


def test_causes_are_told_apart_by_key_and_by_what_they_are_about(
    messages: Messages, caplog: pytest.LogCaptureFixture
) -> None:
    for key, level in (("one", logging.ERROR), ("two", logging.ERROR), ("a change of state", logging.INFO)):
        for about in ("a", "b", "a"):
            messages.say(level, key, "{about}", about=about)
    assert len(caplog.records) == 2 + 2 + 3
    messages.forget()
    messages.say(logging.ERROR, "one", "{about}", about="a")
    assert len(caplog.records) == 8


def test_an_end_is_logged_only_of_what_was_logged(messages: Messages, caplog: pytest.LogCaptureFixture) -> None:
    messages.recovered(KEY, "{about} works again", about="s3://b")
    assert not caplog.records
    for _ in range(2):
        messages.say(logging.WARNING, KEY, "{about} fails", about="s3://b")
        messages.recovered(KEY, "{about} works again", about="s3://b")
    assert [record.levelno for record in caplog.records] == 2 * [logging.WARNING, logging.INFO]
    assert {record.spot_key for record in caplog.records} == {KEY}  # type: ignore[attr-defined]


def test_other_ranks_name_themselves_and_leave_out_some(
    messages: Messages, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 3, raising=False)
    messages.say(logging.INFO, "resumed", "resumed")
    messages.say(logging.WARNING, "resumed", "left out", only_rank_zero=True)
    assert caplog.messages == ["[spot r3] resumed"]


def test_messages_are_shown_where_the_program_has_no_handlers(capfd: pytest.CaptureFixture[str]) -> None:
    program = """
import logging
from lightning_spot.say import say, show
show(), show(), say(logging.INFO, "resumed", "once")
logging.basicConfig(format="mine: %(message)s", level=logging.INFO)
say(logging.INFO, "resumed", "again")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert capfd.readouterr().err == "[spot] once\nmine: [spot] again\n"


def test_causes_without_end_fill_neither_log_nor_memory(
    messages: Messages, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Who makes them up, such as a stranger's address, has few lines in ten minutes; other keys have theirs."""
    for clock.now_s in (0.0, AGAIN_S):
        for number in range(2000):
            messages.say(logging.WARNING, KEY, "{about}", about=f"{clock.now_s}-{number}", of_strangers=True)
        assert len(caplog.records) <= 65
        assert clock.now_s == 0.0 or "(1936 times" in caplog.text
        messages.say(logging.WARNING, "another", "{about}", about="of another key")
        assert "of another key" in caplog.text
        caplog.clear()


def test_each_of_many_runs_is_named_however_many_fail(messages: Messages, caplog: pytest.LogCaptureFixture) -> None:
    """From the 65th on, those of one outage were neither named nor said to work again."""
    for number in range(3000):
        messages.say(logging.WARNING, KEY, "{about} fails", about=f"run-{number}")
    assert 1000 < len(caplog.records) < 1100
    caplog.clear()
    for number in range(1000):
        messages.recovered(KEY, "{about} works again", about=f"run-{number}")
    assert len(caplog.records) == 1000


def test_strangers_push_nothing_out_of_the_latest_messages(messages: Messages, clock: SimpleNamespace) -> None:
    messages.say(logging.WARNING, KEY, "{about}", about="s3://b")
    for clock.now_s in (0.0, AGAIN_S, 2 * AGAIN_S):
        for key, number in itertools.product(("request-bad", "request-denied", "server-error"), range(200)):
            messages.say(logging.WARNING, key, "{about}", about=number, of_strangers=True)
    assert messages.recent[0].text == "s3://b"
    assert messages.recent[-1].key == "server-error"


def logged(form: str, code: str) -> list[str]:
    """What a program logs in a form."""
    begin = "import logging; from lightning_spot.untrusted import log_plainly; from lightning_spot.say import say\n"
    command = [sys.executable, "-c", f"{begin}log_plainly(20, {form!r})\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr.splitlines()


def test_lines_of_json_have_time_level_key_and_facts() -> None:
    code = "say(30, 'storage-slow', 'It {about} is {how}', about='s3://b', how='slow\\x1b[2J')\n"
    code += "logging.getLogger('other').info('two\\nlines')\ntry: 1 / 0\nexcept Exception: logging.exception('bug')\n"
    ours, other, bug = (json.loads(line) for line in logged("json", code))
    assert (ours["level"], ours["key"], ours["about"]) == ("WARNING", "storage-slow", "s3://b")
    assert datetime.fromisoformat(ours["time"]).tzinfo is not None
    assert "\x1b" not in ours["how"] + ours["message"]
    assert other["message"] == "two\\nlines"
    assert "ZeroDivisionError" in bug["traceback"]


def test_lines_of_text_have_time_and_level() -> None:
    [line] = logged("text", "say(30, 'storage-slow', 'It is slow')")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING \[spot\] It is slow", line)


def test_a_server_logs_as_it_is_told(start_server: StartServer) -> None:
    for form, line in (("json", '"key": "token-weak"'), ("text", "WARNING [spot] the token")):
        server = start_server("--log-format", form, environment={"LIGHTNING_SPOT_TOKEN": "short"})
        assert line in server.log.read_text()
