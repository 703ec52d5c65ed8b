"""Wrong inputs: each is refused with its type, the field that is wrong, and an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.support import Command

SHORT = ("--devices", "8xh100-sxm5-80gb", "--batch", "8", "--sequence", "1024")
MODEL = "llama-3.1-8b"
UNKNOWN = "/problems/unknown-name"
DOCUMENT = "/problems/invalid-document"
USAGE = "/problems/invalid-request"
LAYOUT = "/problems/impossible-layout"


@pytest.fixture
def documents(tmp_path: Path) -> dict[str, Path]:
    """Documents with one mistake each, by name."""
    texts = {
        "job.yaml": "global_batch_size: 8\nsequence_length: 1024\n",
        "broken.yaml": "global_batch_size: 8\n  sequence_length: [1\n",
        "broken.toml": "global_batch_size = \n",
        "broken.json": '{"global_batch_size": 8,\n}',
        "misspelled.yaml": "global_batch_size: 8\nsequence_lenght: 1024\n",
        "negative.yaml": "global_batch_size: -8\n",
        "constraint.yaml": "global_batch_size: 8\nconstraints: {tensor: 2}\n",
        "runtime.yaml": "global_batch_size: 8\nruntime: megatron\n",
        "cluster.yaml": "node_groups: [{device: h1000, nodes: 1, devices_per_node: 8}]\n",
        "empty.yaml": "",
        "list.json": "[]",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return {name: tmp_path / name for name in texts}


CASES: list[tuple[str, str, str, str]] = [
    # words, type of the problem, its field, a word of the hint
    (f"plan llama3-70b {' '.join(SHORT)}", UNKNOWN, "MODEL", "llama-3.1-70b"),
    (f"plan {MODEL} {' '.join(SHORT)} --fix tp=3", LAYOUT, "--fix tensor_parallel_degree=3", "tp="),
    ("export job.yaml --to torchrun", DOCUMENT, "job.yaml", "planner plan"),
    ("paln", UNKNOWN, "", "plan"),
    (f"plan {MODEL} --job broken.yaml --devices 8xh100-sxm5-80gb", DOCUMENT, "broken.yaml", "line"),
    # and our own
    (f"plan {MODEL} --devics 8xh100-sxm5-80gb", USAGE, "planner plan", "--devices"),
    (f"plan {MODEL} --devices 8xh100 --batch 8", UNKNOWN, "--devices", "h100-sxm5-80gb"),
    (f"plan {MODEL} --devices h100-sxm5-80gb --batch 8", DOCUMENT, "--devices", "8xh100-sxm5-80gb"),
    (f"plan {MODEL} --devices 60xh100-sxm5-80gb --batch 8", DOCUMENT, "--devices", "56 or 64"),
    (f"plan {MODEL} --devices 8xh100-sxm5-80gb", DOCUMENT, "--batch", "--batch 128"),
    (f"plan {MODEL} --devices 8xh100-sxm5-80gb --batch 0", DOCUMENT, "--batch", "1 or more"),
    (f"plan {MODEL} --devices 8xh100-sxm5-80gb --batch 8", DOCUMENT, "--sequence", "tokens"),
    (f"plan {MODEL} {' '.join(SHORT)} --runtime megatron-cor", UNKNOWN, "--runtime", "megatron-core"),
    (f"plan {MODEL} {' '.join(SHORT)} --precision bf17", DOCUMENT, "--precision", "bf16"),
    (f"plan {MODEL} {' '.join(SHORT)} --optimizer adamv", DOCUMENT, "--optimizer", "adamw"),
    (f"plan {MODEL} {' '.join(SHORT)} --fix tpp=2", UNKNOWN, "--fix", "tensor_parallel_degree"),
    (f"plan {MODEL} {' '.join(SHORT)} --fix tp", DOCUMENT, "--fix tensor_parallel_degree", "=VALUE"),
    (f"plan {MODEL} {' '.join(SHORT)} --fix schedule=1f1c", UNKNOWN, "schedule", "1f1b"),
    (f"plan {MODEL} {' '.join(SHORT)} --time-limit 1m", DOCUMENT, "--time-limit", "seconds"),
    (f"plan {MODEL} {' '.join(SHORT)} --cluster cluster.yaml", DOCUMENT, "--devices", "--cluster"),
    (f"plan {MODEL} {' '.join(SHORT)} -o missing/plan.json", DOCUMENT, "missing/plan.json", "create"),
    (f"plan {' '.join(SHORT)}", DOCUMENT, "--model", "MODEL"),
    (f"plan {MODEL} --batch 8 --sequence 8 --cluster cluster.yaml", UNKNOWN, "device", "planner devices"),
    (f"plan {MODEL} --devices 8xh100-sxm5-80gb --job broken.toml", DOCUMENT, "broken.toml", "line"),
    (f"plan {MODEL} --devices 8xh100-sxm5-80gb --job broken.json", DOCUMENT, "broken.json", "line"),
    (f"plan {MODEL} --devices 8xh100-sxm5-80gb --job misspelled.yaml", DOCUMENT, "sequence_lenght", "sequence_length"),
    (f"plan {MODEL} --devices 8xh100-sxm5-80gb --job negative.yaml", DOCUMENT, "global_batch_size", "1"),
    (f"plan {MODEL} --devices 8xh100-sxm5-80gb --job constraint.yaml", DOCUMENT, "constraint.yaml", "tensor_parallel_degree"),
    (f"predict {MODEL} {' '.join(SHORT)}", USAGE, "--layout", "--help"),
    (f"predict {MODEL} {' '.join(SHORT)} --layout tp=2 pp=3", LAYOUT, "layout", "8"),
    (f"predict {MODEL} {' '.join(SHORT)} --layout tp=2 tp=4", DOCUMENT, "--layout tensor_parallel_degree", "once"),
    (f"predict {MODEL} {' '.join(SHORT)} --layout tensor=2", UNKNOWN, "--layout", "tensor_parallel_degree"),
    ("check list.json", DOCUMENT, "list.json", ""),
    ("check missing.json", DOCUMENT, "missing.json", "list.json"),
    ("timeline job.yaml", DOCUMENT, "job.yaml", "plan.json"),
    ("export --to megatron", UNKNOWN, "", "megatron-lm"),
    ("devices h100", UNKNOWN, "", "h100-sxm5-80gb"),
    ("schema plam", UNKNOWN, "", "plan"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "kind", "field", "hint"), CASES, ids=[case[0] for case in CASES]
)
def test_wrong_inputs(
    planner: Command,
    documents: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    kind: str,
    field: str,
    hint: str,
) -> None:
    """The exit code is 2, stdout is empty, and the problem has type, field and hint."""
    monkeypatch.chdir(next(iter(documents.values())).parent)
    ended = planner(*words.split(), "--json")
    assert (ended.code, ended.out) == (2, "")
    problem = json.loads(ended.err)
    assert problem["type"] == kind
    assert any(field in entry["field"] for entry in problem["errors"])
    assert any(hint in entry["hint"] for entry in problem["errors"])


@pytest.mark.parametrize("name", ["broken.yaml", "broken.toml", "broken.json"])
def test_syntax_errors_name_file_and_line(
    planner: Command, documents: dict[str, Path], name: str
) -> None:
    """A document that is not valid YAML, TOML or JSON is reported with its file and line."""
    ended = planner(
        "plan", MODEL, "--devices", "8xh100-sxm5-80gb", "--job", documents[name]
    )
    assert ended.code == 2
    assert str(documents[name]) in ended.err
    assert "line" in ended.err
    assert "<unicode string>" not in ended.err


def test_an_error_is_two_lines(planner: Command) -> None:
    """`error:` says what is wrong with which value, `hint:` one action."""
    lines = planner("plan", "llama3-70b", *SHORT).err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")


def test_no_gpu_is_wrong_usage(
    planner: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --devices and without a GPU the exit code is 2, with a hint for --devices."""
    monkeypatch.setenv("PATH", "")
    ended = planner("plan", MODEL, "--batch", "8", "--sequence", "1024")
    assert (ended.code, ended.out) == (2, "")
    assert "error: --devices: " in ended.err
    assert "--devices 64xh100-sxm5-80gb" in ended.err


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["NVIDIA H100 80GB HBM3, 81559"] * 8, "8xh100-sxm5-80gb"),
        (["NVIDIA A100-SXM4-40GB, 40960"] * 4, "4xa100-sxm4-40gb"),
        (["NVIDIA GeForce GT 710, 2048"], None),
        (["NVIDIA H100 80GB HBM3, [N/A]"], None),
        (["NVIDIA H100 80GB HBM3, 81559", "NVIDIA A100-SXM4-40GB, 40960"], None),
    ],
)
def test_this_machines_gpus(
    planner: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    lines: list[str],
    expected: str | None,
) -> None:
    """Without --devices, the GPUs that nvidia-smi lists are planned for, if they are one known device."""
    listing = "\\n".join(lines)
    script = tmp_path / "nvidia-smi"
    script.write_text(f'#!/bin/sh\nprintf "{listing}\\n"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    words = ("init", MODEL, "--batch", "8", "--sequence", "1024")
    ended = planner(*words, "--directory", tmp_path / "out")
    if expected is None:
        assert ended.code == 2
        assert "--devices" in ended.err
    else:
        assert ended.code == 0
        assert f"name: {expected}" in (tmp_path / "out" / "cluster.yaml").read_text()


def test_planning_needs_no_torch(tmp_path: Path) -> None:
    """Planning for a catalogue model, and a misspelled one, work where torch cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    for model, code in ((MODEL, 0), ("llama3-70b", 2)):
        command = [sys.executable, "-m", "planner", "plan", model, *SHORT]
        ended = subprocess.run(
            [*command, "--fix", "tp=8", "--top", "0"],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == code, ended.stderr
        assert "torch" not in ended.stderr
