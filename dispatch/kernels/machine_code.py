"""What the Triton kernels become on each GPU generation, compiled ahead of time: `python -m dispatch.kernels.machine_code`.

Needs no GPU. Prints a table and what is wrong in it, and exits with 1 if anything is. The launches are the ones that
`grouped_gemm` and `decoder_triton` make at DeepSeek-MoE-16B's shapes, recorded on tensors without data.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from dispatch.errors import BackendError
from dispatch.kernels import decoder_triton, grouped_gemm
from dispatch.quantization import Int8Weight, SplitWeight

SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227}
"""Shared memory a block may have, in KiB, by compute capability (CUDA C programming guide, technical specifications)."""
TYPES = {torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCode:
    """One kernel on one compute capability. Loads: asynchronous copies from global to shared memory, by bytes a thread."""

    kernel: str
    capability: int
    registers: int
    spills: int
    shared: int
    integer_mma: int
    loads_16: int
    loads_narrower: int
    inexact: tuple[str, ...]

    def problems(self) -> list[str]:
        """What is not as the kernels are meant to be: sentences, empty if all is well."""
        where = f"{self.kernel} on sm_{self.capability}"
        found = []
        if self.spills:
            found.append(f"{where} has {self.spills} instructions that spill registers, expected none: smaller tiles")
        if self.shared > SHARED_LIMIT[self.capability] * 1024:
            found.append(
                f"{where} takes {self.shared} bytes of shared memory, expected at most "
                f"{SHARED_LIMIT[self.capability]} KiB: smaller tiles or fewer stages"
            )
        if self.inexact:
            found.append(f"{where} has {', '.join(self.inexact)}, which round otherwise than the reference")
        if "gate_up" in self.kernel or "linear" in self.kernel:
            if not self.integer_mma:
                found.append(f"{where} has no integer tensor-core instruction")
            if not self.loads_16 or self.loads_narrower:
                found.append(
                    f"{where} has {self.loads_16} asynchronous loads of 16 bytes and {self.loads_narrower} narrower "
                    "ones, expected 16 bytes alone"
                )
        return found


def launches(call: Callable[[], object]) -> list[tuple[Any, dict[str, Any]]]:
    """The kernels that `call` launches and their arguments by name, recorded instead of run."""
    recorded: list[tuple[Any, dict[str, Any]]] = []
    with _recording(recorded):
        call()
    return recorded


@contextmanager
def _recording(recorded: list[tuple[Any, dict[str, Any]]]) -> Iterator[None]:
    found = (*vars(grouped_gemm).values(), *vars(decoder_triton).values())
    kernels = {id(value): value for value in found if isinstance(value, triton.JITFunction)}.values()
    if not kernels:
        raise BackendError("TRITON_INTERPRET is set, so that nothing is compiled: unset it")
    for kernel in kernels:

        def record(*args: Any, kernel: Any = kernel, grid: Any, warmup: bool, **options: Any) -> None:
            recorded.append((kernel, {**dict(zip(kernel.arg_names, args, strict=False)), **options}))

        kernel.run = record
    try:
        yield
    finally:
        for kernel in kernels:
            del kernel.run


def launches_of_the_16b(tokens: int = 5) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Every different kernel of the engine over DeepSeek-MoE-16B, by a name that says what for."""

    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*size, dtype=dtype, device="meta")

    def weight(*size: int) -> Int8Weight:
        return Int8Weight(values=empty(*size, dtype=torch.int8), scales=empty(*size[:-1], dtype=torch.float32))

    def layer() -> Tensor:
        ids, routing = empty(tokens, 6, dtype=torch.int64), empty(tokens, 6)
        return grouped_gemm.experts(empty(tokens, 2048), weight(64, 2816, 2048), weight(64, 2048, 1408), ids, routing)

    def dense(columns: int) -> Tensor:
        return grouped_gemm.linear(empty(tokens, columns), weight(2048, columns))

    def attention() -> Tensor:
        keys, values = empty(16, 64, 128, 64), empty(16, 64, 64, 128)
        start, angles = empty(1, dtype=torch.int64), empty(4096, 64, dtype=torch.float32)
        q = decoder_triton.rotate_and_store(empty(tokens, 3 * 2048), angles, angles, start, keys, values)
        return decoder_triton.attention(q, keys, values, start, 128**-0.5)

    def router() -> Tensor:
        split = SplitWeight(values=empty(128, 2048, dtype=torch.int8), scales=empty(64, dtype=torch.float32))
        x = decoder_triton.rms_norm(empty(tokens, 2048), empty(2048), 1e-6)
        return decoder_triton.route(decoder_triton.linear16(x, split), 6, normalize=False)[1]

    def float_layer() -> Tensor:
        ids, routing = empty(tokens, 6, dtype=torch.int64), empty(tokens, 6, dtype=torch.float32)
        return decoder_triton.float_experts(empty(tokens, 2048), empty(64, 2816, 2048), empty(64, 2048, 1408), ids, routing)

    plan, rows, gate_up, inner, down, combine = launches(layer)
    rotate, attend, join = launches(attention)
    norm, _, scores, route = launches(router)
    return {
        "rms_norm": norm,
        "rotate_and_store": rotate,
        "attend": attend,
        "join_blocks": join,
        "linear, dense, bare sums (router)": scores,
        "route": route,
        "float product, grouped": launches(float_layer)[0],
        "float product, dense": launches(lambda: decoder_triton.float_linear(empty(tokens, 2048), empty(2048, 2048)))[0],
        "plan": plan,
        "quantize_rows, bf16": rows,
        "gate_up_silu": gate_up,
        "quantize_rows, fp32": inner,
        "linear, grouped (down)": down,
        "combine": combine,
        "linear, dense, K 2048": launches(lambda: dense(2048))[1],
        "linear, dense, K 10944": launches(lambda: dense(10944))[1],
    }


