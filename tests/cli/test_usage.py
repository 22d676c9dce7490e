"""Exit codes, one-line errors, clean streams: what holds for every command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pykestrel.cli.main import COMMANDS

from .conftest import Cli

IDS = ("--prompt-ids", "1,2,3", "--temp", "0")


def one_error(done: subprocess.CompletedProcess[str]) -> str:
    """The single line on stderr; stdout must be empty."""
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("pykestrel: error: ")
    return lines[0]


def test_help_and_version(cli: Cli) -> None:
    for args in ((), ("--help",), ("help",)):
        done = cli(*args)
        assert done.returncode == 0
        assert done.stderr == ""
        for command in COMMANDS:
            assert f"  {command} " in done.stdout
    assert cli("help", "run").stdout == cli("run", "--help").stdout
    assert cli("--version").stdout.startswith("pykestrel 0.")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["rnu"], "did you mean run?"),
        (["--verbose"], "unknown option '--verbose'"),
        (["run", "--tmep", "1", "x"], "did you mean --temp?"),
        (["run", "-m"], "-m/--model"),
        (["run", "-m", "x", "-c", "many", "x"], "--ctx-size must be a whole number"),
        (["run", "-m", "x", "--device", "tpu", "x"], "one of auto, cuda, cpu"),
        (["run", "-m", "x", "--kv", "q4", "x"], "one of int8, f16, f32"),
        (["run", "-m", "x", "--temp", "-1", "x"], "temperature"),
        (["run", "-m", "x", "--top-p", "2", "x"], "--top-p must be a number"),
        (["run", "-m", "x", "--prompt-ids", "1,a"], "--prompt-ids must be token ids"),
        (["run", "-m", "x", "--prompt-ids", "1", "words"], "--prompt-ids excludes"),
        (["run", "-m", "x", "-p", "a", "b"], "given twice"),
        (["run", "-m", "x", "--raw", "-sys", "a", "b"], "--raw asks for none"),
        (["run", "-m", "x"], "no prompt"),
        (["run", "words"], "no model given"),
        (["bench"], "no model given"),
        (["bench", "-m", "x", "-p", "0", "-n", "0"], "nothing to measure"),
        (["perplexity", "-m", "x"], "give one text file"),
        (["perplexity", "-m", "x", "--quant", "q8,q5", "-"], "one of bf16, q8, q4"),
        (["perplexity", "-m", "x", "--quant", "q8,q8", "-"], "twice"),
        (["perplexity", "-m", "x", "--stride", "512", "-"], "--stride"),
        (["quantize"], "OUT"),
        (["quantize", "out"], "no model given"),
        (["tokenize", "-m", "x"], "no text"),
        (["tokenize", "-m", "x", "--decode", "1", "x"], "--decode excludes"),
        (["info"], "pykestrel pull smollm2-135m"),
        (["run", "smollm2-135m", "hi"], "did you mean -m smollm2-135m?"),
        (["run", "./big.gguf", "hi"], "did you mean -m ./big.gguf?"),
        (["tokenize", "smollm2-135m", "hi"], "did you mean -m smollm2-135m?"),
        (["perplexity", "smollm2-135m"], "did you mean -m smollm2-135m?"),
        (["bench", "smollm2-135m"], "did you mean -m smollm2-135m?"),
        (["run", "-m", "x", "-q", "-v", "x"], "--quiet and --verbose exclude each other"),
        (["tokenize", "--count", "--ids", "x"], "--count and --ids exclude each other"),
        (["tokenize", "--decode", "1", "--ids"], "--decode and --ids exclude each other"),
        (["run", "-m", "x", "--json", "-i", "x"], "--json is for one answer"),
        (["-m", "x"], "options follow a command"),
    ],
)
def test_wrong_usage_is_exit_code_2(cli: Cli, args: list[str], words: str) -> None:
    done = cli(*args)
    assert words in one_error(done)
    assert done.returncode == 2


def test_a_missing_model_is_exit_code_1(cli: Cli) -> None:
    for args in (["run", "-m", "nowhere", "x"], ["info", "nowhere"], ["bench", "-m", "nowhere"]):
        done = cli(*args)
        assert "nowhere" in one_error(done)
        assert done.returncode == 1


def test_cuda_that_cannot_be_used_is_exit_code_3(cli: Cli, tiny: Path) -> None:
    for flag in (["--cuda"], ["--device", "cuda"]):
        done = cli("run", "-m", tiny, *flag, *IDS)
        assert "CUDA was asked for" in one_error(done)
        assert done.returncode == 3


def test_device_auto_falls_back_to_the_cpu(cli: Cli, tiny: Path) -> None:
    done = cli("run", "-m", tiny, "--device", "auto", "-n", "3", *IDS)
    assert done.returncode == 0
    assert done.stderr.count("\n") <= 1


def test_auto_warns_once_where_a_gpu_was_expected(
    cli: Cli, tiny: Path, env: dict[str, str]
) -> None:
    env["PYKESTREL_LIB"] = "/nowhere/libvcuda.so"
    done = cli("run", "-m", tiny, "-n", "3", *IDS)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("pykestrel: warning: running on the CPU: ")
    assert "/nowhere/libvcuda.so" in line
    assert cli("run", "-m", tiny, "-n", "3", *IDS, "--device", "cpu").stderr == ""
    assert cli("run", "-m", tiny, "-n", "3", *IDS, "--quiet").stderr == ""


def test_debug_shows_the_traceback_and_then_the_line(cli: Cli) -> None:
    done = cli("run", "-m", "nowhere", "--debug", "x")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("pykestrel: error: ")


def test_a_bad_variable_is_named_and_a_flag_beats_it(
    cli: Cli, tiny: Path, env: dict[str, str]
) -> None:
    env["PYKESTREL_MAX_TOKENS"] = "lots"
    done = cli("run", "-m", tiny, *IDS)
    assert "PYKESTREL_MAX_TOKENS" in one_error(done)
    assert done.returncode == 2
    assert cli("run", "-m", tiny, "-n", "4", *IDS).stdout.count(",") == 3
    env["PYKESTREL_MAX_TOKENS"] = "2"
    assert cli("run", "-m", tiny, *IDS).stdout.count(",") == 1


def test_the_model_may_come_from_the_environment(cli: Cli, tiny: Path, env: dict[str, str]) -> None:
    env["PYKESTREL_MODEL"] = str(tiny)
    env["PYKESTREL_PROMPT_IDS"] = "1,2,3"
    env["PYKESTREL_TEMPERATURE"] = "0"
    env["PYKESTREL_MAX_TOKENS"] = "3"
    assert cli("run").stdout.count(",") == 2


def test_a_range_error_of_a_variable_names_it(cli: Cli, tiny: Path, env: dict[str, str]) -> None:
    env["PYKESTREL_TOP_P"] = "7"
    assert "PYKESTREL_TOP_P" in one_error(cli("run", "-m", tiny, "--prompt-ids", "1"))


# -- streams --------------------------------------------------------------------------------------


def pipeline(
    env: dict[str, str], shell: str, *args: str | Path
) -> subprocess.CompletedProcess[str]:
    """pykestrel's command line inside a shell's; ``$@`` is the command."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", shell, "bash", sys.executable, "-m", "pykestrel"]
        + [str(a) for a in args],
        env=env, capture_output=True, text=True, timeout=120, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
