"""run_train.sh and scripts/environment.sh, as a shell user meets them.

Refusals run the real check. For all that the scripts start besides, a stub stands in for python3:
it writes down how it was called.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYTHON_STUB = r"""#!/usr/bin/env bash
# $CALLS gets a line for each call: the program's name, its arguments, and some variables.
case "$1 $2" in
    "- "*) cat >/dev/null; exit "${PACKAGES_MISSING:-0}" ;;
    "-c "*) exit 0 ;;
esac
variables="RANK=${RANK:-} WORLD_SIZE=${WORLD_SIZE:-} OMP=${OMP_NUM_THREADS:-}"
echo "$* | $variables PATH0=${PYTHONPATH%%:*}" >>"$CALLS"
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip") sleep 0.3; exit "${PIP_STATUS:-0}" ;;
    "-m torchtitan_ext.check_config") exit "${CHECK_STATUS:-0}" ;;
    "-m torch.distributed.run")
        [[ -z "${HANG:-}" ]] || trap 'echo "got $((++n)) TERM"' TERM
        echo started
        if [[ -n "${HANG:-}" ]]; then
            echo $$
            for _ in {1..300}; do ((${n:-0})) && break; sleep 0.1; done
            sleep 0.3  # for another signal
            exit 1
        fi
        exit "${TRAIN_STATUS:-0}" ;;
