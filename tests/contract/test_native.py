"""The rules of the C interface, on a libvcuda whose CUDA runtime is emulated (no GPU)."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_cuda import BAD_ALLOC, ILLEGAL_ADDRESS, FakeCuda, Kind

from pykestrel import native
from pykestrel.native import abi, loader

from .conftest import NATIVE, ROOT, run

pytestmark = pytest.mark.usefixtures("fake_cuda")


def test_query() -> None:
    info = native.dev_query(0)
    assert (info.name, info.uuid[:4], info.pci) == ("Fake GPU 0", "GPU-", "0000:00:00.0")
    assert (info.cc_major, info.cc_minor, info.sm_count, info.kernel_arch) == (9, 0, 132, 90)
    assert info.memory_total == info.memory_free == 1 << 30
    assert (
        info.peak_bytes_per_second == 2 * info.memory_clock_khz * 1000 * info.memory_bus_bits // 8
    )
    assert native.driver_version() == (13010, 13000)
    assert native.state() == native.State(1, "1 CUDA device", library=True, broken=False)


def test_failures_say_why(fake_cuda: FakeCuda) -> None:
    with pytest.raises(native.NativeError, match="there is no device 9") as caught:
        native.dev_query(9)
    assert caught.value.status == -1
    fake_cuda.fail_at(1, BAD_ALLOC)
    with pytest.raises(native.NativeError, match="out of host memory"):
        native.dev_query(0)
    fake_cuda.devices(3)
    fake_cuda.without_code(2)
    assert native.dev_query(2).kernel_arch == 0
    with pytest.raises(native.NativeError, match="no code for device 2"):
        native.create(2)
    assert "no code for device 2" in native.last_error()
    native.dev_query(0)
    assert "no code for device 2" in native.last_error()  # success does not clear it


@pytest.mark.parametrize(
    ("driver", "devices", "reason"),
    [
        (0, 1, "no NVIDIA driver was found; install one that supports CUDA 13.0"),
        (12080, 1, "supports CUDA 12.8 and this library needs 13.0; update the driver"),
        (13010, 0, "shows no GPU; CUDA_VISIBLE_DEVICES may hide it"),
    ],
)
def test_no_device(fake_cuda: FakeCuda, driver: int, devices: int, reason: str) -> None:
    fake_cuda.driver(driver)
    fake_cuda.devices(devices)
    assert native.dev_count() == 0
    assert reason in native.state().reason
    with pytest.raises(native.NativeError, match="driver"):
        native.create(0)


def test_struct_sizes() -> None:
    """An older caller gets its fields and not a byte more; a newer one is refused."""
    library = loader.load()
    size = ctypes.sizeof(abi.DeviceInfoStruct)
    for wrong in (0, 4, size - 1, size + 8, 2**32 - 1):
        raw = abi.DeviceInfoStruct(struct_size=wrong, index=-7)
        with pytest.raises(native.NativeError, match=f"struct_size is {wrong} and this library"):
            library.vcuda_dev_query(0, ctypes.byref(raw))
        assert (raw.struct_size, raw.index) == (wrong, -7)  # nothing changed
    with pytest.raises(native.NativeError, match="'info' is NULL"):
        library.vcuda_dev_query(0, None)
    with pytest.raises(native.NativeError, match="'count' is NULL"):
        library.vcuda_dev_count(None)
    with pytest.raises(native.NativeError, match="'out' is NULL"):
        library.vcuda_create(0, None)


def test_prof() -> None:
    with native.create(0) as handle:
        assert native.prof_read(handle).launches == 0
        native.dev_selftest(handle)
        native.dev_selftest(handle)
        prof = native.prof_read(handle)
        assert (prof.launches, prof.h2d_copies, prof.d2h_copies, prof.h2d_bytes) == (2, 2, 2, 2048)
        assert prof.gemm == native.Phase(0, 0)
        native.prof_reset(handle)
        assert native.prof_read(handle).launches == 0


def test_a_lost_device_stays_lost(fake_cuda: FakeCuda) -> None:
    fake_cuda.devices(2)
    handle = native.create(1)
    native.dev_selftest(handle)
    fake_cuda.fail_at(1, ILLEGAL_ADDRESS, Kind.LAUNCH)
    with pytest.raises(native.NativeError, match="cudaErrorIllegalAddress") as first:
        native.dev_selftest(handle)
    assert first.value.status == abi.LOST
    for call in (native.dev_selftest, native.prof_read, native.prof_reset):
        with pytest.raises(native.NativeError, match="lost earlier: cudaErrorIllegal") as later:
            call(handle)
        assert later.value.status == abi.LOST
    with native.create(0) as other:  # another device does not mind
        native.dev_selftest(other)
    native.destroy(handle)
    assert fake_cuda.live == 0


def test_a_fault_that_shows_late(fake_cuda: FakeCuda) -> None:
    """A kernel's own fault is seen by who waits for it, and loses the device all the same."""
    with native.create(0) as handle:
        fake_cuda.fail_async(1)
        with pytest.raises(native.NativeError, match="cudaErrorIllegalAddress") as caught:
            native.dev_selftest(handle)
        assert caught.value.status == abi.LOST
        assert status_of(native.prof_read, handle) == abi.LOST


