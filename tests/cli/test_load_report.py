"""What is told of loading on the CPU, the bar on a terminal, and the arithmetic of `bench`."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cpu_models import make_config

import pykestrel
from pykestrel import LoadMeter
from pykestrel.cli import bench, measure
from pykestrel.cli.measure import Measured, Subject, summary
from pykestrel.cli.models import gigabytes, split_line, tell_residency
from pykestrel.cli.terminal import Terminal
from pykestrel.engine.cpu import memory
from pykestrel.loading import read_config, resolve_model
from pykestrel.meter import Resident
from pykestrel.prediction import predict
from pykestrel.units import parse_bytes
from pykestrel.weights import Traffic

from .conftest import ROOT, Cli
from .pty_session import PtySession


class Heard(Terminal):
    """A terminal that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, str]] = []

    def note(self, text: str) -> None:
        self.said.append(("note", text))

    def warn(self, text: str) -> None:
        self.said.append(("warn", text))

    def detail(self, text: str) -> None:
        self.said.append(("detail", text))


# -- the meter ------------------------------------------------------------------------------------


def test_the_meter_of_the_cpu(tiny: Path) -> None:
    meter = LoadMeter()
    with pykestrel.load(tiny, device="cpu", meter=meter) as model:
        assert model.loaded is meter
        assert meter.weights == meter.wanted > 20
        assert meter.resident is None
        assert (meter.upload_s, meter.waiting_s) == (0, 0)
        assert meter.read_s > 0
        assert meter.read_s + meter.convert_s < meter.threads * meter.wall_s + 0.5
        assert meter.wall_s < model.load_s
        assert "device" not in meter.facts()
        json.dumps(meter.facts())


def test_uploads_are_told_from_waiting() -> None:
    meter = LoadMeter(upload_s=5.0)
    meter.in_uploads(2.0)
    assert (meter.upload_s, meter.waiting_s) == (2.0, 3.0)
    meter.in_uploads(4.0)  # clocks differ a little: never less than nothing
    assert (meter.upload_s, meter.waiting_s) == (4.0, 0.0)


def test_a_job_that_fails_is_no_weight() -> None:
    meter = LoadMeter()
    with pytest.raises(ValueError, match="no"), meter.job():
        raise ValueError("no")
    with meter.job():
        pass
    assert meter.weights == 1
    assert meter.convert_s > 0


# -- what is said ---------------------------------------------------------------------------------


def test_the_first_prompt_expands_nothing(tiny: Path) -> None:
    with pykestrel.load(tiny, device="cpu") as model:
        stats = model.session.engine.stats()  # type: ignore[attr-defined]
        assert stats["expanded_bytes"] == stats["wanted_bytes"] > 0
        model.generate([5, 6, 7], max_tokens=2, temperature=0, ignore_eos=True)
        assert model.session.engine.stats()["expansions"] == stats["expansions"]  # type: ignore[attr-defined]


def test_copies_that_do_not_stay(cli: Cli, tiny: Path) -> None:
    args = ("run", "-m", tiny, "--prompt-ids", "5,6", "-n", "1", "--temp", "0", "--ignore-eos")
    assert cli(*args, "--cpu-cache", "0").stderr == ""  # it was chosen
    told = cli(*args, "--cpu-cache", "0", "-v").stderr
    assert "0 B of " in told
    assert "of float32 copies of the weights stay in memory" in told
    with pykestrel.load(tiny, device="cpu", cpu_cache=1000) as model:
        heard = Heard()
        tell_residency(heard, model.loaded, model.session.engine)
        ((kind, line),) = heard.said
        assert kind == "warn"
        wanted = model.session.engine.stats()["wanted_bytes"]  # type: ignore[attr-defined]
        assert f"--cpu-cache {gigabytes(wanted)} keeps all, at the cost of that much" in line
        assert parse_bytes(gigabytes(wanted)) >= wanted
        tell_residency(heard, model.loaded, model.session.engine, chosen=1000)
        assert heard.said[-1] == ("detail", line)
    with pykestrel.load(tiny, device="cpu") as model:
        heard = Heard()
        tell_residency(heard, model.loaded, model.session.engine)
        assert heard.said == []


