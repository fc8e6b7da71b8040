"""What the figures were measured on, and whether there is a GPU that works."""

import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch


def describe_environment() -> dict[str, str]:
    """Versions and hardware, all strings, for headers, benchmark files and evidence."""
    facts = {"python": platform.python_version()}
    for package in ("torch", "transformers", "triton", "safetensors"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "not installed"
    facts["cpu"] = f"{_cpu_name()}, {torch.get_num_threads()} threads"
    facts["driver"] = _driver() or "none"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
        facts["capability"] = f"sm_{properties.major}{properties.minor}"
        facts["cuda"] = str(torch.version.cuda)
    else:
        facts["gpu"] = "none"
    return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProblem:
    """Why no GPU can be used. `broken`: there is one, or its driver, and it does not work."""

    message: str
    broken: bool


def gpu_problem() -> GpuProblem | None:
    """None if a kernel runs on the first GPU; otherwise why not, naming driver and torch build."""
    driver, devices = _driver(), _devices()
    about = f"torch {torch.__version__} (CUDA {torch.version.cuda or 'none: a CPU build'}), driver {driver or 'not found'}"
    present = bool(driver or devices)
    try:
        if torch.cuda.is_available():
            present = True
            torch.ones(1, device="cuda").add_(1).item()
            return None
        # is_available hides the reason, init tells it
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "torch sees no GPU"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    seen = f"; the machine has {', '.join(devices)}" if devices else ""
    return GpuProblem(message=f"no usable GPU: {reason} [{about}{seen}]", broken=present)


def _devices() -> list[str]:
    return sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return None
    words = path.read_text().split()
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
