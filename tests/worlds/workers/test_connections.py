"""Requests to worker processes: timeouts, crashes, restarts and the crash log."""

import pytest
import torch
from test_pool import FAULTY, acts, pool

from holdfast.errors import WorkerError
from holdfast.worlds.workers.connections import StepRequest
from holdfast.worlds.workers.spawn import fork_server


@pytest.fixture(scope="module", autouse=True)
def one_fork_server():
    """Import everything once for all workers of these tests."""
    with fork_server():
        yield


def test_step_request_message_has_no_actions():
    message = StepRequest(1, 0, torch.zeros(4, 2), clock=7).message
    assert message == {"group": 1, "slot": 0, "dtype": torch.float32, "shape": (2,)}


def test_worker_timeout_does_not_apply_to_making_worlds():
    with pool("helpers.faulty_worlds:Slow", 4, timeout=1.0) as shared:
        shared.reset()
        shared.step(acts(shared, 0))
        with pytest.raises(WorkerError, match="did not answer within 1 seconds"):
            shared.step(acts(shared, 1))


def test_worker_that_crashes_in_its_first_step_is_not_restarted_again(tmp_path):
    lines, options = [], {"how": "raise", "when": 3, "who": 0, "stays": True}
    with pool(FAULTY, 4, restart=True, log=lines.append, options=options) as shared:
        shared.reset()
        shared.step(acts(shared, 0))
        shared.step(acts(shared, 1))
        shared.step(acts(shared, 2))
        with pytest.raises(WorkerError, match="completed no step since its start, so it is not restarted"):
            shared.step(acts(shared, 3))
    assert len(lines) == 1


def test_crash_in_the_first_step_is_an_error():
    options = {"how": "leave", "when": 1, "who": 0}
    with pool(FAULTY, 4, restart=True, log=lambda line: None, options=options) as shared:
        shared.reset()
        with pytest.raises(WorkerError, match="ended with exit code 3"):
            shared.step(acts(shared, 0))


def test_crash_log_is_written_and_a_write_error_is_not_fatal(tmp_path):
    options = {"how": "raise", "when": 2, "who": 0, "marker": str(tmp_path / "marker")}
    for file, message in ((tmp_path / "crashes.txt", "Its traceback is in"), (tmp_path, "could not be written")):
        lines = []
        (tmp_path / "marker").unlink(missing_ok=True)
        with pool(FAULTY, 4, restart=True, options=options) as shared:
            shared.set_log(lines.append, file)
            shared.reset()
            for clock in range(4):
                shared.step(acts(shared, clock))
        assert message in lines[0]
    assert "in _raise" in (tmp_path / "crashes.txt").read_text()
