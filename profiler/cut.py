"""Cut a model into layers, and keep only a run of them: a stage.

A stage is made from the whole model by taking away what other stages own, so parameters keep the names they have in
the user's model: checkpoints and seeds agree whatever the split. This works on a meta model, so that a rank never holds
the parameters of another stage.

Any module can be cut (`planner.profiler.cut_graph`). Two common forms need no traced run, so that their stages are shorter: the
children of an `nn.Sequential` (as torchgpipe's GPipe takes it), and the blocks of a language model of transformers
(`planner.profiler.transformer_cut`). A model that nobody can cut is a single layer, and the cut says why.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from planner.errors import LayoutError, UnsupportedError
from planner.profiler.kinds import has_backward, name_kinds, signature
from planner.profiler.recompute import recompute as recompute_module
from planner.spec.profile import RecomputeMode, SharedParameters, SkipEdge
from planner.spec.recipes import factored_elements

Recompute = Mapping[int, RecomputeMode]
"""Mode by index of a layer; layers that are not named do not recompute."""
NO_RECOMPUTE: Recompute = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CutLayer:
    """The smallest unit that may be placed."""

    name: str
    kind: str
    """Layers of one kind have the same structure, shapes and input: they are counted and measured once."""
    modules: tuple[str, ...]
    """Qualified names in the user's model; everything below them belongs to the layer."""
    parameters: tuple[str, ...] = ()
    """Qualified names of parameters that the layer uses without their modules."""
    recomputable: bool = True
    """May keep only its input and run its forward again in the backward."""


Size = tuple[int, int]
"""Micro-batch size and sequence length."""
Tensors = tuple[Tensor, ...]
InputMaker = Callable[[int, int], Tensors]
"""(micro-batch size, sequence length) -> meta tensors that the model takes."""


@dataclass(frozen=True, slots=True)
class RealModel:
    """A model that may read values of its tensors."""

    build: Callable[[], nn.Module]
    """A new one, on the CPU."""
    inputs: InputMaker
    """As `InputMaker`, but with values."""


@dataclass(frozen=True, slots=True)
class Borders:
    """The tensors of one micro-batch at the borders of all layers, on meta; what carries gradients requires them."""

    crossing: tuple[Tensors, ...]
    """Before every layer and behind the last one: what stages hand on."""
    takes: tuple[Tensors, ...]
    """What every layer reads."""
    makes: tuple[Tensors, ...]
    """What every layer makes for later ones; the last one, what the model returns."""
    output_bytes: tuple[int, ...]
    """Of what every layer makes for the next one."""


class Chain(Protocol):
    """How the layers of a model are run by themselves."""

    keeps_tree: bool
    """Do stages keep the whole module tree, with stand-ins in it, so that the model's own initialisation works?"""

    def stage(self, model: nn.Module, start: int, stop: int) -> nn.Module:
        """Take all layers but start..stop (exclusive) out of the model, in place; forward of what is left."""

    def layer(self, model: nn.Module, index: int) -> nn.Module:
        """A stage of one layer, without what only passes through it."""

    def parts(
        self, stage: nn.Module, index: int, layer: CutLayer
    ) -> dict[str, nn.Module]:
        """The modules of a stage that run a layer, in order, by names that are the same in every stage."""

    def borders(self, model: nn.Module, inputs: InputMaker, size: Size) -> Borders:
        """Tensors at the borders of the layers of the whole model, which is on meta."""

    def readers(
        self, index: int, place: int, dtype: torch.dtype
    ) -> list[tuple[int, int]]:
        """(layer, place among what it takes) of all layers that read this tensor of what layer `index` makes."""

    def later_takers(
        self, index: int, place: int, dtype: torch.dtype
    ) -> list[tuple[int, int]]:
        """(layer, place among what it takes) of all layers behind `index` that take this tensor of what it takes."""

    def edges(self, sequence_length: int, dtype: torch.dtype) -> tuple[SkipEdge, ...]:
        """Tensors that layers take besides what the layer before made."""


