"""The report at the end of a training."""

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

from holdfast import ranks
from holdfast.config.run import Config
from holdfast.errors import error_text
from holdfast.monitor.timeline import TimelineRecorder, write_timeline
from holdfast.policies import LSTMWrapper
from holdfast.worlds import WorldSpec

PAGE = "report.html"


def make_timeline(config: Config, policy: LSTMWrapper) -> TimelineRecorder | None:
    """Return the recorder of the last rollouts; None: the run writes no report."""
    if config.report == "off" or not ranks.is_main():
        return None
    return TimelineRecorder(policy, ranks.share(config.world.agents), config.trainer.bptt_horizon, config.iterations)


def write_final_report(
    config: Config,
    policy: LSTMWrapper,
    spec: WorldSpec,
    folder: Path,
    timeline: TimelineRecorder | None,
    steps_trained: int,
    log: Callable[[str], object],
) -> Path | None:
    """Write the report of a run, finished or stopped; one that fails is one line and ends no training."""
    if config.report == "off":
        return None
    command = f"holdfast report {shlex.quote(str(folder))}"
    try:
        # Imported here, because matplotlib takes a while to import.
        from holdfast.play.record import leave_replay
        from holdfast.report.policy_measurements import AT_END_S, measure_policy
        from holdfast.report.report_page import write_report

        if timeline is not None and timeline.timeline is not None:
            write_timeline(timeline.timeline, folder)
        leave_replay(folder, policy, config, steps_trained)
        measure = partial(measure_policy, policy, spec, config, limit_s=AT_END_S)
        return write_report([folder], folder / PAGE, measure)
    except KeyboardInterrupt:
        log(f"no report; write it with: {command}")
    except Exception as error:
        log(f"no report: {error_text(error, 300)}; try {command}")
    return None
