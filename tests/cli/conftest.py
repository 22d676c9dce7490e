"""The command line as a user meets it: in a process of its own, and on a terminal of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from .pty_session import PtySession

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "data"

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
)


def clean_environment(home: Path) -> dict[str, str]:
    """The caller's environment less what changes the program's behaviour."""
    drop = ("PYKESTREL_", "LC_", "HF_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    for name in ("NO_COLOR", "FORCE_COLOR", "LANG", "LANGUAGE", "PYTHONUTF8", "PYTHONIOENCODING"):
        env.pop(name, None)
    env |= {"LANG": "C.UTF-8", "TERM": "xterm", "PYKESTREL_CACHE": str(home / "cache")}
    env["PROMPT_TOOLKIT_NO_CPR"] = "1"  # the terminal of these tests does not say where it is
    try:
        metadata.distribution("pykestrel")
    except metadata.PackageNotFoundError:
        env["PYTHONPATH"] = str(ROOT)
    return env


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A clean environment with an empty cache; a test may change it."""
    return clean_environment(tmp_path)


Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cli(env: dict[str, str], tmp_path: Path) -> Cli:
    """``cli("run", ..., stdin="text" | b"bytes" | None)``: run pykestrel and wait for it."""

    def run(
        *args: str | Path, stdin: str | bytes | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        done = subprocess.run(
            [sys.executable, "-m", "pykestrel", *map(str, args)],
            input=data,
            stdin=subprocess.DEVNULL if data is None else None,
            capture_output=True,
            env=env,
            cwd=tmp_path,
            timeout=timeout,
            check=False,
        )
        out, err = (x.decode("utf-8", "backslashreplace") for x in (done.stdout, done.stderr))
        assert "Traceback" not in err or "--debug" in args or "PYKESTREL_DEBUG" in env, err
        return subprocess.CompletedProcess(done.args, done.returncode, out, err)

    return run


@pytest.fixture
def terminal(env: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., PtySession]]:
    """``terminal("run", ...)``: start pykestrel on a pseudo-terminal."""
    if sys.platform == "win32":
        pytest.skip("pseudo-terminals are a Unix thing")
    sessions: list[PtySession] = []

    def start(*args: str | Path) -> PtySession:
        command = [sys.executable, "-m", "pykestrel", *map(str, args)]
        sessions.append(PtySession(command, env=env, cwd=tmp_path))
        return sessions[-1]

    yield start
    for session in sessions:
        session.close()


@pytest.fixture(scope="session")
def tiny() -> Path:
    """A random-weight model of 320 ids without a tokenizer."""
    return GOLDEN / "llama-gqa3"


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights with a tokenizer of bytes and a chat template that can think."""
    return make_tiny_chat(tmp_path_factory.mktemp("tiny") / "tiny-chat")


def make_tiny_chat(path: Path, *, eos: int = 301) -> Path:
    """A copy of the golden llama with a byte-level tokenizer: 256 bytes, padding, added tokens.

    301 is <|im_end|>, the only end of text; the random weights pick it now and then.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    path.mkdir(parents=True)
    source = GOLDEN / "llama-gqa3"
    shutil.copy(source / "model.safetensors", path)
    config = json.loads((source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": eos}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    vocab |= {f"<pad{i}>": i for i in range(len(vocab), 300)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)]
    )
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>")])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
    return path
