"""Compiles `csrc/` into a shared library at first use and caches it.

The cache key covers sources, compiler, flags and CPU features, so a home directory shared by different
machines is safe. Of ranks that start together one builds under a file lock and the others wait; the library is
renamed to its place once it is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from megatron_tlt.distributed.processors import cpu_lines
from megatron_tlt.errors import BackendError
from megatron_tlt.observe.log import announced

SOURCE_DIR = Path(__file__).with_name("csrc")
FLAGS = ("-std=gnu99", "-O3", "-ffp-contract=off", "-pthread", "-shared", "-fPIC")
# The sources have forms for extensions of x86 only (csrc/simd.h), so elsewhere nothing is chosen by the processor.
OF_PROCESSOR = {"x86_64": ("-march=native",)}
BF16 = ("-DTLT_BF16",)  # options of the library that computes with bf16 numbers
COMPILERS = "gcc 9 or later, or clang"  # __builtin_convertvector
CACHE_VARIABLE = "MEGATRON_TLT_CACHE"


@cache
def find_compiler() -> str | None:
    """$CC if it is set, else cc, gcc or clang; None if there is none."""
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if found := shutil.which(name):
            return found
    return None


def missing_for_native() -> str | None:
    """What this machine lacks for the native decoder, in the words of a problem of `rollout.kernels`. None: nothing."""
    if find_compiler() is not None:
        return None
    needs = f"needs a C compiler ({COMPILERS}) on every node: no cc, gcc or clang on PATH"
    return f"{needs}; 'torch' does without, slower, and TLT on and off need not give the same bits then"


def missing_for_triton() -> str | None:
    """What this machine lacks of a C compiler and Python's headers, where Triton's `runtime/build.py` looks for them:
    it compiles the functions that launch its kernels and those of `torch.compile`. None: nothing.
    """
    names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    if not any(map(shutil.which, names)):
        return f"no {' or '.join(names)} on PATH"
    header = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
    return None if header.is_file() else f"no {header} (python3-dev)"


def flags() -> tuple[str, ...]:
    """Options of the compiler on this machine."""
    return FLAGS + OF_PROCESSOR.get(platform.machine(), ())


@cache
def library_path(options: tuple[str, ...] = ()) -> Path:
    """Path of the library compiled with `flags` and `options`, built now if it is not cached, which takes seconds.
    Raises BackendError if it cannot be built.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BackendError(
            f"no cc, gcc or clang on PATH: kernels=native needs a C compiler ({COMPILERS}), kernels=torch does without"
        )
    try:
        return _built(compiler, options, _cache_dir() / f"native-{_key(compiler, options)}.so")
    except OSError as error:  # a full disk or quota
        where = f"set {CACHE_VARIABLE} to a directory with room for it"
        raise BackendError(f"cannot build the native decoder: {error}; {where}") from error


def _built(compiler: str, options: tuple[str, ...], target: Path) -> Path:
    if target.exists():
        return target
    expected = "once on this machine, some seconds"
    with announced("compiling the native decoder", expected), open(target.with_suffix(".lock"), "w") as lock:
        with suppress(OSError):  # no locks on this file system: each rank builds, and renames the same library
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(compiler, options, target)
    return target


def _compile(compiler: str, options: tuple[str, ...], target: Path) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".so.tmp")
    os.close(handle)
    sources = sorted(str(p) for p in SOURCE_DIR.glob("*.c"))
    try:
        done = subprocess.run(
            [compiler, *flags(), *options, *sources, "-o", name, "-lm"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            can = f"{COMPILERS}, with an assembler of its time, can; kernels=torch does without"
            raise BackendError(f"{compiler} cannot build the native decoder ({can}):\n{done.stderr[-4000:]}")
        os.chmod(name, 0o755)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def _key(compiler: str, options: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCE_DIR.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest.update(repr((compiler, version, flags(), options, platform.machine(), _cpu_features())).encode())
    return digest.hexdigest()[:20]


def _cpu_features() -> str:
    lines = cpu_lines("flags", "Features", "model name", "cpu family", "model\t")
    return "\n".join(sorted(lines)) or platform.processor()


def _cache_dir() -> Path:
    """$MEGATRON_TLT_CACHE, else the user's cache directory, else a private one among the temporary files."""
    places = [Path(tempfile.gettempdir()) / f"megatron_tlt-{os.getuid()}"]
    if chosen := os.environ.get(CACHE_VARIABLE):
        places.insert(0, Path(chosen))
    else:
        with suppress(RuntimeError):  # a user without HOME, whom the system does not know
            home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            places.insert(0, Path(home) / "megatron_tlt")
    for directory in places:
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if os.access(directory, os.W_OK) and directory.stat().st_uid == os.getuid():
            return directory
    raise BackendError(f"no writable directory for the native decoder's cache: set {CACHE_VARIABLE}")