def test_words_of_a_device() -> None:
    meter = LoadMeter(weights=291, wanted=291, wall_s=0.66, threads=8, read_s=1, upload_s=0.5)
    meter.resident = Resident(146, 146, 4_300_000_000, 0)
    heard = Heard()
    tell_residency(heard, meter, object())  # type: ignore[arg-type]
    assert heard.said == [
        ("note", "preload: 291/291 weights, 4.3 GB in 146 entries on the device, 0.7 s")
    ]
    assert split_line(1.234, meter) == (
        "loaded in 1.23 s, weights 0.66 s; 8 threads busy: read 1.00 s, convert 0.00 s, "
        "upload 0.50 s"
    )
    for left, gone in ((145, 0), (146, 1)):
        meter.resident = Resident(left, 146, 4_300_000_000, gone)
        tell_residency(heard, meter, object())  # type: ignore[arg-type]
        assert heard.said[-1][0] == "warn"
        assert heard.said[-1][1].startswith(f"only {left} of 146 entries")


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are a Unix thing")
def test_the_bar_shows_bytes_weights_and_seconds(env: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from pykestrel.cli.terminal import Terminal\n"
        "with Terminal().progress('loading x', beside=lambda: '12/34 weights') as report:\n"
        "    for i in range(5):\n"
        "        report('w', 1_000_000 * i, 4_000_000)\n"
        "        time.sleep(0.2)\n"
        "print('done')\n"
    )
    env["PYTHONPATH"] = str(ROOT)
    session = PtySession([sys.executable, "-c", code], env=env, cwd=tmp_path)
    try:
        session.expect(r"loading x .*/4\.0 MB 12/34 weights 0\.\d s")
        session.expect("done")
        assert session.wait() == 0
    finally:
        session.close()


def test_off_a_terminal_there_is_no_bar_and_no_rich(cli: Cli, tiny: Path) -> None:
    args = ("run", "-m", tiny, "--prompt-ids", "5,6", "-n", "1", "--temp", "0", "--ignore-eos")
    assert cli(*args).stderr == ""
    code = (
        "import sys; from pykestrel.cli import main; "
        "status = main(sys.argv[1:]); print('rich' in sys.modules); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=False
    )
    assert done.stdout.split()[-1] == "False", done.stderr


# -- predictions ----------------------------------------------------------------------------------