def status_of(call: Callable[[native.Handle], object], handle: native.Handle) -> int:
    try:
        call(handle)
    except native.NativeError as e:
        return e.status
    return abi.OK


def test_every_call_of_the_selftest_may_fail(fake_cuda: FakeCuda) -> None:
    """Whichever runtime call fails: -1, nothing counted, nothing kept, and the next one works."""
    with native.create(0) as handle:
        native.dev_selftest(handle)
        live, done = fake_cuda.live, 1
        for n in range(1, 100):
            fake_cuda.fail_at(n)
            status = status_of(native.dev_selftest, handle)
            done += status == abi.OK  # what gives something back may fail unnoticed
            if fake_cuda.fault_pending:
                break
            assert status in (abi.OK, abi.NOT_DONE), n
            assert native.prof_read(handle).launches == done
            assert fake_cuda.live == live
            fake_cuda.fail_at(0)
            native.dev_selftest(handle)
            done += 1
        assert 5 < n < 99
    assert fake_cuda.live == 0


def test_destroy_twice() -> None:
    handle = native.create(0)
    native.destroy(handle)
    native.destroy(handle)
    with pytest.raises(native.NativeError, match="NULL"):
        native.prof_read(handle)


def test_last_error_belongs_to_the_thread() -> None:
    with pytest.raises(native.NativeError, match="device 2"):
        native.create(2)  # there is one
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(native.last_error()))
    thread.start()
    thread.join()
    assert seen == [""]
    assert "device 2" in native.last_error()


def test_threads_share_a_handle() -> None:
    with native.create(0) as handle:
        threads = [
            threading.Thread(target=lambda: [native.dev_selftest(handle) for _ in range(200)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert native.prof_read(handle).launches == 800


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_refused() -> None:
    handle = native.create(0)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            native.dev_selftest(handle)
            text = "no error"
        except native.NativeError as e:
            text = f"{e.status} {e}"
        native.destroy(handle)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(read) as stream:
        text = stream.read()
    assert status == 0
    assert text.startswith("-1 ")
    assert "fork()" in text
    assert str(pid) in text
    native.dev_selftest(handle)
    native.destroy(handle)


def test_the_example_of_the_manual(cc: str, fake_library: Path, tmp_path: Path) -> None:
    """The program of docs/abi.md compiles as it stands, and runs without Python."""
    text = (ROOT / "docs/abi.md").read_text(encoding="utf-8")
    example = re.search(r"```c\n(.*?)```", text, flags=re.DOTALL)
    assert example
    (tmp_path / "demo.c").write_text(example[1], encoding="utf-8")
    folder = fake_library.parent
    done = run(
        [cc, "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "demo.c", "-o", "demo"]
        + ["-I", NATIVE / "include", f"-L{folder}", f"-Wl,-rpath,{folder}", "-lvcuda"],
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    done = run([tmp_path / "demo"])
    assert (done.returncode, done.stdout) == (0, "Fake GPU 0, 1 GB free\n")
