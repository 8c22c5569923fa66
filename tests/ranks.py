"""Runs a function on several gloo ranks, as an ordinary call in a test."""

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# The server imports these once, and every rank is forked from it: no rank pays for imports.
_PRELOADED = ["tests.rank_imports"]


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 300, **kwargs: Any
) -> list[Any]:
    """Calls ``function(*args, **kwargs)`` on each rank; returns the results in rank order.

    The function has to be importable (defined at the top of a module). The default process group
    is there, and RANK, LOCAL_RANK and WORLD_SIZE are set.

    Raises:
        RuntimeError: with the traceback of the first rank that failed.
        TimeoutError: some rank did not end in ``timeout`` seconds.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks}
            process = context.Process(
                target=_rank_main,
                args=(sender, environment, Path(folder) / "store", function, args, kwargs),
                daemon=True,
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[Connection, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for pipe in pipes if pipe not in results]
        ready = wait(waiting, timeout=max(0, deadline - time.monotonic()))
        if not ready:
            late = [pipes.index(pipe) for pipe in waiting]
            raise TimeoutError(f"ranks {late} did not end in time")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                error, results[pipe] = pipe.recv()
            except EOFError:
                error = "the process died"
            if error:
                raise RuntimeError(f"rank {pipes.index(pipe)}: {error}")
    return [results[pipe] for pipe in pipes]


def _rank_main(
    pipe: Connection,
    environment: dict[str, int],
    store: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=environment["RANK"],
        world_size=environment["WORLD_SIZE"],
    )
    try:
        pipe.send((None, function(*args, **kwargs)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    # Other ranks may still be in a collective with this one: wait for the test to end them all.
    time.sleep(3600)