def test_the_cpu_s_predictions_come_true(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pykestrel.engine.cpu import engine

    config = read_config(resolve_model(str(tiny)))
    need = memory.memory_needed(config, "q8", 512, "int8")
    for free in (need["total"] - 1, need["total"], need["total"] + 3 * need["expanded"]):
        for module in (memory, engine):
            monkeypatch.setattr(module, "available_memory", lambda free=free: free)
        fate = predict(config, "q8", 512, "int8")
        assert (fate.engine, fate.needs, fate.free) == ("cpu", need["total"], free)
        assert fate.fits == (free >= need["total"])
        if not fate.fits:
            assert "take " in fate.advice
            with pytest.raises(pykestrel.OutOfMemory):
                pykestrel.load(tiny, device="cpu", ctx_size=512)
            continue
        with pykestrel.load(tiny, device="cpu", ctx_size=512) as model:
            stats = model.session.engine.stats()  # type: ignore[attr-defined]
            assert fate.resident == (stats["expanded_bytes"] == stats["wanted_bytes"])
            assert stats["wanted_bytes"] == need["expanded"]
        assert ("--cpu-cache" in fate.advice) == (not fate.resident)


def test_info_and_doctor_predict(cli: Cli, tiny: Path) -> None:
    shown = cli("info", tiny, "-c", "256").stdout
    assert any(line.startswith("fits ") and " yes: as q8 it needs " in line
               for line in shown.splitlines())  # fmt: skip
    fate = json.loads(cli("info", tiny, "-c", "256", "--json").stdout)["prediction"]
    assert (fate["engine"], fate["quant"], fate["ctx_size"], fate["fits"]) == (
        "cpu", "q8", 256, True,
    )  # fmt: skip
    done = cli("doctor", "-m", tiny, "--quant", "q4", "-c", "256", "--json")
    said = json.loads(done.stdout)["model"]
    assert said["prediction"]["quant"] == "q4"
    assert said["prediction"]["needs"] < fate["needs"]
    shown = cli("doctor", "-m", tiny, "--quant", "q4", "-c", "256").stdout
    assert any(line.startswith("fits ") and " yes: as q4 it needs " in line
               for line in shown.splitlines())  # fmt: skip
    assert "model" not in json.loads(cli("doctor", "--json").stdout)
    done = cli("doctor", "-m", "nowhere")
    assert done.returncode == 0  # nothing is wrong with the installation
    assert "not known: there is no model 'nowhere'" in done.stdout
    done = cli("doctor", "-m", tiny, "-c", "513", "--json")
    assert "between 2 and the 512" in json.loads(done.stdout)["model"]["error"]


# -- bench ----------------------------------------------------------------------------------------

KEYS = {
    "test", "kind", "n", "depth", "seconds", "tokens_per_second", "spread", "ms_per_token",
    "built_in_window",
}  # fmt: skip


def test_a_sweep(cli: Cli, tiny: Path) -> None:
    args = ("--pp", "8,16", "--tg", "4", "--ttft", "32,0", "-d", "0,20,0.25k", "-r", "2")
    done = cli("bench", "-m", tiny, *args, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    names = [t["test"] for t in result["tests"]]
    assert names == [
        *("pp8", "pp16", "tg4", "pp8 @ d20", "pp16 @ d20", "tg4 @ d20"),
        *("pp8 @ d256", "pp16 @ d256", "tg4 @ d256", "ttft32"),
    ]
    assert result["ctx_size"] == 256 + 16
    for t in result["tests"]:
        assert set(t) >= KEYS
        assert t["built_in_window"] == 0
        assert len(t["seconds"]) == 2
        speeds = [t["n"] / s for s in t["seconds"]]
        assert t["tokens_per_second"] == pytest.approx(statistics.fmean(speeds))
        assert t["spread"] == pytest.approx(statistics.stdev(speeds))
        assert t["ms_per_token"] == pytest.approx(1000 * statistics.median(t["seconds"]) / t["n"])
        assert ("gb_per_second" in t) == (t["kind"] == "tg")
        assert ("ttft_ms" in t) == (t["kind"] == "ttft")
        assert ("logits_hash" in t) == (t["kind"] != "ttft")
    last = result["tests"][-1]
    assert last["ttft_ms"] == pytest.approx(1000 * statistics.fmean(last["seconds"]))
    assert last["ttft_spread_ms"] == pytest.approx(1000 * statistics.stdev(last["seconds"]))
    assert (last["kind"], last["n"], last["depth"]) == ("ttft", 32, 0)
    load = result["load"]
    assert load["weights"] == load["wanted"] > 0
    assert 0 < load["wall_s"] < result["load_seconds"]
    assert set(load) == {
        "weights", "wanted", "bytes", "wall_s", "read_s", "convert_s", "upload_s", "waiting_s",
        "threads",
    }  # fmt: skip


def test_the_usual_tests(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    """A 1k prompt is among them where the model holds one."""
    long = tmp_path / "long"
    shutil.copytree(tiny, long)
    config = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    done = cli("bench", "-m", long, "-r", "1", "-t", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 100
    rows = [line.split("|")[4].strip() for line in done.stdout.splitlines() if "llama" in line
            or "long" in line]  # fmt: skip
    assert rows == ["pp512", "tg128", "ttft1k"]
    assert " context 1025, " in done.stdout
    assert "ms |" in next(line for line in done.stdout.splitlines() if "ttft1k" in line)
    assert "\nloaded in " in done.stdout
    for args in (["-c", "1024"], ["-p", "8"], ["-n", "8"], ["--ttft", "0"]):
        done = cli("bench", "-m", long, "-r", "1", "-t", "1", *args, "--json")
        assert all(t["kind"] != "ttft" for t in json.loads(done.stdout)["tests"]), args


def test_names_of_tests() -> None:
    assert measure.Test("ttft", 1024, 0).name == "ttft1k"
    assert measure.Test("ttft", 8192, 0).name == "ttft8k"
    assert measure.Test("ttft", 1000, 0).name == "ttft1000"
    assert measure.Test("ttft", 1024, 0).positions == 1025  # the prompt and its token
    assert measure.Test("pp", 8192, 4096).name == "pp8192 @ d4096"
    assert (measure.Test("tg", 128, 4096).start, measure.Test("tg", 128, 4096).positions) == (
        4097,
        4225,
    )


def subject(**more: Any) -> Subject:
    made = Subject.__new__(Subject)
    config = make_config()
    vars(made).update(config=config, kv="int8", traffic=Traffic.of(config, "q8"), **more)
    return made


def test_arithmetic_of_a_summary() -> None:
    got = summary(subject(), measure.Test("ttft", 1024, 0), Measured([0.5, 0.25], "", {}, 3), None)
    assert got["tokens_per_second"] == pytest.approx((2048 + 4096) / 2)
    assert got["ttft_ms"] == 375
    assert got["ttft_spread_ms"] == pytest.approx(statistics.stdev([500, 250]))
    assert got["built_in_window"] == 3
    one = summary(subject(), measure.Test("tg", 10, 100), Measured([2.0], "ab", {}), 1e9)
    assert (one["tokens_per_second"], one["spread"], one["ms_per_token"]) == (5, 0, 200)
    read = one["weight_bytes_per_token"] + one["kv_bytes_per_token"]
    assert one["gb_per_second"] == pytest.approx(read * 5 / 1e9)
    assert one["percent_of_bandwidth"] == pytest.approx(100 * read * 5 / 1e9)


def test_what_is_built_while_it_is_timed_is_counted(tiny: Path) -> None:
    """The warm-up may build; what the timed runs build is counted and warned of."""
    with pykestrel.load(tiny, device="cpu", cpu_cache=0, ctx_size=64) as model:
        made = Subject.of(model)
        cache = model.session.engine._cache  # type: ignore[attr-defined]

        def tick(run: int) -> None:
            pass

        assert measure.measure(made, measure.Test("pp", 8, 0), [5] * 64, 2, tick).builds == 0
        original = measure._step

        def lazy(*args: Any) -> Any:
            cache.expansions += 1
            return original(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measure, "_step", lazy)
            measured = measure.measure(made, measure.Test("pp", 8, 0), [5] * 64, 2, tick)
        assert measured.builds == 2  # of three runs the first is a warm-up
        words = bench._built(summary(made, measure.Test("pp", 8, 0), measured, None), "cpu")
        assert words == (
            "2 weights had to be built again while pp8 was timed: a larger --cpu-cache keeps more"
        )
