# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import launch_cases
import muster

HERE = str(pathlib.Path(__file__).parent)


def is_there(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_function_by_itself_or_by_its_name(tmp_path, capfd):
    arguments = {"folder": str(tmp_path), "scale": 2.5}
    muster.launch(launch_cases.add_up, 3, arguments, environment={"WORD": "x"}, output="prefixed")
    told = [eval((tmp_path / f"rank-{rank}").read_text()) for rank in range(3)]
    assert told == [[rank, 3, [7.5, 7.5], str(rank), "x"] for rank in range(3)]
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[{rank}] I am {rank}" for rank in range(3)]
    muster.launch("launch_cases:Holder.inside", 1)
    muster.launch(launch_cases.leave_quietly, 2)
    assert capfd.readouterr() == ("called inside\n", "")


def test_a_command(tmp_path, capfd):
    words = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])"
    muster.launch([sys.executable, "-c", words], 2, log_directory=tmp_path / "logs")
    assert [(tmp_path / f"logs/rank-{rank}.out").read_text() for rank in range(2)] == ["0 2\n", "1 2\n"]
    assert capfd.readouterr() == ("", "")
    with pytest.raises(muster.PeerLostError) as caught:
        muster.launch(["bash", "-c", "echo low on ink >&2; exit $((RANK * 7))"], 2)
    assert caught.value.rank == 1 and "ended with status 7" in str(caught.value) and "low on ink" in str(caught.value)
    with pytest.raises(muster.NotFoundError, match="no-such-program"):
        muster.launch(["/no-such-program"], 2)


@pytest.mark.parametrize(
    "how, kind, words",
    [
        ("raise", muster.PeerLostError, ["ValueError: shard 1 is blue", "Traceback", "launch_cases.py", "in fail"]),
        ("error", muster.CorruptError, ["shard 1 is torn", "in fail"]),
        ("exit", muster.PeerLostError, ["SystemExit: 3"]),
        ("kill", muster.PeerLostError, ["was killed by SIGKILL"]),
    ],
)
def test_the_failure_of_a_rank(how, kind, words, capfd):
    with pytest.raises(muster.Error) as caught:
        muster.launch(launch_cases.fail, 3, {"how": how})
    error = caught.value
    assert type(error) is kind and (error.rank, error.host) == (1, socket.gethostname())
    assert f"rank 1 (host {error.host}, pid {error.pid})" in str(error) and not is_there(error.pid)
    assert all(each in str(error) for each in words) and "\n" not in str(error), str(error)


@pytest.mark.parametrize(
    "target, options, words",
    [
        (lambda: None, {}, "ranks cannot import"),
        ("launch_cases", {}, "is not the name of a function"),
        (5, {}, "is not a target"),
        (["true"], {"arguments": {}}, "a command has no `arguments`"),
        ([], {}, "the command must not be empty"),
        (launch_cases.fail, {"arguments": {"how": {1, 2}}}, "config['how']: set is not a value"),
        (launch_cases.fail, {"arguments": {"how": muster.empty("F32", (1,))}}, "tensor"),
        (launch_cases.fail, {"ranks": 0}, "world_size 0 is out of range"),
        (launch_cases.fail, {"output": "loud"}, "output: unknown value 'loud'"),
        (launch_cases.fail, {"tee": True}, "log directory"),
        (launch_cases.fail, {"timeout": 0}, "more than 0"),
        (launch_cases.fail, {"environment": {"A=B": "1"}}, "A=B"),
    ],
)
def test_invalid_arguments_are_refused_before_a_rank_starts(target, options, words):
    with pytest.raises(muster.InvalidArgumentError) as caught:
        muster.launch(target, **{"ranks": 1, **options})
    assert words in str(caught.value)


def test_a_name_that_is_not_there(capfd):
    with pytest.raises(muster.PeerLostError, match="AttributeError.*nothing"):
        muster.launch("launch_cases:nothing", 1)


def test_a_job_that_takes_too_long(tmp_path):
    with pytest.raises(muster.TimeoutError, match="timed out after 1.5 s"):
        muster.launch(launch_cases.stay, 2, {"folder": str(tmp_path)}, timeout=1.5, grace=0.1)
    assert not any(is_there(path.read_text()) for path in tmp_path.iterdir())


def test_any_thread_may_launch(capfd):
    failures = []

    def work():
        try:
            muster.launch(launch_cases.Holder.inside, 2)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert failures == [] and capfd.readouterr().out == 4 * "called inside\n"


@pytest.mark.parametrize("to_group", [False, True])
def test_ctrl_c_ends_all(to_group, tmp_path):
    source = f"""
        import sys
        sys.path.insert(0, {HERE!r})
        import launch_cases, muster
        try:
            muster.launch(launch_cases.stay, 2, {{"folder": {str(tmp_path)!r}}}, grace=0.3)
        except KeyboardInterrupt:
            print("interrupted")
    """
    caller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    names = [tmp_path / name for name in ("rank-0", "rank-1", "child-0", "child-1")]
    for _ in range(600):
        if all(name.exists() and name.read_text() for name in names):
            break
        time.sleep(0.05)
    (os.killpg if to_group else os.kill)(caller.pid, signal.SIGINT)
    output, errors = caller.communicate(timeout=60)
    assert (caller.returncode, output) == (0, "interrupted\n"), errors
    assert not any(is_there(name.read_text()) for name in names)


def test_a_program_launches_its_own_functions(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import muster\n"
        "def train(steps):\n"
        "    print(__name__, muster.world().rank, steps)\n"
        "if __name__ == '__main__':\n"
        "    muster.launch(train, 1, {'steps': [1, float('inf')]})\n"
    )
    for command in ([str(program)], ["-m", "program"]):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split(" ", 1)[1] == "0 [1, inf]\n"
    done = subprocess.run([sys.executable, "-c", program.read_text()], capture_output=True, text=True)
    assert "ranks cannot import train, because its program has no file" in done.stderr


@pytest.mark.parametrize("way", ["file", "module", "function of another module"])
def test_a_program_without_the_guard_is_one_error_that_names_it(way, tmp_path):
    program = tmp_path / "unguarded.py"
    target = "work" if way != "function of another module" else "'unguarded:work'"
    program.write_text(f"import muster\n\ndef work():\n    print('worked')\n\nmuster.launch({target}, 3)\n")
    command = [sys.executable, str(program)] if way != "module" else [sys.executable, "-m", "unguarded"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == "", done
    assert done.stderr.count("Traceback") == 1 and '__name__ == "__main__"' in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith("muster.errors.InvalidArgumentError: rank "), done.stderr


def test_a_backend_that_only_pytorch_has_does_not_stop_a_job(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_BACKEND", "nccl")
    muster.launch(launch_cases.leave_quietly, 2)
