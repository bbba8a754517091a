"""Every element compared: exactly, or within a bound of its own."""

import torch


class Checks:
    """Collects comparisons. results: dicts with name, ok, elements, and worst (largest error as a
    share of its bound) or text (what is wrong)."""

    def __init__(self):
        self.results = []

    @property
    def ok(self):
        """True if something was compared and all of it held."""
        return bool(self.results) and all(result["ok"] for result in self.results)

    def _add(self, name, elements, text="", **more):
        result = dict(name=name, ok=not text, elements=int(elements), **more)
        self.results.append(dict(result, text=text) if text else result)

    def equal(self, name, got, want):
        """Plain values (lists, numbers)."""
        size = len(got) if hasattr(got, "__len__") else 1
        self._add(name, size, "" if got == want else "{!r}, not {!r}".format(got, want))

    def exact(self, name, got, want):
        """Tensors of the same type and shape, bit by bit."""
        if self._same_kind(name, got, want):
            different = (_bits(got) != _bits(want)).flatten()
            self._elements(name, got, want, different)

    def within(self, name, got, want, bound):
        """got [..] against want and bound, both float64 of the same shape; NaN is never within."""
        if got.shape != want.shape:
            self._add(name, 0, "shape {}, not {}".format(tuple(got.shape), tuple(want.shape)))
            return
        error = (got.double() - want).abs()
        outside = ~(error <= bound)
        share = float((error / bound).max()) if error.numel() else 0.0
        self._elements(name, got, want, outside.flatten(), worst=share)

    def _same_kind(self, name, got, want):
        for what in ("dtype", "shape"):
            a, b = getattr(got, what, None), getattr(want, what)
            if a != b:
                self._add(name, 0, "{} {}, not {}".format(what, a, b))
                return False
        return True

    def _elements(self, name, got, want, bad, **more):
        text, count = "", int(bad.sum())
        if count:
            first = int(bad.nonzero()[0])
            place = [int(i) for i in torch.unravel_index(torch.tensor(first), got.shape)]
            text = "{} of {} elements differ, first at {}: {}, not {}".format(
                count, bad.numel(), place, _value(got, place), _value(want, place)
            )
        self._add(name, bad.numel(), text, **more)


def _value(tensor, place):
    return float(tensor[tuple(place)].float())


def _bits(tensor):
    """The tensor's elements as integers of the same size."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])
