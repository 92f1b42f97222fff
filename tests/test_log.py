"""The logger "tfdist" and its handler."""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import select
import subprocess
import sys
import textwrap
import threading

import pytest

from tfdist._src.log import StderrHandler, logger

SECONDS = 60
SIZE = 2 * select.PIPE_BUF  # of a small pipe; one page would be full with any data


@contextlib.contextmanager
def program(code, *, env=None, **streams):
    """Runs a program that has the logger; kills it at the end."""
    code = "import logging, os, sys, time\nfrom tfdist._src.log import logger\n" + textwrap.dedent(
        code
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **(env or {})}, text=True, **streams
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def stderr_of(code, env=None):
    with program(code, env=env, stderr=subprocess.PIPE) as process:
        err = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 0, err
    return err


def test_a_line_begins_with_the_name_of_its_logger():
    err = stderr_of("""
        logger.info("100 % done")
        logger.getChild("run").error("two\\nlines \\udc80")
    """)
    assert err == "tfdist: 100 % done\ntfdist run: two\nlines \\udc80\n"


@pytest.mark.parametrize(
    ("level", "shown"),
    [("", "iwe"), ("debug", "diwe"), ("WARNING", "we"), ("error", "e"), ("loud", "iwe")],
)
def test_the_setting_selects_the_levels(level, shown):
    code = "for level in ('debug', 'info', 'warning', 'error'): getattr(logger, level)(level[0])"
    err = stderr_of(code, {"TFDIST_LOG_LEVEL": level})
    assert err == "".join(f"tfdist: {letter}\n" for letter in shown)


def test_the_level_of_the_program_counts():
    code = """
        import importlib, tfdist._src.log as log
        assert logger.level == logging.INFO
        logger.setLevel("ERROR"); logger.handlers.clear()
        importlib.reload(log)
        log.logger.warning("no"); log.logger.error("yes")
    """
    assert stderr_of(code) == "tfdist: yes\n"


def test_the_standard_library_captures_messages(caplog, capsys):
    logger.warning("heard twice")
    assert caplog.record_tuples == [("tfdist", logging.WARNING, "heard twice")]
    assert capsys.readouterr().err == "tfdist: heard twice\n"


def test_a_replaced_stderr_gets_the_lines(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    logger.info("here")
    assert sys.stderr.getvalue() == "tfdist: here\n"
    sys.stderr.close()
    logger.info("nowhere")
    monkeypatch.setattr(sys, "stderr", None)
    logger.info("nowhere")


@pytest.mark.parametrize(
    ("configure", "line"),
    [
        ("logging.basicConfig(format='root: %(message)s')", "root: once\n"),
        ("logging.basicConfig(handlers=[logging.FileHandler(os.devnull)])", "tfdist: once\n"),
        ("logging.basicConfig(); logging.root.handlers[0].setLevel('ERROR')", "tfdist: once\n"),
    ],
    ids=["on stderr", "in a file", "with a higher level"],
)
def test_no_line_is_printed_twice(configure, line):
    assert stderr_of(f"{configure}; logger.info('once')") == line


def test_no_line_is_printed_twice_with_absl():
    err = stderr_of("import absl.logging as a; a.use_absl_handler(); logger.info('once')")
    assert err.count("once") == 1 and err.endswith("] once\n")


def small_pipe():
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, SIZE)
    return read, write


def fill(write):
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"." * 512)
    os.set_blocking(write, True)


def read_all(read):
    with open(read, encoding="utf-8") as file:
        return file.read()


def test_a_reader_that_stops_blocks_nothing():
    """Lines wait for the reader up to a number; a line counts the others."""
    read, write = small_pipe()
    fill(write)
    code = """
        begin = time.monotonic()
        for number in range(1500):
            logger.info(f"line {number}")
        print(time.monotonic() - begin, flush=True)
        input()
        logger.info("later")
    """
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": write}
    with program(code, **streams) as process:
        os.close(write)
        seconds = float(process.stdout.readline())
        texts = [os.read(read, SIZE).decode()]
        reader = threading.Thread(target=lambda: texts.append(read_all(read)))
        reader.start()
        process.communicate("go on\n", timeout=SECONDS)
        reader.join(SECONDS)
    assert seconds < 30  # rather than 1500 times 0.2
    lines = "".join(texts).lstrip(".").splitlines()
    kept = [f"tfdist: line {number}" for number in range(1000)]
    assert lines[:1000] == kept
    dropped = "tfdist: dropped 500 messages, since nobody read stderr"
    assert lines[1000:] == [dropped, "tfdist: later"]


@pytest.mark.parametrize("reading", [False, True])
def test_pending_lines_are_written_at_exit(reading):
    """Pending lines are written if stderr is writable again; otherwise the process ends."""
    read, write = small_pipe()
    fill(write)
    code = "logger.info('last'); print('done', flush=True); input()"
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": write}
    with program(code, **streams) as process:
        os.close(write)
        process.stdout.readline()
        if reading:
            assert os.read(read, SIZE).strip(b".") == b""
        process.communicate("\n", timeout=SECONDS)
        assert process.returncode == 0
    assert ("tfdist: last\n" in read_all(read)) == reading


