"""When the job of a run was started: tries and time of functions and of scripts without a pipeline."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headway.run import Run
from headway.run.job_record import Start, read_starts, record_end, record_start
from headway.watch.runs import summarize


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path, name="plain", command=["train.py"])


def write(run: Run, *rows: object) -> None:
    run.starts_file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def begin(time: object, output_before: object = None) -> dict[str, object]:
    return {"event": "start", "time": time, "output_before": output_before}


def end(time: object) -> dict[str, object]:
    return {"event": "end", "time": time, "exit_code": 1}


def test_starts_and_ends_are_recorded(run: Run) -> None:
    assert read_starts(run) == []
    (row,) = summarize([run])
    assert (row.attempts, row.seconds, row.started) == (0, 0, None)
    for code in (1, 0):
        record_start(run, job="17")
        assert read_starts(run)[-1].ended is None
        record_end(run, code)
    first, second = read_starts(run)
    assert first.ended is not None and second.ended is not None
    assert first.began <= first.ended <= second.began <= second.ended
    assert [json.loads(line).get("job") for line in run.starts_file.read_text().splitlines()] == [
        "17",
        None,
    ] * 2
    (row,) = summarize([run])
    assert (
        row.attempts == 2
        and row.started is not None
        and row.started.timestamp() == pytest.approx(second.began)
    )


def test_the_time_is_the_sum_over_all_starts_and_one_that_was_killed_counts_up_to_its_last_output(
    run: Run,
) -> None:
    write(
        run,
        begin(1000),
        end(1010),
        begin(2000),
        begin(3000, output_before=2007),
        end(3004),
        begin(4000, 3003),
    )
    run.job_log.parent.mkdir(exist_ok=True)
    run.job_log.write_text("the last words")
    os.utime(run.job_log, (4002, 4002))
    (row,) = summarize([run])
    assert (row.attempts, row.seconds) == (4, 10 + 7 + 4 + 2)


def test_what_cannot_be_is_passed_over(run: Run) -> None:
    write(
        run,
        begin(10, 5),
        begin("soon"),
        end(None),
        {},
        [],
        begin(1e300),
        begin(20, output_before=1e9),
        end(19),
    )
    assert read_starts(run) == [Start(began=10, ended=20), Start(began=20, ended=19)]
    assert summarize([run])[0].seconds == 10, "a clock that was set back takes nothing away"