class TensorChain:
    """Base of chains that hand on one tensor."""

    keeps_tree = False

    def layer(self, model: nn.Module, index: int) -> nn.Module:
        """Nothing passes through."""
        return self.stage(model, index, index + 1)

    def stage(self, model: nn.Module, start: int, stop: int) -> nn.Module:
        """See `Chain.stage`."""
        raise NotImplementedError

    def outputs(self, model: nn.Module, inputs: Tensor) -> Tensors:
        """The output of every layer of the whole model."""
        raise NotImplementedError

    def parts(
        self, stage: nn.Module, index: int, layer: CutLayer
    ) -> dict[str, nn.Module]:
        """The layer's own modules, those that are there."""
        held = dict(stage.named_modules())
        return {name: held[name] for name in layer.modules if name in held}

    def borders(self, model: nn.Module, inputs: InputMaker, size: Size) -> Borders:
        """One tensor at every border."""
        given = inputs(*size)
        outputs = (
            each.detach().requires_grad_(each.requires_grad)
            for each in self.outputs(model, given[0])
        )
        crossing = (given, *((output,) for output in outputs))
        return Borders(
            crossing,
            crossing[:-1],
            crossing[1:],
            tuple(output.nbytes for (output,) in crossing[1:]),
        )

    def readers(
        self, index: int, place: int, dtype: torch.dtype
    ) -> list[tuple[int, int]]:
        """The next layer."""
        return [(index + 1, 0)]

    def later_takers(
        self, index: int, place: int, dtype: torch.dtype
    ) -> list[tuple[int, int]]:
        """None: the tensor goes no further."""
        return []

    def edges(self, sequence_length: int, dtype: torch.dtype) -> tuple[SkipEdge, ...]:
        """None."""
        return ()


@dataclass(frozen=True, slots=True)
class LayerCut:
    """The layers of a model, in the order they run."""

    layers: tuple[CutLayer, ...]
    shared_parameters: tuple[SharedParameters, ...]
    chain: Chain = field(repr=False)
    reason: str = ""
    """Why the model is a single layer, when it could not be cut."""
    needs_values: bool = False
    """The model reads values of its tensors, so it cannot run on meta: it is counted on a real run on the CPU."""
    only_sequence: int = 0
    """Tokens per sample, of a model that does not run on fewer; 0: it does."""

    def stage(
        self,
        model: nn.Module,
        start: int,
        stop: int,
        *,
        recompute: Recompute = NO_RECOMPUTE,
    ) -> nn.Module:
        """The part of `model` that holds layers start..stop (exclusive). The model is used up: build one per stage.

        The stage's forward takes what crosses its first border: what the model takes (token ids, images) for the first
        layer; and returns what crosses its last one: logits for the last layer of all. Several tensors are taken as
        several arguments and returned as a tuple; what the stage does not need passes through it. A returned tensor is
        never a view, which torch.distributed.pipelining cannot detach in place.
        A shared parameter whose owner stands in another stage is kept as this stage's own copy, under its own name.

        Args:
            recompute: mode (`planner.profiler.recompute`) by index (of `layers`).

        Raises:
            LayoutError: no such range of layers, or a recomputed layer outside of it.
            UnsupportedError: a recomputed layer that cannot be.
        """
        self._check(start, stop, recompute)
        return self._recomputing(self.chain.stage(model, start, stop), recompute)

    def layer(
        self, model: nn.Module, index: int, *, recompute: RecomputeMode = "none"
    ) -> nn.Module:
        """One layer alone: its forward takes what the layer reads (`Borders.takes`) and returns what it makes.

        Raises:
            LayoutError, UnsupportedError: as `stage`.
        """
        self._check(index, index + 1, {index: recompute})
        return self._recomputing(self.chain.layer(model, index), {index: recompute})

    def first_of_kind(self) -> dict[str, int]:
        """Index of the first layer of every kind."""
        first: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            first.setdefault(layer.kind, index)
        return first

    def parts(self, stage: nn.Module, index: int) -> dict[str, nn.Module]:
        """The modules of a stage that run layer `index`, in order, by names that are the same in every stage: hooks
        before the first see the layer start, hooks after the last see it end."""
        return self.chain.parts(stage, index, self.layers[index])

    def _recomputing(self, stage: nn.Module, recompute: Recompute) -> nn.Module:
        for index, mode in recompute.items():
            for part in self.parts(stage, index).values():
                recompute_module(part, mode)
        return stage

    def _check(self, start: int, stop: int, recompute: Recompute) -> None:
        if not 0 <= start < stop <= len(self.layers):
            raise LayoutError(
                f"there is no stage of the layers {start} to {stop} (exclusive): the model has {len(self.layers)}.",
                field="stages",
                hint=f"give 0 <= start < stop <= {len(self.layers)}.",
            )
        for index, mode in recompute.items():
            if not start <= index < stop:
                raise LayoutError(
                    f"layer {index} is to be recomputed, but the stage holds the layers {start} to {stop} (exclusive).",
                    field="recompute",
                    hint="name only layers of the stage.",
                )
            if mode != "none" and not self.layers[index].recomputable:
                raise UnsupportedError(
                    f"layer {self.layers[index].name!r} cannot be recomputed.",
                    field="recompute",
                    hint="recompute other layers; those with a `full` row in the profile can be.",
                )


