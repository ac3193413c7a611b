"""Faults of processes: workers that die or raise, trainers that are interrupted or killed, systems with tiny limits."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from example_datasets import FailsAt, Images, OddError
from torch.utils.data import DataLoader

from dualtrack.facts.errors import LoaderError
from dualtrack.loading.pooled_loader import PooledLoader

PRELUDE = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader
from example_datasets import Images
from dualtrack.loading.pooled_loader import PooledLoader
def own_shared_files():
    return [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]
"""


def start_script(body: str, **options: Any) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        **options,
    )


def run_script(body: str, **options: Any) -> str:
    process = start_script(body, **options)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    alive = pids
    while alive and time.monotonic() < deadline:
        alive = [
            pid for pid in alive if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        ]
        time.sleep(0.1)
    return alive


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "slot_bytes", [4096, 512]
)  # in 512 bytes nothing fits: batches cross by descriptors, whose pipes break
def test_a_killed_worker_is_an_error_in_bounded_time_and_the_loader_can_be_used_again(
    persistent: bool, slot_bytes: int
) -> None:
    legacy = DataLoader(Images(2000), batch_size=4, num_workers=2, persistent_workers=persistent)
    with PooledLoader(legacy, "cpu", 1 << 18, slot_bytes=slot_bytes) as loader:
        iterator = iter(loader)
        next(iterator)
        victim = multiprocessing.active_children()[0]
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(LoaderError, match=rf"1 died \(pid {victim.pid} with exit code -9\)"):
            for _ in iterator:
                pass
        assert time.monotonic() - started < 10
        assert loader.stats().slots_in_use_bytes <= 4 * 4096
        assert multiprocessing.active_children() == []
        assert len(list(loader)) == 500


def test_a_worker_killed_while_it_waits_for_a_slot_is_noticed() -> None:
    legacy = DataLoader(Images(2000), batch_size=4, num_workers=2)
    with PooledLoader(legacy, "cpu", 2 * 4096, slot_bytes=4096) as loader:
        iterator = loader.host_batches()
        held = next(iterator)
        time.sleep(0.2)
        for worker in multiprocessing.active_children():
            worker.kill()
        with pytest.raises(LoaderError, match="died"):
            for batch in iterator:
                batch.release()
        held.release()
        assert loader.stats().slots_in_use_bytes == 0


def test_a_worker_killed_between_epochs_is_named_and_replaced() -> None:
    legacy = DataLoader(Images(40), batch_size=4, num_workers=2, persistent_workers=True)
    with PooledLoader(legacy, "cpu", 1 << 18, slot_bytes=4096) as loader:
        assert len(list(loader)) == 10
        victim = multiprocessing.active_children()[0]
        victim.kill()
        victim.join()
        with pytest.raises(LoaderError, match="1 died"):
            list(loader)
        assert len(list(loader)) == 10


def test_the_loaders_own_timeout_still_ends_its_wait() -> None:
    class Sleepy(Images):
        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(1.5 if index == 4 else 0)
            return super().__getitem__(index)

    with PooledLoader(
        DataLoader(Sleepy(8), batch_size=4, num_workers=1, timeout=0.3), "cpu", 1 << 18, slot_bytes=4096
    ) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(RuntimeError, match=r"timed out after 0.3 seconds"):
            next(iterator)


def test_a_worker_that_falls_silent_is_an_error_at_the_deadline() -> None:
    legacy = DataLoader(Images(2000), batch_size=4, num_workers=2)
    with PooledLoader(legacy, "cpu", 1 << 18, slot_bytes=4096, wait_seconds=1.0) as loader:
        iterator = iter(loader)
        next(iterator)
        workers = multiprocessing.active_children()
        for worker in workers:
            os.kill(worker.pid, signal.SIGSTOP)  # type: ignore[arg-type]
        with pytest.raises(LoaderError, match="no batch came within 1 s although 2 workers are alive"):
            for _ in iterator:
                pass
        for worker in workers:
            os.kill(worker.pid, signal.SIGCONT)  # type: ignore[arg-type]
        assert next(iterator) is not None


@pytest.mark.full  # torch waits five seconds for each worker before it gives up on it
def test_close_ends_even_workers_that_react_to_nothing() -> None:
    loader = PooledLoader(DataLoader(Images(2000), batch_size=4, num_workers=2), "cpu", 1 << 18, slot_bytes=4096)
    next(iterator := iter(loader))
    workers = multiprocessing.active_children()
    for worker in workers:
        os.kill(worker.pid, signal.SIGSTOP)  # type: ignore[arg-type]
    loader.close()
    assert not any(worker.is_alive() for worker in workers)
    del iterator


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("missing label"), KeyError),
        (ValueError("bad image"), ValueError),
        (OddError(7, "shelf"), (OddError, RuntimeError)),
        (TypeError("bad type"), TypeError),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_the_dataset_arrives_at_its_batch_with_name_and_traceback(
    num_workers: int, error: Exception, kind: Any
) -> None:
    with PooledLoader(DataLoader(FailsAt(error), num_workers=num_workers), "cpu", 1 << 16) as loader:
        iterator = iter(loader)
        assert [int(next(iterator)) for _ in range(2)] == [0, 1]
        with pytest.raises(kind) as caught:
            next(iterator)
        text = str(caught.value) if num_workers else repr(caught.value)
        assert type(error).__name__ in text
        assert "__getitem__" in text or num_workers == 0
        assert [int(batch) for batch in iterator] == [3, 4, 5]


