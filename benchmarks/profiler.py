"""Is a profile true? Counted against really saved bytes, and predicted against measured seconds, for twelve models:
``python -m benchmarks.profiler``.

Every model is small enough for a laptop's CPU; ``--device cuda`` measures on a GPU, and there also compares the peak
memory of a real training step with the prediction. Three times are compared, forward and backward:

    analytic    priced by the roofline of this device's own data sheet, nothing of the model having run
    by layer    the sum of the measured profile's layers
    measured    the whole model at once

A second table compares layers that are counted and priced by the device's measured curves with measured layers
(`benchmarks.profiler_curves`). With ``--json`` it prints one JSON object; ``--quick`` takes three models and little time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.profiler_curves import CASES, layers, summary
from benchmarks.profiler_curves import table as curves_table
from planner.cost import price
from planner.errors import PlannerError
from planner.profiler import count, measure
from planner.profiler.device_curves import device_curves
from planner.profiler.measure_device import device_spec
from planner.profiler.measure_timing import Mark, time_phases
from planner.profiler.models import ModelSource, load_model
from planner.profiler.sources import from_config
from planner.profiler.watch import saved_tensors
from planner.search import predict
from planner.spec import (
    Cluster,
    DeviceSpec,
    Job,
    ModelProfile,
    NodeGroup,
    PredictionLayout,
    read,
)
from planner.spec.profile import DataType, Measurement

WIDTH, LAYERS, VOCABULARY, TOKENS, MICRO_BATCH_SIZE = 128, 4, 1000, 128, 4
BUDGET_SECONDS, QUICK_SECONDS = 5.0, 0.5
"""For the timed runs of one model by layer, and of the whole."""
LAYERS_SECONDS = 12.0
"""For the timed runs of one model whose layers are priced by curves."""
QUICK = ("gpt2", "mlp", "convolutions")

LANGUAGE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
DECODER: dict[str, Any] = LANGUAGE | {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": WIDTH // 4,
    "max_position_embeddings": TOKENS,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": LANGUAGE
    | {
        "model_type": "gpt2",
        "n_layer": LAYERS,
        "n_head": 4,
        "n_embd": WIDTH,
        "n_positions": TOKENS,
    }
    | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "llama": DECODER | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen3": DECODER | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "mixtral": DECODER
    | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "bert": DECODER
    | {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": LANGUAGE
    | {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "decoder_start_token_id": 0,
    }
    | {
        "d_model": WIDTH,
        "d_kv": WIDTH // 4,
        "d_ff": 2 * WIDTH,
        "num_layers": LAYERS,
        "num_heads": 4,
    }
    | {"dropout_rate": 0.0},
    "vit": {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
    | {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "intermediate_size": 2 * WIDTH,
    }
    | {
        "image_size": 64,
        "patch_size": 8,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}
"""Small ones of these families, without dropout: with it, attention keeps more on a CPU than on what is counted for."""


def mlp() -> tuple[nn.Module, Tensor]:
    """A user's own chain of layers."""
    widths = (64, *(4 * WIDTH,) * 6, 10)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), torch.zeros(1, 64)


def convolutions() -> tuple[nn.Module, Tensor]:
    """A user's own classifier of small images."""
    channels = (3, 16, 32, 64)
    blocks: list[nn.Module] = [
        nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1),
            nn.BatchNorm2d(b),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        for a, b in itertools.pairwise(channels)
    ]
    return nn.Sequential(
        *blocks, nn.Sequential(nn.Flatten(), nn.Linear(64 * 16, 10))
    ), torch.zeros(1, 3, 32, 32)


class UNet(nn.Module):
    """Down, across and up again, with a long skip connection at every resolution (Ronneberger et al. 2015)."""

    def __init__(
        self, channels: Sequence[int] = (3, 16, 32, 64), classes: int = 8
    ) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(channels))
        self.down = nn.ModuleList(_double(a, b) for a, b in pairs)
        self.bottom = _double(channels[-1], 2 * channels[-1])
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * b, b, 2, stride=2) for _, b in reversed(pairs)
        )
        self.merge = nn.ModuleList(_double(2 * b, b) for _, b in reversed(pairs))
        self.head = nn.Conv2d(channels[1], classes, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, height, width) -> (batch, height, width, classes)."""
        skips = []
        for block in self.down:
            images = block(images)
            skips.append(images)
            images = self.pool(images)
        images = self.bottom(images)
        for up, merge in zip(self.up, self.merge, strict=True):
            images = merge(torch.cat([skips.pop(), up(images)], dim=1))
        output: Tensor = self.head(images)
        return output.permute(0, 2, 3, 1)


def _double(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.ReLU(),
    )


def u_net() -> tuple[nn.Module, Tensor]:
    """A user's own network with long skip connections."""
    return UNet(), torch.zeros(1, 3, 64, 64)


def sources() -> Mapping[str, Callable[[], ModelSource]]:
    """The twelve, by name: configurations, catalogue models, and a user's callables."""
    configured = {
        name: partial(from_config, name, dict(config), where=name)
        for name, config in CONFIGS.items()
    }
    catalogued = {name: partial(load_model, name) for name in ("resnet-50", "vgg16")}
    called = {
        each.__name__: partial(load_model, f"{__name__}:{each.__name__}")
        for each in (mlp, convolutions, u_net)
    }
    return configured | catalogued | called


