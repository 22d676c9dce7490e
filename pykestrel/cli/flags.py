"""The flags that commands share. The tables are also what the REPL's ``/set`` takes and what
docs/cli.md lists."""

from __future__ import annotations

from .options import (
    Option,
    bias,
    count,
    ids,
    limit,
    listed,
    one_of,
    operations,
    positive,
    real,
    size,
    text,
    whole,
)

MODEL = Option(
    ("-m", "--model"),
    "a model directory, a .gguf file, a hub name in the local hub cache, or a name that "
    "`pykestrel pull` knows",
    metavar="MODEL",
)

QUANT = Option(
    ("--quant",),
    "weights in memory: bf16, q8 or q4",
    one_of("bf16", "q8", "q4"),
    "KIND",
    default="what a quantised directory holds, else q8",
)

CTX_SIZE = Option(
    ("-c", "--ctx-size"),
    "positions of context, such as 4096 or 32k",
    count,
    "N",
    default="the model's limit, at most 4096",
)

KV = Option(
    ("--kv",),
    "K/V cache: int8, f16 or f32",
    one_of("int8", "f16", "f32"),
    "KIND",
    "int8",
)

CPU_CACHE = Option(
    ("--cpu-cache",),
    "memory for float32 copies of weights on the CPU, such as 1GB",
    size,
    "BYTES",
    default="measured from what is free",
)

THREADS = Option(
    ("-t", "--threads"),
    "threads of the CPU engine and of its BLAS",
    positive,
    "N",
    default="one a core",
)

DEVICE = Option(
    ("--device",),
    "auto, cuda or cpu; cuda that cannot be had is exit code 3",
    one_of("auto", "cuda", "cpu"),
    "NAME",
    default="auto",
    aliases=(("--cuda", "cuda"), ("--cpu", "cpu")),
)

PREFILL = Option(
    ("--prefill",),
    "where prompts are computed for a model on the GPU: auto, cpu or cuda; for finding faults",
    one_of("auto", "cpu", "cuda"),
    "NAME",
    default="auto, which is the GPU",
)

VERIFY = Option(
    ("--verify",),
    "run every token on the GPU and on the CPU, and warn of the first difference; slow",
    None,
)

VRAM_BUDGET = Option(
    ("--vram-budget",),
    "weights on the GPU at most, such as 4GB; the CPU computes the rest",
    size,
    "BYTES",
    default="all",
)

HOST_BUDGET = Option(
    ("--host-budget",),
    "weights of the CPU engine in memory at most, such as 8GB; the rest is read from a file",
    size,
    "BYTES",
    default="all",
)

OFFLOAD = Option(
    ("--offload",),
    "how a part of the weights is used: segments (whole layers at once) or projections",
    one_of("segments", "projections"),
    "NAME",
    default="segments",
)

MIN_FLOP = Option(
    ("--min-flop",),
    "with --vram-budget: products of fewer operations stay on the CPU, such as 1e7",
    operations,
    "N",
    default="measured",
)

PART = (VRAM_BUDGET, HOST_BUDGET, OFFLOAD, MIN_FLOP)

CHAT_TEMPLATE = Option(
    ("--chat-template",), "a Jinja file that replaces the model's chat template", text, "FILE"
)

LOADING = (
    *(MODEL, DEVICE, QUANT, CTX_SIZE, KV, *PART, CPU_CACHE, THREADS),
    *(PREFILL, VERIFY),
)

SAMPLING = (
    Option(
        ("-n", "--max-tokens", "--n-predict", "--max-new-tokens"),
        "stop after N tokens; -1: no limit",
        limit,
        "N",
        default="until the model ends or the context is full",
    ),
    Option(("--temperature", "--temp"), "0 takes the most likely token", real, "X"),
    Option(("--top-k",), "keep the K most likely tokens; 0: all", whole, "K"),
    Option(("--top-p",), "keep the most likely tokens up to this probability", real, "X"),
    Option(("--min-p",), "drop tokens below this share of the best one's probability", real, "X"),
    Option(
        ("--repetition-penalty", "--repeat-penalty"),
        "divide the scores of tokens that were seen, prompt included; 1: off",
        real,
        "X",
    ),
    Option(("--presence-penalty",), "subtract once for generated tokens", real, "X"),
    Option(("--frequency-penalty",), "subtract for every time a token was generated", real, "X"),
    Option(("--logit-bias",), "add to scores, such as 42:-100,7:2.5", bias, "ID:BIAS,.."),
    Option(("--seed",), "the same seed, prompt and settings give the same text", whole, "N"),
    Option(("--stop",), "end before this text; may be repeated", text, "TEXT", many=True),
    Option(("--stop-token-ids",), "end at these token ids", listed(whole), "ID,.."),
    Option(("--ignore-eos",), "go on after the model's end of text", None),
    Option(("--min-tokens",), "do not end before N tokens", count, "N"),
)

THINKING = (
    Option(
        ("--think",), "let the model think first", None, default="the template's own",
        off=("--no-think",),
    ),
    Option(("--hide-thinking",), "show the answer only", None),
)  # fmt: skip

PROMPT_IDS = Option(
    ("--prompt-ids",), "run these token ids, for models without a tokenizer", ids, "1,2,3"
)

QUIET = Option(("-q", "--quiet"), "no progress and no notes on stderr", None)
VERBOSE = Option(("-v", "--verbose"), "timings and details on stderr", None)
DEBUG = Option(("--debug",), "show the traceback of an error", None)
YES = Option(("-y", "--yes"), "answer yes to every question", None)
JSON = Option(("--json",), "print one JSON object on stdout", None)
FORCE = Option(("-f", "--force"), "replace what is there", None)

COMMON = (QUIET, VERBOSE, DEBUG)
