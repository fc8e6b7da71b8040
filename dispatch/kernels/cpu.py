"""The CPU backend: cpu.c and decoder.c, built once with the machine's C compiler, kept in a cache folder, called by ctypes."""

import ctypes
import hashlib
import os
import platform
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from dispatch.errors import BackendError
from dispatch.kernels.reference import check_routing, check_rows
from dispatch.quantization import Int8Weight

SOURCES = [Path(__file__).with_name(name) for name in ("cpu.c", "decoder.c")]
HEADER = Path(__file__).with_name("exact.h")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-fPIC", "-std=c11")


@cache
def library() -> ctypes.CDLL:
    """The compiled cpu.c, built on the first call on this machine. Raises BackendError with the compiler's words if that fails.

    $CC names the compiler (default cc), $DISPATCH_CACHE the folder for what it makes (default ~/.cache/dispatch).
    """
    compiler = os.environ.get("CC", "cc")
    folder = Path(os.environ.get("DISPATCH_CACHE") or Path.home() / ".cache" / "dispatch")
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        openmp = _openmp()
        texts = [path.read_text() for path in (*SOURCES, HEADER)]
        parts = (*texts, version, *FLAGS, openmp, platform.machine(), _cpu_flags())
        path = folder / f"cpu-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.so"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as work:
                objects = [str(Path(work, path.stem + ".o")) for path in SOURCES]
                built = Path(work, "cpu.so")
                commands = [[*FLAGS, "-c", str(path), "-o", made] for path, made in zip(SOURCES, objects, strict=True)]
                for command in (*commands, ["-shared", *objects, openmp, "-o", str(built)]):
                    subprocess.run([compiler, *command], capture_output=True, text=True, check=True)
                # other processes see the whole file or none
                built.replace(path)
        loaded = ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        words = getattr(error, "stderr", None) or str(error)
        raise BackendError(
            f"the CPU backend could not be built with {compiler!r} into {folder}: {words.strip()}. Install a C compiler with "
            "OpenMP (gcc), name one in $CC, or use backend='reference', which gives the same bits slowly"
        ) from error
    pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    for name, arguments in (
        ("integer_matmul", [pointer] * 2 + [number] * 3 + [pointer]),
        ("linear", [pointer] * 3 + [number] * 3 + [pointer] * 2),
        ("experts", [pointer] * 7 + [number] * 5 + [pointer] * 2),
        ("experts_scratch", [number] * 5),
        ("read_once", [pointer, number]),
        ("linear16", [pointer] * 3 + [number] * 3 + [pointer] * 2),
        ("float_linear", [pointer] * 2 + [number] * 4 + [pointer]),
        ("rms_norm", [pointer] * 2 + [real] + [number] * 2 + [pointer]),
        ("rotate_and_store", [pointer] * 4 + [number] * 6 + [pointer] * 3),
        ("attention", [pointer] * 4 + [number] * 6 + [real, pointer]),
        ("route", [pointer] + [number] * 4 + [pointer] * 2),
        ("float_experts_scratch", [number] * 4),
        ("float_experts", [pointer] * 5 + [number] * 5 + [pointer] * 2),
    ):
        function = getattr(loaded, name)
        function.argtypes = arguments
        function.restype = number
    return loaded


def integer_matmul(rows: Tensor, values: Tensor) -> Tensor:
    """int16 rows [M, K] times int8 values [N, K] -> int64 sums [M, N]."""
    out = torch.empty(len(rows), len(values), dtype=torch.int64)
    rows, values = rows.contiguous(), values.contiguous()
    library().integer_matmul(rows.data_ptr(), values.data_ptr(), *out.shape, rows.shape[1], out.data_ptr())
    return out


def linear(x: Tensor, weight: Int8Weight) -> Tensor:
    """Rows x [M, K] times weight [N, K] -> [M, N] in x's dtype, as `reference.linear`."""
    return linear_of(x, weight.values, weight.scales)


def linear_of(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """`linear` without the wrapping: values [N, K] int8 and scales [N] float32, contiguous."""
    check_rows(x, values.shape[1])
    rows = x.float().contiguous()
    (m, k), n = rows.shape, len(values)
    out = torch.empty(m, n)
    scratch = torch.empty(m * (2 * k + 4), dtype=torch.uint8)
    library().linear(rows.data_ptr(), values.data_ptr(), scales.data_ptr(), m, n, k, out.data_ptr(), scratch.data_ptr())
    return out.to(x.dtype)


def experts(x: Tensor, gate_up: Int8Weight, down: Int8Weight, ids: Tensor, weights: Tensor) -> Tensor:
    """Every token through its experts, as `reference.experts`, the routing plan included. Raises InputError for bad ids."""
    check_rows(x, gate_up.values.shape[2])
    rows, routing, chosen = x.float().contiguous(), weights.float().contiguous(), ids.long().contiguous()
    (tokens, hidden), (count, _, intermediate) = rows.shape, down.values.shape
    if chosen.shape != routing.shape or chosen.dim() != 2 or len(chosen) != tokens:
        check_routing(ids, weights, tokens, count)
    sizes = (tokens, hidden, intermediate, count, chosen.shape[1])
    out = torch.empty(tokens, hidden)
    scratch = torch.empty(library().experts_scratch(*sizes), dtype=torch.uint8)
    bad = library().experts(
        rows.data_ptr(),
        gate_up.values.data_ptr(),
        gate_up.scales.data_ptr(),
        down.values.data_ptr(),
        down.scales.data_ptr(),
        chosen.data_ptr(),
        routing.data_ptr(),
        *sizes,
        out.data_ptr(),
        scratch.data_ptr(),
    )
    if bad:
        check_routing(ids, weights, tokens, count)
    return out.to(x.dtype)


def read_once(data: Tensor) -> None:
    """Reads a tensor from memory with all threads: the yardstick for the rate at which weights are read."""
    library().read_once(data.data_ptr(), data.nbytes)


def _openmp() -> str:
    """The OpenMP that torch runs on, so that both share one pool: two pools spin against each other for the cores."""
    maps = Path("/proc/self/maps")
    loaded = re.findall(r"\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*", maps.read_text()) if maps.exists() else []
    return loaded[0] if loaded else "-fopenmp"


def _cpu_flags() -> str:
    """What -march=native depends on: a cache folder may be shared between machines."""
    info = Path("/proc/cpuinfo")
    return (
        next((line for line in info.read_text().splitlines() if line.startswith(("flags", "Features"))), "")
        if info.exists()
        else ""
    )