def cut_model(
    model: nn.Module,
    inputs: Tensor | InputMaker,
    *,
    keywords: tuple[str, ...] = (),
    starts: tuple[str, ...] = (),
    longest_sequence: int = 0,
    real: RealModel | None = None,
) -> LayerCut:
    """The layers of a model; a single one, with the reason, when it cannot be cut.

    Args:
        model: the model on the meta device; it is run, and must not be changed afterwards.
        inputs: makes meta tensors that the model takes, or one such tensor, the micro-batch in front.
        keywords: names of the inputs; empty: by place.
        starts: qualified names of modules before which a layer starts (``*`` for one component of a name); empty: the
            layers are found.
        longest_sequence: most tokens that the model takes; 0: any number.
        real: the same model with values, for one that does not run without.

    Raises:
        UnsupportedError: the model does not run on meta tensors, nor on real ones.
        UnknownNameError: a start that the model does not have.
    """
    _refuse_sparse(model)
    maker = _resized(inputs) if isinstance(inputs, Tensor) else inputs
    refusals: list[UnsupportedError] = []
    if not starts and not keywords and len(maker(1, SHORTEST)) == 1:
        try:
            simple = _cut_simply(model, maker(2, min(longest_sequence, 8) or 8)[0])
            if simple is not None:
                return simple
        except UnsupportedError as error:
            refusals.append(error)
    from planner.profiler.cut_graph import cut_graph

    try:
        return cut_graph(
            model,
            maker,
            keywords=keywords,
            starts=starts,
            longest_sequence=longest_sequence,
        )
    except UnsupportedError as error:
        refusals.append(error)
    from planner.profiler.cut_whole import cut_whole

    return cut_whole(model, maker, keywords, refusals, real, longest_sequence)


def _refuse_sparse(model: nn.Module) -> None:
    """Gradients are counted, added up and kept as dense tensors."""
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise UnsupportedError(
                f"{name or type(part).__name__!r} asks for sparse gradients.",
                field="model",
                hint="write sparse=False.",
            )


SHORTEST = 2
"""Tokens of the shortest example."""


def _resized(example: Tensor) -> InputMaker:
    def make(micro_batch_size: int, sequence_length: int) -> Tensors:
        is_sequence = example.dim() == 2 and not example.is_floating_point()
        rest = (sequence_length,) if is_sequence else tuple(example.shape[1:])
        return (example.new_empty((micro_batch_size, *rest)),)

    return make


def _cut_simply(model: nn.Module, inputs: Tensor) -> LayerCut | None:
    """The cut of a Sequential or language model; None for other models.

    Raises:
        UnsupportedError: it is no chain that hands on one tensor.
    """
    if isinstance(model, nn.Sequential):
        return (
            _cut_sequential(model, inputs)
            if _is_plain(model) and not _repeats_state(model)
            else None
        )
    if (
        hasattr(model, "base_model")
        and hasattr(model, "config")
        and not inputs.is_floating_point()
    ):
        from planner.profiler.transformer_cut import cut_transformer

        return cut_transformer(model, inputs)
    return None


def _is_plain(model: nn.Sequential) -> bool:
    """Does it do nothing but run its children?"""
    is_own = type(model).forward is not nn.Sequential.forward or "forward" in vars(
        model
    )
    return not is_own and not has_hooks(model)


def has_hooks(module: nn.Module) -> bool:
    """Is something called beside the module's own forward and backward?"""
    tables = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return any(tables)


def _repeats_state(model: nn.Sequential) -> bool:
    """Does a child with parameters or buffers stand at several places?"""
    repeated = (
        child for child in set(model) if sum(each is child for each in model) > 1
    )
    return any(child.state_dict() for child in repeated)


