"""Every counted figure is a polynomial in micro-batch size b and sequence length s, found exactly from a few counts.

    p(b, s) = c0 + c1 b + c2 s + c3 b s + c4 s^2 + c5 b s^2                                                         (1)

because kernels work sample by sample (linear in b), and token by token except for attention (at most quadratic in s);
terms without b are those of weights and of tables that samples share. A maximum over time is no polynomial, so
`LayerCount` carries its candidates, each of which is one: the greatest is taken after evaluation.

A single sample may run other kernels than several (no copy to bring samples together, no sum over what is broadcast).
Where it does, it has polynomials of its own, in s alone: c0 + c2 s + c4 s^2.

Coefficients are whole numbers, stored without trailing zeros. Models without a sequence have s = 0: c0 + c1 b is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Any, Literal

from planner.profiler.quantities import (
    Exchange,
    GradientName,
    GroupName,
    Kernel,
    KernelKind,
    LayerCount,
)
from planner.profiler.splits import Split
from planner.spec import profile as spec_profile
from planner.spec.profile import (
    CollectiveName,
    CollectivePolynomial,
    CountPolynomials,
    KernelPolynomials,
    LayerPolynomials,
    terms_of,
)

Size = tuple[int, int]
"""Micro-batch size and sequence length."""
Polynomial = tuple[int, ...]

SCALARS = (
    "forward_flops",
    "backward_input_flops",
    "backward_weight_flops",
    "input_bytes",
    "output_bytes",
    "backward_bytes",
    "local_parameters",
    "local_matrix_elements",
    "local_muon_flops",
    "local_factored_elements",
)
SPLIT_SCALARS = (
    "local_expert_parameters",
    "local_frozen_parameters",
    "local_frozen_expert_parameters",
)
"""Stored only where a split, or frozen parameters, make them other than zero."""
MODE_SCALARS = ("kept_bytes", "recompute_flops")
KERNEL_FIGURES = ("flops", "bytes", "m", "n", "k", "batch")
FIGURES = len(KERNEL_FIGURES)


def basis(size: Size) -> tuple[int, ...]:
    """The six terms of equation (1); the two that are left without a sequence."""
    samples, tokens = size
    terms = terms_of(samples, tokens)
    return terms if tokens else terms[:2]


def evaluate(polynomial: Sequence[int], size: Size) -> int:
    """Equation (1)."""
    return spec_profile.evaluate(polynomial, basis(size))


def fit(values: Mapping[Size, int]) -> Polynomial:
    """The polynomial through these values: the first sizes, as many as there are terms, determine it.

    Raises:
        ArithmeticError: no polynomial of the form (1) with whole coefficients takes these values.
    """
    sizes = tuple(values)
    terms = _terms(sizes)
    known = list(values.values())[: len(terms)]
    rows = _inverse(sizes[: len(terms)], terms)
    found = [0] * (terms[-1] + 1)
    for term, row in zip(terms, rows, strict=True):
        found[term] = int(
            sum((c * value for c, value in zip(row, known, strict=True)), Fraction())
        )
    if any(evaluate(found, size) != value for size, value in values.items()):
        raise ArithmeticError(
            f"no polynomial with whole coefficients takes the values {dict(values)}"
        )
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)


def _terms(sizes: tuple[Size, ...]) -> tuple[int, ...]:
    """Which terms of the basis the sizes tell apart: for one sample alone, those without b."""
    terms = range(len(basis(sizes[0])))
    return tuple(terms[::2] if all(samples == 1 for samples, _ in sizes) else terms)


@cache
def _inverse(
    sizes: tuple[Size, ...], terms: tuple[int, ...]
) -> tuple[tuple[Fraction, ...], ...]:
    """Inverse of the matrix of these terms of the basis vectors, by Gauss-Jordan elimination over the rationals."""
    width = len(sizes)
    rows = [[Fraction(basis(size)[term]) for term in terms] for size in sizes]
    rows = [
        row + [Fraction(int(i == j)) for j in range(width)]
        for i, row in enumerate(rows)
    ]
    for column in range(width):
        pivot = next((i for i in range(column, width) if rows[i][column]), None)
        if pivot is None:
            raise ArithmeticError(f"the sizes {sizes} do not determine a polynomial")
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [value / rows[column][column] for value in rows[column]]
        for i in range(width):
            if i != column:
                rows[i] = [
                    a - rows[i][column] * b
                    for a, b in zip(rows[i], rows[column], strict=True)
                ]
    return tuple(tuple(row[width:]) for row in rows)


def fit_layer(counts: Mapping[Size, LayerCount]) -> dict[str, Any]:
    """Polynomials of everything in these counts of one layer at several sizes, as plain data.

    Raises:
        ArithmeticError: something is no polynomial, or the layer runs other kernels at other sizes.
    """
    _check_same_shape(counts)
    columns = {size: _flatten(count) for size, count in counts.items()}
    names = next(iter(columns.values()))
    fitted = {
        name: fit({size: values[name] for size, values in columns.items()})
        for name in names
    }
    first = next(iter(counts.values()))
    return {
        **{name: fitted[name, 0, name] for name in SCALARS},
        **{
            name: fitted[name, 0, name]
            for name in SPLIT_SCALARS
            if fitted[name, 0, name]
        },
        "modes": {
            name: {
                **{figure: fitted[name, 0, figure] for figure in MODE_SCALARS},
                "temporaries": undominated(
                    fitted[name, i, "temporaries"] for i in range(len(mode.temporaries))
                ),
                "recomputed": mode.recomputed,
            }
            for name, mode in first.modes.items()
        },
        "kernels": [
            (
                each.kind,
                *(fitted["kernels", i, figure] for figure in KERNEL_FIGURES),
                *_gradients(each),
            )
            for i, each in enumerate(first.kernels)
        ],
        "exchanges": [
            (each.phase, each.operation, fitted["exchanges", i, "bytes"], *_group(each))
            for i, each in enumerate(first.exchanges)
        ],
    }


def _group(exchange: Exchange) -> tuple[GroupName, ...]:
    """Stored where it is not the tensor-parallel group."""
    return () if exchange.group == "tensor" else (exchange.group,)


def _gradients(kernel: Kernel) -> tuple[GradientName | bool | None, ...]:
    """Gradients, and whether a product is a linear layer's; stored where they are known."""
    if kernel.is_linear is not None:
        return kernel.gradients, kernel.is_linear
    return () if kernel.gradients is None else (kernel.gradients,)


