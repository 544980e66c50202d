"""`stream`: chunks with the carry kept against one scan; which memory is read and written when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import assocscan
from assocscan import AxisError, Monoid, ScanTypeError, ScanValueError, ops
from assocscan.functional import stream as module
from assocscan.functional.chunk_copies import Chunk, Copies

LENGTHS = [[3, 4], [0, 5, 0, 1, 0], [7], [1] * 6]
no_identity = Monoid(lambda a, b: a * b, name="stream_no_identity")


def drained(chunks: Any) -> tuple[list[Any], Any]:
    """The results, and the generator's return value."""
    found = []
    while True:
        try:
            found.append(next(chunks))
        except StopIteration as end:
            return found, end.value


def pairs(length: int, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(length)
    shape = [2, 3]
    shape.insert(axis, length)
    return (torch.rand(shape, generator=g, dtype=torch.float64),
            torch.randn(shape, generator=g, dtype=torch.float64))  # fmt: skip


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("with_init", [True, False])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_chunks_give_one_scan(
    lengths: list[int], inclusive: bool, with_init: bool, axis: int
) -> None:
    place = axis % 3
    a, b = pairs(sum(lengths), place)
    init = (torch.ones(2, 3).double(), torch.full((2, 3), 0.5).double()) if with_init else None
    chunks = zip(a.split(lengths, place), b.split(lengths, place), strict=True)
    found, final = drained(
        assocscan.stream(ops.affine, chunks, axis, init=init, inclusive=inclusive, device="cpu")
    )
    wanted, last = assocscan.associative_scan(
        ops.affine, (a, b), axis, False, inclusive, init=init, return_final=True
    )
    joined = tuple(torch.cat([y[k] for y in found], place) for k in range(2))
    torch.testing.assert_close(joined, wanted, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(final, last, rtol=1e-13, atol=1e-13)
    assert [y[0].shape[place] for y in found] == lengths


def test_gradients_go_through_the_carry() -> None:
    x = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(7, 2, dtype=torch.float64) * (torch.arange(7) % 2)[:, None]
    y = torch.cat(list(assocscan.stream("logaddexp", x.split(3))))
    (found,) = torch.autograd.grad((y * weights).sum(), x)
    (wanted,) = torch.autograd.grad((x.logcumsumexp(0) * weights).sum(), x)
    torch.testing.assert_close(found, wanted)


def test_empty_chunks_need_no_identity() -> None:
    x = torch.tensor([2, 3, 4])
    for op in (no_identity, torch.mul):
        found, final = drained(assocscan.stream(op, x.split([0, 2, 0, 1])))
        assert [y.tolist() for y in found] == [[], [2, 6], [], [24]]
        assert final.item() == 24
    assert drained(assocscan.stream("sum", [], init=3.0)) == ([], 3.0)
    assert drained(assocscan.stream("sum", [])) == ([], None)


def test_carries_of_16_bits_are_float32() -> None:
    x = torch.full((4096,), 0.01, dtype=torch.bfloat16)
    found, final = drained(assocscan.stream("sum", x.split(16)))
    assert final.dtype == torch.float32 and found[-1].dtype == torch.bfloat16
    torch.testing.assert_close(final, x.float().sum(), rtol=1e-5, atol=0)


def test_a_chunk_is_read_before_the_next_is_asked_for() -> None:
    buffer = torch.empty(4)

    def chunks() -> Iterator[torch.Tensor]:
        for k in range(3):
            yield buffer.fill_(k)

    results = [y.clone() for y in assocscan.stream("sum", chunks())]
    assert torch.cat(results).tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 6, 8, 10, 12]


def test_buffers_receive_the_results() -> None:
    x = torch.arange(10.0)
    memory = torch.full((4,), torch.nan)
    found = []
    for y in assocscan.stream("sum", x.split(4), out=[memory] * 3):
        assert y.data_ptr() == memory.data_ptr()
        found.append(y.clone())
    assert [len(y) for y in found] == [4, 4, 2]
    assert torch.equal(torch.cat(found), x.cumsum(0))


class Late(Copies):
    """Copies that are carried out only when somebody waits for them, as a GPU's may be."""

    is_asynchronous = True

    def bring(self, chunk: Any) -> Chunk:
        made = Chunk([torch.full_like(chunk, torch.nan)], assocscan.pytrees.flatten(chunk)[1])
        made.event = Event(made.tensors[0], chunk)
        return made

    def receive(self, chunk: Chunk) -> Any:
        chunk.wait()
        return chunk.tree

    def store(self, results: Any, buffer: Any, axis: int) -> Chunk:
        place = buffer[: len(results)]
        return Chunk([place], assocscan.pytrees.flatten(place)[1], Event(place, results))


class Event:
    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.target, self.source, self.is_done = target, source, False

    def synchronize(self) -> None:
        if not self.is_done:
            self.target.copy_(self.source)
            self.is_done = True


def test_two_buffers_in_turn_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "copies_to", Late)
    memory, results = torch.empty(2, 3), torch.empty(2, 3)
    asked = []

    def chunks() -> Iterator[torch.Tensor]:
        for k in range(5):
            asked.append(k)
            yield memory[k % 2].copy_(torch.arange(3 * k, 3 * k + 3))

    found = []
    for y in assocscan.stream("sum", chunks(), device="cuda", out=[*results] * 3):
        found.append(y.clone())
        assert asked[-1] == min(len(found) + 1, 4)  # the next chunks are on their way
    assert torch.equal(torch.cat(found), torch.arange(15.0).cumsum(0))