class SequentialStage(nn.Sequential):
    """Some children of an `nn.Sequential`, under their own names."""

    def forward(self, input: Tensor) -> Tensor:
        """Run the children one after the other."""
        return detachable(super().forward(input))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class SequentialChain(TensorChain):
    """Every child is a layer."""

    names: tuple[str, ...]

    def stage(self, model: nn.Module, start: int, stop: int) -> nn.Module:
        """A new container of the children start..stop. A child that stands at several places, which has no state then,
        becomes one of its own at each: hooks and recomputation are of one layer."""
        children: OrderedDict[str, nn.Module] = OrderedDict()
        for name in self.names[start:stop]:
            child = model.get_submodule(name)
            is_again = any(child is other for other in children.values())
            children[name] = copy.deepcopy(child) if is_again else child
        return SequentialStage(children)

    def outputs(self, model: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the children one by one."""
        outputs = []
        for name in self.names:
            given, version = inputs, getattr(inputs, "_version", 0)
            inputs = model.get_submodule(name)(inputs)
            if getattr(given, "_version", 0) != version:
                raise UnsupportedError(
                    f"layer {name!r} changes in place what it takes, so it cannot begin a stage.",
                    field="model",
                    hint="write inplace=False.",
                )
            outputs.append(inputs)
        return tuple(outputs)


def _cut_sequential(model: nn.Sequential, inputs: Tensor) -> LayerCut:
    names = tuple(
        model._modules
    )  # `named_children` leaves out children that stand at several places
    chain = SequentialChain(names)
    outputs = _chain_of_tensors(chain, model, inputs)
    signatures = [
        (
            signature(model.get_submodule(name)),
            tuple(given.shape),
            given.dtype,
            given.requires_grad,
            _place(index, len(names)),
        )
        for index, (name, given) in enumerate(
            zip(names, (inputs, *outputs), strict=False)
        )
    ]
    kinds = name_kinds(
        signatures, [type(model.get_submodule(name)).__name__ for name in names]
    )
    layers = tuple(
        # The loss belongs to the last layer and keeps its output, so recomputing that layer would save nothing.
        CutLayer(
            name,
            kind,
            (name,),
            recomputable=index < len(names) - 1
            and has_backward(model.get_submodule(name).parameters(), outputs[index]),
        )
        for index, (name, kind) in enumerate(zip(names, kinds, strict=True))
    )
    return LayerCut(layers, find_shared_parameters(model, layers), chain)


def _place(index: int, count: int) -> tuple[bool, bool]:
    """First and last layers cost more or less than their twins between: no input gradient, the loss."""
    return index == 0, index == count - 1


def _chain_of_tensors(
    chain: SequentialChain, model: nn.Module, inputs: Tensor
) -> tuple[Tensor, ...]:
    try:
        outputs = chain.outputs(model, inputs)
    except (
        RuntimeError,
        ValueError,
        TypeError,
        IndexError,
        NotImplementedError,
    ) as error:
        raise UnsupportedError(
            f"the model does not run on meta tensors of shape {tuple(inputs.shape)}: {str(error).splitlines()[0]}",
            field="model",
            hint="return example inputs that the model takes, and avoid operations that read values.",
        ) from error
    for name, output in zip(chain.names, outputs, strict=True):
        if not (isinstance(output, Tensor) and output.is_floating_point()):
            raise UnsupportedError(
                f"layer {name!r} returns no floating-point tensor, so it cannot end a stage.",
                field="model",
                hint="merge it with the next layer into one child of the nn.Sequential.",
            )
    return outputs


def find_shared_parameters(
    model: nn.Module, layers: Iterable[CutLayer]
) -> tuple[SharedParameters, ...]:
    """Parameters that modules of several layers hold, such as tied embeddings (Press and Wolf 2017)."""
    layer_of = {module: layer.name for layer in layers for module in layer.modules}
    names_by_parameter: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_parameter.setdefault(id(parameter), []).append(name)
    shared = []
    for names in names_by_parameter.values():
        users = tuple(dict.fromkeys(_owner(name, layer_of) for name in names))
        if len(users) > 1:
            shared.append(
                shared_parameters(names, users, model.get_parameter(names[0]))
            )
    return tuple(shared)


def tied_modules(models: Iterable[nn.Module]) -> set[str]:
    """Modules that share a parameter, within a model or between them."""
    users: dict[int, list[str]] = {}
    for model in models:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            users.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return {name for names in users.values() if len(names) > 1 for name in names}


def shared_parameters(
    names: Iterable[str], users: Iterable[str], parameter: nn.Parameter
) -> SharedParameters:
    """A parameter that several layers use."""
    return SharedParameters(
        names=tuple(names),
        layers=tuple(users),
        parameters=parameter.numel(),
        factored_elements=factored_elements(tuple(parameter.shape)),
        frozen=not parameter.requires_grad,
    )


def _owner(name: str, layer_of: dict[str, str]) -> str:
    """The layer that a qualified parameter name belongs to."""
    while name not in layer_of:
        name = name.rpartition(".")[0]
    return layer_of[name]


def detachable(output: Tensor) -> Tensor:
    """The tensor itself, or a contiguous copy when it is a view: schedules detach stage outputs in place, which views
    refuse, and send them, which takes contiguous tensors."""
    if output._is_view() or not output.is_contiguous():
        return output.clone(memory_format=torch.contiguous_format)
    return output