esac
"""


@pytest.fixture
def stub(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with 2 cores, no accelerator, and the stub as python3."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "python3": PYTHON_STUB,
        "nproc": "#!/bin/sh\necho 2\n",
        "nvidia-smi": "#!/bin/sh\nexit 1\n",
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {
        "PATH": f"{programs}:/usr/bin:/bin",
        "CALLS": str(tmp_path / "calls"),
        "TMPDIR": str(tmp_path),
    }


def start(environment: dict[str, str], *flags: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    script = [str(ROOT / "run_train.sh"), *flags]
    return subprocess.run(script, env=environment, cwd=cwd, capture_output=True, text=True)


def calls(environment: dict[str, str]) -> list[str]:
    path = Path(environment["CALLS"])
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("toml", "flags", "variables", "message"),
    [
        ("[training]\nsteps =\n", [], {}, "error: [job] config_file = "),
        ("[training]\nsteps = 0\n", [], {}, "error: [training] steps = 0: must be at least 1"),
        (
            "",
            ["--parallelism.data_parallel_shard_degree=3"],
            {"NGPU": "4"},
            "error: [parallelism] data_parallel_shard_degree = 3: ",
        ),
    ],
)
def test_refused_config_exits_2_with_one_line(
    tmp_path: Path, toml: str, flags: list[str], variables: dict[str, str], message: str
) -> None:
    (tmp_path / "run.toml").write_text(toml)
    environment = os.environ | {"CONFIG_FILE": "run.toml"} | variables
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    begin = time.monotonic()
    done = start(environment, *flags, cwd=tmp_path)
    seconds = time.monotonic() - begin
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(message)
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.toml"]
    # 10 s on a free machine; the tests may share it with others.
    assert seconds < 30


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NGPU": "two"}, 'error: NGPU = "two": must be an integer of at least 1'),
        ({"NGPU": "0"}, 'error: NGPU = "0": must be an integer of at least 1'),
        ({"MAX_RESTARTS": "-1"}, 'error: MAX_RESTARTS = "-1": must be an integer'),
        ({"LOG_RANK": "0,2", "NGPU": "2"}, 'error: LOG_RANK = "0,2": must be ranks below NGPU'),
        ({"NNODES": "2"}, "error: MASTER_ADDR: must be set when NNODES > 1"),
        ({"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"}, "error: NODE_RANK = 2: must be"),
        ({"COMM_MODE": "gloo"}, 'error: COMM_MODE = "gloo": must be fake_backend'),
        ({"COMM_MODE": "fake_backend", "NNODES": "2"}, 'error: NNODES = "2": must be 1 with'),
    ],
)
def test_bad_variable_is_named(tmp_path: Path, variables: dict[str, str], message: str) -> None:
    environment = os.environ | variables
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = start(environment, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(message)


def test_one_host_starts_torchrun_after_the_check(stub: dict[str, str], tmp_path: Path) -> None:
    done = start(stub, "--training.steps=3", "--job.description=two words", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "started\n")
    check, run = calls(stub)
    flags = "--job.config_file=./train_configs/deepseek_v3_debug.toml --training.steps=3"
    flags += " --job.description=two words"
    assert check.startswith(f"-m torchtitan_ext.check_config {flags} |")
    assert "--nproc_per_node 2 --rdzv_backend c10d --rdzv_endpoint localhost:0" in run
    assert "--max-restarts 0" in run
    assert "--local-ranks-filter 0 --role rank --tee 3" in run
    assert f"-m torchtitan_ext.train {flags} |" in run
    assert f"OMP=1 PATH0={ROOT}" in run
    # Nothing is left of torchrun's logs.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "calls"]


def test_variables_reach_torchrun(stub: dict[str, str], tmp_path: Path) -> None:
    stub |= {"NGPU": "8", "LOG_RANK": "0,7", "MAX_RESTARTS": "2", "OMP_NUM_THREADS": "3"}
    stub |= {"NNODES": "4", "NODE_RANK": "1", "MASTER_ADDR": "host0", "CONFIG_FILE": "x.toml"}
    start(stub, cwd=tmp_path)
    run = calls(stub)[-1]
    assert "--nproc_per_node 8 --nnodes 4" in run
    assert "--rdzv_endpoint host0:29500 --rdzv_conf is_host=0" in run
    assert "--max-restarts 2" in run
    assert "--local-ranks-filter 0,7" in run
    assert "--job.config_file=x.toml" in run
    assert "OMP=3" in run


@pytest.mark.parametrize(
    ("visible", "gpus", "expected"), [(None, 3, 3), ("0,2", 3, 2), ("", 3, 2), (None, 0, 2)]
)
def test_default_ranks_are_visible_accelerators(
    stub: dict[str, str], tmp_path: Path, visible: str | None, gpus: int, expected: int
) -> None:
    lines = "".join(f"echo 'GPU {i}: a card'\n" for i in range(gpus))
    (tmp_path / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\n{lines}")
    if visible is not None:
        stub["CUDA_VISIBLE_DEVICES"] = visible
    start(stub, cwd=tmp_path)
    run = calls(stub)[-1]
    assert f"--nproc_per_node {expected} " in run
    is_cpu = gpus == 0 or visible == ""
    assert ("OMP=1" in run) == is_cpu  # torchrun decides on a machine with accelerators


def test_fake_backend_is_one_process(stub: dict[str, str], tmp_path: Path) -> None:
    start(stub | {"COMM_MODE": "fake_backend", "NGPU": "64"}, "--debug.seed=1", cwd=tmp_path)
    run = calls(stub)[-1]
    assert run.startswith("-m torchtitan_ext.train ")
    assert "--comm.mode=fake_backend --training.steps=1 --debug.seed=1" in run
    assert "RANK=0 WORLD_SIZE=64 OMP=2" in run


@pytest.mark.parametrize(
    ("variables", "status", "started"),
    [({"CHECK_STATUS": "2"}, 2, False), ({"TRAIN_STATUS": "7"}, 7, True)],
)
def test_exit_status_is_passed_on(
    stub: dict[str, str], tmp_path: Path, variables: dict[str, str], status: int, started: bool
) -> None:
    done = start(stub | variables, cwd=tmp_path)
    assert done.returncode == status
    assert ("started" in done.stdout) == started


def test_help_starts_nothing(stub: dict[str, str], tmp_path: Path) -> None:
    assert start(stub, "--help", cwd=tmp_path).returncode == 0
    assert len(calls(stub)) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_torchrun(stub: dict[str, str], tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [str(ROOT / "run_train.sh")],
        env=stub | {"HANG": "1"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts the tests in the background has them ignore it, and so would this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    torchrun = int(process.stdout.readline())
    # A terminal sends Ctrl-C to a whole group: torchrun is not to get it twice.
    assert os.getpgid(torchrun) == torchrun
    process.send_signal(number)
    output, errors = process.communicate(timeout=10)
    assert output == "got 1 TERM\n"
    assert errors.splitlines() == [
        f"run_train.sh: got {number.name}, ending the ranks",
        f"run_train.sh: ended by {number.name}",
    ]
    assert process.returncode == 128 + number
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "calls"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "-m not slow |"),
        (["-k", "config", "-x"], "-m not slow -k config -x |"),
        (["-x", "--slow"], "-x |"),
    ],
)
def test_run_tests_selects(
    stub: dict[str, str], tmp_path: Path, arguments: list[str], expected: str
) -> None:
    subprocess.run([ROOT / "scripts" / "run_tests.sh", *arguments], env=stub, cwd=tmp_path)
    workers = subprocess.run(["nproc"], env=stub, capture_output=True, text=True).stdout.strip()
    side_by_side = f"-n {workers} --maxprocesses=4 --dist=loadfile --no-loadscope-reorder"
    assert calls(stub)[-1].startswith(f"-m pytest -q {side_by_side} {expected}")


# --- the environment


@pytest.fixture
def fresh(stub: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """A machine whose python3 lacks the packages."""
    return stub | {"PACKAGES_MISSING": "1", "VENV": str(tmp_path / "venv")}


def installs(environment: dict[str, str]) -> int:
    return sum(call.startswith("-m pip install") for call in calls(environment))


def test_fresh_machine_installs_once(fresh: dict[str, str], tmp_path: Path) -> None:
    first = start(fresh, cwd=tmp_path)
    assert first.returncode == 0
    assert "Installing requirements.txt into" in first.stderr
    second = start(fresh, cwd=tmp_path)
    assert second.stderr == ""
    assert installs(fresh) == 1


def test_interrupted_install_is_done_again(fresh: dict[str, str], tmp_path: Path) -> None:
    failed = start(fresh | {"PIP_STATUS": "2"}, cwd=tmp_path)
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith("error: could not install ")
    # Even if every package's metadata is there by now.
    assert start(fresh | {"PACKAGES_MISSING": "0"}, cwd=tmp_path).returncode == 0
    assert installs(fresh) == 2


def test_changed_requirements_are_installed(fresh: dict[str, str], tmp_path: Path) -> None:
    start(fresh, cwd=tmp_path)
    (tmp_path / "venv" / ".installed-requirements").write_text("hash of an older file\n")
    start(fresh, cwd=tmp_path)
    assert installs(fresh) == 2


def test_two_starts_at_once_install_once(fresh: dict[str, str], tmp_path: Path) -> None:
    script = str(ROOT / "run_train.sh")
    both = [subprocess.Popen([script], env=fresh, cwd=tmp_path) for _ in range(2)]
    assert [process.wait(timeout=30) for process in both] == [0, 0]
    assert installs(fresh) == 1


def test_own_virtual_environment_is_left_alone(stub: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text(PYTHON_STUB)
    python.chmod(0o755)
    start(stub | {"VENV": str(tmp_path / "venv")}, cwd=tmp_path)
    assert installs(stub) == 0
    assert [path.name for path in (tmp_path / "venv").iterdir()] == ["bin"]