def test_errors() -> None:
    x = torch.ones(4)
    with pytest.raises(ScanTypeError, match=r"chunks is a tensor.*chunks.split\(n, 1\)"):
        assocscan.stream("sum", x, 1)
    with pytest.raises(ScanTypeError, match="chunks is 3, expected an iterable"):
        assocscan.stream("sum", 3)  # type: ignore[arg-type]
    with pytest.raises(ScanValueError, match="no monoid is registered as 'summ'"):
        assocscan.stream("summ", [x])
    with pytest.raises(ScanTypeError, match="inclusive is 'no'"):
        assocscan.stream("sum", [x], inclusive="no")  # type: ignore[arg-type]
    with pytest.raises(ScanValueError, match="unknown backend"):
        assocscan.stream("sum", [x], backend="gpu")
    with pytest.raises(AxisError):
        next(assocscan.stream("sum", [x], 1))
    with pytest.raises(ScanValueError, match="out ended after 1 buffers"):
        list(assocscan.stream("sum", [x, x], out=[x.clone()]))
    with pytest.raises(ScanValueError, match=r"out has shape \[3\].*only along axis 0"):
        list(assocscan.stream("sum", [x], out=[torch.ones(3)]))
    with pytest.raises(ScanValueError, match=r"out has shape .* and dtype torch.float64"):
        list(assocscan.stream("sum", [x], out=[x.double()]))
    with pytest.raises(ScanValueError, match="a buffer of out has the leaves"):
        list(assocscan.stream("sum", [x], out=[(x,)]))


def test_chunks_that_are_no_parts_of_one_sequence() -> None:
    """Another width would be broadcast, another dtype promoted."""
    ones = torch.ones(3, 3)
    for other in (torch.ones(3, 1), torch.ones(3, 2), ones.double()):
        ys = assocscan.stream("sum", [ones, ones[:0], other])
        assert len([next(ys), next(ys)]) == 2
        with pytest.raises(ScanValueError, match=r"chunk 2 is .*first chunk is float32 \[…, 3\]"):
            next(ys)
    with pytest.raises(ScanTypeError, match="chunk 1 is "):
        list(assocscan.stream("sum", [ones, ones.numpy()]))
    with pytest.raises(ScanTypeError, match="argument 'dim': pass axis=0"):
        assocscan.stream("sum", [ones], dim=0)  # type: ignore[call-arg]
