"""Training runs by run_train.sh, several at a time, that go on where they were ended."""

import fcntl
import os
import subprocess
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from torchtitan_ext.metrics_file import read_last_step

RUN_TRAIN = Path(__file__).resolve().parents[2] / "run_train.sh"
_POLL_SECONDS = 1.0


class RunFailedError(RuntimeError):
    """A run did not get to its last step. The message names it and its log."""


@dataclass(frozen=True)
class Run:
    """A run on one or more ranks of this host."""

    name: str
    folder: Path
    flags: tuple[str, ...]
    num_steps: int
    num_ranks: int = 1

    @property
    def log(self) -> Path:
        """What run_train.sh printed."""
        return self.folder / "log.txt"

    def last_step(self) -> int:
        """The last step that was logged; 0 before the first."""
        return read_last_step(self.folder)

    def is_done(self) -> bool:
        return self.last_step() == self.num_steps

    def start(self, num_threads: int) -> subprocess.Popen[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        threads_per_rank = max(1, num_threads // self.num_ranks)
        environment = dict(os.environ, NGPU=str(self.num_ranks))
        environment["OMP_NUM_THREADS"] = str(threads_per_rank)
        # The configuration is among the flags, resolved already.
        environment.pop("CONFIG_FILE", None)
        flags = [*self.flags, f"--job.dump_folder={self.folder}"]
        with open(self.log, "ab") as log:
            try:
                # Held as long as a process of the run has its output open.
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunFailedError(
                    f"{self.name} is still being trained, see {self.log}"
                ) from None
            return subprocess.Popen(
                ["bash", str(RUN_TRAIN), *flags], env=environment, stdout=log, stderr=log
            )


def finish_with_progress(runs: list[Run], jobs: int) -> None:
    """As :func:`finish_runs`, with a progress bar over the steps of all runs."""
    from tqdm import tqdm

    done = sum(run.last_step() for run in runs)
    with tqdm(total=sum(run.num_steps for run in runs), initial=done, unit="step") as bar:

        def show(going: list[Run]) -> None:
            bar.set_postfix_str(", ".join(run.name for run in going), refresh=False)
            bar.update(sum(run.last_step() for run in runs) - bar.n)

        finish_runs(runs, jobs, show)


def finish_runs(runs: Iterable[Run], jobs: int, on_poll: Callable[[list[Run]], None]) -> None:
    """Runs what is not done yet, ``jobs`` at a time.

    Args:
        on_poll: called about once a second with the runs that are going.

    Raises:
        RunFailedError: a run ended before its last step; the others have been ended, too.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    waiting = [run for run in runs if not run.is_done()]
    going: dict[Run, subprocess.Popen[bytes]] = {}
    with ExitStack() as on_exit:
        on_exit.callback(lambda: _end(going.values()))
        while waiting or going:
            while waiting and len(going) < jobs:
                run = waiting.pop(0)
                going[run] = run.start(threads)
            _wait_for_any(list(going.values()))
            on_poll(list(going))
            for run in [run for run, process in going.items() if process.poll() is not None]:
                status = going.pop(run).returncode
                if status != 0 or not run.is_done():
                    raise RunFailedError(
                        f"{run.name} ended with status {status} at step {run.last_step()} of "
                        f"{run.num_steps}; see {run.log}"
                    )
    on_poll([])


def _wait_for_any(processes: list[subprocess.Popen[bytes]]) -> None:
    with suppress(subprocess.TimeoutExpired):
        processes[0].wait(timeout=_POLL_SECONDS)


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()
