"""Head-room of a device budget: what is in use beside counted activations, learned by position in the step.

Parameters, gradients, what ops make and drop, workspaces: it differs from op to op, and one op with a large workspace
is no reason to evict in the whole step. So it is measured between any two looks at the device: the *level* at every
save and at every need, and the *working set*, the most above that level until the next one. What is being saved is told
from the rest. In a step that is planned by position, the room for what its position takes is kept free; in any
other, for the level as it is and the largest working set so far, and for what was in use while the budget was passed
(`Budget.other_bytes`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta.beside import Beside, Track
from delta.budget import Budget, Need
from delta.ledger import Ledger

if TYPE_CHECKING:
    from delta.learner import Learner


class HeadRoom:
    """Measures the step under way, and tells what to keep free at its position. Only for a budget on the device.

    `sees_peaks`: the device tells what was in use between two looks, and not only at each of them.
    """

    def __init__(self, budget: Budget, ledger: Ledger, learner: Learner, sees_peaks: bool = True) -> None:
        self._budget, self._ledger, self._learner, self._sees_peaks = budget, ledger, learner, sees_peaks
        self._level_bytes = 0
        self._resident_bytes = 0  # counted activations at the last look
        self.largest_bytes = 0  # the largest working set of all steps
        self.new_step()

    def new_step(self) -> None:
        self.measured = Beside()
        self.peak_bytes = 0  # of the device, in this step
        self._fitting = 1.0  # the least share of what would be resident, had nothing gone, for which there was room
        self._holding = 1.0  # ... of what was resident
        self._anywhere_bytes = 0  # the most beside counted activations where less than all had room
        self._at: Track | None = None  # of the position reached last
        self._drift_bytes = 0  # by which the level was higher than was learned, when it was looked at last
        self._looked = False  # since the position reached last
        self._working_bytes = 0  # the largest working set so far
        self._begun_bytes = 0  # the level when the last save was reached, without what it saved
        self._taken: list[int] = []  # the most above that, by save

    # -- measuring ------------------------------------------------------------------------------------------------
    def looked(self, now_bytes: int, peak_bytes: int, uncounted_bytes: int = 0) -> None:
        """The device has `now_bytes` in use, and had up to `peak_bytes` since the last look, by the program's work.
        `uncounted_bytes` are of what is being saved, and counts from here on."""
        resident_bytes = self._ledger.resident_bytes
        # Saved tensors die while backward goes on, and in forward those that have been let go of: the peak may have
        # been before that.
        most_counted_bytes = max(resident_bytes, self._resident_bytes)
        self._used(now_bytes, resident_bytes)
        self._used(peak_bytes, most_counted_bytes)
        if self._at is not None:
            beside_bytes = peak_bytes - most_counted_bytes
            forward = self._at is self.measured.saves
            if forward:  # what is being saved is there by now
                beside_bytes = max(beside_bytes, now_bytes - resident_bytes)
            working_bytes = self._at.reached(beside_bytes)
            if forward:
                working_bytes = max(self._taken[-1], beside_bytes - self._begun_bytes)
                self._taken[-1] = working_bytes
            self._working_bytes = max(self._working_bytes, working_bytes)
            self.largest_bytes = max(self.largest_bytes, working_bytes)
        self._level(now_bytes, resident_bytes + uncounted_bytes)
        self._looked = True

    def settled(self, now_bytes: int, peak_bytes: int, uncounted_bytes: int = 0) -> None:
        """The same after Delta's own work, in which what is counted went up or down. What an op takes that is replayed
        is beside all that counts by then; it is none of the place's own, where other plans replay something else."""
        counted_bytes = self._ledger.resident_bytes + uncounted_bytes
        most_counted_bytes = max(counted_bytes, self._resident_bytes)
        self._used(now_bytes, counted_bytes)
        self._used(peak_bytes, most_counted_bytes)
        self._level(now_bytes, counted_bytes)
        if self._at is not None:
            self._at.reached(self._level_bytes)
            taken_bytes = peak_bytes - most_counted_bytes - self._at.levels[-1]
            self._working_bytes = max(self._working_bytes, taken_bytes)

    def _level(self, now_bytes: int, resident_bytes: int) -> None:
        self._resident_bytes = resident_bytes
        self._level_bytes = max(0, now_bytes - resident_bytes)

    def _used(self, nbytes: int, resident_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes, nbytes)
        beside_bytes = nbytes - resident_bytes
        unevicted_bytes = resident_bytes + self._ledger.unevicted_bytes - self._ledger.resident_bytes
        if beside_bytes + unevicted_bytes > self._budget.whole_bytes:
            self._anywhere_bytes = max(self._anywhere_bytes, beside_bytes)
            self._fitting = min(self._fitting, (self._budget.whole_bytes - beside_bytes) / max(1, unevicted_bytes))
        if nbytes > self._budget.whole_bytes:
            self._holding = min(self._holding, (self._budget.whole_bytes - beside_bytes) / max(1, resident_bytes))
            self._budget.other_bytes = max(self._budget.other_bytes, beside_bytes)

    @property
    def need(self) -> Need:
        """Of the step so far. A plan that has a share of all activations resident when that is most is taken to have
        that share at each place: the place with room for the least share says how much may be resident in all. Where
        one had more, and the budget was passed, so much less of all that was resident fits."""
        base_bytes = self.measured.saves.levels[0] if self.measured.saves.levels else 0
        ledger, room_bytes = self._ledger, self._budget.whole_bytes - base_bytes
        for share, nbytes in (
            (self._fitting, ledger.peak_unevicted_bytes),
            (self._holding, ledger.peak_resident_bytes),
        ):
            if share < 1:
                room_bytes = min(room_bytes, int(max(0, share) * nbytes))
        most_bytes = self._budget.whole_bytes - room_bytes
        return Need(base_bytes, most_bytes, self._anywhere_bytes, ledger.peak_unevicted_bytes)

    def saved(self) -> None:
        """The step has come to the next save."""
        self._begun_bytes = self._level_bytes
        self._taken.append(0)
        self._begin(self.measured.saves, self._learner.beside.saves)

    def needed(self) -> None:
        """The step has come to the next need."""
        self._begin(self.measured.needs, self._learner.beside.needs)

    def _begin(self, track: Track, known: Track) -> None:
        position = len(track.levels)
        track.begin(self._level_bytes)
        self._at = track
        if position < len(known.levels) and self._looked:  # else the level is that of a place before
            self._drift_bytes = max(0, self._level_bytes - known.levels[position])
        self._looked = False

    def found(self) -> Beside:
        """What the step has used, now that it has ended."""
        if self._sees_peaks:
            return self.measured
        log = self._learner.log
        saved_bytes = [log.nbytes[record] for record in log.saves]
        return self.measured.as_in_forward(self._taken, saved_bytes, [order for order, _ in log.needs])

    # -- keeping free ---------------------------------------------------------------------------------------------
    @property
    def here_bytes(self) -> int:
        """What the program needs from here to the next position."""
        backward = self._at is self.measured.needs
        return self._most(backward, len((self.measured.needs if backward else self.measured.saves).levels) - 1)

    @property
    def free_bytes(self) -> int:
        """What of that is not in use as the step has come here."""
        return self.here_bytes - self._level_bytes

    def from_save(self, order: int) -> int:
        """... from when a storage counts, by save order, to the next one. It is made before that."""
        return self._most(False, order)

    @property
    def working_bytes(self) -> int:
        """The working set of what runs next: as learned; without a plan at least the largest of the step so far."""
        known = self._learner.beside.needs if self._at is self.measured.needs else self._learner.beside.saves
        if self._at is None or not known.working:
            return self._working_bytes
        position = len(self._at.levels) - 1  # a look comes before it moves on
        next_bytes = max(known.working[position : position + 2], default=0)
        return next_bytes if self._learner.plan is not None else max(next_bytes, self._working_bytes)

    def until_need(self, position: int) -> int:
        """The most that the program needs from here on until a need of the plan has been served."""
        known = self._learner.beside_needs[max(0, len(self.measured.needs.levels) - 1) : position + 1]
        return max(self.here_bytes, max(known, default=0) + self._drift_bytes)

    def _most(self, backward: bool, position: int) -> int:
        learner = self._learner
        known = learner.beside_needs if backward else learner.beside_saves
        position = min(position, len(known) - 1)
        known_bytes = known[position] + self._drift_bytes if position >= 0 else 0
        if learner.plan is not None and known:
            return known_bytes
        # Not known for sure: as much more than now as was taken between any two looks, or than steps like it took here.
        return max(self._budget.other_bytes, self._level_bytes + self._working_bytes, known_bytes)
