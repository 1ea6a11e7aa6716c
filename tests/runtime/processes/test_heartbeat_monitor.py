"""The silence of processes: limits by role, announced pauses, and time in which the watcher itself did not run."""

from skiff_runtime.config import Config
from skiff_runtime.messages import Heartbeat, PhaseReport
from skiff_runtime.processes.heartbeat_monitor import MAX_TURN_SECONDS, HeartbeatMonitor

PROCESSES = ["rank0", "rank1", "tokenizer0"]


class Watch:
    """A monitor whose clock a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.monitor = HeartbeatMonitor(Config(rank_heartbeat_timeout_seconds=10), clock=lambda: self.now)
        self.beat(*PROCESSES)

    def beat(self, *processes: str, pause_seconds: float = 0.0) -> None:
        for process in processes:
            self.monitor.record(Heartbeat(process=process, pause_seconds=pause_seconds))

    def run(self, seconds: int, *beating: str) -> str | None:
        """Take a turn each second; return the first silence that is reported."""
        for _ in range(seconds):
            self.now += 1.0
            self.monitor.begin_turn()
            self.beat(*beating)
            if (silence := self.monitor.describe_silence(PROCESSES)) is not None:
                return silence
        return None


def test_ranks_have_a_shorter_limit_than_other_processes() -> None:
    watch = Watch()
    assert watch.run(10, "rank0") is None
    assert watch.run(1, "rank0") == "rank1 has been silent for 10 s (--rank-heartbeat-timeout-seconds)"
    watch = Watch()
    assert watch.run(60, "rank0", "rank1") is None
    assert (
        watch.run(1, "rank0", "rank1") == "tokenizer0 has been silent for 60 s (--heartbeat-timeout-seconds)"
    )


def test_any_message_ends_a_silence() -> None:
    watch = Watch()
    watch.run(9)
    watch.monitor.record(PhaseReport(process="rank0", phase="ready", seconds=1.0))
    watch.beat("rank1")
    assert watch.run(10) is None
    assert watch.monitor.ages() == {"rank0": 10.0, "rank1": 10.0, "tokenizer0": 19.0}


def test_announced_pause_extends_the_limit_once() -> None:
    watch = Watch()
    watch.beat("rank1", pause_seconds=30.0)
    assert watch.run(40, "rank0") is None
    assert watch.run(1, "rank0") is not None
    watch.beat("rank1")
    assert watch.run(10, "rank0") is None
    assert watch.run(1, "rank0") is not None


def test_suspension_of_the_watcher_counts_as_one_turn() -> None:
    watch = Watch()
    watch.now += 3600.0
    watch.monitor.begin_turn()
    assert watch.monitor.describe_silence(PROCESSES) is None
    assert watch.monitor.ages()["rank0"] == MAX_TURN_SECONDS
