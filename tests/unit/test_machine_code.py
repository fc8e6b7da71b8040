"""The machine code of the Triton kernels at the 16B's shapes: as it must be, and red when it is not."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from dispatch.errors import BackendError
from dispatch.kernels.machine_code import SHARED_LIMIT, MachineCode, launches_of_the_16b

GOOD = MachineCode(
    kernel="linear, dense",
    capability=86,
    registers=48,
    spills=0,
    shared=24 * 1024,
    integer_mma=8,
    loads_16=16,
    loads_narrower=0,
    inexact=(),
)


def run(*arguments):
    # this process interprets kernels where there is no GPU; the compiler needs one that does not
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], env=settings, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_every_kernel_on_every_generation():
    code, table, errors = run("-m", "dispatch.kernels.machine_code")
    assert code == 0, errors
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 16 * len(SHARED_LIMIT)
    assert {row[1] for row in rows} == {"80", "86", "89", "90"}
    for kernel, sm, registers, spills, shared, mma, loads_16, narrower in rows:
        assert (int(spills), int(narrower)) == (0, 0), (kernel, sm)
        assert 0 < int(registers) <= 255
        assert float(shared) <= {"80": 163, "86": 99, "89": 99, "90": 227}[sm]
        multiplies = kernel.startswith(("gate_up", "linear"))
        assert (int(mma) > 0, int(loads_16) > 0) == (multiplies, multiplies), (kernel, sm)


# triton makes a constant of every number that is 1, which the interpreter does not
ODD = """
import torch
from dispatch.kernels import grouped_gemm, machine_code
from dispatch.quantization import Int8Weight

def empty(*size, dtype=torch.float16):
    return torch.empty(*size, dtype=dtype, device="meta")

def weight(*size):
    return Int8Weight(values=empty(*size, dtype=torch.int8), scales=empty(*size[:-1], dtype=torch.float32))

def layer(tokens, hidden, inner, experts, top_k):
    ids, routing = empty(tokens, top_k, dtype=torch.int64), empty(tokens, top_k)
    stacks = weight(experts, 2 * inner, hidden), weight(experts, hidden, inner)
    grouped_gemm.experts(empty(tokens, hidden), *stacks, ids, routing)
    grouped_gemm.linear(empty(tokens, hidden), weight(inner, hidden))
    grouped_gemm.integer_matmul(empty(tokens, hidden, dtype=torch.int16), weight(inner, hidden).values)

machine_code.TYPES |= {torch.float16: "*fp16"}
for sizes in ((1, 1, 1, 1, 1), (1, 33, 17, 5, 3), (1000, 100, 72, 256, 8)):
    for kernel, arguments in machine_code.launches(lambda: layer(*sizes)):
        print(machine_code.compile_for(kernel.__name__, kernel, arguments, 80))
for name, (kernel, arguments) in machine_code.launches_of_the_16b(tokens=1).items():
    assert not machine_code.compile_for(name, kernel, arguments, 90).problems()
"""


def test_sizes_of_every_kind_compile():
    code, found, errors = run("-c", ODD)
    assert code == 0, errors
    lines = found.splitlines()
    assert sum("_gate_up_silu" in line for line in lines) == 3
    assert all("inexact=()" in line for line in lines), found


FAULTS = {
    "one stage": ("grouped_gemm.TILE['num_stages'] = 1", "has 0 asynchronous loads of 16 bytes"),
    "wide tiles": (
        "grouped_gemm.TILE['BLOCK_N'] = 256; grouped_gemm.TILE['num_warps'] = 1",
        "instructions that spill registers",
    ),
    "many stages": ("grouped_gemm.TILE['num_stages'] = 12", "bytes of shared memory, expected at most 99 KiB"),
    "fused sums": ("grouped_gemm.NO_FMA['enable_fp_fusion'] = True", "has fma.rn.f32, which round otherwise"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_named(fault):
    plant, message = FAULTS[fault]
    code, _, errors = run(
        "-c",
        f"from dispatch.kernels import grouped_gemm, machine_code; {plant}; machine_code.SHARED_LIMIT = {{86: 99}}\n"
        "only = machine_code.launches_of_the_16b()['gate_up_silu']\n"
        "machine_code.launches_of_the_16b = lambda: {'gate_up_silu': only}\n"
        "raise SystemExit(machine_code.main())",
    )
    assert code == 1, errors
    assert re.search(rf"gate_up_silu on sm_86 .*{message}", errors), errors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spills": 3}, "linear, dense on sm_86 has 3 instructions that spill registers, expected none"),
        ({"shared": 99 * 1024 + 1}, "takes 101377 bytes of shared memory, expected at most 99 KiB"),
        ({"integer_mma": 0}, "has no integer tensor-core instruction"),
        ({"loads_16": 0}, "has 0 asynchronous loads of 16 bytes and 0 narrower ones"),
        ({"loads_narrower": 2}, "has 16 asynchronous loads of 16 bytes and 2 narrower ones"),
        ({"inexact": ("fma.rn.f32",)}, "has fma.rn.f32, which round otherwise than the reference"),
    ],
)
def test_problems(change, words):
    assert GOOD.problems() == []
    (problem,) = replace(GOOD, **change).problems()
    assert words in problem


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="nothing is interpreted here")
def test_in_the_interpreter_it_says_what_to_do():
    with pytest.raises(BackendError, match="TRITON_INTERPRET is set, so that nothing is compiled: unset it"):
        launches_of_the_16b()