@dataclass(frozen=True, slots=True)
class Row:
    """One model; seconds and bytes of one micro-batch."""

    model: str
    layers: int
    parameters: int
    counted_bytes: int
    """What autograd keeps, as counted on shapes; with what attention keeps beside, where this device has no fused
    kernel for it (a CPU with a trained bias)."""
    saved_bytes: int
    """What autograd kept of the whole model."""
    analytic_seconds: tuple[float, float]
    """Forward, backward."""
    by_layer_seconds: tuple[float, float]
    measured_seconds: tuple[float, float]
    predicted_peak_bytes: int | None = None
    """Of a training step with AdamW; on a GPU only."""
    measured_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A model that cannot be profiled, and why."""

    model: str
    reason: str


def compare(
    name: str, source: ModelSource, spec: DeviceSpec, device: str, budget_seconds: float
) -> Row:
    """Count, price and measure one model."""
    length = TOKENS if source.input_kind == "tokens" else 0
    sizes = (MICRO_BATCH_SIZE,)
    counted = count.profile(source, sequence_length=length, micro_batch_sizes=sizes)
    measured = measure.profile(
        source,
        device=device,
        sequence_lengths=(length,),
        micro_batch_sizes=sizes,
        time_budget_seconds=budget_seconds,
    )
    whole = Whole(source, length, torch.device(device))
    kept = whole.saved_bytes()
    timing = time_phases(whole.run, whole.device, limit_seconds=budget_seconds)
    on_gpu = whole.device.type == "cuda"
    return Row(
        model=name,
        layers=len(counted.layers),
        parameters=sum(
            parameter.numel() for parameter in source.blueprint.parameters()
        ),
        counted_bytes=sum(row.activation_bytes for row in plain_rows(measured)),
        saved_bytes=kept,
        analytic_seconds=seconds(price(counted, spec)),
        by_layer_seconds=seconds(measured),
        measured_seconds=(timing.median(itemgetter(0)), timing.median(itemgetter(1))),
        predicted_peak_bytes=predicted_peak_bytes(measured, length) if on_gpu else None,
        measured_peak_bytes=whole.peak_bytes() if on_gpu else None,
    )


def plain_rows(profile: ModelProfile) -> list[Measurement]:
    """One row per layer: without recomputation, of the one size that was asked for."""
    return [
        next(row for row in layer.measurements if row.recompute == "none")
        for layer in profile.layers
    ]


def seconds(profile: ModelProfile) -> tuple[float, float]:
    """Forward and backward of all layers."""
    rows = plain_rows(profile)
    backward = sum(
        (row.backward_input_seconds or 0.0) + (row.backward_weight_seconds or 0.0)
        for row in rows
    )
    return sum(row.forward_seconds or 0.0 for row in rows), backward


class Whole:
    """The whole model with its loss, on the device, in fp32."""

    def __init__(
        self, source: ModelSource, sequence_length: int, device: torch.device
    ) -> None:
        self.device = device
        self.model = (
            source.cut().stage(source.build(), 0, len(source.cut().layers)).to(device)
        )
        self.inputs = source.example_inputs(MICRO_BATCH_SIZE, sequence_length, device)
        shape = self.model(*self.inputs).shape
        self.targets = torch.randint(shape[-1], shape[:-1], device=device)

    def loss(self) -> Tensor:
        """Of one micro-batch, as the last layer's row has it: mean cross entropy in fp32."""
        output = self.model(*self.inputs)
        return cross_entropy(output.flatten(0, -2).float(), self.targets.flatten())

    def run(self, mark: Mark) -> None:
        """Forward and backward once."""
        mark()
        loss = self.loss()
        mark()
        loss.backward()  # type: ignore[no-untyped-call]
        mark()

    def saved_bytes(self) -> int:
        """What autograd keeps after the forward: every storage that lives, once, but for the model's own."""
        seen: list[weakref.ref[torch.UntypedStorage]] = []
        owned = {
            tensor.untyped_storage()._cdata
            for tensor in (*self.model.parameters(), *self.model.buffers())
        }
        owned.add(self.targets.untyped_storage()._cdata)
        with saved_tensors(
            lambda tensor: seen.append(weakref.ref(tensor.untyped_storage()))
        ):
            loss = self.loss()
        assert loss.requires_grad  # holds the graph, and with it what was saved
        alive = {
            storage._cdata: storage.nbytes()
            for reference in seen
            if (storage := reference()) is not None
        }
        return sum(size for key, size in alive.items() if key not in owned)

    def peak_bytes(self) -> int:
        """The GPU allocator's peak in a training step with AdamW, when gradients and states already exist."""
        optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats(self.device)
            optimizer.zero_grad(set_to_none=False)
            self.loss().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)


