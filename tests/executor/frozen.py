"""Models with frozen parameters: adapters by hand, and frozen first layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.executor.plans import GPT2_STILL, LLAMA, MIXTRAL

RANK = 4


class Adapted(nn.Module):
    """A linear layer with an adapter beside it (Hu et al. 2021, "LoRA", section 4.1)."""

    def __init__(self, base: nn.Linear, rank: int = RANK) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """W x + B A x."""
        made: Tensor = self.base(input) + self.up(self.down(input))
        return made


def adapt(model: nn.Module, *names: str) -> nn.Module:
    """Freeze a model, in place, and put adapters beside the linear layers of these names."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(parent, name, Adapted(child))
    return model


def _transformer(settings: dict[str, object], *, tied: bool = False) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    data = {key: value for key, value in settings.items() if key != "model_type"}
    config = AutoConfig.for_model(
        settings["model_type"], **data, tie_word_embeddings=tied
    )
    config.use_cache = False
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa"
    ).train()
    return model


def adapted_llama() -> nn.Module:
    """Adapters in every block of a frozen model."""
    return adapt(_transformer(LLAMA), "q_proj", "v_proj")


def adapted_tied_llama() -> nn.Module:
    """Likewise, embedding and head being one frozen matrix."""
    return adapt(_transformer(LLAMA, tied=True), "q_proj", "v_proj")


def adapted_mixtral() -> nn.Module:
    """Adapters in the attention of a mixture whose experts are frozen."""
    return adapt(_transformer(MIXTRAL), "q_proj", "v_proj")


def top_of_llama() -> nn.Module:
    """The last two blocks, the norm and the head are trained."""
    model = _transformer(LLAMA)
    model.model.embed_tokens.requires_grad_(False)  # type: ignore[union-attr, operator]
    model.model.layers[:2].requires_grad_(False)  # type: ignore[union-attr, index]
    return model


def norms_of_gpt2() -> nn.Module:
    """Nothing but norms is trained; embedding and head are one frozen matrix."""
    model = _transformer(GPT2_STILL, tied=True).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(True)
    return model


def frozen_mlp() -> nn.Module:
    """Two frozen layers before trained ones, and a frozen one among these."""
    model = nn.Sequential(
        nn.Linear(8, 32),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 5),
    )
    for place in (0, 2):
        model[place].requires_grad_(False)
    return model


class Two(nn.Module):
    """A frozen encoder, whose features a trained decoder reads beside the input's own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)
        )
        self.decoder = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(32, 4)
        self.encoder.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, 16) -> (samples, 4)."""
        hidden = inputs
        for layer in self.encoder:
            hidden = layer(hidden)
        hidden = torch.cat((hidden, inputs), -1)
        for layer in self.decoder:
            hidden = hidden + layer(hidden)
        made: Tensor = self.head(hidden)
        return made


def frozen_encoder() -> tuple[nn.Module, Tensor]:
    """A model that is cut by its traced run."""
    return Two(), torch.empty(2, 16)


def all_frozen() -> nn.Module:
    """Nothing is trained."""
    return frozen_mlp().requires_grad_(False)