def _flatten(count: LayerCount) -> dict[tuple[str, int, str], int]:
    """Every number of a count under (field, index, figure)."""
    numbers: dict[tuple[str, int, str], int] = {
        (name, 0, name): getattr(count, name) for name in (*SCALARS, *SPLIT_SCALARS)
    }
    for name, mode in count.modes.items():
        numbers |= {(name, 0, figure): getattr(mode, figure) for figure in MODE_SCALARS}
        numbers |= {
            (name, i, "temporaries"): value for i, value in enumerate(mode.temporaries)
        }
    for i, kernel in enumerate(count.kernels):
        numbers |= {
            ("kernels", i, figure): getattr(kernel, figure) for figure in KERNEL_FIGURES
        }
    return numbers | {
        ("exchanges", i, "bytes"): each.bytes for i, each in enumerate(count.exchanges)
    }


def _check_same_shape(counts: Mapping[Size, LayerCount]) -> None:
    shapes = {
        (
            tuple(
                (kernel.kind, kernel.gradients, kernel.is_linear)
                for kernel in count.kernels
            ),
            tuple((each.phase, each.operation, each.group) for each in count.exchanges),
            tuple(
                (name, len(mode.temporaries), mode.recomputed)
                for name, mode in count.modes.items()
            ),
        )
        for count in counts.values()
    }
    if len(shapes) > 1:
        raise ArithmeticError(
            f"the layer runs other operations at other sizes of {list(counts)}"
        )


def undominated(polynomials: Iterable[Polynomial]) -> list[Polynomial]:
    """Those that may be the greatest somewhere: no other has every coefficient at least as great."""
    distinct = sorted(set(polynomials))
    return [
        each
        for each in distinct
        if not any(_dominates(other, each) for other in distinct if other != each)
    ]


def _dominates(left: Polynomial, right: Polynomial) -> bool:
    width = max(len(left), len(right))
    padded = ((*each, *(0,) * (width - len(each))) for each in (left, right))
    return all(a >= b for a, b in zip(*padded, strict=True))


def layer_polynomials(
    data: Mapping[str, Any],
    split: Split,
    *,
    sequences: tuple[int, int | None],
    smallest_micro_batch_size: int = 1,
) -> LayerPolynomials:
    """Return `fit_layer`'s data as a profile has them.

    Args:
        data: of several samples; ``one_sample`` has the data of one that differs.
        split: that was counted.
        sequences: shortest and longest sequence, in tokens, for which they are valid; the
            longest is None without a limit, both are 0 for models without a sequence.
        smallest_micro_batch_size: samples that the model runs on.
    """
    alone = data.get("one_sample")
    return LayerPolynomials(
        **_fields(data),
        tensor_parallel_degree=split.tensor,
        context_parallel_degree=split.context,
        expert_parallel_degree=split.expert,
        sequence_parallel=split.sequence,
        smallest_micro_batch_size=smallest_micro_batch_size,
        shortest_sequence=sequences[0],
        longest_sequence=sequences[1],
        one_sample=None if alone is None else CountPolynomials(**_fields(alone)),
    )


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `CountPolynomials`; the rows of a profile have no input bytes."""
    names = [name for name in (*SCALARS, *SPLIT_SCALARS) if name != "input_bytes"]
    return {
        **{name: data.get(name, ()) for name in names},
        "modes": data["modes"],
        "kernels": tuple(_kernel(*kernel) for kernel in data["kernels"]),
        "collectives": tuple(_collective(*each) for each in data["exchanges"]),
    }


def _kernel(
    kind: KernelKind,
    flops: Polynomial,
    size_bytes: Polynomial,
    m: Polynomial,
    n: Polynomial,
    k: Polynomial,
    batch: Polynomial,
    gradients: GradientName | None = None,
    is_linear: bool | None = None,
) -> KernelPolynomials:
    return KernelPolynomials(
        kind=kind,
        flops=flops,
        bytes=size_bytes,
        m=m,
        n=n,
        k=k,
        batch=batch,
        gradients=gradients,
        is_linear=is_linear,
    )


def _collective(
    phase: Literal["forward", "backward"],
    operation: CollectiveName,
    size_bytes: Polynomial,
    group: GroupName = "tensor",
) -> CollectivePolynomial:
    return CollectivePolynomial(
        phase=phase, operation=operation, bytes=size_bytes, group=group
    )