def test_host_batches_keep_their_place_in_the_epoch_behind_an_error() -> None:
    with PooledLoader(DataLoader(FailsAt(ValueError("bad")), num_workers=2), "cpu", 1 << 16) as loader:
        iterator, places = loader.host_batches(), []
        while True:
            try:
                places.append(next(iterator).index)
            except ValueError:
                places.append(-1)
            except StopIteration:
                break
    assert places == [0, 1, -1, 3, 4, 5]


@pytest.mark.parametrize("where", ["loop", "next", "close"])
def test_an_interrupt_exits_without_orphans_and_with_memory_returned(where: str) -> None:
    process = start_script(
        f"""
        if {where!r} == "next":
            class Slow(Images):
                def __getitem__(self, index):
                    time.sleep(0.1 * index)
                    return super().__getitem__(index)
        else:
            Slow = Images
        loader = PooledLoader(DataLoader(Slow(4000), batch_size=4, num_workers=2), "cpu", 1 << 18, slot_bytes=4096)
        try:
            with loader:
                iterator = iter(loader)
                next(iterator)
                workers = [worker.pid for worker in __import__("multiprocessing").active_children()]
                print(workers, flush=True)
                if {where!r} == "loop":
                    time.sleep(60)
                if {where!r} == "next":
                    for batch in iterator:
                        pass
                if {where!r} == "close":
                    os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            loader.close()
            assert loader.stats().pool_current_bytes == 0
            assert own_shared_files() == []
            print("returned", file=sys.stderr, flush=True)
            raise
        """
    )
    assert process.stdout is not None
    workers = json.loads(process.stdout.readline())
    time.sleep(0.3)
    if where != "close":
        os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert "returned" in errors
    assert process.returncode != 0
    assert wait_until_gone(workers, 10) == []


def test_a_killed_trainer_takes_its_workers_along_and_leaves_no_file() -> None:
    body = """
        loader = PooledLoader(DataLoader(Images(4000), batch_size=4, num_workers=2), "cpu", 8 * 4096, slot_bytes=4096)
        iterator = iter(loader)
        next(iterator)
        print([worker.pid for worker in __import__("multiprocessing").active_children()], flush=True)
        time.sleep(60)
    """
    first, second = start_script(body), start_script(body)
    assert first.stdout is not None and second.stdout is not None
    workers = json.loads(first.stdout.readline())
    others = json.loads(second.stdout.readline())
    time.sleep(0.5)  # the workers have filled their slots and wait
    first.kill()
    first.communicate()
    assert wait_until_gone(workers, 15) == []
    assert all(psutil.pid_exists(pid) for pid in others)
    second.kill()
    second.communicate()
    assert wait_until_gone(others, 15) == []
    pids = {str(pid) for pid in (first.pid, second.pid, *workers, *others)}
    assert [path.name for path in Path("/dev/shm").iterdir() if pids & set(path.name.split("_"))] == []


def test_an_open_loader_does_not_keep_the_interpreter_from_exiting() -> None:
    for persistent in (False, True):
        started = time.monotonic()
        output = run_script(
            f"""
            legacy = DataLoader(Images(4000), batch_size=4, num_workers=2, persistent_workers={persistent})
            loader = PooledLoader(legacy, "cpu", 4 * 4096, slot_bytes=4096)
            iterator = loader.host_batches()
            held = next(iterator)
            time.sleep(0.2)
            print([worker.pid for worker in __import__("multiprocessing").active_children()])
            """
        )
        assert time.monotonic() - started < 60
        assert wait_until_gone(json.loads(output), 10) == []


def test_batches_need_no_descriptors_and_no_shared_files_of_their_own() -> None:
    output = run_script(
        """
        import resource
        loader = PooledLoader(DataLoader(Images(4000, 10_000), batch_size=4, num_workers=2), "cpu", 1 << 20, slot_bytes=40_960)
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        kept = list(loader)
        assert len(kept) == 1000
        assert "/dev/shm/torch" not in open("/proc/self/maps").read()
        print(len(kept))
        """
    )
    assert output.strip() == "1000"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a tiny /dev/shm")
def test_a_tiny_dev_shm_is_no_hindrance() -> None:
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    probe = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"this machine forbids an own mount of /dev/shm: {probe.stderr.strip()}")
    body = """
        assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize <= 65536
        with PooledLoader(DataLoader(Images(80, 100_000), batch_size=4, num_workers=2), "cpu", 8 << 20, slot_bytes=400_384) as loader:
            print(len(list(loader)))
    """
    script = PRELUDE + textwrap.dedent(body)
    command = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, script]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.stdout.strip() == "20", done.stderr


def test_the_pool_starts_no_thread_so_that_later_forks_stay_safe() -> None:
    output = run_script(
        """
        import threading
        with PooledLoader(DataLoader(Images(8), batch_size=4), "cpu", 1 << 18, slot_bytes=4096) as train:
            list(train)
            print(threading.active_count())
            with PooledLoader(DataLoader(Images(80), batch_size=4, num_workers=2), "cpu", 1 << 18, slot_bytes=4096) as evaluation:
                print(len(list(evaluation)))
        print(threading.active_count())
        """
    )
    assert output.split() == ["1", "20", "1"]


def test_workers_that_inherit_views_of_a_kept_batch_do_not_free_it() -> None:
    legacy = DataLoader(Images(40), batch_size=4, num_workers=2)
    with PooledLoader(legacy, "cpu", 1 << 16, slot_bytes=4096) as loader:
        kept = next(iter(loader))
        for _ in range(3):
            for _ in loader:
                pass
        assert kept[:, 0].tolist() == [0, 1, 2, 3]
        assert torch.equal(kept, torch.stack([legacy.dataset[index] for index in range(4)]))