def predicted_peak_bytes(profile: ModelProfile, sequence_length: int) -> int:
    """The cost model's, without what the process reserves beside its tensors."""
    group = NodeGroup(
        device=profile.device_spec or profile.device, nodes=1, devices_per_node=1
    )
    job = Job(
        global_batch_size=MICRO_BATCH_SIZE,
        sequence_length=sequence_length,
        precision="fp32",
    )
    layout = PredictionLayout(micro_batch_size=MICRO_BATCH_SIZE)
    (row,) = predict(
        profile, Cluster(node_groups=(group,)), job, layout
    ).prediction.memory
    return row.peak_bytes - row.reserved_bytes


def rows(
    names: Sequence[str], device: str, budget_seconds: float
) -> Iterator[Row | Refused]:
    """One per model, as they come."""
    spec = device_spec(device)
    for name in names:
        try:
            yield compare(name, sources()[name](), spec, device, budget_seconds)
        except PlannerError as error:
            yield Refused(name, str(error).splitlines()[0])


def table(found: Sequence[Row | Refused]) -> Iterator[str]:
    """Markdown."""
    yield "| model | layers | parameters | counted | saved | counted / saved | analytic | by layer | measured |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for row in found:
        if isinstance(row, Refused):
            yield f"| {row.model} | {row.reason} | | | | | | | |"
            continue
        yield (
            f"| {row.model} | {row.layers} | {row.parameters / 1e6:.2f} M | {row.counted_bytes / 1e6:.3f} MB | "
            f"{row.saved_bytes / 1e6:.3f} MB | {row.counted_bytes / row.saved_bytes:.4f} | "
            f"{_milliseconds(row.analytic_seconds)} | {_milliseconds(row.by_layer_seconds)} | "
            f"{_milliseconds(row.measured_seconds)} |"
        )
    yield from _peaks(
        [row for row in found if isinstance(row, Row) and row.measured_peak_bytes]
    )


def _peaks(found: Sequence[Row]) -> Iterator[str]:
    if not found:
        return
    yield ""
    yield "| model | predicted peak | measured peak | error |"
    yield "|---|---:|---:|---:|"
    for row in found:
        assert row.predicted_peak_bytes is not None
        assert row.measured_peak_bytes is not None
        error = row.predicted_peak_bytes / row.measured_peak_bytes - 1
        yield (
            f"| {row.model} | {row.predicted_peak_bytes / 1e6:.1f} MB | {row.measured_peak_bytes / 1e6:.1f} MB | "
            f"{error:+.1%} |"
        )


def _milliseconds(pair: tuple[float, float]) -> str:
    return " + ".join(f"{1e3 * value:.2f}" for value in pair) + " ms"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, or one JSON object."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.profiler", description="Compare profiles with measurements."
    )
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument(
        "--part",
        choices=("models", "curves", "both"),
        default="both",
        help="models: counted and measured bytes and seconds; curves: counted layers "
        "priced by measured curves (default: both)",
    )
    parser.add_argument(
        "--models",
        type=lambda text: text.split(","),
        help=f"of {', '.join(sources())}; of the curves: {', '.join(CASES)}",
    )
    parser.add_argument(
        "--curves",
        metavar="DEVICE.json",
        help="device document of planner calibrate --device (default: measured now)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"models only: {', '.join(QUICK)}, with little time",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    chosen = parser.parse_args(arguments)
    part = "models" if chosen.quick else chosen.part
    known = {"models": set(sources()), "curves": set(CASES)}
    known["both"] = known["models"] | known["curves"]
    for name in chosen.models or ():
        if name not in known[part]:
            parser.error(f"no model {name!r}; there are {', '.join(known[part])}")
    result: dict[str, Any] = {"device": chosen.device}
    text: list[str] = []
    if part != "curves":
        names = _chosen(sources(), chosen.models or (QUICK if chosen.quick else None))
        budget = QUICK_SECONDS if chosen.quick else BUDGET_SECONDS
        found = list(rows(names, chosen.device, budget))
        result["models"] = [asdict(row) for row in found]
        text += [*table(found), ""]
    if part != "models":
        result["curves"], lines = _compare_curves(
            _chosen(CASES, chosen.models), chosen.device, chosen.curves
        )
        text += lines
    print(json.dumps(result) if chosen.json else "\n".join(text))


def _chosen(known: Mapping[str, Any], wanted: Sequence[str] | None) -> list[str]:
    return [name for name in known if wanted is None or name in wanted]


def _compare_curves(
    names: Sequence[str], device: str, path: str | None
) -> tuple[dict[str, Any], list[str]]:
    """Price counted layers by measured curves; return the figures, and the table."""
    spec = read(DeviceSpec, path) if path else device_curves(device)
    before = os.getloadavg()[0]
    dtype: DataType = "fp32" if device == "cpu" else "bf16"
    found = list(layers(names, spec, device, LAYERS_SECONDS, dtype))
    after = os.getloadavg()[0]
    figures = summary(found) | {"load_average": [before, after]}
    if spec.curves is not None:
        figures["environment"] = spec.curves.environment
    load = f"load average: {before:.1f} before the layers, {after:.1f} after"
    return figures, [*curves_table(found), "", load]


if __name__ == "__main__":
    main()
