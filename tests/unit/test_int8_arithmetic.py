"""The arithmetic of the int8 products: the reference against float64, the CPU backend against the reference, bit for bit."""

import subprocess
import sys
import warnings

import pytest
import torch
from int8_layers import in_float32, in_float64, layer, poison, rows_differ_with_company

from dispatch.errors import BackendError, InputError
from dispatch.kernels import cpu, reference
from dispatch.moe import kernels
from dispatch.quantization import Int8Weight, quantize

# hidden, intermediate, experts, top_k, tokens: tails of every kind, N > K and N < K, experts without tokens, one token in all
SHAPES = [
    (192, 96, 16, 4, 5),
    (33, 17, 5, 3, 9),
    (40, 72, 3, 2, 1),
    (64, 48, 16, 4, 64),
    (16, 256, 64, 6, 3),
    (100, 1, 2, 1, 4),
    (1, 7, 2, 2, 3),
    (2048, 1408, 7, 6, 2),
]


@pytest.fixture(params=[reference, cpu], ids=["reference", "cpu"])
def backend(request):
    return request.param


@pytest.fixture
def poisoned(monkeypatch):
    poison(monkeypatch)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_against_float64(backend, shape, poisoned):
    case = layer(*shape)
    found, expected = backend.experts(*case), in_float64(*case)
    # a row's step is 1 / 32639 of its largest value, its rounding 1/sqrt(12) of that; two roundings and the sum over K stay
    # well below 10 steps of relative error
    assert float((found - expected).norm() / expected.norm()) < 10 / 32639
    assert found.dtype == torch.float32


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cpu_gives_the_bits_of_the_reference(shape, poisoned):
    case = layer(*shape)
    assert torch.equal(cpu.experts(*case), reference.experts(*case))
    x, gate_up = case[:2]
    one = Int8Weight(values=gate_up.values[0].clone(), scales=gate_up.scales[0].clone())
    assert torch.equal(cpu.linear(x, one), reference.linear(x, one))
    rows, _ = reference.quantize_rows(x)
    assert torch.equal(cpu.integer_matmul(rows, one.values), reference.integer_matmul(rows, one.values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_and_out(dtype):
    x, *rest = layer(64, 48, 4, 2, 3)
    found = cpu.experts(x.to(dtype), *rest)
    assert found.dtype == dtype
    assert torch.equal(found, reference.experts(x.to(dtype), *rest))
    assert torch.equal(found, cpu.experts(x.to(dtype).float(), *rest).to(dtype))


def test_a_row_does_not_depend_on_its_company(backend):
    assert not rows_differ_with_company(backend.experts)


def test_float_sums_do_depend_on_it():
    # the positive control: the same comparison must find a difference here, or it finds nothing
    assert rows_differ_with_company(in_float32)


@pytest.mark.parametrize("planted", ["scales of expert 0", "gate and up swapped", "no routing weights", "one column off"])
def test_a_planted_fault_is_seen(planted):
    x, gate_up, down, ids, weights = layer(64, 48, 6, 3, 5)
    wrong = {
        "scales of expert 0": lambda: (
            x,
            Int8Weight(values=gate_up.values, scales=gate_up.scales[:1].expand(6, -1).contiguous()),
            down,
            ids,
            weights,
        ),
        "gate and up swapped": lambda: (
            x,
            Int8Weight(values=gate_up.values.roll(48, 1), scales=gate_up.scales.roll(48, 1)),
            down,
            ids,
            weights,
        ),
        "no routing weights": lambda: (x, gate_up, down, ids, torch.ones_like(weights)),
        "one column off": lambda: (x, Int8Weight(values=gate_up.values.roll(1, 2), scales=gate_up.scales), down, ids, weights),
    }[planted]()
    expected = in_float64(x, gate_up, down, ids, weights)
    assert float((cpu.experts(*wrong) - expected).norm() / expected.norm()) > 0.05


@pytest.mark.parametrize("k", [1, 15, 16, 17, 63, 64, 65, 4096, 4097, 10944, 16385, 100_003])
@pytest.mark.parametrize("m", [1, 4, 5])
def test_sums_are_exact_at_the_extremes(backend, k, m):
    rows = torch.full((m, k), 32767, dtype=torch.int16)
    values = torch.tensor([127, -127], dtype=torch.int8)[:, None].repeat(1, k)
    assert backend.integer_matmul(rows, values).tolist() == [[127 * 32767 * k, -127 * 32767 * k]] * m
    rows[:, 1::2] *= -1
    left = 127 * 32767 * (k % 2)
    assert backend.integer_matmul(rows, values).tolist() == [[left, -left]] * m


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_row_poisons_itself_alone(backend, bad):
    x, *rest = layer(64, 48, 6, 3, 5)
    clean = backend.experts(x, *rest)
    x[2, 7] = bad
    found = backend.experts(x, *rest)
    assert bool(found[2].isnan().all())
    assert torch.equal(found[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_rows_of_zeros_and_tiny_rows(backend):
    weight = quantize(torch.randn(5, 33))
    x = torch.randn(3, 33)
    x[1] = 0
    x[2] *= 1e-37
    found = backend.linear(x, weight)
    assert found[1].tolist() == [0.0] * 5
    assert bool(torch.isfinite(found).all())
    assert torch.equal(found, reference.linear(x, weight))


@pytest.mark.parametrize(
    ("row", "words"), [([0, 6, 1], r"\[0, 6, 1\]"), ([-1, 0, 1], r"\[-1, 0, 1\]"), ([3, 0, 3], r"\[3, 0, 3\]")]
)
def test_bad_expert_ids_are_refused(backend, row, words):
    x, gate_up, down, ids, weights = layer(64, 48, 6, 3, 5)
    ids[3] = torch.tensor(row)
    with pytest.raises(InputError, match=rf"token 3 is routed to experts {words}, expected different ids in \[0, 6\)"):
        backend.experts(x, gate_up, down, ids, weights)


def test_routing_of_another_shape_is_refused(backend):
    x, gate_up, down, ids, weights = layer(64, 48, 6, 3, 5)
    with pytest.raises(InputError, match=r"expected whole numbers \[5, k\] and weights of the same shape"):
        backend.experts(x, gate_up, down, ids[:4], weights[:4])


def test_no_tokens(backend):
    x, gate_up, down, ids, weights = layer(64, 48, 6, 3, 5)
    assert backend.experts(x[:0], gate_up, down, ids[:0], weights[:0]).shape == (0, 64)


def test_silu():
    x = torch.linspace(-80, 80, 200_001)
    expected = x.double() / (1 + torch.exp(-x.double()))
    # the series is off by half an fp32 step; one product, one sum and one division add a step each at most
    assert float(((reference.silu(x) - expected) / expected.where(expected != 0, 1)).abs().max()) < 4 * 2**-23
    assert reference.silu(torch.tensor([-1e30, -200.0, 200.0, 0.0])).tolist()[2:] == [200.0, 0.0]
    assert bool((reference.silu(torch.tensor([-1e3, -200.0])).abs() < 1e-30).all())
    assert bool(reference.silu(torch.tensor([torch.nan])).isnan())


def test_compiled_once_for_all_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("DISPATCH_CACHE", str(tmp_path))
    script = "from dispatch.kernels import cpu; cpu.library()"
    subprocess.run([sys.executable, "-c", script], check=True)
    (built,) = tmp_path.iterdir()
    made = built.stat().st_mtime_ns
    # the second process may ask the compiler for its version, and for nothing else
    (tmp_path / "only_version.py").write_text(
        "import subprocess\nrun = subprocess.run\n\ndef only_version(command, **options):\n"
        "    assert command[1:] == ['--version']\n    return run(command, **options)\n\nsubprocess.run = only_version\n"
        + script
    )
    subprocess.run([sys.executable, str(tmp_path / "only_version.py")], check=True)
    assert [path.stat().st_mtime_ns for path in tmp_path.glob("*.so")] == [made]


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    cpu.library.cache_clear()
    kernels.cache_clear()
    yield
    cpu.library.cache_clear()
    kernels.cache_clear()


def test_without_a_compiler_auto_falls_back_and_says_so(no_compiler):
    with pytest.warns(UserWarning, match="could not be built with 'no-such-compiler'.*Going on with the reference backend"):
        assert kernels("auto", "cpu") is reference
    with pytest.raises(BackendError, match="Install a C compiler"):
        cpu.library()


def test_backends_by_device():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels("auto", "cpu") is cpu
    assert kernels("reference", "cuda") is reference
    with pytest.raises(BackendError, match="the triton backend needs a GPU, the model is on cpu"):
        kernels("triton", "cpu")
    with pytest.raises(BackendError, match="the cpu backend needs a model on the CPU, it is on cuda"):
        kernels("cpu", "cuda")