def test_a_closed_pipe_is_a_quiet_end(env: dict[str, str], tiny: Path) -> None:
    args = ("run", "-m", tiny, "-n", "300", "--ignore-eos", *IDS)
    done = pipeline(env, '"$@" | head -c 1', *args)
    assert done.stderr == ""
    assert done.returncode == 0
    assert len(done.stdout) == 1


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
def test_stdout_that_is_closed_from_the_start(env: dict[str, str], tiny: Path) -> None:
    done = pipeline(env, '"$@" >&-', "run", "-m", tiny, "-n", "3", *IDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_one_line(env: dict[str, str], tiny: Path) -> None:
    done = pipeline(env, '"$@" >/dev/full', "run", "-m", tiny, "-n", "3", *IDS)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr == "pykestrel: error: cannot write to stdout: no space left on device\n"
    assert pipeline(env, '"$@" >/dev/full', "--help").stderr == done.stderr


def test_a_model_directory_as_the_first_word(cli: Cli, tiny: Path) -> None:
    done = cli("run", tiny, "hi")
    assert f"did you mean -m {tiny}?" in one_error(done)
    assert done.returncode == 2


def test_version_is_for_every_command(cli: Cli) -> None:
    assert cli("info", "--version").stdout == cli("--version").stdout


def test_threads_are_set_before_numpy_is_there(cli: Cli, tiny: Path, env: dict[str, str]) -> None:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        env.pop(name, None)
    done = cli("bench", "-m", tiny, "-p", "4", "-n", "0", "-r", "1", "--json", "-t", "1")
    result = json.loads(done.stdout)
    assert result["threads"] == result["engine_stats"]["threads"] == 1
    env["PYKESTREL_THREADS"] = "3"
    done = cli("bench", "-m", tiny, "-p", "4", "-n", "0", "-r", "1", "--json")
    assert json.loads(done.stdout)["engine_stats"]["threads"] == 3


def test_no_command_imports_numpy_before_it_runs() -> None:
    code = (
        "import sys; from importlib import import_module; from pykestrel.cli.main import COMMANDS\n"
        "from pykestrel.cli.options import Parser\n"
        "for name, _ in COMMANDS.values():\n"
        "    import_module('pykestrel.cli.' + name).configure(Parser(prog='x'))\n"
        "print('numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout == "False\n"


def test_silence_on_stdin_is_explained(env: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pykestrel", "tokenize", "-m", "nowhere"]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, **pipes) as process:  # type: ignore[call-overload]
        assert process.stderr.readline() == "waiting for the text on stdin (Ctrl+D ends it)\n"
        process.communicate("hello")


def test_doctor_marks_variables_that_nothing_reads(cli: Cli, env: dict[str, str]) -> None:
    env |= {"PYKESTREL_TEMP": "1", "PYKESTREL_NO_THINK": "1", "PYKESTREL_ZZZ": "1"}
    env["PYKESTREL_TOP_K"] = "5"
    found = json.loads(cli("doctor", "--json").stdout)["unknown_variables"]
    assert found == {
        "PYKESTREL_TEMP": "not read: --temp is set by PYKESTREL_TEMPERATURE",
        "PYKESTREL_NO_THINK": "not read: --no-think is set by PYKESTREL_THINK=0",
        "PYKESTREL_ZZZ": "not read: no flag has it",
    }
    assert "PYKESTREL_TEMP=1  (not read: --temp is set by" in cli("doctor").stdout


def test_interrupted_is_130(env: dict[str, str], tiny: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    program = (
        "import sys, pykestrel.cli.main as m, pykestrel.cli.doctor as d\n"
        f"def stop(*_):\n    {code}\n    import time; time.sleep(5)\n"
        "d.run = stop\nsys.exit(m.main(['doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_fault_of_the_program_is_one_line_too(env: dict[str, str]) -> None:
    program = (
        "import sys, pykestrel.cli.main as m, pykestrel.cli.doctor as d\n"
        "d.run = lambda *_: {}['key']\nsys.exit(m.main(['doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "KeyError" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_importing_is_quick_and_lazy() -> None:
    code = (
        "import sys, pykestrel; pykestrel.KestrelError; print(sorted(m for m in sys.modules if "
        "m.split('.')[0] in ('numpy', 'rich', 'prompt_toolkit', 'jinja2', 'tokenizers')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_doctor(cli: Cli) -> None:
    done = cli("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    done = cli("doctor", "--json")
    assert json.loads(done.stdout)["ok"] is True
