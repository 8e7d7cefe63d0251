"""Where a step ends when something saved in it outlives backward.

Most steps end by themselves: their last saved tensor dies in backward. What was saved for an output that the loss does
not use dies with the output, often not before the next forward has made a new one. Forward that goes on after backward
may then be another step, or still the same one: two losses one after the other, or a generator that waits while its
discriminator is trained.

What backward asks for tells them apart. A *stretch* is forward and the backward after it. One that asks for nothing
saved before it begins a step; one that does belongs to the step before. When a stretch begins nobody knows which it
will be, but steps are alike: when two that begin steps have been seen, every step is taken to have as many stretches as
the first of them, until that turns out wrong.
"""

from __future__ import annotations


class StepEnds:
    """Counts stretches and says which of them end a step. Steps that end by themselves never wait for it."""

    def __init__(self) -> None:
        self.stretch = 0  # the one under way
        self.needed = False  # backward has asked for something in it
        self.whole = False  # what ended last was one step, from its beginning
        self._older = False  # backward has asked for something saved before this stretch
        self._length = 0  # stretches in a step; 0: not known
        self._since = 0  # stretches since a step began last, with the one that began it
        self._stretches = 0  # since one ended

    def need(self, stretch: int) -> None:
        """Backward asks for something that was saved in that stretch."""
        self.needed = True
        if stretch < self.stretch:
            self._older = True

    def forward(self) -> bool:
        """Forward goes on after backward: whether the step has ended before it."""
        if not self._older:
            self._length = self._since or self._length
            self._since = 1
        elif self._since:
            self._since += 1
        else:
            self._length = 0  # the step was cut in two
        self._stretches += 1
        self.whole = self._stretches == self._length
        self._begin()
        return 0 < self._length <= self._since

    def ended(self) -> None:
        """The step has ended, by itself or because `forward` said so."""
        self._since = self._stretches = 0
        self._begin()

    def _begin(self) -> None:
        self.stretch += 1
        self.needed = self._older = False