def compile_for(name: str, kernel: Any, arguments: dict[str, Any], capability: int) -> MachineCode:
    """Compiles one recorded launch, with the hints that triton's launcher would take from its arguments."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    hints: dict[tuple[int, ...], list[list[object]]] = {}
    options = {option: arguments[option] for option in OPTIONS if option in arguments}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        number = "fp32" if isinstance(value, float) else "i32"
        signature[parameter.name] = TYPES[value.dtype] if isinstance(value, Tensor) else number
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            hints[(index,)] = [["tt.divisibility", 16]]
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(ASTSource(kernel, signature, constants, hints), target=target, options=options)
    code: str = made.asm["sass"]
    return MachineCode(
        kernel=name,
        capability=capability,
        registers=_registers(next(path for file, path in made.metadata_group.items() if file.endswith(".cubin"))),
        spills=len(re.findall(r"\b(?:STL|LDL)\b", code)),
        shared=made.metadata.shared,
        integer_mma=len(re.findall(r"\b(?:IMMA|IGMMA)\b", code)),
        loads_16=len(re.findall(r"\bLDGSTS\S*\.128\b", code)),
        loads_narrower=len(re.findall(r"\bLDGSTS(?!\S*\.128\b)", code)),
        inexact=tuple(sorted(set(re.findall(r"\b(?:fma\S*f32|\S*\.ftz\S*|\S*\.approx\S*|div\.full\S*)", made.asm["ptx"])))),
    )


def _registers(cubin: str) -> int:
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    done = subprocess.run([str(tool), "--dump-resource-usage", cubin], capture_output=True, text=True, check=True)
    return int(re.findall(r"REG:(\d+)", done.stdout)[0])


def table(found: list[MachineCode]) -> list[str]:
    """Markdown, one line a kernel and compute capability."""
    lines = [
        "| kernel | sm | registers | spills | shared KiB | integer MMA | 16-byte loads | narrower |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for code in found:
        numbers = (
            code.registers,
            code.spills,
            f"{code.shared / 1024:.1f}",
            code.integer_mma,
            code.loads_16,
            code.loads_narrower,
        )
        lines.append(f"| {code.kernel} | {code.capability} | {' | '.join(map(str, numbers))} |")
    return lines


def main() -> int:
    found = [
        compile_for(name, kernel, arguments, capability)
        for name, (kernel, arguments) in launches_of_the_16b().items()
        for capability in SHARED_LIMIT
    ]
    print(f"triton {triton.__version__}", *table(found), sep="\n")
    problems = [problem for code in found for problem in code.problems()]
    print(*problems, sep="\n", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