@pytest.mark.parametrize("how", ["os.close(2)", "sys.stderr.close()", "sys.stderr = None"])
def test_a_closed_stderr_is_ignored(how):
    code = f"{how}; logger.info('nowhere'); logging.shutdown(); print('done')"
    with program(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.communicate(timeout=SECONDS) == ("done\n", "")


def test_a_reader_that_is_gone_is_ignored():
    read, write = os.pipe()
    os.close(read)
    code = "logger.info('x' * 9000); logger.info('y'); print('done')"
    with program(code, stdout=subprocess.PIPE, stderr=write) as process:
        os.close(write)
        assert process.communicate(timeout=SECONDS)[0] == "done\n"


def test_lines_of_threads_and_processes_are_whole():
    """Also of processes that are forked while threads write."""
    read, write = small_pipe()
    code = """
        import threading
        def write(name):
            for number in range(100):
                logger.info(f"{name} {number} {'x' * 1000}")
        def start(name):
            threads = [threading.Thread(target=write, args=(f"{name}{i}",)) for i in range(3)]
            for thread in threads: thread.start()
            return threads
        threads = start("parent")
        children = []
        for child in range(2):
            children.append(os.fork())
            if not children[-1]:
                for thread in start(f"child{child}"): thread.join()
                logging.shutdown()
                os._exit(0)
        for thread in threads: thread.join()
        for child in children: assert os.waitpid(child, 0)[1] == 0
    """
    with program(code, stderr=write) as process:
        os.close(write)
        lines = read_all(read).splitlines()
        assert process.wait(SECONDS) == 0
    names = [f"{process}{i}" for process in ("parent", "child0", "child1") for i in range(3)]
    expected = [f"tfdist: {name} {number} {'x' * 1000}" for name in names for number in range(100)]
    assert sorted(lines) == sorted(expected)


def test_a_forked_child_does_not_repeat_pending_lines():
    read, write = small_pipe()
    fill(write)
    code = """
        logger.info("of the parent")
        if not (child := os.fork()):
            logger.info("of the child")
            print("ready", flush=True)
            input()
            logging.shutdown()
            os._exit(0)
        os.waitpid(child, 0)
    """
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": write}
    with program(code, **streams) as process:
        os.close(write)
        process.stdout.readline()
        assert os.read(read, SIZE).strip(b".") == b""
        process.communicate("\n", timeout=SECONDS)
    assert read_all(read) == "tfdist: of the child\ntfdist: of the parent\n"


def test_long_lines_are_written_whole():
    text = "x" * 100_000
    assert stderr_of("logger.info('x' * 100_000)") == f"tfdist: {text}\n"


def test_a_signal_handler_that_interrupts_a_write(capfd):
    """Its message follows the interrupted one."""
    code = """
        import signal, tfdist._src.log as log
        signal.signal(signal.SIGUSR1, lambda *_: logger.info("of the handler"))
        write = log._write
        def interrupted(descriptor, data):
            log._write = write
            signal.raise_signal(signal.SIGUSR1)
            return write(descriptor, data)
        log._write = interrupted
        logger.info("of the program")
    """
    assert stderr_of(code) == "tfdist: of the program\ntfdist: of the handler\n"


def test_a_progress_bar_in_a_terminal():
    """A message of the launcher begins a new line there, but not in a pipe."""
    code = """
        from tfdist._src.launch.console import warn
        sys.stderr.write("1/9"); sys.stderr.flush()
        warn("lost")
    """
    assert stderr_of(code) == "1/9tfdist run: lost\n"
    controller, terminal = os.openpty()
    with program(code, stderr=terminal) as process:
        assert process.wait(SECONDS) == 0
    assert os.read(controller, 100) == b"1/9\r\ntfdist run: lost\r\n"
    os.close(controller)
    os.close(terminal)


def test_there_is_one_handler():
    assert [type(handler) for handler in logger.handlers] == [StderrHandler]


def launcher(level):
    command = [sys.executable, "-m", "tfdist", "run", "--dry-run", __file__]
    env = {**os.environ, "TFDIST_LOG_LEVEL": level, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def test_the_level_of_the_launcher():
    notice = "tfdist run: starting one worker, as no GPUs are visible; -n N starts N\n"
    assert launcher("").stderr == notice
    assert launcher("warning").stderr == ""


def test_an_invalid_level_is_one_error_of_the_launcher():
    done = launcher("loud")
    assert done.returncode == 1
    assert done.stderr == (
        "tfdist run: error: TFDIST_LOG_LEVEL must be one of debug, info, warning, error. Received: "
        "'loud'. Set it to one of them, or unset it to use the default.\n"
    )
