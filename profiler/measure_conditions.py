"""Under which conditions a measurement was made: clocks, power and load before and after, for people to judge noise."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
from contextlib import suppress
from pathlib import Path

import torch

GPU_FIELDS = (
    "clocks.sm",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)
"""Of nvidia-smi: MHz, W and degrees Celsius."""
CLOCK_FOLDERS = "cpu[0-9]*/cpufreq/scaling_cur_freq"


def conditions(device: torch.device) -> dict[str, str]:
    """Clock, power and temperature of a GPU; clock and load average of a CPU. What this machine does not tell is left
    out."""
    return _gpu(device) if device.type == "cuda" else _cpu()


def compared(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """Both as one text per name, for a profile's environment."""
    names = [name for name in before if name in after]
    return {name: f"{before[name]} before, {after[name]} after" for name in names}


def _cpu() -> dict[str, str]:
    found = {}
    with suppress(OSError):
        found["load_average"] = f"{os.getloadavg()[0]:.2f}"
    clocks = _cpu_clocks_hertz()
    if clocks:
        found["clock"] = f"{statistics.mean(clocks) / 1e9:.2f} GHz"
    return found


def _cpu_clocks_hertz() -> list[float]:
    with suppress(OSError, ValueError):
        files = sorted(Path("/sys/devices/system/cpu").glob(CLOCK_FOLDERS))
        if files:
            return [1e3 * float(file.read_text(encoding="utf-8")) for file in files]
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return [
            1e6 * float(line.partition(":")[2])
            for line in lines
            if line.startswith("cpu MHz")
        ]
    return []


def _gpu(device: torch.device) -> dict[str, str]:
    """nvidia-smi, which comes with the driver, asked about the GPU by its unique name."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    command = [
        program,
        f"--id=GPU-{uuid}",
        f"--query-gpu={','.join(GPU_FIELDS)}",
        "--format=csv,noheader,nounits",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return parse_gpu(done.stdout) if done.returncode == 0 else {}


def parse_gpu(line: str) -> dict[str, str]:
    """One line of nvidia-smi with `GPU_FIELDS`, separated by commas.

    >>> parse_gpu("1980, 1980, 120.5, 700.0, 35")
    {'clock': '1980 of 1980 MHz', 'power': '120.5 of 700.0 W', 'temperature': '35 C'}
    """
    clock, most_clock, power, most_power, temperature = (
        part.strip() for part in line.split(",")
    )
    return {
        "clock": f"{clock} of {most_clock} MHz",
        "power": f"{power} of {most_power} W",
        "temperature": f"{temperature} C",
    }
